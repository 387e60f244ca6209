"""Mixers with a state along the sequence, and convolutions: linear attention, Mamba 1 and 2, lightning, RG-LRU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_templates.linear_attention.reference import reference as linear_attention
from kernel_templates.linear_attention.spec import Spec
from onboarding.architecture import MixerRole
from onboarding.stages.parse.marked import LINEAR_ATTENTION_INPUTS
from onboarding.stages.parse.understand.compare import CLOSE, RECURRENT, disagreement
from onboarding.stages.parse.understand.ledger import DEFINITION, DISTURBED, Ledger, Sizes
from onboarding.stages.parse.understand.observe import Call, Observation
from onboarding.stages.parse.understand.parts import Part
from onboarding.stages.parse.understand.semantics import (
    decayed_attention,
    linear_recurrence,
    selective_scan,
    state_space_dual,
)

_SHORT = {"query": "q", "key": "k", "value": "v"}


def understand_recurrence(
    part: Part, step: Observation, ledger: Ledger, sizes: Sizes, attended: bool
) -> list[MixerRole]:
    """The roles of a mixer that ran no softmax attention, or those that it has beside one."""
    roles: list[MixerRole] = []
    for call in step.during(part.call, "function"):
        role = _function_role(call, ledger, sizes)
        if role is not None:
            roles.append(role)
    width = convolution_width(part)
    for role in roles:
        role.convolution = width
    if not roles and not attended:
        roles += [role for recognise in (_lightning, _rg_lru) if (role := recognise(part, step, ledger, sizes))][:1]
    return roles


def prove_causal(part: Part, step: Observation, ledger: Ledger) -> None:
    """The whole mixer looks back only."""
    if part.moves is None:
        ledger.unproven("mixer", "causal", "the mixer does not run alone")
    elif any(c.inputs["scores"].shape == step.ids.shape for c in step.during(part.call, "topk")):
        # few disturbances change a choice, so that none was seen to reach back proves nothing
        ledger.unproven("mixer", "causal", "it chooses some of all tokens, later ones among them")
    else:
        ledger.claim("mixer", "causal", DISTURBED, float(part.moves.future), 0.0)


def convolution_width(part: Part) -> int | None:
    """Taps of the depthwise convolution along the sequence that a mixer holds."""
    for module in part.module.modules():
        size = getattr(module, "kernel_size", None)
        if isinstance(module, torch.nn.Conv1d) and size and size[0] > 1:
            return int(size[0])
    return None


# ---- marked functions -----------------------------------------------------------------------------------------------


def _function_role(call: Call, ledger: Ledger, sizes: Sizes) -> MixerRole | None:
    names = set(call.inputs)
    if any(wanted <= names for wanted in LINEAR_ATTENTION_INPUTS):
        return _linear_role(call, ledger, sizes)
    if {"A", "B", "C"} <= names and "dt" in names and call.inputs["A"].dim() == 1:
        return _mamba2_role(call, ledger, sizes) if isinstance(_first(call), Tensor) else None
    if {"A", "B", "C"} <= names and isinstance(_first(call), Tensor) and call.inputs["A"].dim() == 2:
        return _mamba1_role(call, ledger, sizes)
    return None


def _first(call: Call) -> Any:
    return call.results()[0] if call.results() else None


def _fresh(inputs: dict[str, Any], names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    """Random tensors like some of a call's inputs: their shapes, about their size."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in names:
        value = inputs.get(name)
        if isinstance(value, Tensor):
            spread = float(value.detach().float().std().nan_to_num(1.0)) or 1.0
            found[name] = torch.randn(value.shape, generator=generator) * min(max(spread, 0.1), 2.0)
    return found


