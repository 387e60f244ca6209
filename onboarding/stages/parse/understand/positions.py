"""Positions: what moves in queries and keys when every position moves on, against the rotary formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onboarding.architecture import MixerRole
from onboarding.stages.parse.understand.ledger import SHIFTED, Ledger, Sizes
from onboarding.stages.parse.understand.observe import Call
from onboarding.stages.parse.understand.parts import first_tensor, hidden

SHIFT = 128
"""A multiple of every pool and chunk: attention that counts from absolute positions sees the same pools."""
ANGLE = 2e-3
"""Largest error of a measured angle, in radians: fp32 cosines of positions around a hundred."""


@dataclass(frozen=True)
class Rotation:
    """A rotation of pairs of channels, measured."""

    style: str
    """``half`` (i with i + d / 2) or ``interleaved`` (2i with 2i + 1)."""
    start: int
    dims: int
    angles: Tensor
    """Per pair, [dims / 2], radians for SHIFT positions."""
    error: float


def understand_positions(
    call: Call,
    shifted: Call | None,
    streams: list[Call],
    mixer: Call,
    role: MixerRole,
    model: Any,
    ledger: Ledger,
    sizes: Sizes,
) -> None:
    """How an attention call sees positions.

    Args:
        call: as the model counts.
        shifted: the same with all positions moved on.
        streams: with one row of positions (time, height, width) moved on at a time; none: there is one row.
        mixer: the call of the whole mixer.
    """
    if role.bias == "alibi":
        role.positions = "alibi"
        ledger.claim("positions", "ALiBi: scores fall with the distance", "the mask's slopes", 0.0, 0.0)
        return
    if shifted is None:
        ledger.unproven("positions", "positions", "the model does not run with shifted positions")
        return
    moved = {n: _moved(call.inputs[n], shifted.inputs[n]) for n in ("q", "k")}
    if not bool(moved["q"].any()) and not bool(moved["k"].any()):
        order = swapped_error(mixer, role)
        if order > 1e-4:
            role.positions = "own"
            reason = "the order of earlier tokens matters, but the positions are counted in the module's own code"
            ledger.unproven("positions", "positions", reason)
            return
        role.positions = "none"
        claim = "no positions" + (" but the relative bias" if role.bias == "relative" else "")
        ledger.claim("positions", claim, SHIFTED, 0.0, 0.0)
        return
    rotation = measure(call.inputs["q"], shifted.inputs["q"]) or measure(call.inputs["k"], shifted.inputs["k"])
    if rotation is None:
        _other_positions(call, shifted, role, ledger)
        return
    dim = int(call.inputs["q"].shape[-1])
    role.positions = "rope" if rotation.dims == dim else "partial rope"
    role.rotary_dims = sizes.of(rotation.dims, r"rope_head_dim|rotary_dim|rotary_ndims|head_dim|rope_dim")
    if rotation.dims != dim and role.head_dim and role.rotary_dims == rotation.dims:
        role.rotary_dims = rotation.dims * role.head_dim // dim
    words = f"{role.positions}, {rotation.style} pairs, {role.rotary_dims} of {role.head_dim} channels"
    ledger.claim("positions", words, SHIFTED + ": one rotation a pair", rotation.error, ANGLE)
    if streams:
        _multimodal(call, streams, rotation, role, ledger)
    name, error = nearest_formula(rotation, model, sizes)
    if name:
        ledger.claim("positions", f"frequencies: {name}", "measured angles against the formula", error, ANGLE)
    else:
        ledger.unproven(
            "positions", "frequencies of the rotary embedding", f"no formula gives the measured angles ({error:.1e})"
        )


def swapped_error(mixer: Call, role: MixerRole) -> float:
    """How much later outputs change when two earlier tokens change places: nothing, where attention knows no order.

    0 where that says nothing: windows, choices and convolutions know an order of their own.
    """
    x = hidden(mixer)
    if role.kind != "full" or role.bias or role.convolution or x.dim() != 3 or x.shape[1] < 24:
        return 0.0
    order = torch.arange(x.shape[1])
    order[[3, 11]] = order[[11, 3]]
    try:
        with torch.no_grad():
            streams = [t for t in mixer.tensors() if t.is_floating_point() and t.shape == x.shape]  # some read two
            swapped = {id(t): t.detach()[:, order] for t in streams}
            base, other = (first_tensor(mixer.again(replace)) for replace in ({}, swapped))
    except Exception:  # the mixer does not run alone
        return 0.0
    later = base[:, 12:]
    return float((other[:, 12:] - later).norm() / later.norm().clamp_min(1e-12))


def _multimodal(call: Call, streams: list[Call], rotation: Rotation, role: MixerRole, ledger: Ledger) -> None:
    """Each rotated channel follows one row of positions."""
    rows = torch.stack([_moved(call.inputs["q"], s.inputs["q"]) for s in streams])
    block = rows[:, rotation.start : rotation.start + rotation.dims]
    wrong = int((block.sum(0) != 1).sum())
    pairs = [int(row.sum()) // 2 for row in block]
    if sum(1 for n in pairs if n) < 2:
        return
    role.positions = "multimodal rope"
    claim = f"multimodal rope: pairs in the proportions {' : '.join(map(str, pairs))} follow time, height, width"
    ledger.claim("positions", claim, "queries with one row of positions moved on", float(wrong), 0.0)


def _moved(a: Tensor, b: Tensor) -> Tensor:
    """Which channels of the last dim differ."""
    difference = (a - b).detach().abs().flatten(0, -2).amax(0)
    return difference > 1e-5 * a.detach().abs().max()


def _other_positions(call: Call, shifted: Call, role: MixerRole, ledger: Ledger) -> None:
    q, other = (c.inputs["q"].detach().double() for c in (call, shifted))
    ratio = (q * other).sum(-1) / q.pow(2).sum(-1).clamp_min(1e-30)
    error = float((other - ratio[..., None] * q).norm() / other.norm())
    if error < 1e-4:
        role.positions, role.position_scale = "none", True
        ledger.claim("positions", "queries are scaled by their position", SHIFTED, error, 1e-4)
        return
    role.positions = "learned"
    ledger.claim("positions", "absolute positions are added to the stream", SHIFTED + ": all channels move", 0.0, 0.0)


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(before: Tensor, after: Tensor) -> Rotation | None:
    """The rotation between queries (or keys) at positions p and p + SHIFT; None: it is no rotation of pairs."""
    moved = _moved(before, after).nonzero().flatten()
    if len(moved) < 2:
        return None
    dim = before.shape[-1]
    a, b = (t.detach().double().flatten(0, -2) for t in (before, after))
    best: Rotation | None = None
    for start, dims in _blocks(int(moved[0]), int(moved[-1]) + 1, dim):
        for style in ("half", "interleaved"):
            found = _rotation(a, b, start, dims, style)
            if best is None or found.error < best.error - 1e-4:
                best = found
    return best if best is not None and best.error <= ANGLE else None


def _blocks(first: int, last: int, dim: int) -> list[tuple[int, int]]:
    """Channel ranges that may be rotated: what moved, widened to even ends (slow channels barely move)."""
    sizes = sorted({d for d in range(2, dim + 1, 2) if d >= last - first})
    starts = sorted({0, first, dim - (last - first), first - first % 2})
    found = []
    for dims in sizes:
        for start in (*starts, dim - dims):
            if 0 <= start <= first and start + dims >= last and start + dims <= dim and (start, dims) not in found:
                found.append((start, dims))
    return found


def _rotation(a: Tensor, b: Tensor, start: int, dims: int, style: str) -> Rotation:
    def pairs(x: Tensor) -> Tensor:
        block = x[:, start : start + dims]
        real, imaginary = block.chunk(2, dim=-1) if style == "half" else (block[:, ::2], block[:, 1::2])
        return torch.complex(real.contiguous(), imaginary.contiguous())

    p, q = pairs(a), pairs(b)
    turn = (q * p.conj()).sum(0)
    angles = turn.angle()
    unit = turn / turn.abs().clamp_min(1e-30)
    stretch = turn.abs() / p.abs().pow(2).sum(0).clamp_min(1e-30)
    residual = (q - p * unit * stretch.clamp(0, 10)).abs().pow(2).sum(0).sqrt() / p.abs().pow(2).sum(
        0
    ).sqrt().clamp_min(1e-12)
    return Rotation(style, start, dims, angles, float(residual.max()))


# ---- formulas -------------------------------------------------------------------------------------------------------


def nearest_formula(rotation: Rotation, model: Any, sizes: Sizes) -> tuple[str, float]:
    """The rotary formula of the configuration whose angles are the measured ones: its name, and the largest error."""
    best = ("", float("inf"))
    limits = {"positions": _published_positions(model.config)}
    scales = [(torch.ones(()), ""), *_learned_scales(model, rotation.angles.numel())]
    for settings in rope_settings(model.config):
        for inverse, words in frequencies(settings, rotation.dims, limits["positions"]):
            for scale, more in scales:
                error = _angle_error(inverse * scale.double(), rotation.angles)
                if error < best[1]:
                    best = (words + more, error)
    return best if best[1] <= ANGLE else ("", best[1])


def _learned_scales(model: Any, pairs: int) -> list[tuple[Tensor, str]]:
    """Factors [pairs] that a module may put on its frequencies: it holds both, a buffer of them and a parameter."""
    found = []
    for module in model.modules():
        held = [b for b in module._buffers.values() if b is not None and b.is_floating_point() and b.numel() == pairs]
        for parameter in module._parameters.values() if held else ():
            if parameter is not None and parameter.numel() == pairs:
                learned = parameter.detach()
                found += [(learned.exp(), ", times exp of a learned vector"), (learned, ", times a learned vector")]
    return found


def _angle_error(inverse: Tensor, angles: Tensor) -> float:
    if inverse.numel() != angles.numel():
        return float("inf")
    worst = []
    for sign in (1.0, -1.0):
        difference = sign * inverse.double() * SHIFT - angles
        wrapped = torch.remainder(difference + math.pi, 2 * math.pi) - math.pi
        worst.append(float(wrapped.abs().max()))
    return min(worst)


def _published_positions(config: Any) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)


def multimodal(config: Any) -> bool:
    """Whether a configuration shares the rotary channels out between rows of positions."""
    return any("mrope" in name for settings in rope_settings(config) for name in settings)


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Every set of rotary settings in a configuration (one, or one a layer type), and the bare bases."""
    text = config.get_text_config()
    found: list[dict[str, Any]] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if "rope_theta" in value or "rope_type" in value:
                found.append(dict(value))
            for inner in value.values():
                collect(inner)

    for value in vars(text).values():
        collect(value)
    bases = [
        v
        for n, v in vars(text).items()
        if ("theta" in n or n in ("rotary_emb_base", "rope_base")) and isinstance(v, int | float)
    ]
    found += [{"rope_type": "default", "rope_theta": base} for base in [*bases, 10000.0]]
    return found


