"""Build models from config fields: the published one on the meta device, the twin with living branches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from onboarding.problem import Problem
from onboarding.twin.plan import TwinPlan

NOISE = 0.1
"""Spread given to parameters that start as a constant (norm weights, biases)."""
ROUTER_BIAS = 0.02
"""Spread of selection biases: enough to change choices, small beside a score's spread."""


def resolve(config: dict[str, Any]) -> Any:
    """The transformers config with all its defaults.

    Raises:
        Problem: ``unknown-model-type`` or ``config-refused``.
    """
    from transformers import AutoConfig

    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "auto_map", "torch_dtype")}
    try:
        return AutoConfig.for_model(str(config.get("model_type", "")), **fields)
    except ValueError as error:
        if "model_type" not in config or "Unrecognized model identifier" in str(error):
            raise Problem("unknown-model-type", f"unknown model_type {config.get('model_type')!r}") from error
        raise Problem("config-refused", "the config's own class refuses it", str(error)) from error


def fields_of(config: Any) -> dict[str, Any]:
    """All fields of a config as plain data, ``model_type`` among them, weights' dtype and quantisation left out."""
    dropped = ("dtype", "torch_dtype", "quantization_config", "transformers_version", "architectures", "auto_map")
    labels = ("id2label", "label2id")
    return {k: _plain(v) for k, v in config.to_dict().items() if k not in (*dropped, *labels)}


def _plain(value: Any) -> Any:
    """As it would come back from JSON: tuples become lists, keys become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def text_fields(config: Any) -> dict[str, Any]:
    """The language model's fields."""
    return fields_of(config.get_text_config())


def model_class(config: Any) -> type[nn.Module]:
    """The class with a language-model head for a config.

    Raises:
        Problem: ``no-language-model`` if transformers maps it to none.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    if config.get_text_config() is not config:
        mappings.reverse()  # a config with towers: the causal-LM entry, where there is one, wants the text part alone
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            cls: type[nn.Module] = found[0] if isinstance(found, tuple) else found
            return cls
    raise Problem("no-language-model", f"transformers has no language model for {type(config).__name__}")


def on_meta(config: Any) -> nn.Module:
    """The model without memory and without initial values."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_class(config)(config)


def trial(fields: dict[str, Any], tokens: int) -> nn.Module:
    """Build a proposal and run one step.

    Raises:
        ArithmeticError: the loss or a gradient is not finite.
        Exception: whatever construction, forward or backward raise.
    """
    model = _instantiate(fields, torch.float32, seed=0)
    ids = torch.arange(tokens)[None] * 7 % plain_vocabulary(model)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not torch.isfinite(loss) or not all(torch.isfinite(grad).all() for grad in grads):
        raise ArithmeticError("loss or gradient is not finite")
    model.zero_grad(set_to_none=True)
    return model


def plain_vocabulary(model: nn.Module) -> int:
    """Ids that plain text may use: all bytes, or fewer where the vocabulary is smaller."""
    config: Any = model.config
    return min(256, int(config.get_text_config().vocab_size))


def build(plan: TwinPlan, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The twin, in training mode, eager attention and experts, every branch alive.

    Parameters that the class starts as constants (norm weights 1 or 0, biases 0) get a spread of 0.1, selection biases
    one of 0.02; everything else is as the class itself initialises it. Values are drawn in float32 on the CPU, so that
    every dtype and device starts from the same numbers.

    Args:
        plan: from :func:`onboarding.twin.derive`.
        dtype: of the parameters; those that the class keeps in float32 stay float32 (except under float64).
        seed: of the initial values.
    """
    model = _instantiate(plan.config, torch.float32, seed)
    if dtype == torch.float64:
        return model.double()
    if dtype != torch.float32:
        keep = _kept_in_float32(model)
        for name, parameter in model.named_parameters():
            if not any(part in name for part in keep):
                parameter.data = parameter.data.to(dtype)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and "inv_freq" not in name and not any(part in name for part in keep):
                buffer.data = buffer.data.to(dtype)
    return model


def _kept_in_float32(model: nn.Module) -> set[str]:
    """Name parts of parameters that the class keeps in float32."""
    kept: set[str] = set()
    for cls in type(model).__mro__:
        kept.update(vars(cls).get("_keep_in_fp32_modules_strict") or ())
    return kept


def _instantiate(fields: dict[str, Any], dtype: torch.dtype, seed: int) -> nn.Module:
    config = resolve(fields)
    cls: Any = model_class(config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model: nn.Module = cls._from_config(config, dtype=dtype, attn_implementation="eager", **_experts_eager(cls))
        enliven(model, torch.Generator().manual_seed(seed))
    return model.train()


def _experts_eager(cls: Any) -> dict[str, str]:
    return {"experts_implementation": "eager"} if cls._can_set_experts_implementation() else {}


@torch.no_grad()
def enliven(model: nn.Module, generator: torch.Generator) -> None:
    """Give constants a spread, in place: a weight of exactly 1 or 0 would hide a scale or an offset done wrong."""
    for parameter in model.parameters():
        if _constant(parameter):
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point() and _constant(buffer):
            buffer.add_(ROUTER_BIAS * torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype))


def _constant(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())
