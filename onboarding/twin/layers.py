"""Which layers of a model differ in kind, and the smallest depth that holds every kind.

Two layers are of one kind when their module trees agree in classes, parameter names, flags and the presence of
numbers; sizes do not count. So any schedule, whatever its fields are called, shows in the result that it has.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from onboarding.twin.shrink import DEPTH

Kind = tuple[Any, ...]


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the language model's blocks: the longest module list of same-purpose blocks outside towers.

    Raises:
        LookupError: the model has no list of blocks.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not _in_tower(name)
    ]
    if not lists:
        raise LookupError(f"{type(model).__name__} has no list of blocks")
    shallowest = min(name.count(".") for name, _ in lists)
    top = [(name, module) for name, module in lists if name.count(".") == shallowest]
    return max(top, key=lambda pair: len(pair[1]))


def _in_tower(name: str) -> bool:
    return any(word in name for word in ("vision", "visual", "audio", "mtp"))


def per_layer_fields(fields: dict[str, Any], depth: int) -> list[str]:
    """Names of the config fields that hold one entry a layer."""
    return sorted(k for k, v in fields.items() if isinstance(v, (list, str)) and len(v) == depth and depth > 1)


def kinds(model: nn.Module, fields: dict[str, Any], per_layer: list[str]) -> list[Kind]:
    """The kind of every block.

    Args:
        model: may live on the meta device.
        fields: the language model's config fields.
        per_layer: the fields whose entries belong to a layer's kind (:func:`per_layer_fields` of the full model).
    """
    _, layers = decoder_layers(model)
    return [
        (signature(layer), tuple((key, _flag(fields[key][i])) for key in per_layer)) for i, layer in enumerate(layers)
    ]


def _flag(value: Any) -> Any:
    """A setting without its size: numbers only count as present."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    return "number" if isinstance(value, (int, float)) else "other"


def signature(module: nn.Module) -> Kind:
    """Class, flags, parameter names and children of a module, without sizes."""
    settings = tuple(
        (key, _flag(value))
        for key, value in sorted(vars(module).items())
        if not key.startswith("_") and key != "training" and isinstance(value, (bool, str, int, float, type(None)))
    )
    parameters = tuple((name, p.ndim) for name, p in module.named_parameters(recurse=False))
    children = tuple((name, signature(child)) for name, child in module.named_children())
    return (type(module).__name__, settings, parameters, children)


def selections(all_kinds: list[Kind], at_least: int) -> list[list[int]]:
    """Layers to keep, fewest first: one of each kind (filled up to ``at_least``), then the shortest prefix."""
    first: dict[Kind, int] = {}
    for index, kind in enumerate(all_kinds):
        first.setdefault(kind, index)
    chosen = set(first.values())
    for index in range(len(all_kinds)):
        if len(chosen) >= at_least:
            break
        chosen.add(index)
    prefix = max(max(first.values()) + 1, min(at_least, len(all_kinds)))
    options = [sorted(chosen), list(range(prefix))]
    return options if options[0] != options[1] else options[:1]


def with_layers(fields: dict[str, Any], chosen: list[int], depth: int) -> dict[str, Any]:
    """The language model's config fields cut down to the chosen layers.

    Args:
        fields: config fields of the language model.
        chosen: layer numbers to keep, ascending.
        depth: layers of the full model.
    """
    cut = copy.deepcopy(fields)
    for key, value in fields.items():
        if DEPTH.search(key) and isinstance(value, int) and value % depth == 0:
            cut[key] = value // depth * len(chosen)
        elif isinstance(value, list) and len(value) == depth:
            cut[key] = [value[i] for i in chosen]
        elif isinstance(value, str) and len(value) == depth and depth > 8:  # one letter a layer: ``M-M*``
            cut[key] = "".join(value[i] for i in chosen)
        elif key.startswith("first_k_") and isinstance(value, int):
            cut[key] = sum(i < value for i in chosen)
        elif key.endswith("_layers") and isinstance(value, list) and all(isinstance(v, int) for v in value):
            cut[key] = [chosen.index(v) for v in value if v in chosen]
    return cut
