"""What a training step hands an operator, as shapes that depend on the number of tokens."""

from __future__ import annotations

from typing import Any

from kernel_templates.novel import NOVEL
from kernel_templates.spec import OperatorSpec

TOKENS = 4096
"""Shapes are looked at for this many tokens and twice as many."""


def training_shapes(spec: OperatorSpec) -> dict[str, Any] | None:
    """Dtype and dims of every input; a dim is ``[a, b]``, for a * tokens + b. None where the family does not say.

    No memory is taken: the family's own cases are made of fake tensors.
    """
    if spec.family == NOVEL:
        return None
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kernel_templates.registry import family_module

    cases = family_module(spec.family, "cases")
    if not hasattr(cases, "training_case"):
        return None
    with FakeTensorMode():
        once, twice = (_tensors(cases, spec, tokens) for tokens in (TOKENS, 2 * TOKENS))
    return {
        name: None
        if tensor is None
        else {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "dims": [[(b - a) / TOKENS, 2 * a - b] for a, b in zip(tensor.shape, twice[name].shape, strict=True)],
        }
        for name, tensor in once.items()
    }


def _tensors(cases: Any, spec: OperatorSpec, tokens: int) -> dict[str, Any]:
    import torch

    dtype = getattr(torch, spec.dtype)
    made: dict[str, Any] = cases.make_tensors(spec, cases.training_case(spec, tokens), torch.Generator(), dtype, "cpu")
    return made
