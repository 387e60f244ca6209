"""What has no place in a kernel module is found, with its line; the generated candidates are clean."""

from __future__ import annotations

from typing import Any

import pytest
from planting import candidate, small_spec

from kernel_templates.registry import FAMILIES, load_spec
from onboarding.stages.judge.structure import findings

SPECS: dict[str, dict[str, Any]] = {
    "norm": {"hidden": 128, "gate": "silu"},
    "gated_activation": {"width": 64, "limit": 7.0},
    "moe": {"experts": 8, "top_k": 2, "hidden": 64, "intermediate": 32, "bias": True},
    "linear_attention": {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_candidates_are_clean(family: str) -> None:
    flags = SPECS.get(family)
    spec = load_spec({"family": family, **flags}) if flags else small_spec(family)
    assert findings(candidate(spec)) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import os", "imports os"),
        ("from os import system", "imports os"),
        ("from . import x", "imports ."),
        ("import torch.utils.cpp_extension", "reaches for torch.utils"),
        ("from torch import hub", "reaches for torch.hub"),
        ("import torch\ndef f():\n    torch.os.system('x')", "reaches for torch.os"),
        ("import torch\ndef f():\n    torch.load('x')", "reaches for torch.load"),
        ("import torch\ndef f():\n    torch.cuda.os.system('x')", "reaches for torch.cuda.os"),
        ("import triton\ndef f():\n    triton.runtime.driver", "reaches for triton.runtime"),
        ("import torch as t", "renames torch"),
        ("import torch\ndef f():\n    t = torch\n    t.os", "hands the module torch around"),
        ("from torch import os", "reaches for torch.os"),
        ("import torch\nprint(1)", "runs Expr while it is imported"),
        ("x = f()", "calls a function while it is imported"),
        ("for i in range(3):\n    pass", "runs For while it is imported"),
        ("import torch\ndef f():\n    torch.allclose = None", "changes the attribute allclose"),
        ("def f():\n    return f.__globals__", "reaches for __globals__"),
        ("def f():\n    return eval('1')", "uses eval"),
        ("def f(x):\n    return getattr(x, 'a')", "uses getattr"),
        ("def f():\n    import os", "imports os"),
        ("SEEN = {}\ndef f(x):\n    SEEN[0] = x", "keeps state between calls"),
        ("SEEN = []\ndef f(x):\n    SEEN.append(x)", "keeps state between calls"),
        ("N = 0\ndef f():\n    global N", "has a Global statement"),
        ("def f(x, seen=[]):\n    return x", "default that could keep state"),
        ("def f():\n    try:\n        pass\n    except Exception:\n        pass", "has a Try statement"),
        ("class A:\n    pass", "runs ClassDef"),
        ("@cache\ndef f():\n    pass", "decorates a function"),
        ("def f(:", "not valid Python"),
        ("x = '\0'", "not valid Python"),
    ],
)
def test_what_has_no_place_is_found(source: str, what: str) -> None:
    found = findings(source.encode())
    assert any(what in str(finding) for finding in found), found
    assert all(finding.line >= 1 for finding in found)


def test_a_triton_module_may_have_constants_autotuning_and_helpers() -> None:
    source = '''"""A kernel."""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
NEGATIVE = tl.constexpr(-1e30)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * LOG2E, mask=i < n)


def forward(tensors: dict[str, torch.Tensor], config: dict[str, int]) -> tuple[dict, dict]:
    x = tensors["x"]
    made = {"y": torch.empty_like(x)}
    made["rows"] = x.new_zeros(x.shape[:-1], dtype=torch.float32)
    kernel[(triton.cdiv(x.numel(), 64),)](x, made["y"], x.numel())
    return {"y": made.pop("y")}, made
'''
    assert findings(source.encode()) == []
