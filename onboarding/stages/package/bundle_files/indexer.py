"""The indexer hook: the module projects and turns queries and keys as it does, the kernel chooses the keys.

Two kinds of modules. Those that score tokens under a mask: their list has no empty places; where a query sees fewer
keys than it may choose, it goes on with keys that the query does not see, and the attention masks them. So does the
list here. And those that score pools of tokens and look after visibility themselves (``index_kpool``): their list
has the tokens of the chosen pools and of the pool that is not complete yet, and -1 in what is left of it.

A kernel of the operation ``selection`` chooses, one of ``compression`` makes the keys of pools.
``indexer_training.py`` says how the indexer learns: then its projections keep their graph.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINEAR = ("wq_b", "wk", "weights_proj")
SIZES = ("n_heads", "head_dim", "qk_rope_head_dim", "index_topk")
POOL = ("index_kpool", "index_kpool_compress_ape", "index_kpool_compress_gate", "index_kpool_always_select_tail")
"""What a module of pools has beside."""
PLACES = ("first", "last")
"""Where a head's rotary channels lie."""
POOLER = "onboard_pools"
"""Attribute of a module whose pools have a kernel."""
ROWS, KEPT = 9, 3


@dataclass
class Candidates:
    """What is chosen from."""

    q: Tensor
    """[B, S, H, D]"""
    k: Tensor
    """[B, T, D]: keys of tokens or of pools."""
    weights: Tensor
    """[B, S, H] fp32"""
    begin: Tensor
    """[B, S] int32: the first key that a query sees."""
    end: Tensor
    """[B, S] int32: past its last one."""
    slots: int
    """Keys that a query may choose."""
    listed: Callable[[Tensor, Tensor], Tensor]
    """index [B, S, K] and count [B, S] -> the module's own list of tokens."""
    pool: int = 1
    """Tokens of a key."""


def install(hooks: Any, module: nn.Module, swap: Any) -> Callable[[], None]:
    """Let ``module`` choose, or make its keys, by ``swap``'s kernel; returns the undo function."""
    if swap.spec["operation"] == "compression":
        vars(module)[POOLER] = swap
        return lambda: vars(module).pop(POOLER, None)
    place = "" if pooled(module) else placed(module)
    assert place is not None  # else there was a mismatch

    def forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training = getattr(swap.applied, "indexers", None)
        try:
            given = inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments
            with torch.set_grad_enabled(training is not None and torch.is_grad_enabled()):
                found = candidates(self, given, place)
                if isinstance(found, str):
                    raise hooks.Uncovered(found)
                hooks._covered(found.q, found.k)
                count = found.k.shape[1] if training is not None and training.stage == "dense" else found.slots
                scores, index, used = choice(swap.call, found, count)
            if training is not None:
                training.note(self, scores, used, found.pool)
            return found.listed(index, used)
        except hooks.Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return original(*args, **kwargs)

    undo: Callable[[], None] = hooks._replace_forward(module, forward)
    return undo


