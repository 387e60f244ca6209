"""Apply, initialize and merge adapters."""

from __future__ import annotations

import torch
from torch import nn

from runtime.experts.packed import is_packed
from runtime.experts.sites import find_experts
from runtime.lora.config import LoraConfig
from runtime.lora.modules import ExpertsLora, adapt_linear, initialize, restore_linear
from runtime.lora.targets import Targets, find_targets
from runtime.parallel.placement import local_part, local_tensor, whole_tensor

_KEY = "_onboard_lora"


def apply_lora(model: nn.Module, config: LoraConfig, dtype: torch.dtype | None = None) -> Targets:
    """Freeze ``model`` and add trained adapters, before ``parallelize``.

    Args:
        model: plain or on the meta device; in the latter case call ``initialize_adapter`` once it has memory.
        config: what to adapt.
        dtype: of the adapters; None takes fp64 for an fp64 model, else fp32.

    Returns:
        what was adapted.

    Raises:
        ValueError: a target matches nothing or a router, or the model has adapters already.
    """
    if _KEY in model.__dict__:
        raise ValueError("the model has adapters already; merge them first")
    targets = find_targets(model, config)
    if dtype is None:
        wide = any(p.dtype == torch.float64 for p in model.parameters())
        dtype = torch.float64 if wide else torch.float32
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in targets.linears:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        adapt_linear(linear, config, dtype)
    for name, weights in targets.experts.items():
        experts = model.get_submodule(name)
        experts.add_module("lora", ExpertsLora(experts, weights, config, dtype))
    model.__dict__[_KEY] = (config, targets)
    initialize_adapter(model)
    return targets


def adapter_of(model: nn.Module) -> tuple[LoraConfig, Targets]:
    """What ``apply_lora`` did.

    Raises:
        ValueError: the model has no adapters.
    """
    found = model.__dict__.get(_KEY)
    if found is None:
        raise ValueError("the model has no adapters: call apply_lora first")
    config, targets = found
    return config, targets


def initialize_adapter(model: nn.Module) -> None:
    """Fill every adapter parameter with its initial value; meta parameters are left for later."""
    config, _ = adapter_of(model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            initialize(name, parameter, config)


def is_adapter(name: str) -> bool:
    """Whether a parameter of an adapted model belongs to an adapter."""
    return name.endswith((".lora_A", ".lora_B")) or ".lora." in name


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Fold the adapters into the weights and remove them; every rank calls it, each changes its own shards.

    The weights keep their dtype: the update is added in fp32 or wider and rounded once.
    """
    config, targets = adapter_of(model)
    for name in targets.linears:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        inner, outer = (whole_tensor(linear.get_parameter(f"lora_{side}")) for side in "AB")
        _add(linear.weight, outer, inner, config.scaling)
        restore_linear(linear)
    for site in find_experts(model):
        if site.name not in targets.experts:
            continue
        if is_packed(site.experts):
            raise ValueError(
                "packed weights cannot take the update; load the base unpacked and the adapter, then merge"
            )
        lora = site.experts.get_submodule("lora")
        assert isinstance(lora, ExpertsLora)
        for name in lora.names:
            inner, outer = (whole_tensor(lora.get_parameter(f"{name}_{side}")) for side in "AB")
            left, right = (inner.mT, outer.mT) if lora.transposed else (outer, inner)
            _add(site.experts.get_parameter(name), left, right, lora.scaling)
        del site.experts._modules["lora"]
    del model.__dict__[_KEY]


def _add(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
    """Add scaling x left @ right to this rank's part of ``weight``."""
    *batch, rows, columns = local_part(weight)
    target = local_tensor(weight)
    wide = torch.promote_types(target.dtype, torch.float32)
    update = left[(*batch, rows)].to(wide) @ right[(*batch, slice(None), columns)].to(wide)
    target.copy_((target.to(wide) + update * scaling).to(target.dtype))
