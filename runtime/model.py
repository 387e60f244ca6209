"""A transformers causal language model from its definition: built without memory, every block found."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.config import ModelConfig
from runtime.refusal import Refused

TOWERS = ("vision", "visual", "audio", "mtp")
"""Words in the names of modules that are no part of the language model."""


def read_definition(folder: Path) -> Any:
    """The transformers config of a definition's folder.

    Raises:
        Refused: ``definition-missing``, ``definition-refused``; code that a definition brings is never run here.
    """
    from transformers import AutoConfig

    try:
        fields = json.loads((folder / "config.json").read_text())
    except OSError:
        advice = "model.definition is a folder with the model's config.json"
        raise Refused("definition-missing", f"no config.json in {folder}", advice) from None
    except ValueError as error:
        raise Refused("definition-refused", f"{folder / 'config.json'} is not JSON", str(error)) from None
    if not isinstance(fields, dict):
        raise Refused("definition-refused", f"{folder / 'config.json'} is no JSON object", "")
    fields = _with_special_floats(fields)
    model_type = str(fields.pop("model_type", ""))
    for name in ("architectures", "auto_map", "torch_dtype", "dtype", "quantization_config"):
        fields.pop(name, None)
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        detail = f"{error}; this transformers must know the model_type itself, since submitted code is not run here"
        raise Refused("definition-refused", f"{folder}: model_type {model_type!r} is not usable", detail) from None


SPECIAL = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def _with_special_floats(value: Any) -> Any:
    """What transformers writes for numbers that JSON has not: ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return SPECIAL.get(value["__float__"], value)
        return {name: _with_special_floats(inner) for name, inner in value.items()}
    return [_with_special_floats(inner) for inner in value] if isinstance(value, list) else value


def model_class(config: Any) -> Any:
    """The class with a language-model head.

    Raises:
        Refused: ``no-language-model``.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    if config.get_text_config() is not config:
        mappings.reverse()  # a config with towers: the causal-LM entry, where there is one, wants the text part alone
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise Refused("no-language-model", f"transformers has no language model for {type(config).__name__}", "")


def build(config: Any, choice: ModelConfig, device: str, *, storage: torch.dtype) -> nn.Module:
    """The model with its parameters on the meta device and its buffers real, in training mode.

    Args:
        config: the transformers config.
        choice: implementations and precision.
        device: where it will run; decides the experts' implementation where none is chosen.
        storage: dtype of the parameters; those that the class keeps in float32 stay float32 (not below float64).
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = _construct(config, choice, device)
    _fill_buffers(model)
    model.tie_weights()  # type: ignore[operator]  # a construction without values leaves it out
    set_storage(model, storage)
    return model.train()


def initial_values(config: Any, choice: ModelConfig, device: str) -> dict[str, Tensor]:
    """Values of every parameter and stored buffer as the class itself draws them, float32 on the CPU, by seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(choice.seed)
        model = _construct(config, choice, device)
    return {name: value.detach() for name, value in model.state_dict().items()}


def set_storage(model: nn.Module, storage: torch.dtype) -> None:
    """Cast parameters in place, except those that the class keeps in float32 (`_keep_in_fp32_modules_strict`)."""
    kept = set() if storage == torch.float64 else kept_in_float32(model)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            own = torch.float32 if any(part in name for part in kept) else storage
            parameter.data = parameter.data.to(own)
    if storage == torch.float64:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.double()


def kept_in_float32(model: nn.Module) -> set[str]:
    """Parts of names of parameters that stay in float32."""
    kept: set[str] = set()
    for module in model.modules():
        for cls in type(module).__mro__:
            kept.update(vars(cls).get("_keep_in_fp32_modules_strict") or ())
    return kept


def text_config(model: nn.Module) -> Any:
    """The language model's fields of a model's config."""
    config: Any = model.config
    return config.get_text_config()


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of the language model's blocks: the longest shallow module list outside towers.

    Raises:
        Refused: ``no-blocks``.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not in_tower(name)
    ]
    if not lists:
        raise Refused("no-blocks", f"{type(model).__name__} has no list of blocks", "")
    shallowest = min(name.count(".") for name, _ in lists)
    name, found = max((p for p in lists if p[0].count(".") == shallowest), key=lambda pair: len(pair[1]))
    return [(f"{name}.{i}", block) for i, block in enumerate(found)]


def in_tower(name: str) -> bool:
    """Whether a module or parameter belongs to a vision or audio tower, or to a head for several tokens."""
    return any(word in name for word in TOWERS)


def freeze_towers(model: nn.Module) -> int:
    """Stop training towers; returns how many parameters that froze."""
    count = 0
    for name, parameter in model.named_parameters():
        if in_tower(name):
            parameter.requires_grad_(False)
            count += parameter.numel()
    return count


def end_token(config: Any) -> int | None:
    """The model's end token, where its vocabulary holds it."""
    text = config.get_text_config()
    end = getattr(text, "eos_token_id", None)
    if end is None:
        end = getattr(config, "eos_token_id", None)
    first = end[0] if isinstance(end, (list, tuple)) and end else end
    return first if isinstance(first, int) and 0 <= first < int(text.vocab_size) else None


def _construct(config: Any, choice: ModelConfig, device: str) -> nn.Module:
    cls = model_class(config)
    experts = choice.experts or ("grouped_mm" if device == "cuda" else "eager")
    options = {"experts_implementation": experts} if cls._can_set_experts_implementation() else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model: nn.Module = cls._from_config(
                config, dtype=torch.float32, attn_implementation=choice.attention, **options
            )
        except (ValueError, ImportError) as error:
            if "attn" not in str(error) and "attention" not in str(error).lower():
                raise
            if choice.attention != "eager":  # not every class has every implementation; eager is always there
                model = cls._from_config(config, dtype=torch.float32, attn_implementation="eager", **options)
            else:
                raise
    return model


def _fill_buffers(model: nn.Module) -> None:
    """Buffers come from construction (rotary frequencies), so they are made again on the CPU by the class itself."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()  # type: ignore[operator]  # costs nothing on parameters without memory
