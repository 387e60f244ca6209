"""The next-token loss without all logits in memory: the head runs on a few tokens at a time, and again in backward.

The model's own forward computes the logits of each chunk (with whatever scaling or capping its class does there): only
the part below the head is replaced, by the hidden states that were computed before.

Where a bundle serves the loss, its head gives logits that are not computed yet (a method ``made`` would do it) and its
loss function takes these, all tokens at once: no logits, and no second pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def install_loss(model: nn.Module, chunk: int) -> None:
    """Make ``model(input_ids, position_ids, labels)`` return the summed loss of its labels.

    Args:
        model: a transformers causal language model; labels are already shifted (int64, -100 is not counted).
        chunk: tokens whose logits exist at one time; 0 makes them all at once.
    """
    own = model.__dict__.get("forward") or MethodType(type(model).forward, model)
    base = base_of(model)

    def forward(self: nn.Module, input_ids: Tensor, position_ids: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return own(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        if chunk == 0:
            logits = own(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            return summed_loss(logits, labels)
        outputs = base(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden = outputs.last_hidden_state.flatten(0, 1)[None]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        ids, targets = input_ids.flatten()[None], labels.flatten()[None]
        if _defers(self, own, base, outputs, hidden, ids):
            with _returning(base, type(outputs)(**{**outputs, "last_hidden_state": hidden})):
                logits = own(input_ids=ids, use_cache=False).logits
            count = torch.ones((), device=hidden.device)
            options = {"shift_labels": targets, "vocab_size": logits.shape[-1], "num_items_in_batch": count}
            return self.loss_function(logits=logits, labels=targets, **options)  # type: ignore[operator]
        for begin in range(0, ids.shape[1], chunk):
            part = slice(begin, begin + chunk)
            total = total + _chunk_loss(own, base, outputs, hidden[:, part], ids[:, part], targets[:, part])
        return total

    model.forward = MethodType(forward, model)


def _defers(model: nn.Module, own: Any, base: nn.Module, outputs: Any, hidden: Tensor, ids: Tensor) -> bool:
    """Whether a bundle's kernel takes this call's loss: one token is tried."""
    if "_loss_function" not in model.__dict__:
        return False
    with torch.no_grad(), _returning(base, type(outputs)(**{**outputs, "last_hidden_state": hidden[:, :1]})):
        return hasattr(own(input_ids=ids[:, :1], use_cache=False).logits, "made")


def base_of(model: nn.Module) -> nn.Module:
    """The part below the head."""
    base: nn.Module = getattr(model, str(model.base_model_prefix))
    return base


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log softmax at the labels, in float32 or wider; [rows, length, vocabulary] and [rows, length]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _chunk_loss(own: Any, base: nn.Module, outputs: Any, hidden: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    def run(piece: Tensor) -> Tensor:
        with _returning(base, type(outputs)(**{**outputs, "last_hidden_state": piece})):
            return summed_loss(own(input_ids=ids, use_cache=False).logits, labels)

    if not torch.is_grad_enabled():
        return run(hidden)
    result: Tensor = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
    return result


@contextmanager
def _returning(module: nn.Module, value: Any) -> Iterator[None]:
    """Inside, a call of ``module`` gives ``value`` (its hooks do not run)."""
    before = module.__dict__.get("_call_impl")
    module.__dict__["_call_impl"] = lambda *args, **kwargs: value
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["_call_impl"]
        else:
            module.__dict__["_call_impl"] = before
