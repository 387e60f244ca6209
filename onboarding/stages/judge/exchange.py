"""How one call reaches the candidate: tensors as files, described in JSON, in layouts that the judge chose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onboarding.stages.judge import images
from onboarding.stages.judge.examinee import Examinee, Refusal
from onboarding.stages.judge.images import Image
from onboarding.stages.judge.oracle import Call


@dataclass(kw_only=True)
class Sent:
    """A call on its way."""

    request: dict[str, Any]
    storages: dict[str, tuple[Tensor, Image]] = field(default_factory=dict)
    """Inputs that the process finds in memory, to be compared with what is there afterwards."""
    upstream: dict[str, tuple[Tensor, Image]] = field(default_factory=dict)
    """The same of what flows into backward, by output."""


def send(
    examinee: Examinee,
    number: int,
    call: Call,
    *,
    large: bool,
    reuse: int | None = None,
    layout: str = "plain",
    upstream_layout: str = "plain",
    expanded: tuple[str, int] = ("", 0),
) -> Sent:
    """Write one call's tensors where the process can read them, and describe them."""
    storages: dict[str, tuple[Tensor, Image]] = {}
    tensors: dict[str, Any] = {}
    upstream: dict[str, Any] = {}
    flowing: dict[str, tuple[Tensor, Image]] = {}
    for name, tensor in call.tensors.items():
        if tensor is None:
            tensors[name] = None
            continue
        how = "expanded" if name == expanded[0] else layout
        storage, image = images.lay_out(tensor, how, large=large, expanded_dim=expanded[1])
        storages[name] = (storage, image)
        path = examinee.given / f"{number}.{name}.bin"
        images.save(storage, path)
        tensors[name] = image.to_json() | {"file": str(path), "requires_grad": name in call.needs}
    for name, gradient in call.upstream.items():
        if upstream_layout == "ones":
            storage = torch.ones(1, dtype=gradient.dtype)
            image = Image(
                dtype=str(gradient.dtype).removeprefix("torch."),
                shape=tuple(gradient.shape),
                stride=(0,) * gradient.ndim,
                offset=0,
                elements=1,
            )
        else:
            storage, image = images.lay_out(gradient, upstream_layout, large=large)
        flowing[name] = (storage, image)
        path = examinee.given / f"{number}.upstream.{name}.bin"
        images.save(storage, path)
        upstream[name] = image.to_json() | {"file": str(path)}
    request = {"tensors": tensors, "upstream": upstream, "reuse": reuse}
    return Sent(request=request, storages=storages, upstream=flowing)


def same_shapes(a: Call, b: Call) -> bool:
    return all(
        (s is None) == (t is None) and (s is None or t is None or (s.shape, s.dtype) == (t.shape, t.dtype))
        for s, t in zip(a.tensors.values(), b.tensors.values(), strict=True)
    )


def again(number: int, needs: frozenset[str], mode: str = "plain") -> Sent:
    """An earlier call once more, in another mode or with other inputs that require a gradient."""
    return Sent(request={"same_as": number, "needs": sorted(needs), "mode": mode})


def ask(examinee: Examinee, sent: list[Sent], kind: str = "case", **more: Any) -> list[Any]:
    """Have the process run the calls; its report on each.

    Raises:
        Refusal: it raised, died or hung, or answers something else.
    """
    calls = [s.request for s in sent]
    try:
        answer = examinee.ask({"kind": kind, "calls": calls, "out": str(examinee.work), **more})
    finally:
        for path in examinee.given.glob("*.bin"):
            path.unlink()
    reports = answer.get("calls")
    disturbed = answer.get("changed")
    if isinstance(disturbed, list) and disturbed:
        raise Refusal(f"it changes {', '.join(str(name)[:80] for name in disturbed[:4])}")
    return checked(reports, len(sent))


def checked(reports: Any, count: int) -> list[dict[str, dict[str, Any]]]:
    """Reports of calls, as far as what is to be read from them goes.

    Raises:
        Refusal: they are not ``count`` objects of four objects.
    """
    groups = ("outputs", "gradients", "inputs", "upstream")
    if (
        not isinstance(reports, list)
        or len(reports) != count
        or not all(isinstance(r, dict) and all(isinstance(r.get(g), dict) for g in groups) for r in reports)
    ):
        raise Refusal("its process wrote noise instead of an answer")
    return reports
