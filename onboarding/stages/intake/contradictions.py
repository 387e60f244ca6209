"""Fields of one configuration that cannot hold together, whatever the model. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_GROUPS = ("n_group", "num_expert_group")
_HEAD_WIDTH = re.compile(r"(^|_)(head_dim|head_size|head_width)$|^(kv_channels|d_kv|d_head)$")
_SHARED = (
    (("linear_num_key_heads",), ("linear_num_value_heads",)),
    (("n_groups", "mamba_n_groups", "mamba_num_groups"), ("mamba_num_heads", "mamba_n_heads")),
)
_OTHER_DEPTH = {"model_type", "num_hidden_layers", "num_layers", "depth"}
"""A nested configuration with one of these speaks of a stack of its own."""
_POSITIVE = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A field that does not fit the others."""

    field: str
    why: str
    certain: bool = False
    """No model works with it; otherwise some may, and it only explains a failure."""


def contradictions(fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Iterator[Contradiction]:
    """What does not fit, the most certain first.

    Args:
        fields: of one configuration; those that are missing are not judged.
        defaults: of its class in transformers, as far as they are constants; None where its class is not known.
    """
    found = [*_heads(fields, defaults), *_experts(fields), *_expert_groups(fields), *_shares(fields)]
    found += _per_layer(fields, _count(fields, "num_hidden_layers"))
    for name in _POSITIVE:
        value = _count(fields, name)
        if value is not None and value < 1:
            found.append(Contradiction(field=name, why=f"it is {value}"))
    yield from sorted(found, key=lambda one: not one.certain)


def _heads(fields: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> Iterator[Contradiction]:
    """Query heads that cannot share key-value heads, or that do not divide a width which nothing else gives them."""
    heads, groups = _count(fields, "num_attention_heads"), _count(fields, "num_key_value_heads")
    width = _count(fields, "hidden_size")
    known = {**(defaults or {}), **fields}
    own = any(_HEAD_WIDTH.search(name) and isinstance(value, int) for name, value in known.items())
    uneven = bool(heads and heads > 0 and width and not own and width % heads)
    if heads and groups and heads > 0 and groups > 0 and heads % groups:
        why = f"{heads} query heads cannot share {groups} key-value heads evenly"
        field = "num_attention_heads" if uneven else "num_key_value_heads"  # the one that fits nothing else either
        yield Contradiction(field=field, why=why, certain=True)
    if uneven and heads and width:
        rotated = defaults is not None and any(name in known for name in ("rope_theta", "rope_parameters"))
        odd = f": {width // heads} channels a head are no pairs to rotate" if rotated and width // heads % 2 else ""
        why = f"{heads} heads do not divide hidden_size {width}, and no head size is given{odd}"
        yield Contradiction(field="num_attention_heads", why=why, certain=bool(odd))
    rope = _count(fields, "qk_rope_head_dim")
    if rope is not None and rope % 2:
        yield Contradiction(field="qk_rope_head_dim", why=f"{rope} channels are no pairs to rotate", certain=True)
    part = fields.get("partial_rotary_factor")
    if isinstance(part, int | float) and not isinstance(part, bool) and not 0 <= part <= 1:
        why = f"{part:g} of a head's channels cannot be rotated"
        yield Contradiction(field="partial_rotary_factor", why=why, certain=True)


def _shares(fields: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Heads of a state along the sequence that share keys, or B and C, in equal groups."""
    for one, many in _SHARED:
        few, all_ = (next(((n, v) for n in names if (v := _count(fields, n))), ("", 0)) for names in (one, many))
        if few[1] > 0 and all_[1] > 0 and all_[1] % few[1]:
            why = f"{all_[1]} heads ({all_[0]}) do not divide into {few[1]} groups ({few[0]})"
            yield Contradiction(field=few[0] if len(one) > 1 else all_[0], why=why, certain=True)


def _per_layer(fields: Mapping[str, Any], depth: int | None, path: str = "") -> Iterator[Contradiction]:
    """Lists with one entry a layer, and lists of layers, against the depth."""
    for name, entries in fields.items():
        if isinstance(entries, dict) and not _OTHER_DEPTH & entries.keys():
            yield from _per_layer(entries, depth, f"{path}{name}.")
        if name == "hybrid_override_pattern" and isinstance(entries, str) and depth:
            letters = len(entries.replace("|", ""))
            if letters != depth:
                why = f"{letters} letters for num_hidden_layers {depth}"
                yield Contradiction(field=f"{path}{name}", why=why, certain=True)
        if not isinstance(entries, list) or not depth or depth < 1:
            continue
        if name in ("layer_types", "mlp_layer_types") and len(entries) != depth:
            why = f"{len(entries)} entries for num_hidden_layers {depth}"
            yield Contradiction(field=f"{path}{name}", why=why, certain=True)
        elif name.endswith("_layers") and entries and all(isinstance(entry, int) for entry in entries):
            beyond = [entry for entry in entries if not 0 <= entry <= depth]  # some files count from one
            if beyond:
                yield Contradiction(field=f"{path}{name}", why=f"there is no layer {beyond[0]} of {depth}")


def _experts(fields: Mapping[str, Any]) -> Iterator[Contradiction]:
    experts = next((v for n in _EXPERTS if (v := _count(fields, n)) is not None), None)
    name, chosen = next(((n, v) for n in _CHOSEN if (v := _count(fields, n)) is not None), ("", None))
    if experts is None or chosen is None:
        return
    if experts > 0 and chosen > experts:
        yield Contradiction(field=name, why=f"{chosen} of {experts} experts a token", certain=True)
    elif experts < 1 <= chosen:
        held = next(n for n in _EXPERTS if _count(fields, n) is not None)
        yield Contradiction(field=held, why=f"{chosen} of {experts} experts a token")
    elif experts > 0 and chosen < 1:
        yield Contradiction(field=name, why=f"{chosen} of {experts} experts a token", certain=True)


def _expert_groups(fields: Mapping[str, Any]) -> Iterator[Contradiction]:
    experts = next((v for n in _EXPERTS if (v := _count(fields, n)) is not None), None)
    name, groups = next(((n, v) for n in _GROUPS if (v := _count(fields, n)) is not None), ("", None))
    best = _count(fields, "topk_group")
    # a greedy choice never looks at the groups
    if not groups or groups < 1 or fields.get("topk_method") == "greedy":
        return
    if experts and experts % groups:
        yield Contradiction(field=name, why=f"{experts} experts do not divide into {groups} groups", certain=True)
    if best is not None and best > groups:
        yield Contradiction(field="topk_group", why=f"{best} of {groups} groups of experts a token", certain=True)


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