def _call_with(call: Call, names: dict[str, str], given: dict[str, Tensor], **options: Any) -> Tensor:
    """The marked function on other tensors; ``names``: definition's name -> argument."""
    arguments = {**call.inputs, **{names.get(n, n): t for n, t in given.items()}, **options}
    function: Any = call.function
    output = function(**arguments)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _linear_role(call: Call, ledger: Ledger, sizes: Sizes) -> MixerRole:
    short = {_SHORT.get(n, n): n for n in call.inputs}
    given = {n: call.inputs[short[n]] for n in ("q", "k", "v", "g", "beta")}
    q, v, g = given["q"], given["v"], given["g"]
    norm = bool(call.inputs.get("use_qk_l2norm_in_kernel", False))
    scale = call.inputs.get("scale")
    spec = Spec(
        key_heads=q.shape[2], value_heads=v.shape[2], key_dim=q.shape[3], value_dim=v.shape[3],
        decay="channel" if g.dim() == 4 else "head", qk_l2norm=norm, scale=None if scale is None else float(scale),
    )  # fmt: skip
    role = MixerRole(
        kind="linear",
        query_heads=sizes.of(int(q.shape[2]), r"head"),
        key_heads=sizes.of(int(q.shape[2]), r"key_heads|k_heads|head"),
        head_dim=sizes.of(int(q.shape[3]), r"key_head_dim|head_k_dim|head_dim"),
        value_dim=sizes.of(int(v.shape[3]), r"value_head_dim|head_v_dim|head_dim"),
        decay=spec.decay,
        delta=True,
        qk_norm=norm,
        scale=None if scale is None else float(scale),
    )
    fresh = _fresh(given, ("q", "k", "v"), 31)
    if not norm:
        fresh["k"] = F.normalize(fresh["k"], dim=-1)
    generator = torch.Generator().manual_seed(32)
    fresh["g"] = -0.3 * F.softplus(torch.randn(g.shape, generator=generator))
    fresh["beta"] = torch.sigmoid(torch.randn(given["beta"].shape, generator=generator))

    def actual(t: dict[str, Tensor]) -> Tensor:
        return _call_with(call, short, t)

    def expected(t: dict[str, Tensor]) -> Tensor:
        return linear_attention(dict(t), spec)["o"]

    rule = "delta rule" + (", q and k of length 1" if norm else "")
    claim = f"linear attention, {rule}, decay per {spec.decay}"
    try:
        ledger.claim("mixer", claim, DEFINITION, disagreement(actual, expected, fresh), RECURRENT)
    except Exception as failure:
        ledger.unproven("mixer", claim, f"{type(failure).__name__}: {failure}"[:200])
    return role


def _step_sizes(inputs: dict[str, Any], dt: Tensor, channel: int) -> Tensor:
    """dt as the recurrence uses it: bias, softplus and limits as the call says."""
    bias = inputs.get("dt_bias") if inputs.get("dt_bias") is not None else inputs.get("delta_bias")
    if bias is not None:
        shape = [1] * dt.dim()
        shape[channel] = -1
        dt = dt + bias.detach().to(dt.dtype).reshape(shape)
    if inputs.get("dt_softplus") or inputs.get("delta_softplus"):
        dt = F.softplus(dt)
    limit = inputs.get("dt_limit")
    return dt.clamp(*limit) if limit else dt


def _mamba2_role(call: Call, ledger: Ledger, sizes: Sizes) -> MixerRole:
    named = {"x": "hidden_states" if "hidden_states" in call.inputs else "x"}
    x, b = call.inputs[named["x"]], call.inputs["B"]
    role = MixerRole(
        kind="mamba2",
        decay="head",
        query_heads=sizes.of(int(x.shape[2]), r"head"),
        key_heads=sizes.of(int(b.shape[2]), r"group"),
        head_dim=sizes.of(int(b.shape[3]), r"state"),
        value_dim=sizes.of(int(x.shape[3]), r"head_dim"),
    )
    fresh = {**_fresh({"x": x}, ("x",), 33), **_fresh(call.inputs, ("dt", "B", "C"), 34)}
    fresh |= {n: call.inputs[n].detach() for n in ("A", "D") if isinstance(call.inputs.get(n), Tensor)}

    def actual(t: dict[str, Tensor]) -> Tensor:
        return _call_with(call, named, t)

    def expected(t: dict[str, Tensor]) -> Tensor:
        dt = _step_sizes(call.inputs, t["dt"], -1)
        return state_space_dual(t["x"], dt, t["A"], t["B"], t["C"], t.get("D"))

    ledger.claim("mixer", "Mamba-2 scan, decay per head", DEFINITION, disagreement(actual, expected, fresh), RECURRENT)
    return role


def _mamba1_role(call: Call, ledger: Ledger, sizes: Sizes) -> MixerRole | None:
    inputs = call.inputs
    x_name = next((n for n in ("u", "hidden_states", "x") if isinstance(inputs.get(n), Tensor)), "")
    dt_name = next((n for n in ("delta", "dt", "discrete_time_step") if isinstance(inputs.get(n), Tensor)), "")
    if not x_name or not dt_name:
        return None
    role = MixerRole(
        kind="mamba1",
        decay="state",
        query_heads=sizes.of(int(inputs["A"].shape[0]), r"intermediate|inner"),
        head_dim=sizes.of(int(inputs["A"].shape[1]), r"state"),
    )
    named = {"x": x_name, "dt": dt_name}
    given: dict[str, Any] = {n: inputs[n] for n in ("B", "C", "z") if n in inputs}
    given |= {"x": inputs[x_name], "dt": inputs[dt_name]}
    fresh = _fresh(given, ("x", "dt", "B", "C", "z"), 35)
    fresh |= {n: inputs[n].detach() for n in ("A", "D") if isinstance(inputs.get(n), Tensor)}

    def actual(t: dict[str, Tensor]) -> Tensor:
        return _call_with(call, named, t)

    def expected(t: dict[str, Tensor]) -> Tensor:
        dt = _step_sizes(inputs, t["dt"], 1)
        b, c = (t[n].squeeze(1) if t[n].dim() == 4 else t[n] for n in ("B", "C"))
        y = selective_scan(t["x"], dt, t["A"], b, c, t.get("D"))
        return y * F.silu(t["z"]) if "z" in t else y

    claim = "Mamba scan, decay per channel and state"
    try:
        ledger.claim("mixer", claim, DEFINITION, disagreement(actual, expected, fresh), RECURRENT)
    except Exception as failure:
        ledger.unproven("mixer", claim, f"{type(failure).__name__}: {failure}"[:200])
    return role


