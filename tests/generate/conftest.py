"""Generated kernels run through the interpreter, unless a CUDA device is there."""

from __future__ import annotations

import torch

from kernel_templates import interpreter

if not torch.cuda.is_available():
    interpreter.activate()
