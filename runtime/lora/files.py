"""Adapters as files that ``peft`` loads: ``adapter_config.json`` and ``adapter_model.safetensors``.

Expert adapters follow PEFT's ``target_parameters``: one wrapper a weight, nested in the order in which the module has
its weights, so the last weight's pair has the plain name and each earlier one a ``base_layer.`` more. PEFT stacks the
experts' ranks: lora_A is [E r, I] by expert, then rank; lora_B is [O, r E] by rank, then expert.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runtime.lora.adapter import adapter_of
from runtime.lora.config import LoraConfig
from runtime.lora.targets import Targets
from runtime.parallel.placement import local_part, local_tensor, whole_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export_adapter(model: nn.Module, folder: Path | str, base_model: str = "") -> None:
    """Write the adapter; every rank calls it, rank 0 writes, and one whole tensor at a time is gathered.

    Args:
        model: adapted, parallelized or not.
        folder: made if missing.
        base_model: name or folder of the base model, for ``adapter_config.json``.

    Raises:
        ValueError: the model has no adapters.
    """
    config, targets = adapter_of(model)
    folder = Path(folder)
    first = not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for key, parameter, stacked in _entries(model, targets):
        whole = whole_tensor(parameter)
        if first:
            whole = stack(whole, key) if stacked else whole
            tensors[key] = whole.cpu().contiguous().clone()
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(peft_config(model, config, targets, base_model), indent=2, sort_keys=True)
        (folder / CONFIG).write_text(text + "\n")
    if dist.is_initialized():
        dist.barrier()


def load_adapter(model: nn.Module, folder: Path | str) -> None:
    """Load an exported adapter into a model to which the same targets were applied; each rank keeps its shards.

    Raises:
        ValueError: files are missing or broken, or the adapter is not of these targets, rank or shapes.
    """
    config, targets = adapter_of(model)
    folder = Path(folder)
    try:
        stored = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, json.JSONDecodeError, SafetensorError) as problem:
        raise ValueError(f"{folder} is no adapter: {problem}") from problem
    if stored.get("r") != config.r or float(stored.get("lora_alpha", 0)) != float(config.alpha):
        raise ValueError(
            f"the adapter has r {stored.get('r')} and alpha {stored.get('lora_alpha')}, the model r {config.r} and "
            f"alpha {config.alpha:g}: apply_lora with the adapter's"
        )
    entries = list(_entries(model, targets))
    expected = {key for key, _, _ in entries}
    if expected != set(tensors):
        odd = sorted(expected.symmetric_difference(tensors))
        raise ValueError(f"the adapter's targets are not the model's: {len(odd)} tensors differ, first {odd[0]}")
    for key, parameter, stacked in entries:
        whole = tensors[key]
        if stacked:
            whole = unstack(whole, key, parameter.shape[0])
        if whole.shape != parameter.shape:
            raise ValueError(f"{key} is {tuple(whole.shape)}, the model needs {tuple(parameter.shape)}")
        with torch.no_grad():
            local_tensor(parameter).copy_(whole[local_part(parameter)])


def stack(whole: Tensor, key: str) -> Tensor:
    """[E, r, I] -> [E r, I] for A, [E, O, r] -> [O, r E] for B."""
    if "lora_A" in key:
        return whole.reshape(-1, whole.shape[-1])
    return whole.permute(1, 2, 0).reshape(whole.shape[1], -1)


def unstack(stacked: Tensor, key: str, experts: int) -> Tensor:
    """The inverse of ``stack``."""
    if "lora_A" in key:
        return stacked.reshape(experts, -1, stacked.shape[-1])
    return stacked.reshape(stacked.shape[0], -1, experts).permute(2, 0, 1)


def _entries(model: nn.Module, targets: Targets) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """(key in the file, parameter, whether experts are stacked), in an order that is the same on every rank."""
    for name in targets.linears:
        linear = model.get_submodule(name)
        for side in ("lora_A", "lora_B"):
            yield f"{_PREFIX}{name}.{side}.weight", linear.get_parameter(side), False
    for name, weights in targets.experts.items():
        for depth, weight in enumerate(reversed(weights)):
            inner = f"{_PREFIX}{name}." + "base_layer." * depth
            for side in ("A", "B"):
                yield f"{inner}lora_{side}.weight", model.get_parameter(f"{name}.lora.{weight}_{side}"), True


def peft_config(model: nn.Module, config: LoraConfig, targets: Targets, base_model: str) -> dict[str, Any]:
    """The content of ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.r,
        "lora_alpha": config.alpha,
        # inference needs none, and PEFT refuses it beside target_parameters
        "lora_dropout": 0.0 if targets.experts else config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
        "target_modules": _shortest(model, targets.linears),
        "target_parameters": [f"{name}.{weight}" for name, weights in targets.experts.items() for weight in weights]
        or None,
    }


def _shortest(model: nn.Module, names: list[str]) -> list[str]:
    """Last parts of the names where they mean exactly these modules, else the whole names."""
    leaves = sorted({name.rpartition(".")[2] for name in names})
    meant = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in leaves]
    return leaves if sorted(meant) == sorted(names) else sorted(names)
