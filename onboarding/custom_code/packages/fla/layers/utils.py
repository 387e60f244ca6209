"""Taking padding out of a batch."""

from __future__ import annotations

import torch
from flash_attn.bert_padding import index_first_axis, pad_input
from torch import Tensor
from torch.nn import functional as F

__all__ = ["get_unpad_data", "index_first_axis", "pad_input"]


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Places of the kept tokens, cu_seqlens, longest sequence."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    places = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    return places, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())
