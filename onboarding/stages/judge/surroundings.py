"""What a candidate's process looks like around the candidate: a kernel leaves all of it as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch


def surroundings(device: torch.device) -> dict[str, Any]:
    """Facts by name, equal if nobody changed them."""
    facts: dict[str, Any] = {
        "the random state": torch.get_rng_state().numpy().tobytes(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": str(torch.get_default_device()),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's deterministic mode": torch.get_deterministic_debug_mode(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "Python's threads": threading.active_count(),
        "the environment": dict(os.environ),
        "the folder": os.getcwd(),
        "where modules are found": tuple(sys.path),
        "the handlers of signals": tuple(signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)),
    }
    if device.type == "cuda":
        facts["the random state of the GPU"] = torch.cuda.get_rng_state(device).numpy().tobytes()
        facts["the current stream"] = torch.cuda.current_stream(device).stream_id
    return facts


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the facts that differ."""
    return [name for name, fact in before.items() if after.get(name) != fact]
