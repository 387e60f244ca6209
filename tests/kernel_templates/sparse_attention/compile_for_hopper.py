"""Compiles what the host functions launch, for sm_90 and without a GPU; prints one JSON line a kernel.

Run as a program, because the interpreter replaces ``triton.jit`` in the test process. The launches are real: meta
tensors go through forward and backward, the driver says "Hopper", and every launch stops after its compilation.

Usage: compile_for_hopper.py '[{"spec": {...}, "case": [tokens, keys], "config": {...}}]'
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernel_templates.configs import choose, load
from kernel_templates.sparse_attention import template as untyped
from kernel_templates.sparse_attention.spec import Spec

template: Any = untyped
CONFIGS = Path(template.__file__).parent / "configs"
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Hopper:
    """What compilation asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int]:
    """Registers and stack bytes (spills live there) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    used = dict(re.findall(r"(REG|STACK):(\d+)", listing))
    return {key: int(value) for key, value in used.items()}


def products(kernel: Any) -> dict[str, int]:
    """Matrix instructions by kind: wgmma with its first operand in shared memory or in registers, and mma.sync."""
    text = kernel.asm["ptx"]
    wgmma = re.findall(r"wgmma\.mma_async\S* \{[^}]*\}, (\{?)", text)
    return {
        "shared_first": sum(1 for brace in wgmma if not brace),
        "registers_first": sum(1 for brace in wgmma if brace),
        "mma_sync": len(re.findall(r"\bmma\.sync", text)),
    }


def compile_all(spec: Spec, case: list[int], lists: int, overrides: dict[str, Any]) -> None:
    """Forward and backward of one operator on meta tensors."""
    tokens, keys = case
    dtype = DTYPES[spec.dtype]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shape = (tokens, lists, spec.top_k) if lists > 1 else (tokens, spec.top_k)
    tensors = {
        "q": empty(tokens, spec.heads, spec.key_dim),
        "k": empty(keys, spec.kv_heads, spec.key_dim),
        "index": empty(*shape, dtype=torch.int32),
    }
    if spec.separate:
        tensors["v"] = empty(keys, spec.kv_heads, spec.value_dim)
    if spec.rope:
        tensors |= {"q_rope": empty(tokens, spec.heads, spec.rope_dim)}
        tensors |= {"k_rope": empty(keys, spec.kv_heads, spec.rope_dim)}
    if spec.sink:
        tensors["sink"] = empty(spec.heads, dtype=torch.float32)
    config = choose(load(CONFIGS), "nvidia_h200", template.bucket(tensors, spec)).config | overrides
    outputs, saved = template.forward(tensors, spec, config)
    needs = set(tensors) - {"index"}
    template.backward(tensors, saved, outputs, needs, spec, config)


def main() -> None:
    driver.set_active(Hopper())
    found: dict[str, Any] = {}

    def compile_only(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            found[kernel.hash] = kernel

        return launch

    JITFunction.__getitem__ = compile_only
    for job in json.loads(sys.argv[1]):
        compile_all(Spec(**job["spec"]), job["case"], job.get("lists", 1), job.get("config", {}))
    for kernel in found.values():
        used = resources(kernel)
        line = {"kernel": kernel.metadata.name, "warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
        print(json.dumps(line | {"registers": used["REG"], "stack": used["STACK"]} | products(kernel)))


if __name__ == "__main__":
    main()
