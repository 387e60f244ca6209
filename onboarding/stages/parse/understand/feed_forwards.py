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
from onboarding.stages.parse.understand.ledger import DEFINITION, IDENTITY, Ledger, Sizes
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Call, Observation
from onboarding.stages.parse.understand.parts import Part, hidden
from onboarding.stages.parse.understand.routers import prove_router, routing_of, tokens_choice
from onboarding.stages.parse.understand.semantics import ACTIVATIONS, RouterForm
from onboarding.stages.parse.uses.gates import GateFlags, joined, probe_gate, prove_gated_mlp
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
    layers = step.inside(call.path, "linear")
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

    def expected(t: dict[str, Tensor]) -> Tensor:
        outputs = [project(i, t["x"], t) for i in range(len(layers) - 1)]
        return project(len(layers) - 1, reference(outputs), t)

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
        gate, up = _halves([outputs[i] for i in order], layout)
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


def _halves(outputs: list[Tensor], layout: str) -> tuple[Tensor, Tensor]:
    if layout == "separate":
        return outputs[0], outputs[1]
    if layout == "concatenated":
        gate, up = outputs[0].chunk(2, dim=-1)
        return gate, up
    return outputs[0][..., ::2], outputs[0][..., 1::2]


def gate_value(gate: Tensor, up: Tensor, flags: GateFlags) -> Tensor:
    """act(min(gate, limit)) * (clamp(up) + offset), SiLU with its alpha."""
    if flags.limit is not None:
        gate, up = gate.clamp(max=flags.limit), up.clamp(-flags.limit, flags.limit)
    if flags.activation == "silu":
        return gate * torch.sigmoid(flags.alpha * gate) * (up + flags.up_offset)
    return ACTIVATIONS[flags.activation](gate) * (up + flags.up_offset)


def _gated(flags: GateFlags, order: tuple[int, ...], layout: str) -> tuple[FeedForwardRole, Any]:
    role = FeedForwardRole(
        kind="dense", gated=True, activation=flags.activation, limit=flags.limit, alpha=flags.alpha,
        up_offset=flags.up_offset, layout=layout,
    )  # fmt: skip

    def reference(outputs: list[Tensor]) -> Tensor:
        gate, up = _halves([outputs[i] for i in order], layout)
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
    module: Any = call.function
    role = FeedForwardRole(
        kind="experts", top_k=sizes.of(int(index.shape[-1]), r"top_?k$|per_tok|moe_k|top_k_experts|active|selected")
    )
    relative = call.path.removeprefix(layer).lstrip(".")
    _prove_experts(module, call, index, weights, role, ledger, sizes, relative)
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


@dataclass(frozen=True)
class _Stacked:
    """Expert weights stacked on their first dim, and how they lie."""

    first: str
    """Name of the gate-up (or up) weights."""
    down: str
    transposed: bool
    layout: str
    gated: bool
    first_bias: str | None
    down_bias: str | None


def _stacked(module: Any) -> _Stacked | None:
    parameters = dict(module.named_parameters(recurse=False))
    three = [n for n, p in parameters.items() if p.dim() == 3]
    if len(three) != 2 or not hasattr(module, "is_concatenated"):
        return None
    down = next((n for n in three if "down" in n), three[1])
    first = next(n for n in three if n != down)
    two = {n: p for n, p in parameters.items() if p.dim() == 2}
    return _Stacked(
        first=first,
        down=down,
        transposed=bool(module.is_transposed),
        layout="concatenated" if module.is_concatenated else "interleaved",
        gated=bool(module.has_gate),
        first_bias=next((n for n in two if n.startswith(first)), None),
        down_bias=next((n for n in two if n.startswith(down)), None),
    )


def _prove_experts(
    module: Any,
    call: Call,
    index: Tensor,
    weights: Tensor,
    role: FeedForwardRole,
    ledger: Ledger,
    sizes: Sizes,
    path: str,
) -> None:
    """The experts module on fresh tokens and choices against the sum of its experts' feed-forwards."""
    lie = _stacked(module)
    if lie is None:
        count = next((p.shape[0] for p in module.parameters() if p.dim() == 3), 0)
        role.experts = sizes.of(int(count), r"expert")
        keep_subgraph(call, "feed-forward", ledger)
        return
    parameters = dict(module.named_parameters(recurse=False))
    count = int(parameters[lie.down].shape[0])
    role.experts = _expert_count(sizes, path, lie.down, count)
    role.layout, role.gated, role.bias = lie.layout if lie.gated else "", lie.gated, lie.first_bias is not None
    flags = _expert_flags(module, lie)
    if flags is None:
        keep_subgraph(call, "feed-forward", ledger)
        return
    role.activation, role.limit, role.alpha, role.up_offset = (
        flags.activation,
        flags.limit,
        flags.alpha,
        flags.up_offset,
    )
    role.width = _expert_width(sizes, path, lie, int(parameters[lie.down].shape[1 if lie.transposed else 2]))
    x = hidden_tokens(call, index)
    generator = torch.Generator().manual_seed(61)
    rows = index.reshape(-1, index.shape[-1]).shape[0]
    fresh = torch.stack([torch.randperm(count, generator=generator)[: index.shape[-1]] for _ in range(rows)])
    fresh = fresh.reshape(index.shape)
    inputs = {"x": torch.randn(x.shape, generator=generator) * (flags.limit or 1.0)}
    inputs["w"] = torch.rand(weights.shape, generator=generator)
    inputs |= {n: p.detach() for n, p in parameters.items()}
    post = bool(getattr(module, "has_post_expert_norm", False))

    def actual(t: dict[str, Tensor]) -> Tensor:
        with parameters_as(module, {n: t[n] for n in parameters}):
            output = call.again({id(x): t["x"], id(index): fresh, id(weights): t["w"]}, module)
        result: Tensor = output
        return result

    def expected(t: dict[str, Tensor]) -> Tensor:
        return experts_reference(t, fresh, lie, flags, module if post else None)

    words = experts_words(role)
    try:
        error = disagreement(actual, expected, inputs)
    except Exception as failure:
        ledger.unproven("feed-forward", words, f"{type(failure).__name__}: {failure}"[:200])
        return
    if not ledger.claim("feed-forward", words, DEFINITION, error, CLOSE):
        keep_subgraph(call, "feed-forward", ledger)


