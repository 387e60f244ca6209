"""Routers: a linear layer, scores, and the choice of experts, found on the class itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kernel_templates.routing.reference import activated, keys_of
from kernel_templates.routing.spec import ACTIVATIONS, GROUP_SCORES, Spec
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.uses.instance import small_instance
from onboarding.stages.parse.uses.proof import same_function

_SIZE, _ROWS = 64, 40
_GROUPS = ("n_group", "num_group", "num_expert_groups", "n_groups")
_TOP_GROUPS = ("topk_group", "top_k_group", "num_limited_groups", "topk_groups")


@dataclass(frozen=True, kw_only=True)
class ProvenRouter:
    """A proven router."""

    spec: Spec
    attributes: dict[str, str]
    """``weight``, ``bias`` (for the choice), ``linear_bias`` -> attribute; ``returns``: what its forward gives."""


def prove_routing(module: nn.Module, hidden: int, dtype: str) -> ProvenRouter | None:
    """The routing that a module computes of hidden states [N, hidden], or None.

    A small instance has the unit matrix as its weight, so that its logits are its input.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    matrices = [n for n, t in tensors.items() if t.dim() == 2 and t.shape[1] == hidden]
    if len(matrices) != 1 or "." in matrices[0]:
        return None
    experts = tensors[matrices[0]].shape[0]
    vectors = {n: t for n, t in tensors.items() if n != matrices[0] and t.dim() == 1 and t.shape[0] == experts}
    if len(vectors) != len(tensors) - 1 or len(vectors) > 2:
        return None
    attributes = {"weight": matrices[0]}
    for name in vectors:
        attributes["bias" if "correction" in name or (len(vectors) == 2 and name != "bias") else "linear_bias"] = name
    try:
        found = _Router(module, hidden, experts, attributes)
        top_k, returns = found.layout()
        in_fp32 = found.logits_in_fp32(dtype)
    except Exception:  # called in another way, or no choice of experts comes out
        return None
    attributes["returns"] = returns
    facts = vars(module)
    groups = next((facts[n] for n in _GROUPS if isinstance(facts.get(n), int)), 1)
    top_groups = next((facts[n] for n in _TOP_GROUPS if isinstance(facts.get(n), int)), 1)
    for activation, group_score in product(ACTIVATIONS, GROUP_SCORES if groups > 1 else GROUP_SCORES[:1]):
        weights = found.weights_of(activation, top_k)
        if weights is None:
            continue
        renormalise, scale = weights
        try:
            spec = Spec(
                experts=experts,
                top_k=top_k,
                activation=activation,
                bias="bias" in attributes,
                groups=groups,
                top_groups=top_groups if groups > 1 else 1,
                group_score=group_score,
                renormalise=renormalise,
                # keeps a sum of vanishing scores from being a divisor; a softmax has none
                sum_eps=1e-20 if renormalise and activation != "softmax" else 0.0,
                scale=scale,
                dtype="float32" if in_fp32 else dtype,
            )
            small = spec.resized(experts=_SIZE)
        except ValueError:
            continue
        if found.proves(small):
            return ProvenRouter(spec=spec, attributes=attributes)
    return None


class _Router:
    """A small instance whose logits are its input."""

    def __init__(self, module: nn.Module, hidden: int, experts: int, attributes: dict[str, str]) -> None:
        self.module, self.hidden, self.experts, self.attributes = module, hidden, experts, attributes
        self.clone = self._clone(torch.float32)
        self.generator = torch.Generator().manual_seed(31)
        self.logits = 1.5 * torch.randn(_ROWS, _SIZE, generator=self.generator)
        self.returns: list[str] = []

    def _clone(self, dtype: torch.dtype) -> Any:
        sizes = {self.hidden: _SIZE, self.experts: _SIZE}
        clone = small_instance(self.module, sizes, torch.Generator().manual_seed(37)).to(dtype)
        with torch.no_grad():
            clone.get_parameter(self.attributes["weight"]).copy_(torch.eye(_SIZE))
            if "linear_bias" in self.attributes:
                getattr(clone, self.attributes["linear_bias"]).zero_()
            if "bias" in self.attributes:
                getattr(clone, self.attributes["bias"]).mul_(0.2)
        return clone

    def _bias(self) -> Tensor | None:
        return getattr(self.clone, self.attributes["bias"]).detach() if "bias" in self.attributes else None

    def _run(self, x: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
        state = {} if bias is None else {self.attributes["bias"]: bias}
        with quiet():
            results = torch.func.functional_call(self.clone, state, (x,))
        return dict(zip(self.returns, results, strict=True))

    def layout(self) -> tuple[int, str]:
        """top_k, and the names of what the forward returns, in order.

        Raises:
            ValueError: it returns something else.
        """
        with quiet(), torch.no_grad():
            results = self.clone(self.logits)
        for result in results:
            if not result.is_floating_point():
                self.returns.append("index")
            else:
                self.returns.append("logits" if result.shape == self.logits.shape else "scores")
        if sorted(self.returns) not in (["index", "logits", "scores"], ["index", "scores"]):
            raise ValueError(f"returns {self.returns}")
        found = dict(zip(self.returns, results, strict=True))
        if "logits" in found and not torch.equal(found["logits"], self.logits):
            raise ValueError("what it returns beside the choice are not the logits")
        return int(found["index"].shape[-1]), " ".join(self.returns)

    def logits_in_fp32(self, dtype: str) -> bool:
        """Whether the linear layer runs in fp32 whatever its input is."""
        narrow: torch.dtype = getattr(torch, dtype)
        clone = self._clone(narrow)
        with quiet(), torch.no_grad():
            results = dict(zip(self.returns, clone(self.logits.to(narrow)), strict=True))
        return bool(results["scores"].dtype == torch.float32 and results.get("logits", results["scores"]).dtype
                    == torch.float32)  # fmt: skip

    def weights_of(self, activation: str, top_k: int) -> tuple[bool, float] | None:
        """Whether weights are divided by their sum, and their factor, if scores are of this kind."""
        with torch.no_grad():
            found = self._run(self.logits)
        spec = Spec(experts=_SIZE, top_k=top_k, activation=activation)
        scores = activated(self.logits.double(), spec).gather(-1, found["index"])
        weights = found["scores"].double()
        ratio, sums = weights / scores, weights.sum(-1)
        normed = weights / (scores / scores.sum(-1, keepdim=True))
        if float((ratio / ratio.mean() - 1).abs().max()) < 1e-4:
            return False, _rounded(float(ratio.mean()))
        if float((normed / sums.mean() - 1).abs().max()) < 1e-4:
            return True, _rounded(float(sums.mean()))
        return None

    def proves(self, spec: Spec) -> bool:
        """Whether choice, weights and gradients are the reference's, in the reference's order."""
        tensors: dict[str, Tensor | None] = {
            "logits": self.logits,
            "slots": torch.zeros(spec.top_k, dtype=torch.int32),
        }
        if spec.bias:
            tensors["bias"] = self._bias()

        def run(given: dict[str, Tensor | None]) -> dict[str, Tensor]:
            logits, bias = given["logits"], given.get("bias")
            assert logits is not None
            found = self._run(logits, bias)
            keys = keys_of(logits.detach(), bias, spec).gather(-1, found["index"])
            order = keys.argsort(-1, descending=True)
            return {"scores": found["scores"].gather(-1, order), "index": found["index"].gather(-1, order)}

        return same_function(run, spec, tensors)


def _rounded(value: float) -> float:
    """Six significant digits: fp32 leaves noise after them."""
    return float(f"{value:.6g}")
