"""Build models from config fields: the published one on the meta device, the twin with living branches."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onboarding.problem import Problem
from onboarding.stages.parse.backbones import missing_backbones
from onboarding.stages.parse.build import build_model, config_for, quiet
from onboarding.stages.parse.inputs import drawn_values, loss_of, parameters_of, repeated, with_image
from onboarding.stages.parse.marked import modeling_modules
from onboarding.stages.parse.structure import embedding_of, find_layers
from onboarding.twin import shrink
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

    fields = {k: v for k, v in config.items() if k not in ("model_type", "auto_map", "torch_dtype")}
    try:
        with quiet():
            return AutoConfig.for_model(str(config.get("model_type", "")), **fields)
    except ValueError as error:
        if "model_type" not in config or "Unrecognized model identifier" in str(error):
            raise Problem("unknown-model-type", f"unknown model_type {config.get('model_type')!r}") from error
        raise Problem("config-refused", "the config's own class refuses it", str(error)) from error


def fields_of(config: Any, *, derived: bool = False) -> dict[str, Any]:
    """All fields of a config as plain data, ``model_type`` among them, weights' dtype and quantisation left out.

    Args:
        config: an object of transformers, or of a definition's own code.
        derived: keep head sizes that the class works out from other fields.
    """
    dropped = ("dtype", "torch_dtype", "quantization_config", "transformers_version", "architectures", "auto_map")
    labels = ("id2label", "label2id")
    fields = {k: _plain(v) for k, v in config.to_dict().items() if k not in (*dropped, *labels)}
    for name in list(fields):
        worked_out = not derived and shrink.HEAD_SIZE.search(name) and _derived(config, fields, name)
        if worked_out or _computed(type(config), name):
            del fields[name]
        elif name in (getattr(config, "sub_configs", None) or {}) and hasattr(getattr(config, name, None), "to_dict"):
            fields[name] = fields_of(getattr(config, name), derived=derived)
    return {_common_name(config, name): value for name, value in fields.items()}


def _common_name(config: Any, name: str) -> str:
    """The library's own word for a field whose name says nothing of its size: its class translates (``layers``)."""
    if shrink.known(name):
        return name
    words = getattr(config, "attribute_map", None) or {}
    return next((common for common, own in words.items() if own == name and shrink.known(common)), name)


def _computed(cls: type, name: str) -> bool:
    """A property that nothing can be assigned to."""
    found = getattr(cls, name, None)
    return isinstance(found, property) and found.fset is None


def _derived(config: Any, fields: dict[str, Any], name: str) -> bool:
    """Whether the class works a size out from others while it is built, whatever it is given."""
    cls = type(config)
    if not dataclasses.is_dataclass(cls) or name in {field.name for field in dataclasses.fields(cls)}:
        return False
    try:
        with quiet():
            alone = cls(**{k: v for k, v in fields.items() if k not in (name, "model_type")})
    except Exception:  # it is needed after all
        return False
    return bool(getattr(alone, name, None) == fields[name])


def _plain(value: Any) -> Any:
    """As it would come back from JSON: tuples become lists, keys become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def path_to(config: Any, wanted: Any) -> tuple[str, ...] | None:
    """Names of the nested configs that lead from one to another; empty where they are the same, None where none do."""
    if config is wanted:
        return ()
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        found = path_to(inner, wanted) if inner is not None else None
        if found is not None:
            return (name, *found)
    return None


def stack_of(model: Any) -> Any:
    """The part of a model's config that its stack of decoder layers was built from.

    It is the one that a module around the stack holds, where that is a nested one (a model may name its stacks as it
    likes: ``global_config``); else the language model's.
    """
    name = find_layers(model, model.config)[0]
    while name:
        name = name.rpartition(".")[0]
        held = getattr(model.get_submodule(name), "config", None)
        if held is not None and path_to(model.config, held):
            return held
    return text_of(model.config)


def stack_fields(model: Any) -> dict[str, Any]:
    """Fields of :func:`stack_of`."""
    return fields_of(stack_of(model))


def text_path(config: Any) -> tuple[str, ...]:
    """Names of the nested configs that lead to the language model's; empty where it is the config itself."""
    return path_to(config, text_of(config)) or ()


_ROPE_DEFAULT = re.compile(r"rope_parameters\.get\(\s*\"(\w+)\",\s*(\[[\d,\s]+\])")


