"""The last step of any router: which experts a token gets.

Routers differ in how they score, not in how they choose: all end in ``topk`` over [T, E]. While a block runs, that call
is answered here, so a selection bias, group limits, capacities and the replay of a recomputation work for every router.
Scores keep their gradient: the values returned are gathered from the router's own tensor.

Legend: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runtime.experts.replay import Tape

TOPK = (torch.topk, Tensor.topk)
SCORES = (torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.softmax, Tensor.softmax, F.softmax)

Select = Callable[[Tensor, Tensor, int], Tensor]
"""(what the router ranks [T, E], its probabilities [T, E], K) -> chosen experts, int64 [T, K]."""


class RouterMode(TorchFunctionMode):
    """Answers ``topk`` until the experts run."""

    def __init__(self, num_experts: int, select: Select, tape: Tape | None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.select = select
        self.tape = tape
        self.scores: Tensor | None = None
        """[T, E] probabilities of the router, where it makes any before it chooses."""
        self.ranked: Tensor | None = None
        """[T, E], what it chose by."""
        self.open = True

    def probabilities(self) -> Tensor | None:
        """[T, E] with the router's gradient, each row summing to one; None before it chose."""
        if self.ranked is None:
            return None
        if self.scores is None:
            return self.ranked.float().softmax(-1)
        return self.scores / self.scores.sum(-1, keepdim=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.open:
            return func(*args, **kwargs)
        if func in TOPK:
            return self._topk(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in SCORES and self.ranked is None and result.shape[-1] == self.num_experts:
            self.scores = result
        return result

    def _topk(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        final = input.ndim == 2 and input.shape[-1] == self.num_experts and dim in (-1, 1) and largest
        if self.tape is not None and self.tape.replaying:
            chosen = self.tape.read()
        else:
            with torch.no_grad():
                if final:
                    scores = input if self.scores is None else self.scores
                    chosen = self.select(input.detach(), scores.detach().reshape(input.shape), k)
                else:
                    chosen = input.detach().topk(k, dim, largest, sorted).indices
            if self.tape is not None:
                self.tape.record(chosen)
        if final:
            self.ranked = input
        return torch.return_types.topk((input.gather(dim, chosen), chosen))
