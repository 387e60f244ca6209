"""What is new in one architecture against another: sizes, features, operators, parameters. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kernel_templates.registry import load_spec
from onboarding.architecture import Architecture, BlockKind, FeedForwardRole, MixerRole, OperatorUse, Record

State = Literal["new", "gone", "changed", "same"]


class Size(Record):
    """One number of both architectures."""

    name: str
    before: int
    after: int

    @property
    def ratio(self) -> float:
        """How many times as large; infinite from nothing."""
        return self.after / self.before if self.before else math.inf if self.after else 1.0


class Difference(Record):
    """One feature or operator."""

    state: State
    name: str
    before: str = ""
    after: str = ""


class Comparison(Record):
    """The second architecture against the first."""

    before: str
    after: str
    sizes: list[Size]
    features: list[Difference]
    operators: list[Difference]
    parameters: list[Size]
    """By role, in elements."""
    likeness: float
    """Share of all features that both have, 0 to 1."""

    @property
    def news(self) -> list[Difference]:
        """What only the second has, or has otherwise."""
        return [d for d in (*self.features, *self.operators) if d.state in ("new", "changed")]


def compare(before: Architecture, after: Architecture) -> Comparison:
    """Everything that differs."""
    old, new = features(before), features(after)
    roles = dict.fromkeys([*before.census.by_role, *after.census.by_role])
    return Comparison(
        before=before.name,
        after=after.name,
        sizes=[Size(name=name, before=a, after=b) for (name, a), b in zip(_sizes(before), _values(after), strict=True)],
        features=differences(old, new),
        operators=_operators(before.uses, after.uses),
        parameters=[
            Size(name=role, before=before.census.by_role.get(role, 0), after=after.census.by_role.get(role, 0))
            for role in roles
        ],
        likeness=likeness(old, new),
    )


def _sizes(a: Architecture) -> list[tuple[str, int]]:
    return [
        ("layers", a.num_layers),
        ("hidden size", a.hidden_size),
        ("vocabulary", a.vocab_size),
        ("kinds of blocks", len(a.blocks)),
        ("parameters", a.census.total),
        ("active parameters", a.census.active),
        ("fp32 parameters", a.census.fp32_parameters),
    ]


def _values(a: Architecture) -> list[int]:
    return [value for _, value in _sizes(a)]


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[Difference]:
    """New ones first, then changed, gone and same ones, each in the order of appearance."""
    rows = []
    for name in dict.fromkeys([*after, *before]):
        a, b = before.get(name), after.get(name)
        state: State = "new" if a is None else "gone" if b is None else "same" if a == b else "changed"
        rows.append(Difference(state=state, name=name, before=a or "", after=b or ""))
    order = {"new": 0, "changed": 1, "gone": 2, "same": 3}
    return sorted(rows, key=lambda row: order[row.state])


def likeness(before: Mapping[str, str], after: Mapping[str, str]) -> float:
    """Shared features over all features; a feature with another value counts half."""
    names = set(before) | set(after)
    shared = [1.0 if before[n] == after[n] else 0.5 for n in names if n in before and n in after]
    return sum(shared) / len(names) if names else 1.0


def nearest(architecture: Architecture, known: Iterable[Architecture]) -> Architecture | None:
    """The most alike of the others; None without any."""
    own = features(architecture)
    others = [other for other in known if other.name != architecture.name]
    return max(others, key=lambda other: likeness(features(other), own), default=None)


# ---- features -----------------------------------------------------------------------------------------------------


def features(a: Architecture) -> dict[str, str]:
    """What the model is made of, by name, with the value that may differ between two models that both have it."""
    found: dict[str, str] = {}
    for block in a.blocks:
        for name, value in _block_features(block):
            if value and value not in found.get(name, "").split("; "):
                found[name] = "; ".join(filter(None, [found.get(name), value]))
            else:
                found.setdefault(name, value)
    found["embeddings"] = "tied" if a.census.tied_embeddings else "untied"
    found["modality"] = a.modality
    found |= dict.fromkeys((f"multi-token prediction: {part}" for part in a.census.not_built), "in the checkpoint only")
    found |= {f"no kernel family for: {name}": "" for name in a.novel}
    return found | _facts(a)


def _facts(a: Architecture) -> dict[str, str]:
    facts = getattr(a, "facts", None)
    if facts is None:
        return {}
    rows: dict[str, Any] = {
        "positions": facts.positions,
        "embedding scale": facts.embedding_scale if facts.embedding_scale != 1 else None,
        "logit scale": facts.logit_scale if facts.logit_scale != 1 else None,
        "logit softcap": facts.logit_softcap,
        "auxiliary losses": "; ".join(facts.auxiliary_losses),
        "heads for later tokens": facts.prediction_heads or None,
    }
    return {name: _text(value) for name, value in rows.items() if value not in (None, "")}


def _block_features(block: BlockKind) -> list[tuple[str, str]]:
    """(name, value) pairs; from the proven roles where there are any, else from the block's words."""
    rows: list[tuple[str, Any]] = []
    if block.roles is None:
        rows = [(f"mixer: {_plain(block.mixer)}", block.mixer), (f"feed-forward: {_kind(block.feed_forward)}", "")]
        rows += [("experts", block.feed_forward)] if block.feed_forward.startswith("MoE") else []
    else:
        for mixer in block.roles.mixers:
            rows += _mixer_features(mixer)
        for part in block.roles.feed_forwards:
            rows += _feed_forward_features(part)
        if block.roles.residual is not None and block.roles.residual.kind != "plain":
            residual = block.roles.residual
            rows.append((f"residual: {residual.kind}", f"{residual.streams} streams" if residual.streams > 1 else ""))
        rows += [(f"norm: {norm.form}, {norm.place}", "") for norm in block.roles.norms]
    return [(name, _text(value)) for name, value in rows]


