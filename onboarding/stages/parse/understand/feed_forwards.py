"""Feed-forwards: gated or plain, and routed experts with their router and what runs beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onboarding.architecture import FeedForwardRole
from onboarding.stages.parse.roles import is_norm
from onboarding.stages.parse.understand.blocks import understand_block
from onboarding.stages.parse.understand.compare import CLOSE, disagreement, parameters_as, same
from onboarding.stages.parse.understand.experts import prove_experts_module
from onboarding.stages.parse.understand.ledger import DEFINITION, IDENTITY, Ledger, Sizes
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Call, Observation
from onboarding.stages.parse.understand.parts import Part, hidden
from onboarding.stages.parse.understand.routers import prove_router, routing_of, tokens_choice
from onboarding.stages.parse.understand.semantics import ACTIVATIONS, RouterForm, gate_value, halves
from onboarding.stages.parse.uses.gates import GateFlags, prove_gated_mlp
from onboarding.stages.parse.uses.proof import relative_error


@dataclass(frozen=True)
class _Mlp:
    """A proven feed-forward of one position."""

    role: FeedForwardRole
    error: float


def understand_feed_forward(
    part: Part, steps: tuple[Observation, Observation], ledger: Ledger, sizes: Sizes, layer: str
) -> FeedForwardRole:
    """The role of a feed-forward, each claim proven or noted as unproven; what matches nothing keeps its subgraph."""
    routed = tokens_choice(steps[0], part.path)
    if routed is not None:
        return _experts_role(part, routed, steps, ledger, sizes, layer)
    role = prove_dense(part.module, part.call, steps[0], ledger, sizes, part.path.removeprefix(layer).lstrip("."))
    role = role or understand_block(part, steps[0], ledger, sizes)
    if role is None:
        keep_subgraph(part.call, "feed-forward", ledger)
        return FeedForwardRole(kind="novel")
    return role


# ---- dense ----------------------------------------------------------------------------------------------------------


def prove_dense(
    module: nn.Module, call: Call, step: Observation, ledger: Ledger, sizes: Sizes, path: str
) -> FeedForwardRole | None:
    """A dense feed-forward by its values, proven as a whole; None: it is none that is known."""
    layers = step.during(call, "linear")
    if not 2 <= len(layers) <= 3:
        return None
    down = layers[-1]
    width = int(down.inputs["x"].shape[-1])
    form = _gated_form(module, layers, down) or _plain_form(layers, down)
    if form is None:
        return None
    role, reference = form
    names = {id(p): n for n, p in module.named_parameters()}
    x = hidden(call)
    generator = torch.Generator().manual_seed(51)
    stretch = 4.0 * (role.limit or 1.0) if role.limit else 1.0
    inputs = {"x": torch.randn(x.shape, generator=generator) * stretch}
    inputs |= {n: p.detach() for n, p in module.named_parameters()}
    weights = [
        {part: names[id(c.inputs[part])] for part in ("weight", "bias") if c.inputs.get(part) is not None}
        for c in layers
    ]
    transposed = down.name == "addmm"

    def actual(t: dict[str, Tensor]) -> Tensor:
        values = {n: t[n] for n in names.values()}
        with parameters_as(module, values):
            output = call.again({id(x): t["x"]}, module)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def project(index: int, value: Tensor, t: dict[str, Tensor]) -> Tensor:
        weight = t[weights[index]["weight"]]
        bias = t[weights[index]["bias"]] if "bias" in weights[index] else None
        return F.linear(value, weight.T if transposed else weight, bias)

    streams = [t for t in call.tensors() if t is not x and t.shape == x.shape and t.is_floating_point()]
    made, whole = down.output.reshape(x.shape), call.results()[0]
    added = next((t.detach().double() for t in streams if same(made + t, whole)), None)

    def expected(t: dict[str, Tensor]) -> Tensor:
        outputs = [project(i, t["x"], t) for i in range(len(layers) - 1)]
        y = project(len(layers) - 1, reference(outputs), t)
        return y if added is None else y + added

    try:
        error = disagreement(actual, expected, inputs)
    except Exception as failure:
        ledger.unproven("feed-forward", dense_words(role), f"{type(failure).__name__}: {failure}"[:200])
        return role
    role.bias = any("bias" in w for w in weights)
    relative = down.path.removeprefix(call.path).lstrip(".")
    role.width = _published(sizes, f"{path}.{relative}".strip("."), width)
    ledger.claim("feed-forward", dense_words(role), DEFINITION, error, CLOSE)
    return role


def _published(sizes: Sizes, path: str, width: int) -> int:
    try:
        module = sizes.full.get_submodule(path)
    except AttributeError:
        return int(sizes.of(width, r"intermediate|ffn|inner|width"))
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        return int(module.in_features)
    return int(weight.shape[0]) if isinstance(weight, Tensor) else width


def dense_words(role: FeedForwardRole) -> str:
    """E.g. ``dense, gated by silu, clamp 7``."""
    words = f"dense, {'gated by ' if role.gated else ''}{role.activation}"
    words += f", clamp {role.limit:g}" if role.limit else ""
    words += f", alpha {role.alpha:g}" if role.alpha != 1.0 else ""
    return words + (f", up + {role.up_offset:g}" if role.up_offset else "")


def _gated_form(module: nn.Module, layers: list[Call], down: Call) -> tuple[FeedForwardRole, Any] | None:
    """y = down(act(gate) * up): by probing the module where it is a plain three- or two-layer one, else by values."""
    inner = down.inputs["x"].detach().double()
    outputs = [c.output.detach().double() for c in layers[:-1]]
    for order, layout in (((0, 1), "separate"), ((1, 0), "separate"), ((0,), "concatenated"), ((0,), "interleaved")):
        if len(order) != len(outputs):
            continue
        gate, up = halves([outputs[i] for i in order], layout)
        if gate.shape != inner.shape:
            continue
        for name, act in ACTIVATIONS.items():
            if relative_error(act(gate) * up, inner) < 1e-5:
                plain = GateFlags(activation=name, limit=None, alpha=1.0, up_offset=0.0)
                return _gated(_probed(module) or plain, order, layout)
    flags = _probed(module)
    proven = prove_gated_mlp(module, "float32") if flags else None
    if flags is None or proven is None:
        return None
    if proven.spec.layout == "separate":
        paths = [c.path.rpartition(".")[2] for c in layers[:-1]]
        order = (paths.index(proven.attributes["gate"]), paths.index(proven.attributes["up"]))
        return _gated(flags, order, "separate")
    return _gated(flags, (0,), proven.spec.layout)


def _probed(module: nn.Module) -> GateFlags | None:
    try:
        proven = prove_gated_mlp(module, "float32")
    except Exception:
        return None
    if proven is None:
        return None
    spec = proven.spec
    return GateFlags(activation=spec.activation, limit=spec.limit, alpha=spec.alpha, up_offset=spec.up_offset)


def _gated(flags: GateFlags, order: tuple[int, ...], layout: str) -> tuple[FeedForwardRole, Any]:
    role = FeedForwardRole(
        kind="dense", gated=True, activation=flags.activation, limit=flags.limit, alpha=flags.alpha,
        up_offset=flags.up_offset, layout=layout,
    )  # fmt: skip

    def reference(outputs: list[Tensor]) -> Tensor:
        gate, up = halves([outputs[i] for i in order], layout)
        return gate_value(gate, up, flags)

    return role, reference


def _plain_form(layers: list[Call], down: Call) -> tuple[FeedForwardRole, Any] | None:
    if len(layers) != 2:
        return None
    inner, made = down.inputs["x"].detach().double(), layers[0].output.detach().double()
    if inner.shape != made.shape:
        return None
    for name, act in ACTIVATIONS.items():
        if relative_error(act(made), inner) < 1e-5:
            return FeedForwardRole(kind="dense", activation=name), lambda outputs, act=act: act(outputs[0])
    return None


# ---- experts --------------------------------------------------------------------------------------------------------


def _experts_role(
    part: Part,
    routed: tuple[Call, Tensor, Tensor],
    steps: tuple[Observation, Observation],
    ledger: Ledger,
    sizes: Sizes,
    layer: str,
) -> FeedForwardRole:
    call, index, weights = routed
    role = FeedForwardRole(
        kind="experts", top_k=sizes.of(int(index.shape[-1]), r"top_?k$|per_tok|moe_k|top_k_experts|active|selected")
    )
    relative = call.path.removeprefix(layer).lstrip(".")
    prove_experts_module(call, index, weights, role, ledger, sizes, relative)
    again = tokens_choice(steps[1], part.path)
    first = routing_of(steps[0], part.path, index, weights, call.position)
    second = routing_of(steps[1], part.path, again[1], again[2], again[0].position) if again else None
    if first is None or second is None:
        ledger.unproven("router", "router", "no linear layer leads to the weights of the experts")
    else:
        form = prove_router(part.module, first, second, steps[0].ids, ledger, partial(_published_form, sizes=sizes))
        if form is not None:
            shown = _published_form(form, sizes)
            role.router = shown.words() + (", chosen by the token itself" if form.choose_by == "token" else "")
            role.score, role.selection_bias, role.renormalised = form.score, form.biased, form.renormalised
            role.groups, role.kept_groups, role.scaling = shown.groups, shown.kept_groups, form.scaling
    _prove_sum(part, call, role, steps[0], ledger, sizes, layer)
    return role


def _published_form(form: RouterForm, sizes: Sizes) -> RouterForm:
    top_k = sizes.of(form.top_k, r"top_?k$|per_tok|moe_k|top_k_experts|active|selected")
    if form.groups == 1:
        return replace(form, top_k=top_k)
    groups = sizes.of(form.groups, r"^(n_groups?|num_groups?|num_expert_groups?)$", r"group")
    return replace(
        form, top_k=top_k, groups=groups, kept_groups=sizes.of(form.kept_groups, r"topk_group|kept", r"group")
    )


def _prove_sum(
    part: Part, call: Call, role: FeedForwardRole, step: Observation, ledger: Ledger, sizes: Sizes, layer: str
) -> None:
    """The block's output is a sum of the routed experts' and of what runs for every token."""
    inside = step.during(part.call, "module")
    routed = call.results()[0]
    x = part.input
    beside = [
        c
        for c in inside
        if c.path not in (part.path, call.path)
        and not c.path.startswith(call.path + ".")
        and not call.path.startswith(c.path + ".")  # a wrapper of the experts is no term of its own
        and c.results()
        and c.results()[0].numel() == x.numel()
        and sum(p.dim() >= 2 for p in _module(c).parameters()) >= 2
    ]
    for shared in beside:
        path = shared.path.removeprefix(layer).lstrip(".")
        if prove_dense(_module(shared), shared, step, ledger, sizes, path) is None:
            keep_subgraph(shared, "feed-forward", ledger)
    role.shared = _shared_count(beside, call, role, sizes, layer)
    after = [
        c
        for c in step.during(part.call, "linear")
        if c.position > call.position and not any(c.path.startswith(b.path) for b in beside)
    ]
    terms = [routed]
    if routed.shape[-1] != x.shape[-1]:
        up = [c for c in after if c.output.shape[-1] == x.shape[-1] and same(c.inputs["x"], routed)]
        if not up:
            ledger.unproven("feed-forward", "experts work in a latent", "no projection back was seen")
            return
        role.latent = _published(sizes, up[0].path.removeprefix(layer).lstrip("."), int(routed.shape[-1]))
        terms = [up[0].output]
    target = _before_norm(part, step).detach().double().reshape(-1)
    made = [terms[0].detach().double().reshape(-1)]
    error, fit = _fit([*made, *(c.results()[0].detach().double().reshape(-1) for c in beside)], target)
    scalars = [c for c in step.during(part.call, "linear") if c.output.shape[-1] == 1]
    if error > 1e-4 and scalars and len(beside) == 1:
        gate = torch.sigmoid(scalars[0].output.detach().double()).reshape(-1, 1)
        value = beside[0].results()[0].detach().double()
        error, fit = _fit([*made, (value.reshape(gate.shape[0], -1) * gate).reshape(-1)], target)
        role.shared_gate = "sigmoid" if error <= 1e-4 else ""
    words = "routed" + (f" x {fit[0]:g}" if abs(fit[0] - 1) > 1e-4 else "")
    words += f" + {role.shared} shared" if len(fit) > 1 else ""
    if error <= 1e-4 and abs(fit[0] - 1) > 1e-4:
        role.scaling *= fit[0]
    ledger.claim("feed-forward", f"output: {words}", IDENTITY + " (least squares)", error, 1e-4)


def _before_norm(part: Part, step: Observation) -> Tensor:
    """What a block gives back, or what its last norm reads where it ends in one."""
    last = [c for c in step.during(part.call, "module") if is_norm(_module(c)) and c.results()[0] is part.output]
    return last[-1].tensors()[0] if last else part.output


def _shared_count(beside: list[Call], call: Call, role: FeedForwardRole, sizes: Sizes, layer: str) -> int:
    total = 0
    for shared in beside:
        try:
            module = sizes.full.get_submodule(shared.path.removeprefix(layer).lstrip("."))
        except AttributeError:
            continue
        widths = [m.in_features for m in module.modules() if isinstance(m, nn.Linear)]
        total += max(1, round(widths[-1] / role.width)) if widths and role.width else 1
    return total


def _module(call: Call) -> Any:
    return call.function


def _fit(columns: list[Tensor], target: Tensor) -> tuple[float, list[float]]:
    """Least-squares coefficients and the relative residual."""
    if any(c.numel() != target.numel() for c in columns):
        return float("inf"), [1.0] * len(columns)
    a = torch.stack(columns, dim=1)
    fit = torch.linalg.lstsq(a, target[:, None]).solution
    error = float((a @ fit - target[:, None]).norm() / target.norm().clamp_min(1e-12))
    return error, [float(f"{v:.6g}") for v in fit.flatten()]
