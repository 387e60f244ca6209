"""Sparse attention: which keys are chosen, by which scores, in which pools."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from onboarding.architecture import MixerRole
from onboarding.stages.parse.understand.ledger import IDENTITY, Ledger, Sizes
from onboarding.stages.parse.understand.masks import Mask
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Call, Observation
from onboarding.stages.parse.understand.parts import Part


def prove_selection(
    part: Part,
    call: Call,
    other: Call | None,
    step: Observation,
    mask: Mask,
    role: MixerRole,
    ledger: Ledger,
    sizes: Sizes,
) -> None:
    """Claims about a mask that is no fixed pattern."""
    queries, keys = call.inputs["q"].shape[-2], call.inputs["k"].shape[-2]
    visible = mask.visible
    assert visible is not None
    rows = visible.expand(*visible.shape[:-2], queries, keys)
    if keys > queries:
        role.kind = "compressed"
        _prove_compressed(rows, queries, keys, role, ledger, sizes)
        return
    future = torch.triu(torch.ones(queries, keys, dtype=torch.bool), 1)
    role.kind = "sparse"
    ledger.claim("mixer", "no chosen key lies ahead of its query", IDENTITY, float((rows & future).sum()), 0.0)
    if other is not None:
        unlike = other.inputs["mask"]
        differs = (
            unlike is None or unlike.shape != call.inputs["mask"].shape or not torch.equal(unlike, call.inputs["mask"])
        )
        ledger.claim(
            "mixer", "which keys are chosen depends on the tokens", "two steps on other tokens", float(not differs), 0.0
        )
    _prove_best(part, step, rows, role, ledger, sizes)


def _prove_compressed(rows: Tensor, queries: int, keys: int, role: MixerRole, ledger: Ledger, sizes: Sizes) -> None:
    """Beside the tokens, queries see entries that each stand for a run of tokens that has ended."""
    from onboarding.stages.parse.understand.semantics import pattern

    local = rows[..., :queries]
    first = local.reshape(-1, queries, queries)[0]
    window = int(first[-1].sum())
    kind = "sliding" if window < queries else "full"
    wrong = int((local != pattern(kind, queries, window)).sum())
    role.window = sizes.of(window, r"window") if kind == "sliding" else None
    ledger.claim(
        "mixer", f"tokens: {kind} attention" + (f" ({role.window})" if role.window else ""), IDENTITY, float(wrong), 0.0
    )
    entries = rows[..., queries:]
    count = keys - queries
    seen = entries.any(dim=tuple(range(entries.dim() - 2)))
    # entry w may be seen from the query at which its last token has been read
    starts = [int(seen[:, w].nonzero()[0]) if bool(seen[:, w].any()) else queries for w in range(count)]
    steps = [b - a for a, b in pairwise(starts) if b < queries]
    pool = (starts[0] + 1) if starts and starts[0] < queries else queries // max(count, 1)
    role.pool = sizes.of(pool, r"compress|ratio|pool|block|window")
    late = sum(start < (w + 1) * pool - 1 for w, start in enumerate(starts))
    ledger.claim("mixer", f"entries of {role.pool} tokens, none seen before its last token", IDENTITY, float(late), 0.0)
    most = int(entries.sum(-1).max())
    role.top_k = sizes.of(most, r"top_?k|budget") if most < count and steps else None


def _prove_best(part: Part, step: Observation, rows: Tensor, role: MixerRole, ledger: Ledger, sizes: Sizes) -> None:
    """The chosen keys are the best by the scores that the indexer computed."""
    queries = rows.shape[-2]
    tops = [c for c in step.during(part.call, "topk") if c.results() and c.inputs["scores"].dim() >= 2]
    tops = [c for c in tops if c.inputs["scores"].shape[-2] == queries or c.inputs["scores"].numel() > queries]
    most = int(rows.sum(-1).max())
    if not tops:
        found = [c for c in step.calls if c.kind == "topk" and c.inputs["scores"].shape[-1] == rows.shape[-1]]
        tops = found[-1:]  # a layer that takes over the choice of the last one that has an indexer
        role.indexer = "shared with an earlier layer" if tops else ""
    if not tops:
        role.top_k = most
        ledger.unproven("mixer", f"{most} keys are chosen for a query", "no choice of the best was seen")
        return
    top = tops[-1]
    scores = top.inputs["scores"].detach()
    k = int(top.inputs["k"])
    keys = rows.shape[-1]
    if scores.shape[-1] == keys and scores.shape[-2] == queries:
        role.top_k = sizes.of(k, r"top_?k|budget")
        wrong = _wrong_choices(scores, rows, k)
        ledger.claim("mixer", f"the {role.top_k} best scored keys and no others are attended", IDENTITY, wrong, 0.0)
    else:
        pool = _pool_size(part, keys, scores.shape[-1])
        role.pool = sizes.of(pool, r"block|pool|compress|ratio|group")
        tokens = sizes.of(k * pool, r"top_?k|budget")
        role.top_k = tokens if tokens != k * pool else sizes.of(k, r"top_?k|blocks") * (role.pool or 1)
        bound = (k + 1) * pool + pool
        ledger.claim(
            "mixer", f"at most {role.top_k} keys in pools of {role.pool}, and the open pool", IDENTITY,
            float(max(0, most - bound)), 0.0,
        )  # fmt: skip
    if not role.indexer:
        _prove_scores(part, step, top, role, ledger, sizes)


def _pool_size(part: Part, keys: int, pools: int) -> int:
    """Tokens in a pool: a setting of the mixer that divides the keys into that many."""
    stated = {v for m in part.module.modules() for v in vars(m).values() if type(v) is int and v > 1}
    fitting = [v for v in stated if pools in (keys // v, -(-keys // v))]
    return max(fitting, default=max(1, round(keys / max(pools, 1))))


def _wrong_choices(scores: Tensor, rows: Tensor, k: int) -> float:
    """Pairs that are attended though they are not among the k best of their row, or the other way round."""
    causal = torch.tril(torch.ones(rows.shape[-2:], dtype=torch.bool))
    masked = scores.masked_fill(~causal, -torch.inf)
    while masked.dim() > rows.dim():
        masked = masked.squeeze(1)
    best = torch.zeros_like(masked, dtype=torch.bool).scatter_(-1, masked.topk(k, dim=-1).indices, True) & causal
    if best.dim() < rows.dim():
        best = best.unsqueeze(1)
    # a tie at the edge may go either way
    edge = masked.topk(k, dim=-1).values[..., -1:]
    tied = (masked - edge).abs() <= 1e-6 * edge.abs().clamp_min(1e-6)
    tied = tied.unsqueeze(1) if tied.dim() < rows.dim() else tied
    return float(((best != rows) & ~tied).sum())


def _prove_scores(part: Part, step: Observation, top: Call, role: MixerRole, ledger: Ledger, sizes: Sizes) -> None:
    """Scores of a query are one linear combination of act(q_h . k) over the index heads, the same for all keys."""
    scores = top.inputs["scores"].detach().double()
    while scores.dim() > 3:
        scores = scores.squeeze(1) if scores.shape[1] == 1 else scores.flatten(0, 1)
    finite = scores > -1e4
    for call in step.during(part.call, "product"):
        if call.position > top.position or not isinstance(call.output, Tensor):
            continue
        for products in _arrangements(call.output.detach().double(), scores):
            for name, act in (("relu", torch.relu), ("", lambda z: z)):
                error = _residual(act(products), scores, finite)
                if error < 1e-4:
                    heads = sizes.of(products.shape[1], r"index\w*heads", r"^n_heads$")
                    words = f"{name + ' of ' if name else ''}q . k" + (f", {heads} weighted heads" if heads > 1 else "")
                    role.indexer = words
                    ledger.claim("mixer", f"indexer: {words}", "least squares over the keys of each query", error, 1e-4)
                    return
    last = scores[:, -1:, :].expand_as(scores)
    alike = float((torch.where(finite, scores - last, torch.zeros_like(scores))).abs().max())
    if alike <= 1e-5 * float(last[last > -1e4].abs().max()):
        role.indexer = "one score a key"
        ledger.claim("mixer", "keys are scored alike for all queries", "scores of one step", alike, 1e-4)
        return
    role.indexer = "own scores"
    owner = step.module(top.path)
    if owner is not None and owner.path != part.path:
        keep_subgraph(owner, "mixer", ledger)
    else:
        ledger.unproven("mixer", "how the indexer scores keys", "no product of queries and keys explains the scores")


def _arrangements(products: Tensor, scores: Tensor) -> list[Tensor]:
    """A product as [B, H, T, S], for each way in which its dims can be those."""
    b, t, s = scores.shape
    if products.dim() == 3 and products.shape == scores.shape:
        return [products[:, None]]
    if products.dim() != 4 or products.shape[0] != b:
        return []
    found = []
    for h, i, j in ((1, 2, 3), (2, 1, 3), (3, 1, 2), (2, 3, 1)):
        if products.shape[i] == t and products.shape[j] == s:
            found.append(products.permute(0, h, i, j))
    return found


def _residual(features: Tensor, scores: Tensor, finite: Tensor) -> float:
    """Worst relative residual over the last query of each sequence, which sees most keys."""
    worst = 0.0
    for b in range(scores.shape[0]):
        for t in (scores.shape[1] - 1, scores.shape[1] - 3):
            seen = finite[b, t]
            a, y = features[b, :, t, seen].T, scores[b, t, seen]
            if y.numel() <= a.shape[1] + 1:
                return float("inf")
            fit = torch.linalg.lstsq(a, y[:, None], driver="gelsd").solution
            worst = max(worst, float((a @ fit - y[:, None]).norm() / y.norm().clamp_min(1e-12)))
    return worst
