"""Compiles what the host functions launch, for sm_90 and without a GPU; prints one JSON line a kernel.

Run as a program, because the interpreter replaces ``triton.jit`` in the test process. Meta tensors go through forward
and backward, the driver says "Hopper", and every launch stops after its compilation.

Usage: compile_for_hopper.py '[{"spec": {...}, "length": 1024, "packed": false}]'
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernel_templates.configs import choose, load
from kernel_templates.linear_attention import template
from kernel_templates.linear_attention.spec import Spec

CONFIGS = Path(template.__file__).parent / "configs"
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# wgmma's accumulators stand in braces; a first operand in braces too comes from registers
WGMMA = re.compile(r"wgmma\.mma_async[^;]*?\{[^}]*\}\s*,\s*(\{|%)", re.DOTALL)


class Hopper:
    """What compilation asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def resources(kernel):
    """Registers and stack bytes (spills live there) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(re.search(rf"{key}:(\d+)", listing).group(1)) for key in ("REG", "STACK")}


def compile_all(spec, length, packed):
    """Forward and backward of one operator on meta tensors."""
    dtype = DTYPES[spec.dtype]
    heads, channels = spec.value_heads, (spec.key_dim,) if spec.decay == "channel" else ()

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    state = empty(1, heads, spec.key_dim, spec.value_dim, dtype=torch.float32)
    tensors = {
        "q": empty(1, length, spec.key_heads, spec.key_dim),
        "k": empty(1, length, spec.key_heads, spec.key_dim),
        "v": empty(1, length, heads, spec.value_dim),
        "initial_state": state,
        "cu_seqlens": empty(2, dtype=torch.int64) if packed else None,
    }
    if spec.decay != "none":
        tensors["g"] = empty(1, length, heads, *channels, dtype=torch.float32)
    if spec.delta:
        tensors["beta"] = empty(1, length, heads)
    config = choose(load(CONFIGS), "nvidia_h200", template.bucket(tensors, spec)).config
    outputs, saved = template.forward(tensors, spec, config)
    grads = {"o": outputs["o"], "final_state": outputs["final_state"]}
    template.backward(tensors, saved, grads, {"q"}, spec, config)


def main():
    driver.set_active(Hopper())
    found = {}

    def compile_only(self, grid):
        def launch(*args, **kwargs):
            kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            found[kernel.hash] = kernel

        return launch

    JITFunction.__getitem__ = compile_only
    for job in json.loads(sys.argv[1]):
        compile_all(Spec(**job["spec"]), job["length"], job.get("packed", False))
    for kernel in found.values():
        used = resources(kernel)
        wgmma = WGMMA.findall(kernel.asm["ptx"])
        print(
            json.dumps(
                {
                    "kernel": kernel.metadata.name,
                    "warps": kernel.metadata.num_warps,
                    "shared": kernel.metadata.shared,
                    "registers": used["REG"],
                    "stack": used["STACK"],
                    "wgmma": len(wgmma),
                    "wgmma_from_registers": wgmma.count("{"),
                }
            )
        )


if __name__ == "__main__":
    main()