def frequencies(settings: dict[str, Any], dims: int, longest: int) -> list[tuple[Tensor, str]]:
    """Inverse frequencies [dims / 2] that settings may mean, each with its name.

    Formulas: Su et al. (2021) default; linear position interpolation, Chen et al. (2023); by parts, Llama 3.1's model
    card; YaRN, Peng et al. (2023), equations 17 to 23; LongRoPE, Ding et al. (2024), per-channel factors.
    """
    base, kind = float(settings.get("rope_theta") or 10000.0), str(settings.get("rope_type") or "default")
    plain = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    label = f"rope, theta {base:g}"
    factor = float(settings.get("factor") or 1.0)
    if kind == "linear":
        return [(plain / factor, f"{label}, linear x {factor:g}")]
    if kind == "llama3":
        return [(_by_parts(plain, settings), f"{label}, llama3 x {factor:g}")]
    if kind == "yarn":
        return [(_yarn(plain, base, dims, settings, longest), f"{label}, yarn x {factor:g}"), (plain, label)]
    if kind == "longrope":
        found = []
        for which in ("short_factor", "long_factor"):
            factors = settings.get(which)
            if factors is not None and len(factors) >= dims // 2:
                found.append(
                    (plain / torch.tensor(factors[: dims // 2], dtype=torch.float64), f"{label}, longrope {which}")
                )
        return found
    if kind == "proportional":
        return [(plain, label), *_proportional(base, dims, settings, label)]
    return [(plain, label)]


def _proportional(base: float, dims: int, settings: dict[str, Any], label: str) -> list[tuple[Tensor, str]]:
    """Frequencies counted over the whole head, of which only a part turns."""
    part = float(settings.get("partial_rotary_factor") or 1.0)
    found = []
    for whole in {round(dims / part), dims}:
        turned = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / whole)
        found.append((turned, f"{label}, proportional"))
    kept = int(dims * part) // 2
    zeros = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    zeros[kept:] = 0.0
    return [*found, (zeros, f"{label}, proportional")]


def _by_parts(plain: Tensor, settings: dict[str, Any]) -> Tensor:
    factor = float(settings["factor"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    old = float(settings["original_max_position_embeddings"])
    length = 2 * math.pi / plain
    smooth = ((old / length - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(plain: Tensor, base: float, dims: int, settings: dict[str, Any], longest: int) -> Tensor:
    factor = float(settings["factor"])
    fast, slow = float(settings.get("beta_fast") or 32), float(settings.get("beta_slow") or 1)
    old = float(settings.get("original_max_position_embeddings") or longest)

    def turns(rotations: float) -> float:
        return dims * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = turns(fast), turns(slow)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(dims // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)