# ---- recurrences in a module's own code -----------------------------------------------------------------------------


def _lightning(part: Part, step: Observation, ledger: Ledger, sizes: Sizes) -> MixerRole | None:
    """Fixed decay a head: a buffer of one rate a head, and q, k, v from one projection through an activation."""
    module = part.module
    heads = getattr(module, "num_attention_heads", None) or getattr(module, "num_heads", None)
    rates = [b for _, b in module.named_buffers(recurse=False) if heads and b.numel() == heads]
    projections = step.during(part.call, "linear")
    if not rates or len(projections) < 2 or part.moves is None:
        return None
    qkv, last = projections[0], projections[-1]
    dim = qkv.output.shape[-1] // (3 * int(heads or 1))
    if dim * 3 * int(heads or 1) != qkv.output.shape[-1]:
        return None
    norms = [c for c in step.during(part.call, "module") if c.path != part.path and c.position > qkv.position]
    normed = next((c for c in norms if "orm" in c.name), None)
    if normed is None:
        return None
    target = normed.tensors()[0].detach()
    act: Callable[[Tensor], Tensor] = getattr(module, "act_fn", F.silu)
    with torch.no_grad():
        mixed = act(qkv.output.detach()).double().reshape(*qkv.output.shape[:2], int(heads or 1), 3 * dim)
        q, k, v = (t.transpose(1, 2) for t in torch.split(mixed, dim, dim=-1))
        made = decayed_attention(q, k, v, rates[0].reshape(-1).double()).transpose(1, 2).flatten(2)
    from onboarding.stages.parse.uses.proof import relative_error

    error = relative_error(target.reshape(made.shape), made)
    if error > RECURRENT:
        return None
    role = MixerRole(
        kind="linear", decay="fixed", query_heads=sizes.of(int(heads or 1), r"head"),
        head_dim=sizes.of(dim, r"head_dim"), value_dim=sizes.of(dim, r"head_dim"), positions="none",
    )  # fmt: skip
    ledger.claim(
        "mixer", "linear attention, fixed decay per head", "values of one step against the recurrence", error, RECURRENT
    )
    if last.position > normed.position:
        role.output_gate = "sigmoid" if len(projections) > 2 else ""
    return role


def _rg_lru(part: Part, step: Observation, ledger: Ledger, sizes: Sizes) -> MixerRole | None:
    """A gated linear recurrence of single channels (Griffin)."""
    for name, module in part.module.named_modules():
        rate = getattr(module, "recurrent_param", None)
        call = step.module(f"{part.path}.{name}".rstrip("."))
        if not isinstance(rate, Tensor) or call is None:
            continue
        x = call.tensors()[0].detach()
        e = x.shape[-1]
        block = module.block_width

        def gates(which: str, source: Tensor, module: Any = module, block: int = block) -> Tensor:
            weight, bias = (
                getattr(module, f"{which}_gate_weight").double(),
                getattr(module, f"{which}_gate_bias").double(),
            )
            blocks = source.reshape(-1, source.shape[-1] // block, block)
            return torch.sigmoid(torch.einsum("nhi,hij->nhj", blocks, weight) + bias).reshape(source.shape)

        with torch.no_grad():
            wide = x.double()
            made = linear_recurrence(wide, gates("input", wide), rate.detach().double(), gates("recurrent", wide))
        from onboarding.stages.parse.uses.proof import relative_error

        error = relative_error(call.results()[0].detach(), made)
        if ledger.claim(
            "mixer",
            "gated linear recurrence per channel (RG-LRU)",
            "values of one step against the recurrence",
            error,
            CLOSE,
        ):
            return MixerRole(
                kind="recurrence", decay="channel", head_dim=sizes.of(e, r"width"), convolution=convolution_width(part)
            )
    return None


def understand_convolution(part: Part, step: Observation, ledger: Ledger) -> MixerRole | None:
    """A mixer that reaches a few positions back and no further: a short convolution, or a shift by one token."""
    if part.moves is None or part.moves.unbounded or part.moves.extent > 16:
        return None
    width = convolution_width(part)
    shift = width is None
    if shift and (part.moves.extent > 2 or step.during(part.call, "softmax")):
        return None  # a reach alone is no convolution
    claim = f"short convolution over {part.moves.extent} positions" if not shift else "mixes in the token before"
    wrong = float(part.moves.future) + (abs(part.moves.extent - (width or part.moves.extent)) if not shift else 0.0)
    ledger.claim("mixer", claim, DISTURBED, wrong, 0.0)
    return MixerRole(kind="convolution", convolution=part.moves.extent, positions="none")
