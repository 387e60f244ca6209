"""Cross entropy over the vocabulary."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class CrossEntropyLoss(nn.Module):
    """Logits ``[N, V]``, labels ``[N]``."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, **_: object
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """In fp32."""
        return F.cross_entropy(
            input.float(), target, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip
