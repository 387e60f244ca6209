"""The indexer hook: the module projects and turns queries and keys as it does, the kernel chooses the keys.

The module's list has no empty places: where a query sees fewer keys than it may choose, it goes on with keys that the
query does not see, and the attention masks them. So does the list here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINEAR = ("wq_b", "wk", "weights_proj")
SIZES = ("n_heads", "head_dim", "qk_rope_head_dim", "index_topk")
PLACES = ("first", "last")
"""Where a head's rotary channels lie."""
ROWS, KEPT = 9, 3


def install(hooks: Any, module: nn.Module, swap: Any) -> Callable[[], None]:
    """Let ``module`` choose by ``swap``'s kernel; returns the undo function."""
    place = placed(module)
    assert place is not None  # else there was a mismatch

    def forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            given = inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments
            if given.get("cache") is not None:
                raise hooks.Uncovered("a cache of keys")
            hidden = given["hidden_states"]
            with torch.no_grad():
                q, k, weights = projected(self, hidden, given["q_resid"], given["position_embeddings"], place)
                hooks._covered(q, k)
                seen = ranges(given["attention_mask"], *hidden.shape[:2])
                if seen is None:
                    raise hooks.Uncovered("a mask with gaps")
                slots = torch.empty(min(self.index_topk, k.shape[1]), dtype=torch.int32, device=q.device)
                begin, end = seen
                _, index, count = swap.call(q=q, k=k, weights=weights, begin=begin, end=end, slots=slots)
                return filled(index, begin, end, count)
        except hooks.Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return original(*args, **kwargs)

    undo: Callable[[], None] = hooks._replace_forward(module, forward)
    return undo


def projected(
    module: Any, hidden: Tensor, latent: Tensor, angles: tuple[Tensor, Tensor], place: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, D], k [B, S, D] and weights [B, S, H] in fp32, as the module makes them."""
    q = module.wq_b(latent).unflatten(-1, (module.n_heads, module.head_dim))
    k = module.k_norm(module.wk(hidden).to(module.k_norm.weight.dtype)).to(hidden.dtype).unsqueeze(2)
    turned, rest = module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim
    if place == "first":
        (q_turned, q_rest), (k_turned, k_rest) = q.split([turned, rest], -1), k.split([turned, rest], -1)
    else:
        (q_rest, q_turned), (k_rest, k_turned) = q.split([rest, turned], -1), k.split([rest, turned], -1)
    q_turned, k_turned = _rotary(module)(q_turned, k_turned, *angles, unsqueeze_dim=2)
    order = 1 if place == "first" else -1
    q, k = torch.cat([q_turned, q_rest][::order], -1), torch.cat([k_turned, k_rest][::order], -1).squeeze(2)
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    return q, k, weights


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


def ranges(mask: Tensor | None, batch: int, tokens: int) -> tuple[Tensor, Tensor] | None:
    """begin and end [B, S] int32 of what each query sees; None if that is not one run of keys.

    Args:
        mask: bool (true: seen) or additive, [.., S, T] and broadcast over sequences; None for all keys before a query.
    """
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = seen.reshape(-1, *seen.shape[-2:]).expand(batch, tokens, -1)
    keys = seen.shape[-1]
    at = torch.arange(keys, device=seen.device, dtype=torch.int32)
    begin = torch.where(seen, at, keys).amin(-1)
    end = torch.where(seen, at, -1).amax(-1) + 1
    if not bool((seen.sum(-1) == (end - begin).clamp_min(0)).all()):
        return None
    return begin.int(), torch.maximum(begin, end).int()


def filled(index: Tensor, begin: Tensor, end: Tensor, count: Tensor) -> Tensor:
    """The list [B, S, K] with keys outside of [begin, end) in its empty places, each once."""
    slot = torch.arange(index.shape[-1], device=index.device, dtype=torch.int32)
    number = slot - count.unsqueeze(-1)
    outside = torch.where(number < begin.unsqueeze(-1), number, number + (end - begin).unsqueeze(-1))
    return torch.where(slot < count.unsqueeze(-1), index, outside.int())


def placed(module: nn.Module) -> str | None:
    """Where the module's rotary channels lie, or None if it does not choose as the kernel does.

    A few rows are chosen both ways, by fewer keys than they see.
    """
    probe: Any = copy.copy(module)
    probe.index_topk = KEPT
    weight = probe.wk.weight

    def wave(width: int, phase: float) -> Tensor:
        steps = torch.arange(ROWS * width, device=weight.device, dtype=torch.float32)
        return (steps * 0.7 + phase * steps.sqrt()).sin().reshape(1, ROWS, width).to(weight.dtype)

    hidden, latent = wave(probe.wk.in_features, 0.3), wave(probe.wq_b.in_features, 0.9)
    half = wave(probe.qk_rope_head_dim // 2, 0.5)
    angle = torch.cat([half, half], -1) * 3.0
    mask = torch.ones(1, ROWS, ROWS, dtype=torch.bool, device=weight.device).tril()
    steps = torch.arange(ROWS, device=weight.device).unsqueeze(0)
    with torch.no_grad():
        own = type(module).forward(probe, hidden, latent, (angle.cos(), angle.sin()), mask, steps, None)
        for place in PLACES:
            q, k, weights = projected(probe, hidden, latent, (angle.cos(), angle.sin()), place)
            z = F.relu(torch.einsum("bshd,btd->bsht", q.float(), k.float()))
            scores = (z * weights.unsqueeze(-1)).sum(2).masked_fill(~mask, float("-inf"))
            # scores rather than keys: of equal ones, as of relu's zeros, torch takes any
            best = scores.topk(KEPT, dim=-1).values
            theirs = scores.gather(-1, own.long()).sort(dim=-1, descending=True).values
            if torch.allclose(best.masked_fill(best.isinf(), 0.0), theirs.masked_fill(theirs.isinf(), 0.0), rtol=1e-3):
                return place
    return None


def mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    """Why the kernel does not choose as this module does, or None."""
    if not all(isinstance(getattr(module, n, None), nn.Module) for n in (*LINEAR, "k_norm")):
        return "projections by other names"
    if not all(isinstance(getattr(module, n, None), int) for n in SIZES):
        return "sizes by other names"
    if spec["operation"] != "selection" or spec["activation"] != "relu" or not spec["weighted"]:
        return "the kernel scores in another way"
    try:
        return None if placed(module) is not None else "it chooses other keys"
    except Exception as error:
        return f"its forward: {type(error).__name__}"
