"""Softmax attention written out in a module's own code: found by its softmax, read off the products around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onboarding.stages.parse.understand.masks import HIDDEN
from onboarding.stages.parse.understand.observe import Call, Observation
from onboarding.stages.parse.understand.parts import Part

EXACT = 1e-4


def written_attention(part: Part, step: Observation) -> list[Call]:
    """Calls as an attention function would have been given them: q, k, v [1, B H, T, D], the mask, the scale.

    Their ``function`` is None: there is nothing to call again, only the values of the step.
    """
    found = []
    tokens = step.ids.shape[1]
    products = step.during(part.call, "product")
    for soft in step.during(part.call, "softmax"):
        weights = soft.output
        if not isinstance(weights, Tensor) or weights.dim() < 3 or weights.shape[-2:] != (tokens, tokens):
            continue
        before = [p for p in products if p.position < soft.position and _numel(p) == weights.numel()]
        after = [p for p in products if p.position > soft.position and _operand(p, 0, weights)]
        if before and after:
            call = _call(before[-1], soft, after[0], tokens)
            if call is not None:
                found.append(call)
    return found


def _numel(call: Call) -> int:
    return call.output.numel() if isinstance(call.output, Tensor) else 0


@dataclass(frozen=True)
class _Product:
    """Two factors as a batched matrix product takes them, whatever function and layout they came in."""

    left: Tensor
    right: Tensor
    output: Tensor
    live: tuple[Tensor, Tensor]
    """The factors as they were given."""
    orders: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    """How the given ones are permuted."""


def _product(call: Call) -> _Product | None:
    tensors = [t for t in call.inputs["args"] if isinstance(t, Tensor)]
    if len(tensors) == 3:  # baddbmm: what is added comes first
        tensors = tensors[1:]
    if len(tensors) != 2 or not isinstance(call.output, Tensor):
        return None
    equation = next((a for a in call.inputs["args"] if isinstance(a, str)), None)
    if equation is None:
        return _Product(tensors[0], tensors[1], call.output, (tensors[0], tensors[1]), (None, None))
    return _of_einsum(equation.replace(" ", ""), tensors[0], tensors[1], call.output)


def _of_einsum(equation: str, left: Tensor, right: Tensor, output: Tensor) -> _Product | None:
    """An einsum with one summed index and one free index on each side."""
    terms, _, made = equation.partition("->")
    first, _, second = terms.partition(",")
    if not made or "." in equation or len(made) != output.dim():
        return None
    both = [i for i in made if i in first and i in second]
    summed = [i for i in first if i in second and i not in made]
    rows, columns = (
        [i for i in made if i in one and i not in other] for one, other in ((first, second), (second, first))
    )
    if not (len(summed) == len(rows) == len(columns) == 1) or not len(first) == len(second) == len(both) + 2:
        return None
    orders = (
        tuple(first.index(i) for i in (*both, *rows, *summed)),
        tuple(second.index(i) for i in (*both, *summed, *columns)),
    )
    out = output.permute([made.index(i) for i in (*both, *rows, *columns)])
    return _Product(left.permute(orders[0]), right.permute(orders[1]), out, (left, right), orders)


def _operand(call: Call, place: int, weights: Tensor) -> bool:
    product = _product(call)
    if product is None:
        return False
    factor = (product.left, product.right)[place]
    return factor.numel() == weights.numel() and factor.shape[-1] == weights.shape[-1]


def _call(scores: Call, soft: Call, values: Call, tokens: int) -> Call | None:
    first, last = _product(scores), _product(values)
    if first is None or last is None:
        return None
    q, k, v = first.left, first.right.transpose(-1, -2), last.right
    if q.dim() < 3 or k.dim() < 3 or v.dim() < 3:
        return None
    heads = soft.output.numel() // tokens**2
    shapes = [t.reshape(1, -1, *t.shape[-2:]) for t in (q, k, v)]
    if any(t.shape[1] not in (heads, *_divisors(heads)) or t.shape[2] != tokens for t in shapes):
        return None
    q, k, v = shapes
    scale, mask = _scale_and_mask(q, k, soft.inputs["x"].reshape(1, heads, tokens, tokens))
    output = last.output.reshape(1, heads, tokens, -1).transpose(1, 2)
    inputs: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "kwargs": {"scaling": scale},
        "rest": (),
        "module": None,
    }
    inputs["live"] = (*first.live, last.live[1])
    inputs["orders"] = (*first.orders, last.orders[1])
    call = Call("attention", soft.path, "written attention", inputs, output, position=soft.position)
    return call if scale is not None else None


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n) if n % d == 0]


def _scale_and_mask(q: Tensor, k: Tensor, logits: Tensor) -> tuple[float | None, Tensor | None]:
    """The scale and the rest of logits = scale q . k + a row + b column + c, where they are visible."""
    with torch.no_grad():
        groups = q.shape[1] // k.shape[1]
        z = (q @ k.repeat_interleave(groups, dim=1).transpose(-1, -2)).double()
        s = logits.detach().double()
        seen = s > HIDDEN
        t = z.shape[-1]
        row, column = (m.double() for m in torch.meshgrid(torch.arange(t), torch.arange(t), indexing="ij"))
        head = seen[0, 0]
        a = torch.stack([z[0, 0][head], row[head], column[head], torch.ones_like(row[head])], dim=1)
        fit = torch.linalg.lstsq(a, s[0, 0][head][:, None], driver="gelsd").solution.flatten()
        scale = float(fit[0])
        rest = torch.where(seen, s - scale * z, torch.full_like(s, torch.finfo(torch.float32).min))
        quiet = torch.where(seen & (rest.abs() < EXACT * s[seen].abs().max()), torch.zeros_like(rest), rest)
        return scale, quiet.float()


def live_error(call: Call, expected: Any) -> float:
    """Error of a definition against the values of a step, and of its gradients against the step's own graph."""
    from onboarding.stages.parse.uses.proof import relative_error

    names = ("q", "k", "v")
    wide = {n: call.inputs[n].detach().double().requires_grad_(True) for n in names}
    with torch.enable_grad():
        made = expected(wide)
        error = relative_error(call.output, made)
        noise = torch.randn(made.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        theirs = torch.autograd.grad((made * noise).sum(), list(wide.values()))
        live = call.inputs["live"]
        if all(t.requires_grad for t in live):
            total = (call.output.double() * noise).sum()
            found = torch.autograd.grad(total, live, retain_graph=True)
            q, k, v = (
                g if order is None else g.permute(order) for g, order in zip(found, call.inputs["orders"], strict=True)
            )
            mine = (q, k.transpose(-1, -2), v)
            errors = [relative_error(m.reshape(e.shape), e) for m, e in zip(mine, theirs, strict=True)]
            error = max(error, *errors)
    return error
