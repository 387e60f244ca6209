"""Softmax attention, read off a twin's step: extent, heads, latent, norms of q and k, gate, sinks, softcap, choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onboarding.architecture import MixerRole
from onboarding.stages.parse.roles import is_norm
from onboarding.stages.parse.understand.compare import CLOSE, columns_of, disagreement, parameters_as, same
from onboarding.stages.parse.understand.indexers import prove_selection
from onboarding.stages.parse.understand.ledger import DEFINITION, DISTURBED, IDENTITY, Ledger, Sizes
from onboarding.stages.parse.understand.masks import Mask, bias_kind, read_mask
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Call, Observation
from onboarding.stages.parse.understand.parts import Part
from onboarding.stages.parse.understand.plain import live_error
from onboarding.stages.parse.understand.semantics import ACTIVATIONS, attention

GATE = 1e-3
"""Relative error that is left where a gate is read off a quotient."""
NORMED = 1e-2
"""A normalised q has degree 0 in its projection (the norm's epsilon is felt); a plain one measures about 1."""


def understand_attention(
    part: Part, call: Call, steps: tuple[Observation, Observation], ledger: Ledger, sizes: Sizes
) -> MixerRole:
    """The role of one attention call of a mixer, each claim proven or noted as unproven.

    Args:
        call: of the attention function, in the first step.
        steps: two steps on different tokens.
    """
    q, k, v = (call.inputs[name] for name in "qkv")
    options = call.inputs["kwargs"]
    tokens, keys = q.shape[-2], k.shape[-2]
    mask = read_mask(_mask_of(call), tokens, keys)
    other = _twin_call(call, steps)
    many = steps[0].ids.shape[0] if call.function is None else 1  # written attention has the batch among its heads
    role = MixerRole(
        kind=mask.kind,
        query_heads=sizes.of(int(q.shape[1]) // many, r"^(num_attention_heads|num_heads|n_heads?)$", r"head"),
        key_heads=_key_heads(int(q.shape[1]) // many, max(1, int(k.shape[1]) // many), sizes),
        head_dim=sizes.of(int(q.shape[-1]), r"head_dim|head_size|qk_"),
        value_dim=sizes.of(int(v.shape[-1]), r"v_head_dim|head_dim|head_size|value"),
        softcap=options.get("softcap"),
    )
    role.heads = _heads(role)
    if mask.kind == "sliding":
        role.window = sizes.of(mask.extent, r"window")
    if mask.kind == "chunked":
        role.chunk = sizes.of(mask.extent, r"chunk")
    if mask.bias is not None:
        unlike = read_mask(other.inputs["mask"], tokens, keys).bias if other is not None else None
        role.bias = bias_kind(mask.bias, mask.visible, unlike)
    _prove_latent(part, call, steps[0], role, ledger, sizes)
    if mask.kind == "chosen":
        prove_selection(part, call, other, steps[0], mask, role, ledger, sizes)
    window = options.get("sliding_window")
    if isinstance(window, int) and window < tokens and mask.kind == "full":
        published = sizes.of(window, r"window")
        reason = "it is passed to the attention function, but no mask holds it: the plain function sees the whole past"
        ledger.unproven("mixer", f"sliding window {published}", reason)
    _prove_function(call, mask, role, ledger)
    _prove_reach(part, role, mask, ledger)
    _prove_qk_norm(part, call, steps[0], role, ledger)
    _prove_gate(part, call, steps[0], role, ledger)
    return role


def _twin_call(call: Call, steps: tuple[Observation, Observation]) -> Call | None:
    """The same call in the other step."""
    if call.function is None:
        return None
    place = [c for c in steps[0].calls if c.kind == "attention" and c.path == call.path].index(call)
    found = [c for c in steps[1].calls if c.kind == "attention" and c.path == call.path]
    return found[place] if place < len(found) else None


def _mask_of(call: Call) -> Tensor | None:
    """The mask of a call; where none was passed, what the function hides by itself (``is_causal`` and the like).

    With the identity as values attention gives its weights, and what is hidden has weight 0.
    """
    given: Tensor | None = call.inputs["mask"]
    if given is not None or call.function is None:
        return given
    q, k, v = (call.inputs[name].detach() for name in "qkv")
    eye = torch.eye(k.shape[2], dtype=v.dtype).expand(*v.shape[:2], -1, -1)
    try:
        with torch.no_grad():
            weights: Tensor = call.function(q, k, eye)
    except Exception:  # it insists on values as wide as the keys
        return None
    return weights.transpose(1, 2) > 0 if weights.shape[-1] == k.shape[2] else None


def _key_heads(queries: int, keys: int, sizes: Sizes) -> int:
    """Published key heads: a twin with few heads may have made them all equal."""
    found = sizes.of(keys, r"^(num_key_value_heads|num_kv_heads|n_kv_heads|n_head_kv|n_kv|multi_query_group_num)$")
    if found == keys and queries == keys:
        return int(sizes.of(keys, r"^(num_attention_heads|num_heads|n_heads?)$", r"head"))
    return int(found)


def _heads(role: MixerRole) -> str:
    if role.query_heads == role.key_heads:
        return "MHA"
    return "MQA" if role.key_heads == 1 else "GQA"


# ---- the function ---------------------------------------------------------------------------------------------------


def scale_of(call: Call) -> float:
    """The factor on the scores: as it was passed, else one over the root of the head dim."""
    scale = call.inputs["kwargs"].get("scaling")
    return float(scale) if scale is not None else call.inputs["q"].shape[-1] ** -0.5


def _prove_function(call: Call, mask: Mask, role: MixerRole, ledger: Ledger) -> None:
    """The attention function on fresh q, k, v under this mask against softmax attention with the claimed options."""
    q, k, v = (call.inputs[name] for name in "qkv")
    scale = scale_of(call)
    role.scale = None if abs(scale * q.shape[-1] ** 0.5 - 1) < 1e-5 else scale
    generator = torch.Generator().manual_seed(23)
    fresh = {n: torch.randn(t.shape, generator=generator) for n, t in (("q", q), ("k", k), ("v", v))}
    if role.softcap:
        fresh["q"] *= role.softcap / max(scale * q.shape[-1] ** 0.5, 1e-6)  # far enough that the cap bends the scores
    rows = _live_rows(mask, q)
    if call.function is None:
        error = live_error(call, lambda t: _defined(t, mask, role, scale, None))
        ledger.claim(
            "mixer", attention_words(role), "values and gradients of one step against the definition", error, CLOSE
        )
        return
    best: tuple[float, dict[str, Any]] = (float("inf"), {})
    failure = ""
    for extra in _extras(call):
        inputs = {**fresh, **{n: t.detach() for n, (_, t) in extra.items()}}
        try:
            error = disagreement(
                partial(_run_function, call, extra, rows), lambda t: _defined(t, mask, role, scale, rows), inputs
            )
        except Exception as problem:  # the function reads more than q, k, v: then it is not plain attention
            failure = f"{type(problem).__name__}: {problem}"[:200]
            continue
        best = min(best, (error, extra), key=lambda pair: pair[0])
        if best[0] <= CLOSE:
            break
    error, extra = best
    role.sinks = "sinks" in extra
    if "bias" in extra and not role.bias:
        role.bias = "data" if extra["bias"][1].requires_grad else "relative"
    if error == float("inf") and failure:
        ledger.unproven("mixer", attention_words(role), failure)
    else:
        ledger.claim("mixer", attention_words(role), DEFINITION, error, CLOSE)


Extra = dict[str, tuple[str, Tensor]]
"""``sinks`` or ``bias`` -> (name of the option, or ``module.`` and the name of the parameter; the tensor)."""


def _extras(call: Call) -> list[Extra]:
    """What the attention function may read beside q, k, v and mask: tensors among its options and its module's."""
    heads, queries = call.inputs["q"].shape[1:3]
    keys = call.inputs["k"].shape[2]
    found: Extra = {}
    for name, value in call.inputs["kwargs"].items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.numel() == heads or (value.dim() == 4 and value.shape[-2:] == (queries, 1)):
            found["sinks"] = (name, value)
        elif value.dim() >= 3 and value.shape[-2:] == (queries, keys):
            found["bias"] = (name, value)
    module: Any = call.inputs["module"]
    own = [(f"module.{n}", p) for n, p in module.named_parameters(recurse=False) if p.numel() == heads]
    options: list[Extra] = [{**found, "sinks": pair} for pair in own]
    return [*options, found, {}] if "sinks" not in found or own else [found, *options, {}]


def _run_function(call: Call, extra: Extra, rows: Tensor | None, t: dict[str, Tensor]) -> Tensor:
    run: Any = call.function
    changed, swapped = {}, {}
    for kind, (name, _) in extra.items():
        if name.startswith("module."):
            swapped[name.removeprefix("module.")] = t[kind]
        else:
            changed[name] = t[kind]
    given = [n for n, v in call.inputs["kwargs"].items() if swapped and v is extra["sinks"][1]]
    changed |= dict.fromkeys(given, t.get("sinks"))
    with parameters_as(call.inputs["module"], swapped):
        out: Tensor = run(t["q"], t["k"], t["v"], **changed)
    return out if rows is None else out[rows]


def _defined(t: dict[str, Tensor], mask: Mask, role: MixerRole, scale: float, rows: Tensor | None) -> Tensor:
    bias = mask.bias.double() if mask.bias is not None else None
    if "bias" in t:
        bias = t["bias"] if bias is None else bias + t["bias"]
    out = attention(
        t["q"], t["k"], t["v"], visible=mask.visible, scale=scale, bias=bias, softcap=role.softcap, sinks=t.get("sinks")
    )
    return out if rows is None else out[rows]


def _live_rows(mask: Mask, q: Tensor) -> Tensor | None:
    """Rows [B, T] in which every head sees a key; None: all."""
    if mask.visible is None:
        return None
    seen = mask.visible.any(-1).expand(q.shape[0], -1, q.shape[2]).all(1)
    return None if bool(seen.all()) else seen


def attention_words(role: MixerRole) -> str:
    """E.g. ``sliding GQA (4096), sinks, softcap 50``."""
    extent = role.window or role.chunk
    parts = [f"{role.kind} {role.heads}" + (f" ({extent})" if extent else "")]
    parts += ["sinks"] if role.sinks else []
    parts += [f"softcap {role.softcap:g}"] if role.softcap else []
    parts += [f"{role.bias} bias"] if role.bias else []
    return ", ".join(parts)


# ---- around the function --------------------------------------------------------------------------------------------


def _prove_reach(part: Part, role: MixerRole, mask: Mask, ledger: Ledger) -> None:
    """The whole mixer, not only its attention function, is causal and reaches as far as claimed."""
    if part.moves is None:
        ledger.unproven("mixer", "causal", "the mixer does not run alone")
        return
    causal = mask.kind != "bidirectional"
    claim = "causal" if causal else "sees the whole sequence"
    ledger.claim("mixer", claim, DISTURBED, float(part.moves.future == causal), 0.0)
    if mask.kind == "sliding" and mask.extent is not None:
        slack = part.moves.extent - mask.extent
        claim = f"nothing older than the window{f' and a convolution of {slack + 1}' if slack > 0 else ''} is felt"
        role.convolution = slack + 1 if slack > 0 else None
        ledger.claim("mixer", claim, DISTURBED, float(part.moves.unbounded and slack > 0), 0.0)


def linears(part: Part, step: Observation) -> list[Call]:
    """The linear layers of a part, in order, those of sub-indexers among them."""
    return step.during(part.call, "linear")


def depends(target: Tensor, on: Tensor) -> Tensor | None:
    """Gradient of a random projection of ``target`` with respect to ``on``; None: it does not depend on it."""
    if not target.requires_grad or not on.requires_grad:
        return None
    weight = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((target * weight).sum(), on, retain_graph=True, allow_unused=True)[0]


def source_of(target: Tensor, calls: list[Call]) -> tuple[Call, Tensor] | None:
    """The last linear layer that a tensor comes from, and the gradient at its output."""
    for call in reversed(calls):
        gradient = depends(target, call.output)
        if gradient is not None and bool(gradient.abs().max() > 0):
            return call, gradient
    return None


def _prove_qk_norm(part: Part, call: Call, step: Observation, role: MixerRole, ledger: Ledger) -> None:
    """Euler's identity: f(p) of degree n has <p, df/dp> = n f. A norm behind the projection makes q of degree 0."""
    degrees = {}
    calls = [c for c in linears(part, step) if c.position < call.position]
    for name in ("q", "k"):
        found = source_of(call.inputs[name], calls)
        if found is not None:
            projection, gradient = found
            terms = (projection.output * gradient).detach().double().flatten(0, -2)
            degrees[name] = float(terms.sum(-1).norm() / terms.norm().clamp_min(1e-30))
    if not degrees:
        return
    normed = [name for name, degree in degrees.items() if degree < NORMED]
    role.qk_norm = len(normed) == len(degrees)
    check = "Euler's identity: the degree of q and k in their projections"
    if role.qk_norm:
        ledger.claim("mixer", "q and k are normalised", check, max(degrees.values()), NORMED)
    elif normed:
        ledger.claim("mixer", f"{normed[0]} alone is normalised", check, degrees[normed[0]], NORMED)
    else:
        low = min(degrees.values())
        ledger.claim("mixer", "no norm of q and k", check, 0.0 if low > 10 * NORMED else float("inf"), 0.0)


def _prove_latent(part: Part, call: Call, step: Observation, role: MixerRole, ledger: Ledger, sizes: Sizes) -> None:
    """MLA: k and v are expanded by one linear layer from a normed latent that is narrower than both."""
    calls = [c for c in linears(part, step) if c.position < call.position]
    value, key = call.inputs["v"], call.inputs["k"]
    found = source_of(value, calls)
    if found is None:
        return
    expand = found[0]
    # a bias or a mask may reach k from elsewhere: only a direct dependency counts
    if depends(key, expand.output) is None or not _bottleneck(part, expand, step):
        return
    if key.shape[1] == 1 and same(key, value):
        return  # one shared head, not expanded
    role.heads = "MLA"
    if call.function is None:  # written attention has the batch among its heads
        value = value.reshape(step.ids.shape[0], -1, *value.shape[-2:])
    flat = value.transpose(1, 2).flatten(0, 1).flatten(1)
    error, _ = columns_of(flat, expand.output.flatten(0, -2))
    path = expand.path.removeprefix(_layer_of(part)).lstrip(".")
    role.latent = _published_width(sizes, path, int(expand.inputs["x"].shape[-1]))
    ledger.claim("mixer", f"MLA: values are rows of a latent of {role.latent}", IDENTITY, error, 1e-4)
    query = source_of(call.inputs["q"], [c for c in calls if c is not expand])
    if query is not None and _bottleneck(part, query[0], step):
        path = query[0].path.removeprefix(_layer_of(part)).lstrip(".")
        role.query_latent = _published_width(sizes, path, int(query[0].inputs["x"].shape[-1]))


def _published_width(sizes: Sizes, path: str, width: int) -> int:
    try:
        return sizes.dim(path, "in_features")
    except AttributeError:
        return int(sizes.of(width, r"rank|latent"))


def _layer_of(part: Part) -> str:
    """Path of the decoder layer that a part lies in: up to the first number."""
    pieces = part.path.split(".")
    numbers = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    return ".".join(pieces[: numbers[0] + 1]) if numbers else ""


def _bottleneck(part: Part, expand: Call, step: Observation) -> bool:
    """Whether a linear layer reads something narrower than it writes that another linear layer of the part made."""
    x, weight = expand.inputs["x"], expand.inputs["weight"]
    if x.shape[-1] >= weight.numel() // x.shape[-1]:
        return False
    before = [c for c in linears(part, step) if c.position < expand.position]
    return any(depends(x, c.output) is not None for c in before)


def _prove_gate(part: Part, call: Call, step: Observation, role: MixerRole, ledger: Ledger) -> None:
    """Between the attention's output and the last projection: nothing, or a gate that a linear layer makes."""
    after = [c for c in linears(part, step) if c.position > call.position]
    out = call.output
    last = next((c for c in after if depends(c.output, out) is not None), None)
    if last is None:
        return
    read = last.inputs["x"]
    if read.numel() != out.numel():
        return
    for norm in step.during(part.call, "module"):
        if norm.position > call.position and is_norm(_module(norm)) and same(norm.tensors()[0], out):
            out = norm.results()[0]  # a norm of the output comes first; its form is claimed with the norms
    if same(read, out):
        ledger.claim("mixer", "no output gate", IDENTITY, 0.0, 0.0)
        return
    rows = call.output.shape[0] * call.output.shape[1]
    ratio = (read.reshape(rows, -1) / out.reshape(rows, -1)).detach().double()
    for name in _GATES:
        for source in linears(part, step):
            if source is last or source.output.numel() % rows:
                continue
            error = _gate_error(name, ratio, source.output.detach().double().reshape(rows, -1))
            if error < GATE:
                role.output_gate = name
                ledger.claim("mixer", f"output gate: {name} of a projection", IDENTITY, error, GATE)
                return
    role.output_gate = "own"
    keep_subgraph(part.call, "mixer", ledger)  # what stands there is the module's own


def _gate_error(name: str, ratio: Tensor, made: Tensor) -> float:
    """How far the ratio is from the gate of some columns of a projection; a sigmoid's may have biases of their own."""
    if name.endswith("sigmoid"):
        top = 2.0 if name.startswith("2") else 1.0
        if not bool(((ratio > 0) & (ratio < top)).all()):
            return float("inf")
        before = torch.logit(ratio / top)
        return columns_of(before - before.mean(0), made - made.mean(0))[0]
    return columns_of(ratio, _GATES[name](made))[0]


_GATES: dict[str, Any] = {
    "sigmoid": torch.sigmoid,
    "2 sigmoid": lambda x: 2 * torch.sigmoid(x),
    "silu": ACTIVATIONS["silu"],
    "softplus": torch.nn.functional.softplus,
    "identity": ACTIVATIONS["identity"],
}


def _module(call: Call) -> Any:
    return call.function
