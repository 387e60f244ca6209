"""Growing contexts: what a longer row costs in memory, and whether the numbers hold.

On a CPU the reduced twin, forward and backward, in float32 beside float64: bytes that backward reads, counted exactly,
and the error by length. On a GPU whole training steps of the slice: peak memory, time and loss, as far as memory and
time go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CPU_LENGTHS = (64, 128, 256, 512)
LONGEST = 1 << 20
"""Tokens at which a GPU stops."""
ROOM = 0.92
"""Share of a GPU's memory that the next length may be expected to fill."""
SECONDS = 90.0
"""Time that all lengths together may be expected to take."""


def on_cpu(build: Callable[[torch.dtype], nn.Module], rows: Callable[[int], Tensor]) -> list[dict[str, Any]]:
    """One row a length.

    Args:
        build: the twin in a dtype, with the same values in each.
        rows: token ids int64 [1, length].
    """
    models = {dtype: build(dtype) for dtype in (torch.float32, torch.float64)}
    found: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for length in CPU_LENGTHS:
        # the next length takes twice to four times what the last one took
        if found and time.perf_counter() - begun + 4 * float(found[-1]["seconds"]) > SECONDS:
            break
        started = time.perf_counter()
        ids = rows(length)
        loss, saved, gradient = _pass(models[torch.float32], ids)
        exact, _, expected = _pass(models[torch.float64], ids)
        found.append(
            {
                "tokens": length,
                "seconds": time.perf_counter() - started,
                "bytes": saved,
                "loss": loss,
                "loss_error": abs(loss - exact) / abs(exact),
                "gradient_error": float((gradient.double() - expected).norm() / expected.norm()),
            }
        )
    return found


def on_gpu(step: Callable[[int], float], start: int, device: torch.device) -> list[dict[str, Any]]:
    """One row a length, doubling from ``start``.

    Args:
        step: one training step on a row of so many tokens; gives its loss.
        start: tokens of the first length.
        device: a GPU.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    found: list[dict[str, Any]] = []
    begun, length = time.perf_counter(), start
    while length <= LONGEST:
        if len(found) > 1 and expected_peak(found, length) > ROOM * total:
            break
        if found and time.perf_counter() - begun + 8 * float(found[-1]["seconds"]) > SECONDS:
            break
        try:
            step(length)  # compiles what this length needs
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            started = time.perf_counter()
            loss = step(length)
            torch.cuda.synchronize(device)
        except torch.cuda.OutOfMemoryError:
            break
        found.append(
            {
                "tokens": length,
                "seconds": time.perf_counter() - started,
                "bytes": torch.cuda.max_memory_allocated(device),
                "loss": loss,
            }
        )
        length *= 2
    return found


def expected_peak(rows: list[dict[str, Any]], length: int) -> float:
    """By the line through the last two lengths."""
    a, b = rows[-2], rows[-1]
    slope = (b["bytes"] - a["bytes"]) / (b["tokens"] - a["tokens"])
    return float(b["bytes"] + slope * (length - b["tokens"]))


def _pass(model: nn.Module, ids: Tensor) -> tuple[float, int, Tensor]:
    """Loss, bytes that backward reads, and every gradient in one flat tensor."""
    model.zero_grad(set_to_none=True)
    with saved_bytes(model) as count:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float(loss.detach()), count[0], gradient


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Bytes of all storages that autograd keeps inside, each once; parameters and buffers do not count."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}
    count = [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = tensor  # held, so that no other takes its address
            count[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count
    kept.clear()
