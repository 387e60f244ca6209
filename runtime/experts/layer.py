"""One layer's routed experts, put in place of the model's own forward."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.experts import replay, selection
from runtime.experts.balance import Load, add_gradient
from runtime.experts.compute import run_experts
from runtime.experts.dispatch import dispatch
from runtime.experts.packed import unpacked
from runtime.experts.replicas import Replicas
from runtime.experts.router import RouterMode
from runtime.experts.shared import SharedExperts
from runtime.experts.sites import Site, expert_parameters
from runtime.experts.transport import Transport
from runtime.parallel.config import ParallelConfig


class ExpertsLayer:
    """Selection, balance and dispatch of one layer; ``install`` hooks it into the model's modules."""

    def __init__(
        self,
        site: Site,
        config: ParallelConfig,
        transport: Transport | None,
        load: Load,
        replicas: Replicas | None = None,
    ) -> None:
        """
        Args:
            site: the layer; its experts module may hold this rank's experts only.
            config: of the run.
            transport: None where every expert is local.
            load: counts tokens, holds the bias.
            replicas: copies of busy experts; None without spare slots.
        """
        self.site = site
        self.config = config
        self.transport = transport
        self.load = load
        self.replicas = replicas
        self.shared = SharedExperts.find(site.block) if transport is not None else None
        self.dropped: Tensor | None = None
        """bool [T, K] of the pass that is running, where capacities drop."""
        self.mode: RouterMode | None = None
        self.allowed: Tensor | None = None
        """bool [E], experts that may be chosen, for tests and benchmarks of skewed load; None is all."""

    def install(self) -> None:
        """Replace the forward of the experts and wrap that of their block."""
        experts, block = self.site.experts, self.site.block
        layer = self

        def run(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return layer.run(hidden_states, top_k_index, top_k_weights)

        original = block.forward

        def routed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return layer.routed(original, *args, **kwargs)

        experts.forward = MethodType(run, experts)
        if self.shared is not None:
            self.shared.install()
        block.forward = MethodType(routed, block)

    def routed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The block's forward with this layer's selection."""
        if self.shared is not None:
            self.shared.expect(*args, **kwargs)
        tape = replay.current()
        if tape is None and not self.config.balance.active and self.allowed is None:
            return original(*args, **kwargs)
        self.mode = RouterMode(self.site.num_experts, self.select, tape)
        self.dropped = None
        try:
            with self.mode:
                return original(*args, **kwargs)
        finally:
            self.mode = None

    def select(self, ranked: Tensor, scores: Tensor, slots: int) -> Tensor:
        """Choose experts, int64 [T, K]; called once a pass, not in recomputation."""
        balance = self.config.balance
        before = ranked
        if self.load.bias is not None and not self.load.bias_is_the_models:
            ranked = ranked + self.load.bias
        if self.allowed is not None:
            ranked = ranked.masked_fill(~self.allowed, -math.inf)
        if balance.groups:
            ranked = selection.limit_groups(ranked, balance.groups, balance.groups_kept)
        best = ranked.topk(slots, -1)
        if balance.method == "quantile":
            self.load.add_cutoffs(best.values[:, -1], scores if self.load.bias_is_the_models else before)
        if not balance.capacity_factor:
            return best.indices
        room = selection.capacity(ranked.shape[0], slots, self.site.num_experts, balance.capacity_factor)
        fitted = selection.fit(best.indices, ranked, room, balance.overflow == "reroute")
        self.load.add_overflow(fitted.dropped, fitted.rerouted)
        self.dropped = fitted.dropped
        return fitted.chosen

    def run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The experts' forward: x [T, D], index [T, K], weights [T, K] -> [T, D]."""
        mode, tape = self.mode, replay.current()
        if mode is not None:
            mode.open = False
        if self.config.balance.capacity_factor:
            dropped = self._replayed(self.dropped, tape)
            if dropped is not None:
                index = index.masked_fill(dropped, -1)
                weights = weights.masked_fill(dropped, 0)
        index = index.where((index >= 0) & (index < self.site.num_experts), -1)
        if tape is None or not tape.replaying:
            self.load.count(index)
        if self.config.balance.aux_loss:
            probabilities = mode.probabilities() if mode is not None else None
            if probabilities is None:
                raise ValueError(f"{self.site.name}: its router never ranks its experts, so it has no auxiliary loss")
            weights = add_gradient(weights, self.load.auxiliary(probabilities, index, self._replayed))
        experts = self.site.experts
        tensors = {n: _local(p) for n, p in experts.named_parameters()}
        if self.transport is None:
            tensors = unpacked(experts, tensors, x.dtype)
            counts = None
            if self.config.balance.capacity_factor:
                counts = torch.bincount(index.reshape(-1) + 1, minlength=self.site.num_experts + 1)[1:].tolist()
            return run_experts(experts, tensors, x, index, weights, counts, self.site.num_experts)
        if self.replicas is not None:
            index = self.replicas.slots(index)
            tensors |= {n: self.replicas.extend(tensors[n]) for n in expert_parameters(experts)}
        tensors = unpacked(experts, tensors, x.dtype)
        meanwhile = self.shared.run_early if self.shared is not None else None
        return dispatch(self.transport, experts, tensors, x, index, weights, self.config.dispatch_chunks, meanwhile)

    def _replayed(self, value: Any, tape: replay.Tape | None) -> Any:
        """``value``, or in a recomputation what it was in the first pass."""
        if tape is None:
            return value
        if tape.replaying:
            return tape.read()
        tape.record(value)
        return value


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
