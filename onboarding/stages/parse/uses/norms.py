"""RMSNorm, LayerNorm and their variants: claimed by structure, proven on the class itself."""

from __future__ import annotations

from itertools import product

import torch
from torch import nn

from kernel_templates.norm.spec import Spec
from onboarding.stages.parse.roles import epsilon_of
from onboarding.stages.parse.uses.instance import small_instance
from onboarding.stages.parse.uses.proof import same_function


def prove_norm(module: nn.Module, width: int, gated: bool, dtype: str) -> Spec | None:
    """The norm spec that a module computes, or None.

    Args:
        module: a leaf whose parameters, if any, are a vector of scales and perhaps one of biases.
        width: size of the last dim of its input in the model.
        gated: it is called with a second tensor of the same shape.
        dtype: dtype of its input in the model.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) not in (set(), {"weight"}, {"weight", "bias"}):
        return None
    if any(p.shape != (width,) for p in parameters.values()):
        return None
    bias = "bias" in parameters
    if bias and gated:
        return None
    eps = epsilon_of(module)
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # nn.RMSNorm(eps=None)
    offsets = (False, True) if parameters else (False,)
    gates = ("sigmoid", "silu") if gated else ("none",)
    for centred, offset, gate in product((False, True), offsets, gates):
        spec = Spec(
            hidden=width,
            eps=eps,
            offset=offset,
            weighted=bool(parameters),
            gate=gate,
            centred=centred,
            bias=bias,
            dtype=dtype,
        )
        if _proven(module, spec):
            return spec
    return None


def _proven(module: nn.Module, spec: Spec) -> bool:
    generator = torch.Generator().manual_seed(11)
    clone = small_instance(module, {}, generator)
    parameters = dict(clone.named_parameters(recurse=False))

    def run(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        values = {name: tensors[name] for name in parameters}
        arguments = [tensors["x"], tensors["gate"]] if spec.gate != "none" else [tensors["x"]]
        return {"y": torch.func.functional_call(clone, values, tuple(arguments))}  # type: ignore[arg-type]

    # the second scale makes the epsilon as large as the mean square, so that a wrong one shows
    for scale in (1.0, spec.eps**0.5):
        tensors: dict[str, torch.Tensor | None] = {"x": scale * torch.randn(2, 3, spec.hidden, generator=generator)}
        tensors |= {name: value.detach() for name, value in parameters.items()}
        if spec.gate != "none":
            tensors["gate"] = torch.randn(2, 3, spec.hidden, generator=generator)
        if not same_function(run, spec, tensors):
            return False
    return True
