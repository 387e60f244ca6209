"""The adapters themselves. A linear layer keeps its name and its weight's; its adapters are two parameters beside it.

Legend: E experts, r rank, I input width, O output width.
"""

from __future__ import annotations

import hashlib
import math
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.lora.config import LoraConfig
from runtime.parallel.placement import local_part, local_tensor


def adapt_linear(linear: nn.Linear, config: LoraConfig, dtype: torch.dtype) -> None:
    """Add ``lora_A`` [r, I] and ``lora_B`` [O, r] to ``linear`` and use them in its forward.

    Half-precision rows are multiplied by adapters rounded to their dtype, as FSDP's mixed precision rounds them.
    """
    weight = linear.weight
    # a plain method of the class, so a forward that was replaced before (a kernel's) stays in use
    original = linear.forward
    linear.lora_A = nn.Parameter(torch.empty(config.r, linear.in_features, device=weight.device, dtype=dtype))
    linear.lora_B = nn.Parameter(torch.empty(linear.out_features, config.r, device=weight.device, dtype=dtype))

    def forward(self: Any, x: Tensor) -> Tensor:
        result = original(x)
        a, b = self.lora_A, self.lora_B
        if _is_half(x) and result.dtype == x.dtype:
            inner = F.dropout(x, config.dropout, self.training) if config.dropout else x
            narrow = F.linear(inner, a.to(x.dtype)).flatten(0, -2)
            # one pass over the result: the product's epilogue scales and adds in fp32
            added = torch.addmm(result.flatten(0, -2), narrow, b.to(x.dtype).mT, alpha=config.scaling)
            return added.view(result.shape)
        inner = x.to(a.dtype)  # the order of operations of PEFT
        if config.dropout:
            inner = F.dropout(inner, config.dropout, self.training)
        return (result + F.linear(F.linear(inner, a), b) * config.scaling).to(result.dtype)

    linear.__dict__["_before_lora"] = original
    linear.__dict__["forward"] = MethodType(forward, linear)


def restore_linear(linear: nn.Linear) -> None:
    """Take the adapters away again."""
    original = linear.__dict__.pop("_before_lora")
    linear.__dict__.pop("forward", None)
    if original.__func__ is not type(linear).forward:
        linear.__dict__["forward"] = original
    del linear.lora_A, linear.lora_B


class ExpertsLora(nn.Module):
    """Adapters of one experts module, its child ``lora``: NAME_A [E, r, I] and NAME_B [E, O, r] for each weight."""

    def __init__(self, experts: nn.Module, names: list[str], config: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = names
        self.scaling = config.scaling
        self.materialize = config.experts == "merged"
        self.transposed = bool(getattr(experts, "is_transposed", False))
        for name in names:
            weight = experts.get_parameter(name)
            count, rows, columns = weight.shape
            inputs, outputs = (rows, columns) if self.transposed else (columns, rows)
            a = torch.empty(count, config.r, inputs, device=weight.device, dtype=dtype)
            b = torch.empty(count, outputs, config.r, device=weight.device, dtype=dtype)
            self.register_parameter(f"{name}_A", nn.Parameter(a))
            self.register_parameter(f"{name}_B", nn.Parameter(b))

    def add(self, out: Tensor, x: Tensor, name: str, groups: Any) -> Tensor:
        """Add the update of weight ``name`` to out [S, O], for rows x [S, I] grouped by expert."""
        if name not in self.names:
            return out
        a, b = getattr(self, f"{name}_A"), getattr(self, f"{name}_B")
        if _is_half(x):
            a, b = a.to(x.dtype), b.to(x.dtype)
        narrow = groups.product(x.to(a.dtype), a.mT) * self.scaling
        result: Tensor = (out + groups.product(narrow, b.mT)).to(out.dtype)
        return result

    def merged(self, view: Any) -> dict[str, Tensor]:
        """The experts' weights with their updates, in the order of operations of PEFT's ``ParamWrapper``."""
        result = {}
        for name in self.names:
            weight = getattr(view, name)
            a = getattr(self, f"{name}_A").to(weight.dtype)
            b = getattr(self, f"{name}_B").to(weight.dtype)
            left, right = (a.mT, b.mT) if self.transposed else (b, a)
            result[name] = torch.baddbmm(weight, left, right, alpha=self.scaling)
        return result


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def initialize(name: str, parameter: Tensor, config: LoraConfig) -> None:
    """Fill an adapter parameter: A uniform within 1/sqrt(I) (Kaiming with a = sqrt 5, as PEFT), B zero.

    Works on plain, sharded and freshly materialized parameters alike; every layout gets the same numbers.

    Args:
        name: of the parameter in the model.
        parameter: ends in ``_A`` or ``_B``.
        config: gives the seed.
    """
    target = local_tensor(parameter)
    if target.device.type == "meta":
        return
    with torch.no_grad():
        if name.endswith("_B"):
            target.zero_()
            return
        digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.empty(parameter.shape, dtype=torch.float32)
        whole.uniform_(-1.0, 1.0, generator=generator).mul_(1.0 / math.sqrt(parameter.shape[-1]))
        target.copy_(whole[local_part(parameter)])
