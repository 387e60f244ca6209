"""Load of the experts: counting it, and what the loop does with it after each optimizer step.

Legend: T tokens, K slots a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.experts import replay
from runtime.parallel.config import BalanceConfig


class Load:
    """Counters and bias of one layer."""

    def __init__(self, num_experts: int, config: BalanceConfig, block: nn.Module, distributed: bool) -> None:
        self.num_experts = num_experts
        self.config = config
        self.block = block
        self.distributed = distributed
        self.bias_is_the_models = False
        self._device_counters: dict[str, Tensor] = {}
        self.mask: Tensor | None = None
        """bool [T], the tokens that count; None for all. Padding must not look like load."""
        self.global_tokens: Tensor | float | None = None
        """Tokens of the whole optimizer step over all ranks, where the loop says so."""
        self._bias_owner, self._bias_name = self._find_bias()

    # ---- bias ---------------------------------------------------------------------------------------------------

    def _find_bias(self) -> tuple[nn.Module | None, str]:
        """The router's own selection bias, else one of ours beside it, saved with the model."""
        if self.config.method == "none":
            return None, ""
        for module in self.block.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if "bias" in name and buffer.shape == (self.num_experts,):
                    self.bias_is_the_models = True
                    return module, name
        device = next(self.block.parameters()).device
        self.block.register_buffer("selection_bias", torch.zeros(self.num_experts, device=device))
        return self.block, "selection_bias"

    @property
    def bias(self) -> Tensor | None:
        """fp32 [E], added to scores when experts are chosen, never to their weights."""
        return None if self._bias_owner is None else self._bias_owner.get_buffer(self._bias_name)

    # ---- counting -----------------------------------------------------------------------------------------------

    def counter(self, name: str, size: int, like: Tensor) -> Tensor:
        """fp64 [size] on the device of ``like``: exact for counts, and every backend sums it."""
        found = self._device_counters.get(name)
        if found is None or found.device != like.device:
            found = torch.zeros(size, dtype=torch.float64, device=like.device)
            self._device_counters[name] = found
        return found

    def count(self, index: Tensor) -> None:
        """Add the slots of one micro-batch, int64 [T, K]; -1 counts as none."""
        with torch.no_grad():
            self.counter("load", self.num_experts, index).add_(self._histogram(index))

    def _histogram(self, index: Tensor) -> Tensor:
        """fp64 [E], slots of the tokens that count."""
        if self.mask is not None:
            index = index.masked_fill(~self.mask.reshape(-1, 1), -1)
        ones = torch.ones(index.numel(), dtype=torch.float64, device=index.device)
        total = torch.zeros(self.num_experts + 1, dtype=torch.float64, device=index.device)
        # whole numbers: exact in any order of adding
        return total.index_add_(0, index.reshape(-1) + 1, ones)[1:]

    def add_overflow(self, dropped: Tensor, rerouted: Tensor) -> None:
        """Count slots past the capacity."""
        if self.mask is not None:
            dropped = dropped & self.mask.reshape(-1, 1)
        self.counter("dropped", 1, dropped).add_(dropped.sum())
        self.counter("rerouted", 1, dropped).add_(rerouted)

    def add_cutoffs(self, cutoff: Tensor, scores: Tensor) -> None:
        """Histogram of cutoff [T] - score [T, E] for the quantile rule."""
        bins, limit = self.config.quantile_bins, self.config.quantile_range
        if self.mask is not None:
            cutoff, scores = cutoff[self.mask.reshape(-1)], scores[self.mask.reshape(-1)]
        gap = (cutoff.double().unsqueeze(1) - scores.double()).clamp(-limit, limit)
        cell = ((gap + limit) / (2 * limit) * bins).floor().clamp(max=bins - 1).long()
        cell += torch.arange(self.num_experts, device=cell.device) * bins
        histogram = self.counter("cutoffs", self.num_experts * bins, scores)
        histogram.index_add_(0, cell.reshape(-1), torch.ones(cell.numel(), dtype=torch.float64, device=cell.device))

    # ---- auxiliary loss ------------------------------------------------------------------------------------------

    def auxiliary(self, probabilities: Tensor, index: Tensor, remember: Callable[[Any, Any], Any]) -> Tensor:
        """This rank's share of coefficient E sum_e f_e P_e; the shares add up over ranks and micro-batches.

        f_e is expert e's share of all slots of this micro-batch over all ranks, P_e the mean probability over the
        step's tokens. "Global batch" as in Qwen's 2025 note: a local f_e would force balance within each sequence.

        Args:
            probabilities: [T, E] with gradient.
            index: int64 [T, K].
            remember: gives the value of the first pass in a recomputation.
        """
        tape = replay.current()
        if tape is not None and tape.replaying:
            share = remember(None, tape)
        else:
            with torch.no_grad():
                counts = torch.cat([self._histogram(index), self._counted(index)])
                if self.distributed:
                    dist.all_reduce(counts)
                load, tokens = counts[:-1], counts[-1]
                total = tokens if self.global_tokens is None else self.global_tokens
                share = load / load.sum().clamp(min=1) * (self.num_experts * self.config.aux_loss) / total
            share = remember(share, tape)
        if self.mask is not None:
            probabilities = probabilities * self.mask.reshape(-1, 1).to(probabilities.dtype)
        weighted: Tensor = (probabilities.sum(0) * share.to(probabilities.dtype)).sum()
        return weighted

    def _counted(self, index: Tensor) -> Tensor:
        count = index.shape[0] if self.mask is None else self.mask.sum()
        return torch.as_tensor(count, dtype=torch.float64, device=index.device).reshape(1)


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