def with_implied_rope(model: nn.Module, fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Fields with the rotary settings that the class reads with a default of its own, so that they can be made smaller.

    Args:
        model: the published model.
        fields: of its config.
        path: to the language model's config.
    """
    implied = {
        name: json.loads(value)
        for module in modeling_modules(model)
        for name, value in _ROPE_DEFAULT.findall(inspect.getsource(module))
    }
    if path:
        inner = with_implied_rope(model, fields[path[0]], path[1:])
        return {**fields, path[0]: inner}
    rope = fields.get("rope_parameters")
    return {**fields, "rope_parameters": {**implied, **rope}} if implied and isinstance(rope, dict) else fields


def text_of(config: Any) -> Any:
    """The language model's part of a config; the decoder where an encoder reads text too."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def text_fields(config: Any) -> dict[str, Any]:
    """The language model's fields."""
    return fields_of(text_of(config))


def model_class(config: Any) -> type[nn.Module]:
    """The class with a language-model head for a config: the one it names, else the one that transformers maps.

    Raises:
        Problem: ``no-language-model`` if transformers maps it to none.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    mappings = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    if text_of(config) is not config:
        mappings.reverse()  # a config with towers: the causal-LM entry, where there is one, wants the text part alone
    found: list[type[nn.Module]] = []
    for mapping in mappings:
        if type(config) in mapping:
            cls = mapping[type(config)]
            found += cls if isinstance(cls, tuple) else (cls,)
    named = (getattr(config, "architectures", None) or [None])[0]
    own: Any = getattr(transformers, named, None) if named else None
    if not found and own is not None and getattr(own, "config_class", None) is type(config):
        found = [own]  # the part of a composite config that a mapped class takes
    if not found:
        raise Problem("no-language-model", f"transformers has no language model for {type(config).__name__}")
    return next((cls for cls in found if cls.__name__ == named), found[0])


def on_meta(config: Any) -> nn.Module:
    """The model without memory and without initial values."""
    from transformers.initialization import no_init_weights

    cls: Any = model_class(config)
    part = config_for(cls, config)
    try:
        with torch.device("meta"), no_init_weights(), missing_backbones(), quiet():
            model: nn.Module = cls(part)
    except Exception:  # a constructor that reads values: fake tensors carry those of constants
        model = build_model(config)[0]
    return model


def trial(fields: dict[str, Any], tokens: int, built: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Build a proposal and run one step.

    Args:
        fields: of its config.
        tokens: sequence length of the step.
        built: called with the model before it runs; what it raises rules the proposal out.

    Raises:
        ArithmeticError: the loss or a gradient is not finite.
        Exception: whatever construction, forward or backward raise.
    """
    model = _instantiate(fields, torch.float32, seed=0)
    if built is not None:
        built(model)
    loss = loss_on(model, step_inputs(model, tokens, batch=1, seed=None))
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not torch.isfinite(loss) or not all(torch.isfinite(grad).all() for grad in grads):
        raise ArithmeticError("loss or gradient is not finite")
    model.zero_grad(set_to_none=True)
    return model


def step_inputs(model: Any, tokens: int, *, batch: int, seed: int | None) -> dict[str, Any]:
    """Arguments of one training step that the class accepts: text, or text and an image where it needs one.

    Args:
        model: the twin.
        tokens: sequence length.
        batch: sequences.
        seed: of the tokens; None for a fixed pattern.

    Raises:
        Exception: what the class raises on text alone, when nothing else is accepted either.
    """
    generator = torch.Generator().manual_seed(seed or 0)
    if seed is None:
        ids = (torch.arange(batch * tokens) * 7 % plain_vocabulary(model)).view(batch, tokens)
    else:
        ids = torch.randint(plain_vocabulary(model), (batch, tokens), generator=generator)
    parameters = parameters_of(model.forward)
    arguments = [{"input_ids": ids, "labels": ids, "use_cache": False}]
    failure: Exception | None = None
    one = (repeated(given, batch) for given in with_image(model, ids)) if batch > 1 else ()
    for given in itertools.chain(arguments, with_image(model, ids), one):
        values = {k: drawn_values(k, v, generator) for k, v in given.items()}
        values.pop("use_cache" if "use_cache" not in parameters and not _takes_more(model) else "", None)
        try:
            with torch.no_grad():
                loss_on(model, values)
        except Exception as error:  # this layout is not the one
            failure = failure or error
            continue
        return values
    assert failure is not None
    raise failure


def _takes_more(model: Any) -> bool:
    kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def loss_on(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The loss of one step; of a fixed pattern of tokens where the class is given none."""
    output = model(**inputs)
    ids = next((v for k, v in inputs.items() if k in ("labels", "decoder_input_ids", "input_ids")), None)
    if ids is None:
        batch, tokens = output.logits.shape[:2]
        ids = (torch.arange(batch * tokens) * 7 % plain_vocabulary(model)).view(batch, tokens)
    return loss_of(output, ids)


def plain_vocabulary(model: nn.Module) -> int:
    """Ids that plain text may use: all bytes, or fewer where the vocabulary is smaller."""
    own = getattr(text_of(model.config), "vocab_size", None)
    return min(256, int(own or embedding_of(model).shape[0]))


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
    part = config_for(cls, config)
    with torch.random.fork_rng(devices=[]), missing_backbones(), quiet():
        torch.manual_seed(seed)
        model: nn.Module = cls._from_config(part, dtype=dtype, attn_implementation="eager", **_experts_eager(cls))
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
