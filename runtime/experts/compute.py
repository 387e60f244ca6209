"""The local experts on received rows.

Legend: R rows, K slots a row, S slots with an expert, E local experts, D width, r adapter rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.experts.rows import add_rows, repeat_rows
from runtime.experts.sites import with_tensors

BUILT_IN = (None, "eager", "batched_mm", "grouped_mm")
"""Implementations of transformers that ``grouped_experts`` stands for; any other one (a bundle's kernel) is called."""


def run_experts(
    experts: nn.Module,
    tensors: dict[str, Tensor],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    counts: list[int] | None,
    local: int,
) -> Tensor:
    """Weighted sum over each row's local experts.

    Args:
        experts: the module; gives the flags and the implementation.
        tensors: its parameters' values by name, [E, ...] for those of experts.
        x: [R, D].
        index: int64 [R, K], local expert; -1 for none.
        weights: [R, K].
        counts: slots of each local expert; None if every slot has one and they were not counted.
        local: number of local experts.

    Returns:
        [R, D]; zero rows where nothing was asked for.
    """
    if not index.numel() or (counts is not None and not sum(counts)):
        return x.new_zeros(x.shape)
    view = with_tensors(experts, tensors)
    view.num_experts = local
    view._is_expert_parallel = True
    lora = experts._modules.get("lora")
    grouped_lora = lora is not None and not lora.materialize
    if grouped_lora or view.config._experts_implementation in BUILT_IN:
        # a kernel for whole experts has no place for an adapter's products; merged weights of all experts cost more
        return grouped_experts(view, x, index, weights, counts)
    if lora is not None:
        view.__dict__.update(view._modules["lora"].merged(view))
    none = index.where(index >= 0, local)  # the convention of transformers
    result: Tensor = type(experts).forward(view, x, none, weights)
    return result


def grouped_experts(view: Any, x: Tensor, index: Tensor, weights: Tensor, counts: list[int] | None) -> Tensor:
    """The experts of transformers' convention, every flag of it, as grouped products over sorted slots."""
    rows, slots = index.shape
    flat = index.reshape(-1)
    total = flat.numel() if counts is None else sum(counts)
    # slots without an expert sort last and are cut off, so no product sees them
    by_expert, order = flat.where(flat >= 0, view.num_experts).sort(stable=True)
    by_expert, order = by_expert[:total], order[:total]
    source = order // slots
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(total, device=x.device)
    places = places.view(rows, slots)
    groups = Groups(by_expert, view.num_experts, counts)
    lora = view._modules.get("lora")
    if lora is not None and lora.materialize:
        view.__dict__.update(lora.merged(view))
        lora = None

    def linear(rows_in: Tensor, name: str) -> Tensor:
        weight = getattr(view, name)
        out = groups.product(rows_in.to(weight.dtype), weight if view.is_transposed else weight.mT)
        if lora is not None:
            out = lora.add(out, rows_in, name, groups)
        if view.has_bias:
            out = out + groups.each(getattr(view, f"{name}_bias"))
        return out

    selected = repeat_rows(x, source, places)
    if view.has_gate:
        hidden = view._apply_gate(linear(selected, "gate_up_proj"))
    else:
        hidden = view.act_fn(linear(selected, "up_proj"))
    out = linear(hidden, "down_proj")
    if view.has_post_expert_norm:
        out = type(view.post_expert_norm).forward(view.post_expert_norm, out)
    out = out * repeat_rows(weights.reshape(-1, 1), order, places.view(-1, 1))
    return add_rows(out.to(x.dtype), source, places)


class Groups:
    """Rows sorted by the expert that they belong to."""

    def __init__(self, by_expert: Tensor, experts: int, counts: list[int] | None) -> None:
        """
        Args:
            by_expert: int64 [S], ascending.
            experts: E.
            counts: rows of each, if known on the host.
        """
        self.by_expert = by_expert
        self.experts = experts
        self._counts = counts
        self._offsets: Tensor | None = None

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each group's rows times its matrix, [S, I] x [E, I, O] -> [S, O]; no rows give a gradient of zero."""
        if _grouped_mm_takes(x, weight):
            return F.grouped_mm(x, weight, offs=self.offsets)
        parts = [rows @ matrix for rows, matrix in zip(torch.split(x, self.counts), weight.unbind(0), strict=True)]
        return torch.cat(parts)

    def each(self, values: Tensor) -> Tensor:
        """Each expert's row [E, O] for each of its slots, [S, O]."""
        if self._counts is None and (values.device.type == "cuda" or type(values) is not Tensor):
            return values[self.by_expert]
        return torch.cat([v.expand(n, -1) for v, n in zip(values.unbind(0), self.counts, strict=True)])

    @property
    def counts(self) -> list[int]:
        if self._counts is None:
            counted = torch.bincount(self.by_expert, minlength=self.experts)
            self._counts = [int(n) for n in counted.tolist()]
        return self._counts

    @property
    def offsets(self) -> Tensor:
        """int32 [E], where each expert's rows end; made on the device."""
        if self._offsets is None:
            ends = torch.arange(1, self.experts + 1, device=self.by_expert.device)
            self._offsets = torch.searchsorted(self.by_expert, ends).int()
        return self._offsets


def _grouped_mm_takes(x: Tensor, weight: Tensor) -> bool:
    """On a GPU and in a dry run: bf16, rows of whole 16-byte units. On the CPU a loop is as fast, in any dtype."""
    if x.dtype != torch.bfloat16 or (x.device.type == "cpu" and type(x) is Tensor):
        return False
    return all(size * 2 % 16 == 0 for size in weight.shape[1:])
