"""Fields of one configuration that cannot hold together, whatever the model. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_GROUPS = ("n_group", "num_expert_group")
_POSITIVE = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A field that does not fit the others."""

    field: str
    why: str
    certain: bool = False
    """No model works with it; otherwise some may, and it only explains a failure."""


def contradictions(fields: Mapping[str, Any]) -> Iterator[Contradiction]:
    """What does not fit, the most certain first.

    Args:
        fields: of one configuration, without its nested ones; those that are missing are not judged.
    """
    heads, groups = _count(fields, "num_attention_heads"), _count(fields, "num_key_value_heads")
    width = _count(fields, "hidden_size")
    uneven = bool(heads and width and fields.get("head_dim") is None and width % heads)
    if heads and groups and heads > 0 and groups > 0 and heads % groups:
        why = f"{heads} query heads cannot share {groups} key-value heads evenly"
        field = "num_attention_heads" if uneven else "num_key_value_heads"  # the one that fits nothing else either
        yield Contradiction(field=field, why=why, certain=True)
    yield from _experts(fields)
    yield from _expert_groups(fields)
    for name in ("layer_types", "mlp_layer_types"):
        entries, depth = fields.get(name), _count(fields, "num_hidden_layers")
        if isinstance(entries, list) and depth and len(entries) != depth:
            yield Contradiction(field=name, why=f"{len(entries)} entries for num_hidden_layers {depth}")
    if uneven:
        yield Contradiction(field="num_attention_heads", why=f"{heads} heads do not divide hidden_size {width}")
    for name in _POSITIVE:
        value = _count(fields, name)
        if value is not None and value < 1:
            yield Contradiction(field=name, why=f"it is {value}")


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
        yield Contradiction(field=name, why=f"{chosen} of {experts} experts a token")


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
