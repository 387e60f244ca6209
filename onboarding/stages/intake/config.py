"""Reading and checking ``config.json``: strict JSON, the fields that the model type needs, and their types."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from onboarding.problem import Problem
from onboarding.stages.intake.contradictions import contradictions
from onboarding.stages.intake.model_types import (
    ConfigClass,
    config_class,
    known_activations,
    known_model_types,
    nearest_model_types,
)

MAX_DEPTH = 32
MAX_NODES = 200_000
SIZE_LIMITS = {"num_hidden_layers": 2_000, "hidden_size": 2**20, "vocab_size": 2**26}
"""Fields that every decoder needs, and what is beyond anything that was ever built."""
MAX_SIZE = 2**40
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_SIZE_NAME = re.compile(
    r"^(num|n|max|moe|kv|q|qk|v|head|hidden|intermediate|vocab|ffn|index|linear|ssm|mamba|state)_|_(size|dim|rank|heads|layers|experts)$"
)
_AT_LEAST_ONE = re.compile(r"^(num_attention_heads|num_heads|n_heads?|num_key_value_heads|head_dim)$")
"""Zero of them makes no attention, and a division by zero in most classes."""
_SIZE = re.compile(r"(^|_)(size|dims?|rank|heads|kernel|width|period|expand|groups?|channels|state|conv|interval)$")
_MAY_BE_ZERO = re.compile(
    r"shared|window|type_vocab|additional|q_lora|rope|latent|sparse|per_layer|adapter|ngram|prefix|chunk|crop|pooler|index"
)
"""Sizes whose zero means that the model has no such part."""
_ROPE = re.compile(r"^rope_(scaling|parameters)$")
_EPSILON = re.compile(r"(^|_)(eps|epsilon)$")
_ACTIVATION = re.compile(r"^(hidden_act|hidden_activation|activation_function|mlp_hidden_act)$")
_WINDOW = re.compile(r"(^|_)(sliding_window|local_attention|attention_window|window_size|attention_chunk_size)$")
"""Lengths that some files switch off with -1."""
_ALLOWED_NEGATIVE = re.compile(r"_token_id$|_idx$|_index$|_layer$|axis|_dim$")
_OTHER_FILES = {
    "generation_config.json": ("eos_token_id", "bos_token_id", "do_sample", "temperature", "top_p", "max_new_tokens"),
    "tokenizer_config.json": ("tokenizer_class", "added_tokens_decoder", "chat_template"),
    "model.safetensors.index.json": ("weight_map",),
    "adapter_config.json": ("peft_type", "base_model_name_or_path"),
    "preprocessor_config.json": ("image_processor_type", "processor_class", "image_mean"),
}


def _reject_constant(token: str) -> Any:
    raise Problem("config-not-finite", f"config.json holds {token}", "JSON has no such number; remove or replace it")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise Problem("config-duplicate-field", f"config.json gives {key!r} twice", "keep one of them", field=key)
        seen[key] = value
    return seen


def _nodes(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise Problem("config-too-deep", f"config.json is nested deeper than {MAX_DEPTH}", path, field=path)
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _nodes(inner, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nodes(inner, f"{path}[{index}]", depth + 1)


def read_config(raw: bytes) -> dict[str, Any]:
    """Parse ``config.json``.

    Raises:
        Problem: not UTF-8, not JSON, duplicate fields, NaN or infinite numbers, too deep, or not an object.
    """
    try:
        config = json.loads(raw.decode("utf-8-sig"), parse_constant=_reject_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise Problem("config-not-json", "config.json is not UTF-8", str(error)) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Problem(
            "config-not-json",
            "config.json is not valid JSON",
            f"{error.msg} at {where}",
            line=error.lineno,
            column=error.colno,
        ) from None
    except RecursionError:
        raise Problem("config-too-deep", f"config.json is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise Problem("config-not-json", "config.json holds a number that cannot be read", str(error)) from None
    if not isinstance(config, dict):
        raise Problem(
            "config-not-an-object",
            f"config.json is {_kind(config)}, not an object",
            "a model's config.json starts with {",
        )
    for count, (path, value) in enumerate(_nodes(config)):
        if count > MAX_NODES:
            raise Problem("config-too-large", f"config.json has more than {MAX_NODES} values")
        if isinstance(value, float) and not math.isfinite(value):
            raise Problem(
                "config-not-finite", f"{path} is not a finite number", "1e999 and the like overflow", field=path
            )
    return config


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


def _looks_like(config: dict[str, Any]) -> str:
    scores = {name: sum(key in config for key in keys) / len(keys) for name, keys in _OTHER_FILES.items()}
    best = max(scores, key=lambda name: scores[name])
    return f"did you upload {best}?" if scores[best] > 0 else ""


def check_model_type(config: dict[str, Any], has_code: bool) -> str:
    """The model type, known to transformers or served by the definition's own code.

    Raises:
        Problem: missing, not a text, or unknown without code.
    """
    if "model_type" not in config:
        hint = _looks_like(config) or "transformers needs it to choose the class"
        raise Problem("config-no-model-type", "config.json has no model_type", hint, field="model_type")
    model_type = config["model_type"]
    if not isinstance(model_type, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", model_type):
        raise Problem(
            "config-wrong-type",
            "model_type is not a name",
            f"it is {_kind(model_type)}: {str(model_type)[:80]!r}",
            field="model_type",
        )
    if model_type not in known_model_types() and not has_code:
        near = nearest_model_types(model_type)
        hint = f"did you mean {', '.join(near)}?" if near else "add the model's modeling_*.py and configuration_*.py"
        raise Problem(
            "unknown-model-type",
            f"model_type {model_type!r} is unknown and the definition holds no code",
            hint,
            field="model_type",
            nearest=near,
        )
    return model_type


def check_fields(config: dict[str, Any], model_type: str, *, own_class: bool = False) -> None:
    """Check the presence and the types of the fields that size the model, nested configurations included.

    Args:
        config: the content of ``config.json``.
        model_type: its checked model type.
        own_class: the definition's own code declares the fields; transformers' class of this type does not count.

    Raises:
        Problem: ``config-field-missing``, ``config-wrong-type`` or ``config-out-of-range``, with the field.
    """
    declared = None if own_class else config_class(model_type)
    nested = {key: value for key, value in config.items() if key in _TEXT_PARTS}
    for key, value in nested.items():
        if value is not None and not isinstance(value, dict):
            raise Problem("config-wrong-type", f"{key} must be an object, not {_kind(value)}", "", field=key)
    text = next((value for value in nested.values() if value), None)
    for key, part in config.items():
        inner = part.get("model_type") if isinstance(part, dict) else None
        inner_class = config_class(inner) if isinstance(inner, str) else None
        if isinstance(part, dict) and (part is text or inner_class is not None):
            _check_types(part, inner_class, f"{key}.")
    if declared is not None and text is None:
        _check_required(config, declared, model_type)
    _check_types(config, declared, "")


def _check_required(config: dict[str, Any], declared: ConfigClass, model_type: str) -> None:
    missing = []
    for name in SIZE_LIMITS:
        stored = declared.aliases.get(name, name)
        if stored not in declared.annotations or stored in declared.derived:
            continue  # the class derives it, or never had it
        aliases = {name, stored} | {a for a, b in declared.aliases.items() if b == stored}
        if not aliases & set(config):
            missing.append(stored)
    if not missing:
        return
    hint = _looks_like(config)
    raise Problem(
        "config-field-missing",
        f"config.json has no {missing[0]}",
        f"model_type {model_type!r} needs it" + (f"; {hint}" if hint else ""),
        field=missing[0],
        missing=missing,
    )


def _fits(value: Any, annotation: str) -> bool:
    """Whether a JSON value fits an annotation; anything but plain scalar and list unions is left to transformers."""
    parts = [part.strip().split("[")[0] for part in re.sub(r"\[.*?\]+", "", annotation).split("|")]
    known = {"int", "float", "bool", "str", "None", "list", "tuple", "dict"}
    if not set(parts) <= known:
        return True
    if value is None:
        return "None" in parts  # transformers' classes are strict: null is a value of its own, not "use the default"
    if isinstance(value, bool):
        return "bool" in parts
    if isinstance(value, int):
        return bool({"int", "float"} & set(parts)) or ("bool" in parts and value in (0, 1))
    if isinstance(value, float):
        return "float" in parts or ("int" in parts and value.is_integer())
    if isinstance(value, str):
        return "str" in parts
    if isinstance(value, list):
        return bool({"list", "tuple"} & set(parts))
    return "dict" in parts


def _check_types(config: dict[str, Any], declared: ConfigClass | None, prefix: str) -> None:
    aliases = declared.aliases if declared else {}
    annotations = declared.annotations if declared else {}
    for key, value in config.items():
        annotation = annotations.get(aliases.get(key, key))
        canonical = next((c for c, a in aliases.items() if a == key), key)
        if canonical in SIZE_LIMITS and annotation is None and value is not None:
            annotation = "int"  # custom code declares nothing that can be read, yet these are sizes everywhere
        if annotation is not None and not _fits(value, annotation):
            raise Problem(
                "config-wrong-type",
                f"{prefix}{key} must be {annotation}, not {_kind(value)}",
                f"config.json gives {str(value)[:80]!r}",
                field=f"{prefix}{key}",
            )
        if declared is not None and _ROPE.search(key) and not isinstance(value, dict | None):
            raise Problem(
                "config-wrong-type", f"{prefix}{key} must be an object, not {_kind(value)}", "", field=f"{prefix}{key}"
            )
        if declared is not None and _ACTIVATION.search(key) and isinstance(value, str):
            _check_activation(value, f"{prefix}{key}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if _EPSILON.search(key) and not 0 < value < 1:
            raise Problem(
                "config-out-of-range",
                f"{prefix}{key} is {value:g}",
                "it is added under a square root: between 0 and 1, both excluded",
                field=f"{prefix}{key}",
            )
        if key == "rope_theta" and not value > 0:
            raise Problem(
                "config-out-of-range", f"{prefix}{key} is {value:g}", "it must be above 0", field=f"{prefix}{key}"
            )
        limit = SIZE_LIMITS.get(canonical, MAX_SIZE)
        lowest = _lowest(key, canonical, declared)
        sized = lowest != 0 or (_SIZE_NAME.search(key) and not _ALLOWED_NEGATIVE.search(key))
        if abs(value) > limit or (sized and isinstance(value, int) and value < lowest):
            raise Problem(
                "config-out-of-range",
                f"{prefix}{key} is {value if abs(value) < 10**30 else 'astronomical'}",
                f"it must lie between {lowest} and {limit}",
                field=f"{prefix}{key}",
                limit=limit,
            )
    _check_consistent(config, prefix, declared)


def _lowest(key: str, canonical: str, declared: ConfigClass | None) -> int:
    """The least value of a whole number: one where it sizes a tensor that its class always has."""
    if canonical in SIZE_LIMITS or _AT_LEAST_ONE.search(key):
        return 1
    if _WINDOW.search(key):
        return -1
    default = declared.defaults.get(declared.aliases.get(key, key)) if declared is not None else None
    sized = _SIZE.search(key) and not _MAY_BE_ZERO.search(key)
    return int(bool(sized) and isinstance(default, int) and default > 0)


def _check_consistent(config: dict[str, Any], prefix: str, declared: ConfigClass | None) -> None:
    for found in contradictions(config, declared.defaults if declared is not None else None):
        if found.certain:
            field = f"{prefix}{found.field}"
            how = "correct it, or the field that it is at odds with"
            raise Problem("config-contradicts-itself", f"{field} does not fit: {found.why}", how, field=field)


def _check_activation(name: str, field: str) -> None:
    known = known_activations()
    if known and name not in known:
        raise Problem(
            "config-unknown-activation",
            f"{field} {name[:80]!r} is no activation that transformers knows",
            f"one of {', '.join(sorted(known))}",
            field=field,
        )