def hidden_tokens(call: Call, index: Tensor) -> Tensor:
    """The tokens among the arguments of an experts module: floating, not the weights."""
    return next(t for t in call.tensors() if t.is_floating_point() and t.shape != index.shape)


def experts_words(role: FeedForwardRole) -> str:
    """E.g. ``256 experts, gated by silu, concatenated, with biases``."""
    words = f"{role.experts} experts, {'gated by ' if role.gated else ''}{role.activation}"
    words += f", {role.layout}" if role.layout else ""
    words += f", clamp {role.limit:g}" if role.limit else ""
    words += f", alpha {role.alpha:g}" if role.alpha != 1.0 else ""
    words += f", up + {role.up_offset:g}" if role.up_offset else ""
    return words + (", with biases" if role.bias else "")


def _expert_flags(module: Any, lie: _Stacked) -> GateFlags | None:
    if lie.gated:
        return probe_gate(lambda gate, up: module._apply_gate(joined(gate, up, lie.layout)))
    act = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    g = torch.linspace(-3, 3, 25)
    for name, known in ACTIVATIONS.items():
        if callable(act) and relative_error(act(g), known(g.double())) < 1e-5:
            return GateFlags(activation=name, limit=None, alpha=1.0, up_offset=0.0)
    return None


def experts_reference(t: dict[str, Tensor], index: Tensor, lie: _Stacked, flags: GateFlags, norm: Any) -> Tensor:
    """sum over chosen experts e of w_e down_e(act(up_e x)), in the dtype of ``x``."""
    shape = t["x"].shape
    x, index, w = t["x"].reshape(-1, shape[-1]), index.reshape(-1, index.shape[-1]), t["w"].reshape(-1, index.shape[-1])
    out = None
    for expert in range(t[lie.down].shape[0]):
        share = (w * (index == expert)).sum(-1, keepdim=True)
        first, down = t[lie.first][expert], t[lie.down][expert]
        if lie.transposed:
            first, down = first.T, down.T
        inner = F.linear(x, first, t[lie.first_bias][expert] if lie.first_bias else None)
        if lie.gated:
            value = gate_value(*_halves([inner], lie.layout), flags)
        else:
            value = ACTIVATIONS[flags.activation](inner)
        y = F.linear(value, down, t[lie.down_bias][expert] if lie.down_bias else None)
        if norm is not None:
            y = _post_norm(norm, y)
        out = share * y if out is None else out + share * y
    assert out is not None
    return out.reshape(*shape[:-1], -1)


def _post_norm(module: Any, y: Tensor) -> Tensor:
    """The norm behind each expert: the module's own, which is proven with the norms."""
    own = next(m for m in module.children() if is_norm(m))
    result: Tensor = own(y.float()).to(y.dtype)
    return result


def _expert_count(sizes: Sizes, path: str, name: str, count: int) -> int:
    try:
        return int(sizes.full.get_submodule(path).get_parameter(name).shape[0])
    except AttributeError:
        return int(sizes.of(count, r"expert"))


def _expert_width(sizes: Sizes, path: str, lie: _Stacked, width: int) -> int:
    try:
        return int(sizes.full.get_submodule(path).get_parameter(lie.down).shape[1 if lie.transposed else 2])
    except AttributeError:
        return width


def _prove_sum(
    part: Part, call: Call, role: FeedForwardRole, step: Observation, ledger: Ledger, sizes: Sizes, layer: str
) -> None:
    """The block's output is a sum of the routed experts' and of what runs for every token."""
    inside = step.inside(part.path, "module")
    routed = call.results()[0]
    x = part.input
    beside = [
        c
        for c in inside
        if c.path not in (part.path, call.path)
        and not c.path.startswith(call.path + ".")
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
        for c in step.inside(part.path, "linear")
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
    scalars = [c for c in step.inside(part.path, "linear") if c.output.shape[-1] == 1]
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
    last = [c for c in step.inside(part.path, "module") if is_norm(_module(c)) and c.results()[0] is part.output]
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
