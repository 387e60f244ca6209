"""Spec of a router's choice of experts: scores of logits, the best of them, and their weights. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

ACTIVATIONS = ("softmax", "sigmoid", "sqrt_softplus")
GROUP_SCORES = ("top2", "max")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """The K experts with the largest score (plus ``bias``), and their scores as weights, best first.

    With groups, only experts of the best groups are chosen. Of equal ones the lowest index wins. Everything in fp32.
    Sources: Shazeer et al., "Outrageously large neural networks" (2017), section 2.1; DeepSeek-V3 technical report
    (2024), equations 12 to 16, for sigmoid, groups and a bias for the choice alone.
    """

    family: ClassVar[str] = "routing"
    experts: int = dim()
    top_k: int = dim()
    activation: str = "softmax"
    """``softmax`` over all experts, ``sigmoid``, or ``sqrt_softplus``: sqrt(log(1 + e^z))."""
    bias: bool = False
    """There is a bias that is added for the choice, not to the weights; it has no gradient."""
    groups: int = 1
    """Equal runs of experts, of which ``top_groups`` may be chosen from."""
    top_groups: int = 1
    group_score: str = "top2"
    """Of a group: the sum of its two best scores, or its best."""
    renormalise: bool = False
    """The weights are divided by their sum plus ``sum_eps``."""
    sum_eps: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS or self.group_score not in GROUP_SCORES:
            raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, group_score of {', '.join(GROUP_SCORES)}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be from 1 to {self.experts} experts, not {self.top_k}")
        if not 1 <= self.top_groups <= self.groups or self.experts % self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups must divide {self.experts} experts")
        if self.top_k > self.top_groups * (self.experts // self.groups):
            raise ValueError(f"the chosen groups must hold {self.top_k} experts")
        if self.groups > 1 and self.group_score == "top2" and self.experts // self.groups < 2:
            raise ValueError("the two best of a group must be two")

    def inputs(self) -> tuple[TensorRole, ...]:
        """logits [N, E], bias [E], slots [K] (only its size is read: how many experts a token gets)."""
        roles = [TensorRole(name="logits")]
        if self.bias:
            roles.append(TensorRole(name="bias", differentiable=False))
        return (*roles, TensorRole(name="slots", differentiable=False))

    def outputs(self) -> tuple[TensorRole, ...]:
        """scores [N, K] in the dtype of the logits, index [N, K] int64."""
        return (TensorRole(name="scores"), TensorRole(name="index", differentiable=False))

    def flops(self, tokens: int, backward: bool = False) -> float:
        """One comparison an expert and choice, and a few operations an expert."""
        return float(tokens * self.experts * (6 if backward else self.top_k + 6))

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Forward reads the logits and writes weights and choices; backward reads all of them and writes dlogits."""
        width = DTYPE_BYTES[self.dtype]
        chosen = self.top_k * (width + 8)
        return float(tokens * ((2 if backward else 1) * self.experts * width + chosen))

    def words(self) -> str:
        """E.g. ``sigmoid routing, 8 of 256 experts, biased choice, renormalised, times 2.446, float32``."""
        parts = [f"{self.activation} routing, {self.top_k} of {self.experts} experts"]
        if self.bias:
            parts.append("biased choice")
        if self.groups > 1:
            parts.append(f"{self.top_groups} of {self.groups} groups by {self.group_score}")
        if self.renormalise:
            parts.append("renormalised")
        if self.scale != 1.0:
            parts.append(f"times {self.scale:g}")
        return ", ".join([*parts, self.dtype])
