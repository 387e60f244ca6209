"""Matching a checkpoint's names with a built model: transformers' own rules first, then what is left is explained.

Runs where the model is (in the sandbox for custom code); gives plain data.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onboarding.weights.index import Entry, pattern
from onboarding.weights.result import Placement
from onboarding.weights.stored import Logical, logical_tensors


@dataclass(kw_only=True)
class Match:
    """How the model's tensors come out of the checkpoint's."""

    placements: list[Placement] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)
    """Extra tensor -> what it is, where that is known."""
    wrong_shapes: list[str] = field(default_factory=list)


def match_names(model: nn.Module, entries: dict[str, Entry]) -> Match:
    """Place every tensor of a checkpoint.

    Args:
        model: built at full size; its parameters may be fake.
        entries: the checkpoint's tensors by name.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state = model.state_dict(keep_vars=True)
    rules = _rules(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {p: rule for rule in converters for p in rule.source_patterns}
    prefix = getattr(model, "base_model_prefix", None) or None
    logical, aside = logical_tensors(list(entries))
    found = Match(extra=aside, why=dict.fromkeys(aside, "scales of activations: for inference in low precision"))
    made: dict[str, list[tuple[Logical, str]]] = defaultdict(list)
    for tensor in sorted(logical, key=lambda t: natural_key(t.name)):
        target, source_pattern = rename_source_key(tensor.name, renamings, converters, prefix, state)
        if target not in state and tensor.name in state:
            target, source_pattern = tensor.name, None
        if target not in state:
            found.extra += tensor.parts
        else:
            made[target].append((tensor, source_pattern or ""))
    filled: set[int] = set()
    for target, tensors in made.items():
        for placement in _placements(model, target, tensors, by_pattern, state):
            found.placements.append(placement)
            filled.add(id(state[placement.target]))
            _check_counts(found, placement, state)
            _check_shape(found, placement, tensors, state, entries)
    _ties(found, state, filled)
    _explain(found, model)
    return found


def matched_weights(model: nn.Module, entries: dict[str, Entry]) -> dict[str, Any]:
    """The match as plain data, for :func:`onboarding.weights.report.make_report`."""
    found = match_names(model, entries)
    return {
        "placements": [p.model_dump() for p in found.placements],
        "missing": found.missing,
        "extra": found.extra,
        "why": found.why,
        "wrong_shapes": found.wrong_shapes,
        "hints": hints(found),
    }


def _rules(model: nn.Module) -> list[Any]:
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(model, PreTrainedModel):
        return []
    rules: list[Any] = get_model_conversion_mapping(model)
    return rules


def _placements(
    model: nn.Module,
    target: str,
    tensors: list[tuple[Logical, str]],
    by_pattern: dict[str, Any],
    state: dict[str, Any],
) -> list[Placement]:
    stored = ", ".join(sorted({t.stored for t, _ in tensors if t.stored}))
    sources = [part for tensor, _ in tensors for part in tensor.parts]
    source_pattern = tensors[0][1]
    if not source_pattern:
        how = "exact" if tensors[0][0].name == target else "renamed"
        return [Placement(target=target, sources=sources, how=how, stored=stored)]
    rule = deepcopy(by_pattern[source_pattern])
    words = ", then ".join(_operation_words(operation) for operation in rule.operations) or "as it is"
    targets = [target, *_siblings(target, rule, state)]
    how = "split" if len(targets) > 1 else "fused" if len(sources) > 1 else "renamed"
    return [Placement(target=name, sources=sources, how=how, rule=words, stored=stored) for name in targets]


def _siblings(target: str, rule: Any, state: dict[str, Any]) -> list[str]:
    """Other targets of a rule that makes several tensors out of one: the first names it, the rest follow."""
    patterns = [p.strip("^$") for p in rule.target_patterns]
    first = next((p for p in patterns if p in target), None)
    if first is None:
        return []
    names = (target.replace(first, other) for other in patterns if other != first)
    return [name for name in names if name in state]


def _operation_words(operation: Any) -> str:
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", type(operation).__name__).lower()
    dims = {name: getattr(operation, name) for name in ("dim", "dim0", "dim1") if hasattr(operation, name)}
    return words + (f" ({', '.join(f'{k} {v}' for k, v in dims.items())})" if dims else "")


def _check_counts(found: Match, placement: Placement, state: dict[str, Any]) -> None:
    """A list that becomes one tensor must be whole: one member of each kind for every row."""
    if "merge modulelist" not in placement.rule:
        return
    rows = int(state[placement.target].shape[0])
    for kind, count in Counter(pattern(name) for name in placement.sources).items():
        if count != rows:
            found.wrong_shapes.append(f"{placement.target} wants {rows} of {kind}, the checkpoint has {count}")


def _check_shape(
    found: Match,
    placement: Placement,
    tensors: list[tuple[Logical, str]],
    state: dict[str, Any],
    entries: dict[str, Entry],
) -> None:
    """Where headers give shapes: a tensor that is taken as it is must have the parameter's."""
    if placement.how not in ("exact", "renamed") or placement.rule or placement.stored or len(placement.sources) != 1:
        return
    shape, wanted = entries[placement.sources[0]].shape, tuple(int(n) for n in state[placement.target].shape)
    if shape is not None and shape != wanted:
        found.wrong_shapes.append(
            f"{placement.sources[0]} is {list(shape)}, the model's {placement.target} {list(wanted)}"
        )


def _ties(found: Match, state: dict[str, Any], filled: set[int]) -> None:
    """Names that share a tensor with one that is filled."""
    owners = {id(state[p.target]): p.target for p in found.placements}
    placed = {p.target for p in found.placements}
    for name, tensor in state.items():
        if name in placed:
            continue
        if id(tensor) in filled:
            found.placements.append(Placement(target=name, sources=[owners[id(tensor)]], how="tied"))
        else:
            found.missing.append(name)


def _explain(found: Match, model: nn.Module) -> None:
    """What the leftovers are, as far as the class itself says it."""
    ignored = [
        re.compile(p)
        for module in model.modules()
        for p in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    for name in found.extra:
        if name in found.why:
            continue
        if any(p.search(name) for p in ignored):
            found.why[name] = "the class leaves it out on purpose (layers for several next tokens, and the like)"
        elif name.endswith("inv_freq"):
            found.why[name] = "a rotary table, which the model computes"
        elif name.endswith((".bias", ".masked_bias")) and ".attn" in name:
            found.why[name] = "a causal mask that older versions stored"


def hints(found: Match) -> list[str]:
    """What a leftover could be: several tensors where the model wants one, or one where it wants several."""
    missing, extra = sorted({pattern(n) for n in found.missing}), sorted({pattern(n) for n in found.extra})
    notes = []
    for wanted in missing:
        for parts, whole in _JOINS:
            stem = wanted.removesuffix(".weight")
            if stem.endswith(whole) and all(_with(stem, whole, p) in " ".join(extra) for p in parts):
                notes.append(f"{wanted} could be {' and '.join(parts)} put together: add a conversion for it")
    for left in extra:
        for parts, whole in _JOINS:
            stem = left.removesuffix(".weight")
            if stem.endswith(whole) and all(_with(stem, whole, p) in " ".join(missing) for p in parts):
                notes.append(f"{left} could hold {' and '.join(parts)}: add a conversion that splits it")
    return list(dict.fromkeys(notes))


_JOINS = (
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("w1", "w3"), "w13"),
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("q_proj", "k_proj", "v_proj"), "query_key_value"),
    (("q_proj", "k_proj", "v_proj"), "c_attn"),
)


def _with(stem: str, whole: str, part: str) -> str:
    return stem.removesuffix(whole) + part


def natural_key(name: str) -> list[tuple[int, str | int]]:
    """Sorts ``experts.10`` behind ``experts.9``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