def _mixer_features(m: MixerRole) -> list[tuple[str, Any]]:
    kind = " ".join(filter(None, [m.kind, m.heads if m.kind not in ("linear", "mamba1", "mamba2") else ""]))
    rows: list[tuple[str, Any]] = [
        (f"mixer: {kind}", f"{m.query_heads} heads of {m.head_dim}" if m.query_heads else "")
    ]
    named = {
        "key-value latent": m.latent,
        "query latent": m.query_latent,
        "window": m.window,
        "attention chunk": m.chunk,
        "keys kept by the indexer": m.top_k,
        "pooled keys": m.pool,
        "indexer": m.indexer,
        "softcap": m.softcap,
        "attention output gate": m.output_gate,
        "additive scores": m.bias,
        "short convolution": m.convolution,
    }
    rows += [(name, value) for name, value in named.items() if value not in (None, "", 0)]
    rows += [
        (name, "")
        for name, has in (("attention sinks", m.sinks), ("qk-norm", m.qk_norm), ("delta rule", m.delta))
        if has
    ]
    if m.decay:
        rows.append(("decay of the state", m.decay))
    return rows


def _feed_forward_features(f: FeedForwardRole) -> list[tuple[str, Any]]:
    gated = f"{'gated ' if f.gated else ''}{f.activation}".strip()
    rows: list[tuple[str, Any]] = [(f"feed-forward: {f.kind}", f"{gated}, {f.width} wide" if f.width else gated)]
    if f.limit is not None:
        rows.append(("clamped gate", f.limit))
    if f.experts:
        rows += [("experts", f"{f.experts}, top {f.top_k}"), (f"router score: {f.score}", "")]
        rows += [(name, "") for name, has in _router_flags(f) if has]
        rows += [("shared experts", f.shared)] if f.shared else []
        rows += [("experts in a latent width", f.latent)] if f.latent else []
        rows += [("router groups", f"{f.kept_groups} of {f.groups}")] if f.groups > 1 else []
    return rows


def _router_flags(f: FeedForwardRole) -> list[tuple[str, bool]]:
    return [
        ("router: selection bias", f.selection_bias),
        ("router: renormalised weights", f.renormalised),
        ("router: scaled weights", f.scaling != 1.0),
    ]


def _plain(words: str) -> str:
    return words.partition(" (")[0]


def _kind(words: str) -> str:
    return "MoE" if words.startswith("MoE") else words.partition(" ")[0]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- operators ----------------------------------------------------------------------------------------------------


def _operators(before: list[OperatorUse], after: list[OperatorUse]) -> list[Difference]:
    """Operator specs by family and flags; the same flags at other sizes count as changed."""
    return differences(_by_flags(before), _by_flags(after))


def _by_flags(uses: list[OperatorUse]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for use in uses:
        name, sizes = _name_and_sizes(use)
        found.setdefault(name, []).append(sizes)
    return {name: "; ".join(sorted(dict.fromkeys(sizes))) for name, sizes in found.items()}


_WITHIN = {"group_score": "groups"}
"""A flag that says nothing while there is only one of another."""


def _name_and_sizes(use: OperatorUse) -> tuple[str, str]:
    """``linear attention: decay channel, delta`` and ``32 heads of 128``: switches make a kernel, numbers size it."""
    family = str(use.spec["family"]).replace("_", " ")
    try:
        flags = load_spec(use.spec).flags()
    except (KeyError, TypeError, ValueError):  # written by another version
        return f"{family}: {use.words}", ""
    flags = {name: value for name, value in flags.items() if flags.get(_WITHIN.get(name, "")) != 1}
    switches = [
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
        for name, value in flags.items()
        if value is True or (isinstance(value, str) and value not in ("", "none") and len(value) < 40)
    ]
    return ": ".join(filter(None, [family, ", ".join(switches)])), use.words
