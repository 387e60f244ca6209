"""Generated kernels run through the interpreter, unless a CUDA device is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernel_templates import interpreter

if not torch.cuda.is_available():
    interpreter.activate()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What a kernel does not write is NaN (or the largest integer), the same in every run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
