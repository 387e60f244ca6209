"""From router logits to chosen experts and weights: the form is fitted to one step and proven on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from onboarding.stages.parse.understand.compare import CLOSE
from onboarding.stages.parse.understand.ledger import Ledger
from onboarding.stages.parse.understand.mixers import source_of
from onboarding.stages.parse.understand.observe import Call, Observation, under
from onboarding.stages.parse.understand.semantics import SCORES, RouterForm, route_choice, route_weights
from onboarding.stages.parse.uses.proof import relative_error

CHECK = "choices and weights of another step from its logits: sets equal, values and gradient"


RouterWords = Callable[[RouterForm], RouterForm]
"""From a form at the twin's sizes to the published one."""


@dataclass(frozen=True)
class Routing:
    """What one step shows of a router."""

    logits: Tensor
    """[N, E]."""
    index: Tensor
    """[N, K]."""
    weights: Tensor
    """[N, K]."""
    linear: Call
    """The layer that made the logits."""


def routing_of(step: Observation, path: str, index: Tensor, weights: Tensor, before: int) -> Routing | None:
    """The logits behind a choice of experts; None: no linear layer leads to the weights."""
    calls = [c for c in step.inside(path, "linear") if c.position < before]
    found = source_of(weights, calls)
    k = index.shape[-1]
    call = found[0] if found is not None else _chooser(calls, index.reshape(-1, k))
    if call is None:
        return None
    return Routing(
        logits=call.output.reshape(-1, call.output.shape[-1]),
        index=index.reshape(-1, k),
        weights=weights.reshape(-1, k),
        linear=call,
    )


def _chooser(calls: list[Call], index: Tensor) -> Call | None:
    """The layer whose best outputs are the choice, where the weights do not depend on it (one expert, renormalised)."""
    for call in reversed(calls):
        logits = call.output.reshape(-1, call.output.shape[-1])
        fits = logits.shape[0] == index.shape[0] and logits.shape[-1] >= index.shape[-1]
        if fits and _same_sets(logits.topk(index.shape[-1], dim=-1).indices, index):
            return call
    return None


def prove_router(
    module: nn.Module, first: Routing, second: Routing, ids: Tensor, ledger: Ledger, published: RouterWords
) -> RouterForm | None:
    """The form of a router, or None where no form explains its choices and weights."""
    if first.logits.shape[0] != first.index.shape[0]:
        ledger.unproven("router", "router", "its logits do not have a row a token")
        return None
    with torch.no_grad():
        scored = list(_weight_forms(module, first))
        if not scored:
            ledger.unproven("router", "router", "no known score function gives its weights")
            return None
        for form in scored:
            for chosen, bias in _choice_forms(module, form, first):
                if _same_sets(route_choice(first.logits, bias, chosen), first.index):
                    return chosen if _prove(chosen, bias, second, ledger, published) else None
            if _hashed(module, first, ids):
                hashed = replace(form, choose_by="token")
                return hashed if _prove(hashed, None, second, ledger, published) else None
    ledger.unproven("router", f"router: {scored[0].words()}", "the weights agree, the choice of experts does not")
    return None


def _prove(form: RouterForm, bias: Tensor | None, second: Routing, ledger: Ledger, published: RouterWords) -> bool:
    chosen = route_choice(second.logits, bias, form) if form.choose_by != "token" else second.index
    agree = _same_sets(chosen, second.index)
    with torch.enable_grad():
        wide = second.logits.detach().double().requires_grad_(True)
        expected = route_weights(wide, second.index, form)
        error = relative_error(second.weights, expected)
        noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(41), dtype=torch.float64)
        theirs = torch.autograd.grad((expected * noise).sum(), wide)[0]
        if second.weights.requires_grad and float(theirs.abs().max()) > 1e-12:
            total = (second.weights.double() * noise).sum()
            mine = torch.autograd.grad(total, second.linear.output, retain_graph=True)[0]
            error = max(error, relative_error(mine.reshape(theirs.shape), theirs))
    words = published(form).words() + (", chosen by the token itself" if form.choose_by == "token" else "")
    return ledger.claim("router", f"router: {words}", CHECK, error if agree else float("inf"), CLOSE)


def _same_sets(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a.sort(-1).values == b.sort(-1).values).all())


# ---- weights --------------------------------------------------------------------------------------------------------


