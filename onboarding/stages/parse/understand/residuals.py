"""How the outputs of a layer's parts join the stream: algebra on the values of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onboarding.architecture import ResidualRole
from onboarding.stages.parse.understand.compare import same
from onboarding.stages.parse.understand.ledger import IDENTITY, Ledger
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Observation
from onboarding.stages.parse.understand.parts import LayerView, Part

EXACT = 1e-4


@dataclass(frozen=True)
class _Term:
    """A value that may be added to the stream."""

    part: Part
    value: Tensor


def understand_residual(view: LayerView, step: Observation, ledger: Ledger) -> ResidualRole:
    """The residual kind of a layer, proven by writing its output as a sum."""
    x, y = _stream(view)
    if x is None or y is None:
        ledger.unproven("residual", "residual", "the layer's input and output differ in shape")
        return ResidualRole(kind="novel")
    terms = _terms(view, step)
    if terms and y.numel() > terms[0].value.numel() and y.numel() % terms[0].value.numel() == 0:
        return _hyper(view, x, y, terms, ledger)
    role = _attention_residuals(view, ledger)
    if role is not None:
        return role
    for count, others in enumerate(_others(view, terms, y.numel())):
        error, fit = fit_sum([x, *(t.value for t in others)], y)
        if error <= EXACT:
            return _sum_role(view, x, others, fit, error, ledger)
        role = None if count else _per_channel(x, y, terms, ledger)
        if role is not None:
            return role
    keep = [p for p in view.of("other") if p.call.results()]
    for part in keep:
        keep_subgraph(part.call, "residual", ledger)
    if not keep:
        keep_subgraph(view.call, "residual", ledger)  # the layer as a whole is its own definition
    return ResidualRole(kind="novel")


def _stream(view: LayerView) -> tuple[Tensor | None, Tensor | None]:
    floats = [t for t in view.call.tensors() if t.is_floating_point() and t.dim() >= 3]
    made = [t for t in view.call.results() if t.is_floating_point()]
    if not floats or not made or floats[0].numel() != made[0].numel():
        return None, None
    return floats[0].detach().double(), made[0].detach().double()


def _terms(view: LayerView, step: Observation) -> list[_Term]:
    """For each mixer and feed-forward what the layer takes from it: its output, or its norm's if that follows."""
    terms = []
    rest = [p for p in view.parts if p.role in ("norm", "other")]
    for part in view.parts:
        if part.role not in ("mixer", "feed-forward"):
            continue
        value = part.output
        # a post norm, then perhaps a convolution; each once, by order of calls: what passes its input on reads itself
        for follower in sorted(rest, key=lambda p: p.call.position):
            if follower.call.position > part.call.position and _reads(follower, value):
                value = follower.output
        terms.append(_Term(part, value))
    return terms


def _reads(part: Part, value: Tensor) -> bool:
    return any(t is value or (t.shape == value.shape and same(t, value)) for t in part.call.tensors()[:1])


def _others(view: LayerView, terms: list[_Term], size: int) -> list[list[_Term]]:
    """Sets of terms to try: all; all and what other parts made."""
    extra = [_Term(p, p.output) for p in view.of("other")]
    norms = [_Term(p, p.output) for p in view.of("norm")]
    sets = [terms, [*terms, *extra], [*terms, *extra, *norms]]
    return [[t for t in these if t.value.numel() == size] for these in sets]


def fit_sum(columns: list[Tensor], y: Tensor) -> tuple[float, list[float]]:
    """Least squares of ``y`` in the columns: relative residual and coefficients."""
    flat = [c.detach().double().reshape(-1) for c in columns]
    if any(c.numel() != y.numel() for c in flat):
        flat = [c for c in flat if c.numel() == y.numel()]
    a = torch.stack(flat, dim=1)
    fit = torch.linalg.lstsq(a, y.reshape(-1, 1), driver="gelsd").solution
    error = float((a @ fit - y.reshape(-1, 1)).norm() / y.norm().clamp_min(1e-12))
    return error, [float(v) for v in fit.flatten()]


def _sum_role(
    view: LayerView, x: Tensor, terms: list[_Term], fit: list[float], error: float, ledger: Ledger
) -> ResidualRole:
    kept = fit[0]
    scales = sorted({float(f"{f:.4g}") for f in fit[1:] if abs(f) > 1e-6})
    scaled = abs(kept - 1) > 1e-3 or any(abs(s - 1) > 1e-3 for s in scales)
    parallel = _parallel(view, x, terms)
    if abs(kept) < 1e-6:
        normed = any(t.part.role == "norm" and abs(f) > 1e-6 for t, f in zip(terms, fit[1:], strict=True))
        kind = "normed" if normed else "novel"
        words = "the normed stream goes on" if normed else "the stream is replaced by what a module of its own makes"
    else:
        kind = "parallel" if parallel else "scaled" if scaled else "plain"
        factors = f", factors {', '.join(f'{s:g}' for s in scales)}" if scaled else ""
        words = {"parallel": "parallel", "scaled": "scaled", "plain": "plain"}[kind] + factors
    if kind == "novel":
        for term in terms:
            if term.part.role == "other":
                keep_subgraph(term.part.call, "residual", ledger)
        return ResidualRole(kind=kind)
    ledger.claim("residual", f"residual: {words}", IDENTITY + " (least squares)", error, EXACT)
    return ResidualRole(kind=kind, scale=scales[0] if scaled and scales else 1.0)


