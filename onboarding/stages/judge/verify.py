"""Compares what came back with what must come back, and says in words what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onboarding.stages.judge import images, oracle
from onboarding.stages.judge.exchange import Sent
from onboarding.stages.judge.images import DTYPES, Image, ImageError
from onboarding.stages.judge.oracle import Call, Expected
from onboarding.stages.judge.result import TensorError

SLACK_ELEMENTS = 1 << 16
"""A result may lie in a storage this much larger than itself."""


@dataclass(kw_only=True)
class Returned:
    """What one call returned, read from raw bytes."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By ``y``, ``grad x``."""
    wrong: list[str] = field(default_factory=list)
    """Violations of the contract."""


def read_call(call: Call, report: Any, folder: Path, number: int) -> Returned:
    """Outputs and gradients of one call; whatever does not meet the contract is noted and left out."""
    returned = Returned()
    promised = oracle.contract(call.spec, call.tensors)
    for name, expected in call.expected.items():
        gradient = name.startswith("grad ")
        plain = name.removeprefix("grad ")
        group = "gradients" if gradient else "outputs"
        data = report.get(group, {}).get(plain) if isinstance(report, dict) else None
        if data is None:
            zero = not bool(expected.value.any())
            if not (gradient and zero):
                returned.wrong.append(f"{name} is missing")
            continue
        try:
            tensor = _read(data, expected, folder / f"{number}.{group}.{plain}")
        except ImageError as problem:
            returned.wrong.append(f"{name}: {problem}")
            continue
        if not gradient:
            returned.wrong += _metadata(name, data, promised[plain])
        returned.tensors[name] = tensor
    unasked = report.get("gradients", {}) if isinstance(report, dict) else {}
    returned.wrong += [f"grad {n} was not asked for" for n in unasked if n not in call.needs]
    return returned


def _read(data: dict[str, Any], expected: Expected, path: Path) -> Tensor:
    largest = 4 * expected.value.numel() + SLACK_ELEMENTS
    image = Image.from_json(data, largest)
    dtype = DTYPES[image.dtype]
    if dtype is not expected.dtype:
        raise ImageError(f"dtype {image.dtype} instead of {str(expected.dtype).removeprefix('torch.')}")
    if image.shape != tuple(expected.value.shape):
        raise ImageError(f"shape {list(image.shape)} instead of {list(expected.value.shape)}")
    try:
        return image.view(images.load(path, dtype, image.elements)).clone()
    finally:
        path.unlink(missing_ok=True)


def _metadata(name: str, data: dict[str, Any], promised: Tensor) -> list[str]:
    """Strides (of dims that have more than one element), device and exact type of an output."""
    wrong = []
    steps = [(a, b) for a, b, size in zip(data["stride"], promised.stride(), promised.shape, strict=True) if size > 1]
    if promised.numel() and any(a != b for a, b in steps):
        wrong.append(f"{name}: strides {list(data['stride'])} instead of {list(promised.stride())}")
    if data.get("device") != promised.device.type:
        wrong.append(f"{name}: on {data.get('device')} instead of {promised.device.type}")
    if data.get("plain") is not True:
        wrong.append(f"{name}: not a plain tensor")
    return wrong


def changed_in(sent: Sent, folder: Path, number: int) -> list[str]:
    """What is no longer as it was sent, the poison around the values included: inputs, and gradients that flow in."""
    inputs = _changed(sent.storages, "inputs", "input {}", folder, number)
    return inputs + _changed(sent.upstream, "upstream", "the gradient of {}", folder, number)


def _changed(sent: dict[str, tuple[Tensor, Image]], group: str, words: str, folder: Path, number: int) -> list[str]:
    changed = []
    for plain, (storage, image) in sent.items():
        name = words.format(plain)
        path = folder / f"{number}.{group}.{plain}"
        try:
            back = images.load(path, storage.dtype, image.elements)
        except ImageError as problem:
            changed.append(f"{name} cannot be read back: {problem}")
            continue
        finally:
            path.unlink(missing_ok=True)
        if not images.same_bytes(storage, back):
            inside = images.same_bytes(image.view(storage.cpu()).contiguous(), image.view(back).contiguous())
            changed.append(f"it writes past the end of {name}" if inside else f"{name} was changed")
    return changed


def compare(call: Call, returned: Returned, others: dict[str, Call]) -> tuple[list[TensorError], list[str]]:
    """Errors of every result, and reasons for those beyond their limit.

    Args:
        others: calls whose expected values a wrong result is compared with, by what it would mean.
    """
    errors, reasons = [], []
    for name, actual in returned.tensors.items():
        expected = call.expected[name]
        found = expected.compare(actual)
        share = found.error / expected.limit
        errors.append(
            TensorError(
                tensor=name,
                error=_finite(found.error),
                tolerance=expected.limit,
                share=_finite(share),
                reference_error=_finite(expected.reference_error),
                worst_index=list(found.worst_index),
            )
        )
        if not share <= 1.0:
            reasons.append(f"{name}: {_diagnosis(name, actual, expected, found, others)}")
    return errors, reasons


def block_map(expected: Expected, actual: Tensor, side: int = 8) -> list[list[float]]:
    """Where a result is off: RMS error of at most ``side`` x ``side`` blocks of it, as shares of its limit.

    Rows are all leading dims, columns the last one. 1 means that a block alone uses up the tensor's allowance.
    """
    value = expected.value
    if value.numel() == 0 or actual.shape != value.shape:
        return []
    columns = value.shape[-1] if value.ndim else 1
    wrong = (actual.detach().to(value.device, torch.float64) - value).square().reshape(-1, columns)
    allowed = expected.limit * float(value.square().mean().sqrt())
    if allowed == 0:
        return []
    rows = [block.mean(0) for block in wrong.tensor_split(min(side, len(wrong)))]
    parts = torch.stack(rows).tensor_split(min(side, columns), dim=1)
    grid = torch.stack([part.mean(1) for part in parts], dim=1).sqrt() / allowed
    return [[_finite(round(float(x), 3)) for x in row] for row in grid]


def _diagnosis(name: str, actual: Tensor, expected: Expected, found: Any, others: dict[str, Call]) -> str:
    """What a wrong result looks like."""
    at = f"worst at {list(found.worst_index)}: {found.worst_actual:.6g} instead of {found.worst_expected:.6g}"
    measured = f"relative error {found.error:.3g} exceeds {expected.limit:.3g}, {at}"
    finite = actual.isfinite()
    if not bool(finite.all()):
        share = 1.0 - float(finite.double().mean())
        return f"{share:.1%} not finite: it reads memory that holds no data, or overflows ({at})"
    if not bool(actual.any()):
        return f"zero everywhere; {measured}"
    for meaning, call in others.items():
        other = call.expected.get(name)
        if other is not None and other.value.shape == actual.shape and other.compare(actual).error <= other.limit:
            return f"{meaning}; {measured}"
    if actual.numel() > 1 and bool((actual == actual.reshape(-1)[0]).all()):
        return f"the same value everywhere; {measured}"
    wrong = (actual.to(expected.value.device, torch.float64) - expected.value).abs()
    scale = float(expected.value.square().mean().sqrt())
    parts = float((wrong > 10 * expected.limit * scale).double().mean())
    return f"{measured}; {parts:.1%} of the elements are far off"


def _finite(value: float) -> float:
    """JSON has no infinity: 1e300 stands for it."""
    return min(value, 1e300) if value == value else 1e300
