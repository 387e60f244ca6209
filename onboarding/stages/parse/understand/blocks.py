"""Blocks of experts that route and compute in one piece: recognised and proven as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onboarding.architecture import FeedForwardRole
from onboarding.stages.parse.understand.compare import CLOSE, disagreement, parameters_as
from onboarding.stages.parse.understand.ledger import DEFINITION, Ledger, Sizes
from onboarding.stages.parse.understand.observe import Observation
from onboarding.stages.parse.understand.parts import Part
from onboarding.stages.parse.understand.semantics import ACTIVATIONS, RouterForm, route_choice, route_weights
from onboarding.stages.parse.uses.proof import relative_error


@dataclass(frozen=True)
class Reading:
    """One way to read a block: which weights are which, how they lie, what the router does."""

    router: str
    first: str
    down: str
    transposed: bool
    layout: str
    activation: str
    form: RouterForm
    on_input: bool
    """The weight of a choice is multiplied into what the expert reads, not into what it gives."""
    bias: str | None
    """A vector that is added to the output."""


def understand_block(part: Part, step: Observation, ledger: Ledger, sizes: Sizes) -> FeedForwardRole | None:
    """The role of a block of experts that no call of an experts module shows; None: it is none that is known."""
    module: Any = part.module
    x, y = part.input, part.output
    parameters = dict(module.named_parameters())
    flat, target = x.detach().double().reshape(-1, x.shape[-1]), y.detach().double()
    if target.numel() != flat.numel():
        return None
    wide = {n: p.detach().double() for n, p in parameters.items()}
    shared = _shared(part, step)
    rest = sum((t.detach().double().reshape(flat.shape) for t in shared), torch.zeros_like(flat))
    with torch.no_grad():
        for reading in _readings(parameters, step, part):
            if relative_error(block(flat, wide, reading) + rest, target.reshape(flat.shape)) <= 1e-4:
                return _proven(part, reading, shared, ledger, sizes)
    return None


def _shared(part: Part, step: Observation) -> list[Tensor]:
    """Outputs of the dense feed-forwards inside the block."""
    found = []
    for call in step.during(part.call, "module"):
        module: Any = call.function
        linear = [m for m in module.children() if isinstance(m, nn.Linear)]
        if call.path != part.path and len(linear) >= 2 and call.results()[0].numel() == part.input.numel():
            found.append(call.again({}))  # run anew: the block may add to the output in place
    return found


def _readings(parameters: dict[str, nn.Parameter], step: Observation, part: Part) -> Iterator[Reading]:
    stacked = {n: p for n, p in parameters.items() if p.dim() == 3}
    width = part.input.shape[-1]
    tops = [int(c.inputs["k"]) for c in step.during(part.call, "topk") if c.inputs.get("k")]
    for first, down in product(stacked, repeat=2):
        if first == down or stacked[first].shape[0] != stacked[down].shape[0]:
            continue
        experts = stacked[first].shape[0]
        routers = [n for n, p in parameters.items() if tuple(p.shape) == (experts, width)]
        vectors = [None, *(n for n, p in parameters.items() if tuple(p.shape) == (width,))]
        for router, bias, transposed, layout in product(
            routers, vectors, (False, True), ("concatenated", "interleaved", "plain")
        ):
            if _fits(stacked[first], stacked[down], width, transposed, layout):
                for activation, form, on_input in product(ACTIVATIONS, _forms(tops, experts), (False, True)):
                    yield Reading(router, first, down, transposed, layout, activation, form, on_input, bias)


def _fits(first: Tensor, down: Tensor, width: int, transposed: bool, layout: str) -> bool:
    read, inner = (first.shape[1], first.shape[2]) if transposed else (first.shape[2], first.shape[1])
    inner_read, write = (down.shape[1], down.shape[2]) if transposed else (down.shape[2], down.shape[1])
    return read == width and write == width and inner == inner_read * (1 if layout == "plain" else 2)


def _forms(tops: list[int], experts: int) -> list[RouterForm]:
    return [
        RouterForm(score=score, top_k=k, renormalised=renormalised)
        for k in sorted({k for k in tops if 0 < k <= experts})
        for score in ("softmax", "sigmoid")
        for renormalised in (True, False)
    ]


def block(x: Tensor, weights: dict[str, Tensor], reading: Reading) -> Tensor:
    """sum over the chosen e of w_e E_e(x), or of E_e(w_e x); x [N, D]."""
    logits = F.linear(x, weights[reading.router])
    index = route_choice(logits, None, reading.form)
    shares = torch.zeros_like(logits).scatter(-1, index, route_weights(logits, index, reading.form))
    out = torch.zeros_like(x) if reading.bias is None else weights[reading.bias].expand_as(x)
    for expert in range(logits.shape[-1]):
        share = shares[:, expert, None]
        first, down = weights[reading.first][expert], weights[reading.down][expert]
        if reading.transposed:
            first, down = first.T, down.T
        inner = F.linear(x * share if reading.on_input else x, first)
        act = ACTIVATIONS[reading.activation]
        if reading.layout == "plain":
            value = act(inner)
        else:
            joined = inner.chunk(2, dim=-1) if reading.layout == "concatenated" else (inner[:, ::2], inner[:, 1::2])
            value = act(joined[0]) * joined[1]
        made = F.linear(value, down)
        out = out + (made if reading.on_input else share * made)
    return out


def _proven(part: Part, reading: Reading, shared: list[Tensor], ledger: Ledger, sizes: Sizes) -> FeedForwardRole:
    """Prove a reading on fresh inputs; what runs for every token besides is taken from the module itself."""
    module: Any = part.module
    x = part.input
    names = [reading.router, reading.first, reading.down, *([reading.bias] if reading.bias else [])]
    parameters = dict(module.named_parameters())
    generator = torch.Generator().manual_seed(91)
    inputs = {"x": torch.randn(x.shape, generator=generator), **{n: parameters[n].detach() for n in names}}
    beside = [m for m in module.modules() if m is not module and _is_dense(m, x.shape[-1])] if shared else []

    def actual(t: dict[str, Tensor]) -> Tensor:
        with parameters_as(module, {n: t[n] for n in names}):
            output = part.call.again({id(x): t["x"]}, module)
        first = output[0] if isinstance(output, tuple) else output
        result: Tensor = first.reshape(x.shape)
        return result

    def expected(t: dict[str, Tensor]) -> Tensor:
        made = block(t["x"].reshape(-1, x.shape[-1]), t, reading).reshape(x.shape)
        for other in beside:
            made = made + other(t["x"].float()).to(made.dtype)
        return made

    experts = int(parameters[reading.first].shape[0])
    top_k = sizes.of(reading.form.top_k, r"top_?k$|per_tok|moe_k|active|selected")
    role = FeedForwardRole(
        kind="experts",
        gated=reading.layout != "plain",
        activation=reading.activation,
        layout="" if reading.layout == "plain" else reading.layout,
        bias=reading.bias is not None,
        width=_width(part, reading, sizes),
        experts=sizes.of(experts, r"expert"),
        top_k=top_k,
        router=RouterForm(score=reading.form.score, top_k=top_k, renormalised=reading.form.renormalised).words(),
        score=reading.form.score,
        renormalised=reading.form.renormalised,
        shared=len(beside),
    )
    words = (
        f"{role.experts} experts, {'gated by ' if role.gated else ''}{role.activation}, {role.layout}; {role.router}"
    )
    words += ", weights on what experts read" if reading.on_input else ""
    words += f", + {len(beside)} shared" if beside else ""
    ledger.claim("feed-forward", words, DEFINITION, disagreement(actual, expected, inputs), CLOSE)
    return role


def _is_dense(module: nn.Module, width: int) -> bool:
    linear = [m for m in module.children() if isinstance(m, nn.Linear)]
    return len(linear) >= 2 and linear[0].in_features == width


def _width(part: Part, reading: Reading, sizes: Sizes) -> int:
    pieces = part.path.split(".")
    layer = next((i for i, piece in enumerate(pieces) if piece.isdigit()), 0)
    path = ".".join([*pieces[layer + 1 :], *reading.down.split(".")[:-1]])
    try:
        shape = sizes.full.get_submodule(path).get_parameter(reading.down.rpartition(".")[2]).shape
    except AttributeError:
        shape = dict(part.module.named_parameters())[reading.down].shape
    return int(shape[1 if reading.transposed else 2])
