"""Linear attention behind the functions that transformers marks as replaceable."""

from __future__ import annotations

import inspect

import torch
from torch.nn import functional as F

from kernel_templates.linear_attention.reference import reference
from kernel_templates.linear_attention.spec import Spec
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.marked import MarkedFunction
from onboarding.stages.parse.uses.proof import FP32_RECURRENCE, relative_error, same_function


def prove_linear_attention(call: LeafCall, dtype: str) -> Spec | None:
    """The linear attention spec that a marked function computes with a call's settings, or None."""
    facts = call.facts
    default = facts["key_dim"] ** -0.5
    scale = facts["scale"]
    if facts["value_heads"] % facts["key_heads"]:
        return None
    spec = Spec(
        key_heads=facts["key_heads"],
        value_heads=facts["value_heads"],
        key_dim=facts["key_dim"],
        value_dim=facts["value_dim"],
        decay=facts["decay"],
        delta=True,
        qk_l2norm=facts["qk_l2norm"],
        scale=None if scale is None or abs(scale / default - 1) < 1e-6 else float(scale),
        dtype=dtype,
    )
    return spec if _proven(facts["marked"], spec) else None


def _proven(marked: MarkedFunction, spec: Spec) -> bool:
    """Two sequences, a length that is no multiple of the chunk, an initial state."""
    generator = torch.Generator().manual_seed(17)
    b, t, hk, dk, dv = 2, 150, 2, 16, 24
    hv = hk * (spec.value_heads // spec.key_heads)
    small = spec.resized(key_heads=hk, value_heads=hv, key_dim=dk, value_dim=dv)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gate_shape = (b, t, hv, dk) if spec.decay == "channel" else (b, t, hv)
    tensors: dict[str, torch.Tensor | None] = {
        "q": normal(b, t, hk, dk),
        "k": normal(b, t, hk, dk) * (1.0 if spec.qk_l2norm else dk**-0.5),
        "v": normal(b, t, hv, dv),
        "g": -0.3 * F.softplus(normal(*gate_shape)),
        "beta": torch.sigmoid(normal(b, t, hv)),
        "initial_state": normal(b, hv, dk, dv),
    }
    names = set(inspect.signature(marked.function).parameters)
    long = {"q": "query", "k": "key", "v": "value"}

    def run(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        arguments = {name if name in names else long[name]: value for name, value in given.items()}
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": spec.qk_l2norm, "scale": spec.scale}
        options = {name: value for name, value in options.items() if name in names and value is not None}
        with quiet():
            o, final_state = marked.function(**arguments, **options)
        return {"o": o, "final_state": final_state}

    return same_function(run, small, tensors, FP32_RECURRENCE)


def prove_state_space(call: LeafCall, dtype: str) -> Spec | None:
    """The linear attention that Mamba-2's scan is: B and C are keys and queries, dt x the values, dt A the log decay.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 5.
    """
    facts = call.facts
    if facts["value_heads"] % facts["key_heads"] or not facts["dt_softplus"]:
        return None
    spec = Spec(
        key_heads=facts["key_heads"],
        value_heads=facts["value_heads"],
        key_dim=facts["key_dim"],
        value_dim=facts["value_dim"],
        decay="head",
        delta=False,
        qk_l2norm=False,
        scale=1.0,
        dtype=dtype,
    )
    return spec if _scan_proven(facts["marked"], spec) else None


def _scan_proven(marked: MarkedFunction, spec: Spec) -> bool:
    """The whole function against the operator and what stands around it, in every input's gradient."""
    generator = torch.Generator().manual_seed(31)
    b, t, groups, state, head_dim = 2, 70, 2, 16, 8
    heads = groups * (spec.value_heads // spec.key_heads)
    small = spec.resized(key_heads=groups, value_heads=heads, key_dim=state, value_dim=head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {
        "x": normal(b, t, heads, head_dim),
        "dt": normal(b, t, heads),
        "A": -torch.exp(normal(heads)),
        "B": normal(b, t, groups, state) * state**-0.5,
        "C": normal(b, t, groups, state),
        "D": normal(heads),
        "dt_bias": normal(heads),
        "initial_states": normal(b, heads, head_dim, state),
    }
    first = next(iter(inspect.signature(marked.function).parameters))
    narrow = {n: v.float().requires_grad_() for n, v in given.items()}
    wide = {n: v.requires_grad_() for n, v in given.items()}
    try:
        with quiet():
            arguments = {first if n == "x" else n: v for n, v in narrow.items()}
            found = marked.function(**arguments, chunk_size=16, dt_softplus=True, return_final_states=True)
    except Exception:  # it does not take what Mamba-2's scan takes
        return False
    expected = _scan(wide, small)
    if [tuple(x.shape) for x in found] != [tuple(x.shape) for x in expected]:
        return False
    weights = [normal(*x.shape) for x in expected]
    pairs = list(zip(found, expected, strict=True))
    grads = [
        torch.autograd.grad(
            [(o.double() * w).sum() for o, w in zip(outputs, weights, strict=True)], list(inputs.values())
        )
        for outputs, inputs in ((found, narrow), (expected, wide))
    ]
    pairs += list(zip(*grads, strict=True))
    return all(relative_error(value, wanted) <= FP32_RECURRENCE for value, wanted in pairs)


def _scan(t: dict[str, torch.Tensor], spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2's scan by the linear attention: output [B, T, H, P] and final state [B, H, P, N]."""
    steps = F.softplus(t["dt"] + t["dt_bias"])
    tensors: dict[str, torch.Tensor | None] = {
        "q": t["C"],
        "k": t["B"],
        "v": t["x"] * steps[..., None],
        "g": steps * t["A"],
        "initial_state": t["initial_states"].transpose(-1, -2),
    }
    found = reference(tensors, spec)
    return found["o"] + t["D"][:, None] * t["x"], found["final_state"].transpose(-1, -2)
