"""Routed experts: how their stacked weights lie, and the sum over the chosen ones, proven on fresh choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onboarding.architecture import FeedForwardRole
from onboarding.stages.parse.roles import is_norm
from onboarding.stages.parse.understand.compare import CLOSE, disagreement, parameters_as
from onboarding.stages.parse.understand.ledger import DEFINITION, Ledger, Sizes
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Call
from onboarding.stages.parse.understand.semantics import ACTIVATIONS, gate_value, halves
from onboarding.stages.parse.uses.gates import GateFlags, joined, probe_gate
from onboarding.stages.parse.uses.proof import relative_error

OWN_GATE = GateFlags(activation="own", limit=None, alpha=1.0, up_offset=0.0)
"""A gate that is no known one: the module's own function stands in its definition."""


@dataclass(frozen=True)
class Stack:
    """Expert weights stacked on their first dim (or their rows), and how they lie."""

    first: str
    """Name of the gate-up, gate or only inner weights."""
    down: str
    up: str | None
    """Where gate and up are apart."""
    count: int
    """Experts with weights."""
    transposed: bool
    layout: str
    gated: bool
    first_bias: str | None = None
    down_bias: str | None = None

    def weights(self, t: dict[str, Tensor], name: str) -> Tensor:
        """Weights as [E, out, in]; rows of single experts are stacked as rows where they lie in two dims."""
        weight = t[name]
        if weight.dim() == 2:
            weight = weight.reshape(self.count, -1, weight.shape[-1])
            return weight.transpose(1, 2) if name == self.down else weight
        return weight.transpose(1, 2) if self.transposed else weight


def read_stack(module: Any, index: Tensor) -> Stack | None:
    """How the weights of an experts module lie; None: in no known way."""
    parameters = dict(module.named_parameters())
    three = [n for n, p in parameters.items() if p.dim() == 3]
    two = [n for n, p in parameters.items() if p.dim() == 2]
    if len(three) == 2:
        down = next((n for n in three if "down" in n), three[1])
        first = next(n for n in three if n != down)
        return Stack(
            first=first,
            down=down,
            up=None,
            count=int(parameters[down].shape[0]),
            transposed=bool(getattr(module, "is_transposed", False)),
            layout="concatenated" if getattr(module, "is_concatenated", True) else "interleaved",
            gated=bool(getattr(module, "has_gate", True)),
            first_bias=next((n for n in two if n.startswith(first)), None),
            down_bias=next((n for n in two if n.startswith(down)), None),
        )
    count = next((v for n, v in vars(module).items() if "num_experts" in n and isinstance(v, int)), 0)
    if len(two) == 3 and not three and count and len({tuple(parameters[n].shape) for n in two}) == 1:
        return Stack(first=two[0], up=two[1], down=two[2], count=count, transposed=False, layout="separate", gated=True)
    return None


def prove_experts_module(
    call: Call, index: Tensor, weights: Tensor, role: FeedForwardRole, ledger: Ledger, sizes: Sizes, path: str
) -> None:
    """An experts module on fresh tokens and choices against the sum of its experts' feed-forwards."""
    module: Any = call.function
    stack = read_stack(module, index)
    flags = gate_flags(module, stack) if stack is not None else None
    if stack is None or flags is None:
        count = next((p.shape[0] for p in module.parameters() if p.dim() == 3), 0)
        role.experts = sizes.of(int(count), r"expert")
        keep_subgraph(call, "feed-forward", ledger)
        return
    parameters = dict(module.named_parameters())
    role.experts, role.width = _published(stack, parameters, sizes, path)
    role.layout, role.gated, role.bias = stack.layout if stack.gated else "", stack.gated, stack.first_bias is not None
    role.activation, role.limit = flags.activation, flags.limit
    role.alpha, role.up_offset = flags.alpha, flags.up_offset
    x = next(t for t in call.tensors() if t.is_floating_point() and t.shape != index.shape)
    total = max(stack.count, int(parameters[stack.first].shape[0]) if parameters[stack.first].dim() == 3 else 0)
    generator = torch.Generator().manual_seed(61)
    k = index.shape[-1]
    rows = index.numel() // k
    fresh = torch.stack([torch.randperm(total, generator=generator)[:k] for _ in range(rows)]).reshape(index.shape)
    inputs = {"x": torch.randn(x.shape, generator=generator) * (flags.limit or 1.0)}
    inputs["w"] = torch.rand(weights.shape, generator=generator)
    inputs |= {n: p.detach() for n, p in parameters.items()}

    def actual(t: dict[str, Tensor]) -> Tensor:
        with parameters_as(module, {n: t[n] for n in parameters}):
            output = call.again({id(x): t["x"], id(index): fresh, id(weights): t["w"]}, module)
        result: Tensor = output
        return result

    def expected(t: dict[str, Tensor]) -> Tensor:
        with parameters_as(module, {n: t[n].float() for n in parameters if n not in vars(stack).values()}):
            return experts_reference(t, fresh, total, stack, flags, module).reshape(x.shape)

    words = experts_words(role) + (f", {total - stack.count} without weights" if total > stack.count else "")
    try:
        error = disagreement(actual, expected, inputs)
    except Exception as failure:
        ledger.unproven("feed-forward", words, f"{type(failure).__name__}: {failure}"[:200])
        return
    if not ledger.claim("feed-forward", words, DEFINITION, error, CLOSE):
        keep_subgraph(call, "feed-forward", ledger)