def add_gradient(weights: Tensor, loss: Tensor) -> Tensor:
    """``weights`` unchanged; its backward also differentiates ``loss``, so the loop need not know of it."""
    result: Tensor = _AddGradient.apply(weights, loss)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Load of one optimizer step over all ranks."""

    names: list[str]
    """Experts module of each layer, L."""
    load: Tensor
    """fp64 [L, E], slots of each expert."""
    dropped: Tensor
    """fp64 [L], slots that no expert took."""
    rerouted: Tensor
    """fp64 [L], slots that got another expert than the first choice."""

    def violation(self) -> Tensor:
        """[L], (largest load - mean load) / mean load; 0 is perfect balance."""
        mean = self.load.mean(1)
        return torch.where(mean > 0, (self.load.amax(1) - mean) / mean.clamp(min=1e-9), 0.0)


def after_step(loads: list[tuple[str, Load]], device: torch.device) -> LoadReport | None:
    """Sum the step's counters over all ranks (one all-reduce a kind), move the biases, start counting anew.

    Call it after every optimizer step, on every rank, also when the step's update was skipped.

    Args:
        loads: name and counters of each layer, in the same order on every rank.
        device: of the collectives.

    Returns:
        None for a model without routed experts.
    """
    if not loads:
        return None
    summed = {}
    sizes = {"load": max(load.num_experts for _, load in loads), "dropped": 1, "rerouted": 1}
    if any(load.config.method == "quantile" for _, load in loads):
        sizes["cutoffs"] = max(load.num_experts * load.config.quantile_bins for _, load in loads)
    for name, size in sizes.items():
        rows = torch.zeros(len(loads), size, dtype=torch.float64, device=device)
        for row, (_, load) in zip(rows, loads, strict=True):
            own = load._device_counters.get(name)
            if own is not None:
                row[: own.numel()] = own
        if loads[0][1].distributed:
            dist.all_reduce(rows)
        summed[name] = rows
    for number, (_, load) in enumerate(loads):
        _move_bias(load, summed["load"][number], summed["cutoffs"][number] if "cutoffs" in summed else None)
        for counter in load._device_counters.values():
            counter.zero_()
    return LoadReport(
        names=[name for name, _ in loads],
        load=summed["load"],
        dropped=summed["dropped"][:, 0],
        rerouted=summed["rerouted"][:, 0],
    )


def _move_bias(load: Load, counts: Tensor, cutoffs: Tensor | None) -> None:
    bias = load.bias
    counts = counts[: load.num_experts]
    if bias is None:
        return
    if load.config.method == "bias":
        bias += load.config.bias_speed * (counts.mean() - counts).sign().to(bias.dtype)
    elif cutoffs is not None:
        moved = quantile_bias(
            cutoffs[: load.num_experts * load.config.quantile_bins].view(load.num_experts, -1),
            counts,
            load.config.quantile_range,
        )
        if moved is not None:
            bias.copy_(moved)


def quantile_bias(histogram: Tensor, counts: Tensor, limit: float) -> Tensor | None:
    """The k/E quantile over tokens of (cutoff - score), by expert, centred.

    With this bias an expert would have been above each token's cutoff for k/E of the tokens, its fair share.

    Args:
        histogram: fp64 [E, bins] of the gap over [-limit, limit].
        counts: fp64 [E], slots of each expert: their sum over the tokens is k.
        limit: of the histogram.

    Returns:
        fp64 [E], or None where no token was counted.
    """
    experts, bins = histogram.shape
    tokens = histogram[0].sum()
    if tokens == 0:
        return None
    target = counts.sum() / experts  # k T / E
    below = histogram.cumsum(1)
    cell = torch.searchsorted(below, target.expand(experts, 1).contiguous()).clamp(max=bins - 1)
    before = torch.where(cell > 0, below.gather(1, (cell - 1).clamp(min=0)), 0.0)
    within = ((target - before) / histogram.gather(1, cell).clamp(min=1e-12)).clamp(0, 1)
    gap = ((cell + within) / bins * 2 - 1) * limit
    return (gap - gap.mean()).squeeze(1)


@contextmanager
def counting_only(loads: list[tuple[str, Load]], mask: Tensor | None, global_tokens: float | None) -> Iterator[None]:
    """Within it only tokens of ``mask`` (bool [batch, sequence]) count as load; padding does not.

    Args:
        loads: of the model.
        mask: None counts all.
        global_tokens: tokens of the whole optimizer step over all ranks, the denominator of the auxiliary loss;
            None takes this micro-batch's own.
    """
    for _, load in loads:
        load.mask, load.global_tokens = mask, global_tokens
    try:
        yield
    finally:
        for _, load in loads:
            load.mask = load.global_tokens = None