def _attention_residuals(view: LayerView, ledger: Ledger) -> ResidualRole | None:
    """A part reads a stack of earlier states and gives, for each token, a weighted mean of them (softmax weights)."""
    worst, most, found = 0.0, 0, 0
    for part in view.of("other"):
        rows = _stack(part)
        if rows is None:
            continue
        y = part.output.detach().double().reshape(rows.shape[0], -1)
        if y.shape[-1] != rows.shape[-1]:
            continue
        normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        error = min(_mean_error(rows, y), _mean_error(normed, y))
        if error <= EXACT:
            worst, most, found = max(worst, error), max(most, rows.shape[1]), found + 1
    if not found:
        return None
    check = "each token as a mean of the stacked states: least squares, weights positive with sum 1"
    ledger.claim("residual", f"attention residuals over up to {most} earlier states", check, worst, EXACT)
    return ResidualRole(kind="attention residuals")


def _stack(part: Part) -> Tensor | None:
    """The states that a part reads, [tokens, N, D]: one stacked tensor and single ones, or several single ones."""
    width = part.output.shape[-1]
    tokens = part.output.numel() // width
    rows = []
    for t in dict.fromkeys(part.call.tensors()):
        if not t.is_floating_point() or t.shape[-1] != width or t.numel() % (tokens * width):
            continue
        count = t.numel() // (tokens * width)
        states = t.detach().double()
        if t.dim() >= 4 and t.shape[0] == count != part.output.shape[0]:  # stacked in front
            states = states.movedim(0, -2)
        rows.append(states.reshape(tokens, count, width))
    found = torch.cat(rows, dim=1) if rows else None
    return found if found is not None and 2 <= found.shape[1] < width // 2 else None


def _mean_error(rows: Tensor, y: Tensor) -> float:
    """How far y is from a mean of the rows with positive weights."""
    weights = torch.linalg.pinv(rows.transpose(1, 2), rtol=1e-9) @ y[..., None]
    error = float(((rows.transpose(1, 2) @ weights).squeeze(-1) - y).norm() / y.norm().clamp_min(1e-12))
    total = float((weights.sum(1) - 1).abs().max())
    alike = bool((rows - rows[:, :1]).abs().max() < 1e-9)
    return max(error, total if not alike else 0.0, -float(weights.min()))


def _per_channel(x: Tensor, y: Tensor, terms: list[_Term], ledger: Ledger) -> ResidualRole | None:
    """Each channel has factors of its own: y_c = a_c x_c + sum b_c part_c + constant."""
    width = x.shape[-1]
    rows = [t.value.detach().double().reshape(-1, width) for t in terms if t.value.numel() == x.numel()]
    if len(rows) != len(terms):
        return None
    flat = x.reshape(-1, width)
    a = torch.stack([flat, *rows, torch.ones_like(flat)], dim=-1).transpose(0, 1)
    target = y.reshape(-1, width).T[..., None]
    made = a @ (torch.linalg.pinv(a, rtol=1e-9) @ target)
    error = float((made - target).norm() / target.norm().clamp_min(1e-12))
    if error > EXACT:
        return None
    check = "least squares of each channel in the stream and part outputs"
    ledger.claim("residual", "residual: scaled channel by channel", check, error, EXACT)
    return ResidualRole(kind="scaled")


def _parallel(view: LayerView, x: Tensor, terms: list[_Term]) -> bool:
    """Feed-forward and mixer read the same stream: the feed-forward's input does not hold the mixer's output."""
    mixers = [t for t in terms if t.part.role == "mixer"]
    forwards = [t for t in terms if t.part.role == "feed-forward"]
    if not mixers or not forwards:
        return False
    source = forwards[0].part.input
    norm = next((p for p in view.of("norm") if p.output is source or same(p.output, source)), None)
    stream = (norm.input if norm else source).detach().double()
    return same(stream.reshape(-1), x.reshape(-1))


def _hyper(view: LayerView, x: Tensor, y: Tensor, terms: list[_Term], ledger: Ledger) -> ResidualRole:
    """Several streams: y[n] = sum_m C[m, n] x[m] + post[n] part, C and post of each token free.

    Both sites (mixer, feed-forward) act in turn, so the whole is y = C x + post_2 f + (C_2 post_1) m: for each token a
    linear combination of the streams and the two outputs.
    """
    width = terms[0].value.shape[-1]
    streams = y.shape[-1] * (y.shape[-2] if y.dim() == 4 else 1) // width
    rows = y.reshape(-1, streams, width)
    inputs = x.reshape(-1, streams, width)
    parts = torch.stack([t.value.detach().double().reshape(-1, width) for t in terms], dim=1)
    a = torch.cat([inputs, parts], dim=1).transpose(1, 2)
    # by pseudo-inverse: in the first layer all streams are equal
    fit = torch.linalg.pinv(a, rtol=1e-7) @ rows.transpose(1, 2)
    error = float((a @ fit - rows.transpose(1, 2)).norm() / rows.norm().clamp_min(1e-12))
    mixing = fit[:, :streams]
    eye = torch.eye(streams, dtype=mixing.dtype)
    kept = bool((mixing - eye).abs().max() < 1e-3)
    doubly = bool(((mixing.sum(1) - 1).abs().max() < 2e-2) and ((mixing.sum(2) - 1).abs().max() < 2e-2))
    how = "streams kept" if kept else "streams mixed doubly stochastically" if doubly else "streams mixed"
    words = f"hyper-connections, {streams} streams, {how}"
    if ledger.claim("residual", words, "least squares of each token in streams and part outputs", error, 1e-3):
        for part in view.of("other"):
            keep_subgraph(part.call, "residual", ledger)
    return ResidualRole(kind="hyper-connections", streams=streams)