def choice(op: Callable[..., tuple[Tensor, ...]], found: Candidates, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """scores [B, S, K] fp32, index [B, S, K] and count [B, S] of the ``slots`` best candidates."""
    if found.k.shape[1] == 0:  # no pool is complete
        rows = found.q.shape[:2]
        none = found.begin.new_zeros((*rows, 0))
        return none.float(), none, found.begin.new_zeros(rows)
    slot = torch.empty(min(slots, found.k.shape[1]), dtype=torch.int32, device=found.q.device)
    scores, index, count = op(q=found.q, k=found.k, weights=found.weights, begin=found.begin, end=found.end, slots=slot)
    return scores, index, count


def candidates(module: Any, given: dict[str, Any], place: str) -> Candidates | str:
    """What a call of the module chooses from, or why that is not covered. No gradient leaves the module."""
    if given.get("cache") is not None:
        return "a cache of keys"
    hidden, latent = given["hidden_states"].detach(), given["q_resid"].detach()
    if pooled(module):
        return of_pools(module, hidden, latent, given["attention_mask"])
    seen = ranges(given["attention_mask"], *hidden.shape[:2])
    if seen is None:
        return "a mask with gaps"
    q, k, weights = projected(module, hidden, latent, given["position_embeddings"], place)
    begin, end = seen

    def listed(index: Tensor, count: Tensor) -> Tensor:
        return filled(index, begin, end, count)

    return Candidates(q, k, weights, begin, end, module.index_topk, listed)


# ---- tokens under a mask ------------------------------------------------------------------------------------------


def projected(
    module: Any, hidden: Tensor, latent: Tensor, angles: tuple[Tensor, Tensor], place: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, D], k [B, S, D] and weights [B, S, H] in fp32, as the module makes them."""
    q = module.wq_b(latent).unflatten(-1, (module.n_heads, module.head_dim))
    k = _keys(module, hidden).unsqueeze(2)
    turned, rest = module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim
    if place == "first":
        (q_turned, q_rest), (k_turned, k_rest) = (torch.split(t, [turned, rest], -1) for t in (q, k))
    else:
        (q_rest, q_turned), (k_rest, k_turned) = (torch.split(t, [rest, turned], -1) for t in (q, k))
    q_turned, k_turned = _rotary(module)(q_turned, k_turned, *angles, unsqueeze_dim=2)
    order = 1 if place == "first" else -1
    q, k = torch.cat([q_turned, q_rest][::order], -1), torch.cat([k_turned, k_rest][::order], -1).squeeze(2)
    return q, k, _weights(module, hidden)


def _keys(module: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = module.k_norm(module.wk(hidden).to(module.k_norm.weight.dtype))
    return normed.to(hidden.dtype)


def _weights(module: Any, hidden: Tensor) -> Tensor:
    weights: Tensor = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))
    return weights.float() * float(module.n_heads**-0.5)


def _rotary(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The rotary function that the module's forward names.

    Raises:
        LookupError: it names none, or several.
    """
    forward: Any = inspect.unwrap(type(module).forward)
    named = [n for n in forward.__code__.co_names if n.startswith("apply_rotary") and n in forward.__globals__]
    if len(named) != 1:
        raise LookupError(f"{len(named)} rotary functions")
    function: Callable[..., tuple[Tensor, Tensor]] = forward.__globals__[named[0]]
    return function


_last: list[Any] = []
"""The mask that was looked at last (weakly), with the sizes and what came out: all layers of a step have one mask."""


def ranges(mask: Tensor | None, batch: int, tokens: int) -> tuple[Tensor, Tensor] | None:
    """begin and end [B, S] int32 of what each query sees; None if that is not one run of keys.

    Args:
        mask: bool (true: seen) or additive, [.., S, T] and broadcast over sequences; None for all keys before a query.
        batch: sequences.
        tokens: queries of each.
    """
    if mask is None:
        return None
    facts = (mask._version, batch, tokens)
    if _last and _last[0]() is mask and _last[1] == facts:
        known: tuple[Tensor, Tensor] | None = _last[2]
        return known
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = seen.reshape(-1, *seen.shape[-2:]).expand(batch, tokens, -1)
    begin = torch.where(seen.any(-1), seen.to(torch.uint8).argmax(-1), seen.shape[-1])
    end = begin + seen.sum(-1)
    at = torch.arange(seen.shape[-1], device=seen.device)
    straight = bool((seen == ((at >= begin.unsqueeze(-1)) & (at < end.unsqueeze(-1)))).all())
    found = (begin.int(), end.int()) if straight else None
    _last[:] = [weakref.ref(mask), facts, found]
    return found


def filled(index: Tensor, begin: Tensor, end: Tensor, count: Tensor) -> Tensor:
    """The list [B, S, K] with keys outside of [begin, end) in its empty places, each once."""
    slot = torch.arange(index.shape[-1], device=index.device, dtype=torch.int32)
    number = slot - count.unsqueeze(-1)
    outside = torch.where(number < begin.unsqueeze(-1), number, number + (end - begin).unsqueeze(-1))
    return torch.where(slot < count.unsqueeze(-1), index, outside.int())


# ---- pools of tokens ----------------------------------------------------------------------------------------------


def pooled(module: Any) -> bool:
    """Whether a module chooses pools."""
    return all(hasattr(module, name) for name in POOL)


def of_pools(module: Any, hidden: Tensor, latent: Tensor, present: Tensor) -> Candidates | str:
    """Pools of R tokens from a sequence's first one on; a query sees a pool once it sees its last token.

    Args:
        module: of pools.
        hidden: [B, S, C]
        latent: [B, S, Q]
        present: [B, S] bool: tokens that are no padding.
    """
    tokens, size = hidden.shape[1], module.index_kpool
    run = _run_of(present)
    if run is None:
        return "padding between tokens"
    first, length = run
    q = module.wq_b(latent).unflatten(-1, (module.n_heads, module.head_dim))
    gate = F.linear(hidden, module.index_kpool_compress_gate)
    number = torch.arange(tokens // size, device=hidden.device)
    complete = (number + 1) * size <= length.unsqueeze(-1)
    start = torch.where(complete, first.unsqueeze(-1) + number * size, -1).int()
    k = averaged(module, _keys(module, hidden), gate, start)
    at = torch.arange(tokens, device=hidden.device)
    visible = torch.where(present, (at - first.unsqueeze(-1) + 1).clamp(min=0), 0)
    end = (visible // size).int()

    def listed(index: Tensor, count: Tensor) -> Tensor:
        width = max(index.shape[-1] * size, module.index_topk)
        tail = size - 1 if module.index_kpool_always_select_tail else 0
        slot = torch.arange(width + tail, device=index.device)
        own = (slot // size).clamp(max=max(index.shape[-1] - 1, 0)).expand(*index.shape[:2], -1)
        if index.shape[-1]:
            pools = index.gather(-1, own) * size + slot % size
        else:
            pools = torch.zeros_like(own)
        taken = count.unsqueeze(-1) * size
        open_pool = (visible - visible % size).unsqueeze(-1) + slot - taken
        is_open = (slot >= taken) & (slot < taken + (visible % size).unsqueeze(-1)) & (tail > 0)
        rows = torch.where(slot < taken, pools, torch.where(is_open, open_pool, -1))
        return torch.where(rows >= 0, rows + first[:, None, None], -1).int()

    weights = _weights(module, hidden)
    return Candidates(q, k, weights, torch.zeros_like(end), end, module.index_topk // size, listed, size)


def _run_of(present: Tensor) -> tuple[Tensor, Tensor] | None:
    """First and number [B] of a sequence's tokens, if they follow one another."""
    first, length = present.to(torch.uint8).argmax(-1), present.sum(-1)
    at = torch.arange(present.shape[-1], device=present.device)
    run = (at >= first.unsqueeze(-1)) & (at < (first + length).unsqueeze(-1))
    return (first, length) if bool((run == present).all()) else None


def averaged(module: Any, k: Tensor, gate: Tensor, start: Tensor) -> Tensor:
    """Keys of the pools that begin at ``start`` [B, P]: [B, P, D]; by the module's kernel if it has one."""
    bias: Tensor = module.index_kpool_compress_ape
    if start.shape[-1] == 0:
        return k[:, :0]
    swap = vars(module).get(POOLER)
    if swap is not None and k.dtype == gate.dtype == bias.dtype:
        pooled: Tensor = swap.call(k=k, gate=gate, bias=bias, start=start)[0]
        return pooled
    at = start.long().clamp(min=0).unsqueeze(-1) + torch.arange(bias.shape[0], device=k.device)
    rows = torch.arange(k.shape[0], device=k.device)[:, None, None]
    shares = (gate[rows, at].float() + bias.float()).softmax(2).to(k.dtype)
    return torch.where(start.unsqueeze(-1) >= 0, (shares * k[rows, at]).sum(2), 0.0)


# ---- does it choose as the kernel does? ---------------------------------------------------------------------------


def _wave(like: Tensor, rows: int, width: int, phase: float) -> Tensor:
    steps = torch.arange(rows * width, device=like.device, dtype=torch.float32)
    return (steps * 0.7 + phase * steps.sqrt()).sin().reshape(1, rows, width).to(like.dtype)


def scores_of(found: Candidates) -> Tensor:
    """Scores [B, S, T] of all candidates, minus infinity where a query does not see one."""
    z = F.relu(torch.einsum("bshd,btd->bsht", found.q.float(), found.k.float()))
    scores: Tensor = (z * found.weights.unsqueeze(-1)).sum(2) * float(found.q.shape[-1] ** -0.5)
    at = torch.arange(found.k.shape[1], device=scores.device)
    seen = (at >= found.begin.unsqueeze(-1)) & (at < found.end.unsqueeze(-1))
    return scores.masked_fill(~seen, float("-inf"))


def _alike(best: Tensor, theirs: Tensor) -> bool:
    """Scores rather than keys are compared: of equal ones, as of relu's zeros, torch takes any."""
    best, theirs = (t.sort(dim=-1, descending=True).values for t in (best, theirs))
    return torch.allclose(best.masked_fill(best.isinf(), 0.0), theirs.masked_fill(theirs.isinf(), 0.0), rtol=1e-3)


def placed(module: nn.Module) -> str | None:
    """Where the module's rotary channels lie, or None if it does not choose as the kernel does.

    A few rows are chosen both ways, by fewer keys than they see.
    """
    probe: Any = copy.copy(module)
    probe.index_topk = KEPT
    weight = probe.wk.weight
    hidden = _wave(weight, ROWS, probe.wk.in_features, 0.3)
    latent = _wave(weight, ROWS, probe.wq_b.in_features, 0.9)
    half = _wave(weight, ROWS, probe.qk_rope_head_dim // 2, 0.5)
    angle = torch.cat([half, half], -1) * 3.0
    mask = torch.ones(1, ROWS, ROWS, dtype=torch.bool, device=weight.device).tril()
    steps = torch.arange(ROWS, device=weight.device).unsqueeze(0)
    angles = (angle.cos(), angle.sin())
    given = {"hidden_states": hidden, "q_resid": latent, "position_embeddings": angles, "attention_mask": mask}
    with torch.no_grad():
        own = type(module).forward(probe, hidden, latent, angles, mask, steps, None)
        for place in PLACES:
            found = candidates(probe, given, place)
            assert isinstance(found, Candidates)
            scores = scores_of(found)
            if _alike(scores.topk(KEPT, dim=-1).values, scores.gather(-1, own.long())):
                return place
    return None


def pools_agree(module: nn.Module) -> bool:
    """Whether a module of pools chooses as the kernel does: a few rows, two of them padding, are chosen both ways."""
    probe: Any = copy.copy(module)
    vars(probe).pop(POOLER, None)
    size = probe.index_kpool
    probe.index_topk = 2 * size
    rows = 5 * size + 4
    weight = probe.wk.weight
    hidden = _wave(weight, rows, probe.wk.in_features, 0.3)
    latent = _wave(weight, rows, probe.wq_b.in_features, 0.9)
    present = torch.ones(1, rows, dtype=torch.bool, device=weight.device)
    present[:, :2] = False
    with torch.no_grad():
        own = type(module).forward(probe, hidden, latent, present, None)
        found = of_pools(probe, hidden, latent, present)
        assert isinstance(found, Candidates)
        scores = scores_of(found)
        best = scores.topk(min(found.slots, scores.shape[-1]), dim=-1)
        used = best.values > float("-inf")
        mine = found.listed(best.indices.int(), used.sum(-1))
        pools = own[..., : best.values.shape[-1] * size].unflatten(-1, (-1, size))[..., 0]
        theirs = torch.where(pools >= 0, scores.gather(-1, ((pools - 2).clamp(min=0) // size).long()), float("-inf"))
        # the tokens of the open pool come behind the chosen ones
        tail = own[..., 2 * size :].sort(-1).values
        is_open = mine >= 2 + found.end.unsqueeze(-1) * size
        my_tail = torch.where(is_open, mine, -1).sort(-1).values[..., mine.shape[-1] - tail.shape[-1] :]
    return own.shape == mine.shape and _alike(best.values, theirs) and torch.equal(tail, my_tail)


def mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    """Why the kernel does not choose as this module does, or None."""
    if not all(isinstance(getattr(module, n, None), nn.Module) for n in (*LINEAR, "k_norm")):
        return "projections by other names"
    if not all(isinstance(getattr(module, n, None), int) for n in SIZES):
        return "sizes by other names"
    if spec["operation"] == "compression":
        return None if pooled(module) and _agrees(module) is None else "it makes no pools, or others"
    if spec["operation"] != "selection" or spec["activation"] != "relu" or not spec["weighted"]:
        return "the kernel scores in another way"
    return _agrees(module)


def _agrees(module: nn.Module) -> str | None:
    try:
        same = pools_agree(module) if pooled(module) else placed(module) is not None
    except Exception as error:
        return f"its forward: {type(error).__name__}"
    return None if same else "it chooses other keys"
