"""RMSNorm, LayerNorm and their variants: claimed by structure, proven on the class itself."""

from __future__ import annotations

from itertools import permutations, product

import torch
from torch import nn

from kernel_templates.norm.spec import Spec
from onboarding.stages.parse.roles import epsilon_of
from onboarding.stages.parse.uses.instance import small_instance
from onboarding.stages.parse.uses.proof import same_function


def prove_norm(module: nn.Module, width: int, gated: bool, dtype: str) -> tuple[Spec, dict[str, str]] | None:
    """The norm spec that a module computes, and which of its parameters is the weight and which the bias, or None.

    Args:
        module: a leaf whose parameters, if any, are a vector of scales and perhaps one of biases.
        width: size of the last dim of its input in the model.
        gated: it is called with a second tensor of the same shape.
        dtype: dtype of its input in the model.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if len(parameters) > (1 if gated else 2) or any(p.shape != (width,) for p in parameters.values()):
        return None
    bias = len(parameters) == 2
    eps = epsilon_of(module)
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # nn.RMSNorm(eps=None)
    offsets = (False, True) if parameters else (False,)
    gates = ("sigmoid", "silu") if gated else ("none",)
    # by their own names first, whatever a module calls its scale
    orders = permutations(sorted(parameters, key=lambda name: "bias" in name))
    for order, centred, offset, gate in product(list(orders), (False, True), offsets, gates):
        names = dict(zip(("weight", "bias"), order, strict=False))
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
        if _proven(module, spec, names):
            return spec, names
    return None


def _proven(module: nn.Module, spec: Spec, names: dict[str, str]) -> bool:
    generator = torch.Generator().manual_seed(11)
    clone = small_instance(module, {}, generator)
    parameters = dict(clone.named_parameters(recurse=False))

    def run(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        values = {own: tensors[name] for name, own in names.items()}
        arguments = [tensors["x"], tensors["gate"]] if spec.gate != "none" else [tensors["x"]]
        return {"y": torch.func.functional_call(clone, values, tuple(arguments))}  # type: ignore[arg-type]

    # the second scale makes the epsilon as large as the mean square, so that a wrong one shows
    for scale in (1.0, spec.eps**0.5):
        tensors: dict[str, torch.Tensor | None] = {"x": scale * torch.randn(2, 3, spec.hidden, generator=generator)}
        tensors |= {name: parameters[own].detach() for name, own in names.items()}
        if spec.gate != "none":
            tensors["gate"] = torch.randn(2, 3, spec.hidden, generator=generator)
        if not same_function(run, spec, tensors):
            return False
    return True
