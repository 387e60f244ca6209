"""A short depthwise convolution along the sequence."""

from __future__ import annotations

from typing import Any

from causal_conv1d import causal_conv1d_fn
from torch import Tensor, nn

from onboarding.custom_code.standins import refuse


class ShortConvolution(nn.Conv1d):
    """x ``[B, T, D]`` -> ``[B, T, D]`` and the last inputs, where they are asked for."""

    def __init__(
        self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu", **_: Any
    ) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1)
        self.hidden_size, self.activation = hidden_size, activation

    def forward(  # type: ignore[override]  # as in fla: more than a convolution takes, and a pair as result
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        **extras: object,
    ) -> tuple[Tensor, Tensor | None]:
        """``mask`` ``[B, T]`` blanks padding first; ``cache`` holds the inputs before the first."""
        refuse(cu_seqlens=cu_seqlens is not None, **{k: v for k, v in extras.items() if k != "chunk_indices"})
        if mask is not None:
            x = x * mask[..., None]
        before = None if cache is None else cache[..., 1 - self.kernel_size[0] :]
        y = causal_conv1d_fn(
            x.transpose(1, 2), self.weight[:, 0], self.bias, initial_states=before, activation=self.activation
        )
        y = y.transpose(1, 2)
        last = x.transpose(1, 2)[..., -self.kernel_size[0] :] if output_final_state else None
        return (y if residual is None else y + residual), last