def _weight_forms(module: nn.Module, seen: Routing) -> Iterator[RouterForm]:
    """Forms whose weights at the chosen experts are the seen ones up to one factor, which becomes the scaling."""
    k = seen.index.shape[-1]
    numbers = sorted(set(_floats(module)) - {0.0, 1.0})
    bends: list[tuple[float, float | None]] = [(1.0, None), *((n, None) for n in numbers), *((1.0, n) for n in numbers)]
    besides = sorted({n for n in _integers(module) if 0 < n < seen.logits.shape[-1] - k})
    shared = [(True, n) for n in besides if int(seen.index.max()) < seen.logits.shape[-1] - n]
    for (scale, cap), score in product(bends, SCORES):
        base = RouterForm(score=score, top_k=k, logit_scale=scale, softcap=cap)
        for renormalised, beside in ((False, 0), (True, 0), *shared):
            form = replace(base, renormalised=renormalised, beside=beside)
            expected = route_weights(seen.logits.double(), seen.index, form)
            factor = _one_factor(seen.weights.double(), expected)
            if factor is not None:
                yield replace(form, scaling=float(f"{factor:.6g}"))
    for jitter in numbers if k == 2 else ():
        form = RouterForm(score="sparsemixer", top_k=2, epsilon=jitter)
        if _one_factor(seen.weights.double(), route_weights(seen.logits.double(), seen.index, form)) is not None:
            yield form


def _one_factor(got: Tensor, expected: Tensor) -> float | None:
    """The number by which ``expected`` must be multiplied, if it is one number."""
    denominator = float(expected.pow(2).sum())
    if denominator == 0 or not bool(torch.isfinite(expected).all()):
        return None
    factor = float((got * expected).sum()) / denominator
    return factor if factor > 0 and relative_error(expected * factor, got) < 1e-5 else None


def _floats(module: nn.Module) -> Iterator[float]:
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, float) and value > 0:
                yield value


# ---- choice ---------------------------------------------------------------------------------------------------------


def _choice_forms(module: nn.Module, form: RouterForm, seen: Routing) -> Iterator[tuple[RouterForm, Tensor | None]]:
    """Ways to choose: by scores or logits, with each vector of the module as bias, plain or by groups."""
    experts = seen.logits.shape[-1] - form.beside
    biases: list[Tensor | None] = [None, *_vectors(module, experts)]
    integers = sorted({v for v in _integers(module) if 1 < v < experts and experts % v == 0})
    kept = sorted({v for v in _integers(module) if 0 < v < experts})
    for bias, by in product(biases, ("scores", "logits")):
        plain = replace(form, choose_by=by, biased=bias is not None)
        yield plain, bias
    for bias, groups in product(biases, integers):
        for keep, how, dropped in product(kept, ("top2", "max"), (-torch.inf, 0.0)):
            if keep < groups and keep * (experts // groups) >= form.top_k:
                yield (
                    replace(
                        form, biased=bias is not None, groups=groups, kept_groups=keep, group_score=how, dropped=dropped
                    ),
                    bias,
                )


def _vectors(module: nn.Module, size: int) -> Iterator[Tensor]:
    """Parameters and buffers with one number an expert."""
    for _, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.numel() == size and tensor.is_floating_point():
            yield tensor.detach().reshape(-1)


def _integers(module: nn.Module) -> Iterator[int]:
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, int) and not isinstance(value, bool):
                yield value


def _hashed(module: nn.Module, seen: Routing, ids: Tensor) -> bool:
    """Whether a table from token to experts gives the choice."""
    for _, table in module.named_buffers():
        if table.dim() == 2 and not table.is_floating_point() and table.shape[-1] == seen.index.shape[-1]:
            return torch.equal(table[ids.reshape(-1)].sort(-1).values, seen.index.sort(-1).values)
    return False


def tokens_choice(step: Observation, path: str) -> tuple[Call, Tensor, Tensor] | None:
    """The call that is given tokens, an integer choice of experts and as many weights: (call, index, weights)."""
    for call in step.inside(path, "module"):
        if call.path == path or not under(call.path, path):
            continue
        whole = [t for t in call.tensors() if not t.is_floating_point() and t.dim() >= 1 and t.dtype != torch.bool]
        for index in whole:
            weights = [t for t in call.tensors() if t.is_floating_point() and t.shape == index.shape]
            module: Any = call.function
            if weights and any(p.dim() >= 2 for p in module.parameters()):
                return call, index, weights[0]
    return None