def experts_words(role: FeedForwardRole) -> str:
    """E.g. ``256 experts, gated by silu, concatenated, with biases``."""
    act = "a function of their own" if role.activation == OWN_GATE.activation else role.activation
    words = f"{role.experts} experts, {'gated by ' if role.gated else ''}{act}"
    words += f", {role.layout}" if role.layout else ""
    words += f", clamp {role.limit:g}" if role.limit else ""
    words += f", alpha {role.alpha:g}" if role.alpha != 1.0 else ""
    words += f", up + {role.up_offset:g}" if role.up_offset else ""
    return words + (", with biases" if role.bias else "")


def gate_flags(module: Any, stack: Stack) -> GateFlags | None:
    """What happens between the projections: probed where it is a function, else compared with known activations."""
    if stack.gated and hasattr(module, "_apply_gate"):
        return probe_gate(lambda gate, up: module._apply_gate(joined(gate, up, stack.layout))) or OWN_GATE
    acts = [getattr(m, n, None) for m in module.modules() for n in ("act_fn", "activation_fn", "activation")]
    g = torch.linspace(-3, 3, 25)
    for name, known in ACTIVATIONS.items():
        if any(callable(act) and relative_error(act(g), known(g.double())) < 1e-5 for act in acts):
            return GateFlags(activation=name, limit=None, alpha=1.0, up_offset=0.0)
    return None


def experts_reference(
    t: dict[str, Tensor], index: Tensor, total: int, stack: Stack, flags: GateFlags, module: Any
) -> Tensor:
    """sum over chosen experts e of w_e down_e(act(up_e x)), in the dtype of ``x``; [N, D]."""
    x = t["x"].reshape(-1, t["x"].shape[-1])
    index, w = index.reshape(-1, index.shape[-1]), t["w"].reshape(-1, index.shape[-1])
    first, down = stack.weights(t, stack.first), stack.weights(t, stack.down)
    up = stack.weights(t, stack.up) if stack.up else None
    norm = next((m for m in module.children() if is_norm(m)), None)
    out = torch.zeros_like(x)
    for expert in range(total):
        share = (w * (index == expert)).sum(-1, keepdim=True)
        if expert >= stack.count:
            out = out + share * x  # an expert without weights hands its input on
            continue
        inner = F.linear(x, first[expert], t[stack.first_bias][expert] if stack.first_bias else None)
        if flags is OWN_GATE:
            value = module._apply_gate(inner.float()).to(inner.dtype)
        elif up is not None:
            value = gate_value(inner, F.linear(x, up[expert]), flags)
        elif stack.gated:
            value = gate_value(*halves([inner], stack.layout), flags)
        else:
            value = ACTIVATIONS[flags.activation](inner)
        y = F.linear(value, down[expert], t[stack.down_bias][expert] if stack.down_bias else None)
        if norm is not None:  # behind each expert: the module's own, which is proven with the norms
            y = norm(y.float()).to(y.dtype)
        out = out + share * y
    return out


def _published(stack: Stack, parameters: dict[str, Any], sizes: Sizes, path: str) -> tuple[int, int]:
    """Experts and their width in the published model."""
    own = stack.weights(parameters, stack.down).shape
    try:
        full = dict(sizes.full.get_submodule(path).named_parameters())
        weight = full[stack.down]
    except (AttributeError, KeyError):
        return int(sizes.of(stack.count, r"expert")), int(own[2])
    if weight.dim() == 2:
        count = int(sizes.of(stack.count, r"num_experts"))
        return count, int(weight.shape[0]) // max(count, 1)
    return int(weight.shape[0]), int(weight.shape[1 if stack.transposed else 2])
