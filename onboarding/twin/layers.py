"""Which layers of a model differ in kind, and the smallest depth that holds every kind.

Two layers are of one kind when their module trees agree in classes, parameter names, flags and the presence of
numbers; sizes do not count. So any schedule, whatever its fields are called, shows in the result that it has.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from onboarding.stages.parse.structure import find_layers
from onboarding.twin.shrink import DEPTH

Kind = tuple[Any, ...]
LAYER_NUMBERS = re.compile(r"(_layers|_idxs?|_indices|_indexes|_layer_ids|layers_idx)$")
"""Fields that list the numbers of layers."""


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the language model's blocks: the longest module list of same-purpose blocks outside towers.

    Raises:
        LookupError: the model has no list of blocks.
    """
    if hasattr(model, "config"):
        return find_layers(model, model.config)
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
    return sorted(k for k, v in fields.items() if depth > 1 and (_is_list(v, depth) or _is_pattern(v, depth)))


def _is_list(value: Any, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth


def _is_pattern(value: Any, depth: int) -> bool:
    """One sign a layer: ``M-M*``; words are in lower case."""
    return isinstance(value, str) and len(value) == depth and depth > 1 and not re.search(r"[a-z]", value)


def sections(fields: dict[str, Any], depth: int) -> list[str]:
    """Fields that count the layers of consecutive sections of the stack, in order; empty where there are none."""
    names = [
        k
        for k, v in fields.items()
        if k.endswith("_layers") and not DEPTH.search(k) and isinstance(v, int) and not isinstance(v, bool) and v > 0
    ]
    total = sum(fields[k] for k in names)
    # where two numbered parts make one block, both numbers count parts
    parts = total // depth if depth and total % depth == 0 else 0
    return names if len(names) > 1 and 0 < parts <= 2 and all(fields[k] % parts == 0 for k in names) else []


def _section_of(fields: dict[str, Any], depth: int) -> list[str]:
    """The section of each layer."""
    names = sections(fields, depth)
    parts = sum(fields[name] for name in names) // depth
    return [name for name in names for _ in range(fields[name] // parts)] or [""] * depth


def kinds(model: nn.Module, fields: dict[str, Any], per_layer: list[str]) -> list[Kind]:
    """The kind of every block.

    Args:
        model: may live on the meta device.
        fields: the language model's config fields.
        per_layer: the fields whose entries belong to a layer's kind (:func:`per_layer_fields` of the full model).
    """
    _, layers = decoder_layers(model)
    section = _section_of(fields, len(layers))
    return [
        (signature(layer), section[i], tuple((key, _flag(fields[key][i])) for key in per_layer))
        for i, layer in enumerate(layers)
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
    if isinstance(module, nn.ModuleList):  # how many there are is a size
        children = tuple(dict.fromkeys(("", inner) for _, inner in children))
    return (type(module).__name__, settings, parameters, children)


def selections(all_kinds: list[Kind], at_least: int) -> list[list[int]]:
    """Layers to keep, fewest first: one of each kind, the shortest prefix, then the same with two of each kind.

    A kind that comes only once cannot be kept twice; ``at_least`` fills up.
    """
    options: list[list[int]] = []
    for times in (1, 2):
        members: dict[Kind, list[int]] = {}
        for index, kind in enumerate(all_kinds):
            members.setdefault(kind, []).append(index)
        chosen = {index for found in members.values() for index in found[:times]}
        last = max(chosen)
        for index in range(len(all_kinds)):
            if len(chosen) >= at_least:
                break
            chosen.add(index)
        prefix = max(last + 1, min(at_least, len(all_kinds)))
        options += [sorted(chosen), list(range(prefix))]
    return [option for i, option in enumerate(options) if option not in options[:i]]


def with_layers(
    fields: dict[str, Any], chosen: list[int], depth: int, all_kinds: Sequence[Kind] = ()
) -> dict[str, Any]:
    """The language model's config fields cut down to the chosen layers.

    Args:
        fields: config fields of the language model.
        chosen: layer numbers to keep, ascending.
        depth: layers of the full model.
        all_kinds: of the full model's layers, where a field may count those of one kind.
    """
    cut = copy.deepcopy(fields)
    for key, value in fields.items():
        if DEPTH.search(key) and isinstance(value, int) and value and value % depth == 0:
            cut[key] = value // depth * len(chosen)
        elif isinstance(value, dict) and value and all(k.isdigit() and int(k) < depth for k in value):
            cut[key] = {str(chosen.index(int(k))): v for k, v in value.items() if int(k) in chosen}
        elif _is_list(value, depth):
            cut[key] = [value[i] for i in chosen]
        elif _is_list(value, 2 * depth) and depth > 2 and all(isinstance(v, str) for v in value):
            cut[key] = [v for i in chosen for v in value[2 * i : 2 * i + 2]]
        elif _is_pattern(value, depth):
            cut[key] = "".join(value[i] for i in chosen)
        elif key == "num_kv_shared_layers" and isinstance(value, int):  # the last ones
            cut[key] = sum(i >= depth - value for i in chosen)
        elif key in sections(fields, depth):
            before = sections(fields, depth)
            parts = sum(fields[k] for k in before) // depth
            start = sum(fields[k] for k in before[: before.index(key)]) // parts
            cut[key] = parts * sum(start <= i < start + value // parts for i in chosen)
        elif key.startswith("first_k_") and isinstance(value, int):
            cut[key] = sum(i < value for i in chosen)
        elif LAYER_NUMBERS.search(key) and isinstance(value, list) and all(isinstance(v, int) for v in value):
            cut[key] = [chosen.index(v) for v in value if v in chosen]
        elif key.endswith("_layers") and isinstance(value, int) and not isinstance(value, bool):
            counted = [kind for kind, count in Counter(all_kinds).items() if count == value < depth]
            if counted:  # as many layers as there are of one kind: a count of these
                cut[key] = sum(all_kinds[i] == counted[0] for i in chosen)
    return cut
