"""Normalisations: their form by trying the known ones, their place by which values they read and feed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from onboarding.architecture import NormRole
from onboarding.stages.parse.roles import epsilon_of, is_norm
from onboarding.stages.parse.understand.compare import CLOSE, disagreement, parameters_as, same
from onboarding.stages.parse.understand.ledger import DEFINITION, Ledger
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Call, Observation
from onboarding.stages.parse.understand.parts import LayerView, Part
from onboarding.stages.parse.understand.semantics import NormForm, norm


def understand_norms(view: LayerView, step: Observation, ledger: Ledger) -> list[NormRole]:
    """Every distinct norm of a layer, with its place; each form proven on fresh inputs."""
    found: dict[tuple[str, str], NormRole] = {}
    for call in step.inside(view.path, "module"):
        module: Any = call.function
        if not is_norm(module) or not call.tensors():
            continue
        role = prove_norm_form(call, place_of(call, view, step), ledger)
        if role is not None:
            found.setdefault((role.form, role.place), role)
    return list(found.values())


def place_of(call: Call, view: LayerView, step: Observation) -> str:
    """``pre``, ``post`` or, inside a part, ``query/key``, ``latent``, ``output``, ``inner``."""
    part = next((p for p in view.parts if p.role != "norm" and call.path.startswith(p.path + ".")), None)
    if part is not None:
        return _inner_place(call, part, step)
    made = call.results()[0]
    parts = [p for p in view.parts if p.role in ("mixer", "feed-forward", "other")]
    if any(made is t for p in parts for t in p.call.tensors()):
        return "pre"
    x = call.tensors()[0]
    if any(x is p.output or same(x, p.output) for p in parts):
        return "post"
    return "pre" if any(same(made, p.input) for p in parts) else "inner"


def _inner_place(call: Call, part: Part, step: Observation) -> str:
    attention = next((c for c in step.during(part.call, "attention")), None)
    width = call.results()[0].shape[-1]
    if part.role == "other":
        return "inner"
    if attention is None:
        after = [c for c in step.during(part.call, "linear") if c.position > call.position]
        return "output" if len(after) == 1 else "inner"
    if call.position > attention.position:
        return "output"
    if any(c.inputs["x"] is call.results()[0] for c in step.during(part.call, "linear")):
        return "latent"
    if "." in call.path.removeprefix(part.path + "."):
        return "inner"
    heads = {attention.inputs[n].shape[-1] for n in "qkv"}
    rows = {attention.inputs[n].shape[-1] * attention.inputs[n].shape[1] for n in "qkv"}
    return "query/key" if width in heads | rows else "inner"


def prove_norm_form(call: Call, place: str, ledger: Ledger) -> NormRole | None:
    """The form of one norm, claimed and proven; a module that is no known norm keeps its subgraph."""
    module: Any = call.function
    x = call.tensors()[0]
    gates = [t for t in call.tensors()[1:] if t.shape == x.shape]
    parameters = dict(module.named_parameters(recurse=False))
    vectors = {n: p for n, p in parameters.items() if p.numel() == x.shape[-1]}
    bias = next((n for n in vectors if "bias" in n), None)
    weight = next((n for n in vectors if n != bias), None)
    generator = torch.Generator().manual_seed(81)
    best: tuple[float, NormForm] | None = None
    for form in _forms(module, bool(gates), weight is not None, x.shape[-1]):
        # the second scale makes the epsilon as large as the mean square, so that a wrong one shows
        errors = []
        for scale in (1.0, form.eps**0.5 if form.eps else 1.0):
            inputs = {"x": scale * torch.randn(x.shape, generator=generator)}
            if gates:
                inputs["gate"] = torch.randn(x.shape, generator=generator)
            inputs |= {n: p.detach() for n, p in parameters.items()}
            errors.append(_error(call, x, gates, inputs, form, parameters, weight, bias))
            if errors[-1] > CLOSE:
                break
        if best is None or max(errors) < best[0]:
            best = (max(errors), form)
        if best[0] <= CLOSE:
            break
    if best is None or best[0] > CLOSE:
        keep_subgraph(call, "norm", ledger)
        return NormRole(form=type(module).__name__, place=place, weighted=bool(parameters))
    error, form = best
    words = form.words() + ("" if weight else ", unweighted") + (", with bias" if bias else "")
    ledger.claim("norm", f"{place} norm: {words}", DEFINITION, error, CLOSE)
    return NormRole(form=form.words(), place=place, weighted=weight is not None, eps=form.eps)


def _error(
    call: Call,
    x: Tensor,
    gates: list[Tensor],
    inputs: dict[str, Tensor],
    form: NormForm,
    parameters: dict[str, nn.Parameter],
    weight: str | None,
    bias: str | None,
) -> float:
    module: Any = call.function

    def actual(t: dict[str, Tensor]) -> Tensor:
        replace = {id(x): t["x"], **({id(gates[0]): t["gate"]} if gates else {})}
        with parameters_as(module, {n: t[n] for n in parameters}):
            output = call.again(replace, module)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def expected(t: dict[str, Tensor]) -> Tensor:
        w = t[weight].reshape(-1) if weight else None
        return norm(t["x"], w, t[bias].reshape(-1) if bias else None, t.get("gate"), form)

    try:
        return disagreement(actual, expected, inputs)
    except Exception:
        return float("inf")


def _forms(module: nn.Module, gated: bool, weighted: bool, width: int) -> Iterator[NormForm]:
    """Forms worth trying, the customary ones first."""
    eps = epsilon_of(module)
    epsilons = [eps] if eps is not None else [torch.finfo(torch.float32).eps]
    groups = sorted({v for v in vars(module).values() if type(v) is int and 1 < v < width and width % v == 0})
    sizes: list[int | None] = [None, *groups, *(width // g for g in groups)]
    gates = ("sigmoid", "silu") if gated else ("",)
    offsets = (0.0, 1.0) if weighted else (0.0,)
    for kind, group, gate, first, offset, e in product(
        ("rms", "layer", "l2"), sizes, gates, (False, True) if gated else (False,), offsets, epsilons
    ):
        yield NormForm(kind=kind, eps=e, offset=offset, gate=gate, gate_first=first, group=group)
