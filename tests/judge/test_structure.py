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
        ("def f():\n    return (0 for _ in ()).gi_frame.f_builtins", "reaches for gi_frame"),
        ("def f(x):\n    match x:\n        case str(gi_frame=y):\n            return y", "has a MatchClass"),
        ("SEEN = [0]\ndef f(x):\n    seen = SEEN\n    seen[0] += 1", "keeps state between calls"),
        ("SEEN = (0, [])", "keeps state between calls"),
        ("INPUTS = {}\ndef f(x):\n    return INPUTS", "keeps state between calls"),
        ("SEEN = tl.constexpr([0])", "keeps state between calls"),
        ("INPUTS = {}\ndef f(x, seen=INPUTS):\n    return seen", "default that could keep state"),
        ("f = lambda x, seen=[]: seen", "default that could keep state"),
        ("from torch import *", "imports everything of torch"),
        ("import torch\ndef f():\n    torch.manual_seed(0)", "reaches for torch.manual_seed"),
        ("import torch\ndef f():\n    return torch.initial_seed()", "reaches for torch.initial_seed"),
        ("import torch\ndef f():\n    return torch.get_num_threads()", "reaches for torch.get_num_threads"),
        ("import torch\ndef f():\n    torch.use_deterministic_algorithms(False)", "reaches for torch.use_det"),
        ("import torch\ndef f():\n    with torch.Stream():\n        pass", "reaches for torch.Stream"),
        ("import torch\ndef f():\n    return torch.cuda.synchronize()", "reaches for torch.cuda.synchronize"),
        ("import torch\ndef f():\n    return torch.rand(3)", "reaches for torch.rand"),
        ("def f(x):\n    x.numpy().tofile('a')", "reaches for numpy"),
        ("def f(x):\n    return x.untyped_storage().from_file('a')", "reaches for untyped_storage"),
        ("def f(x):\n    x.register_hook(f)", "reaches for register_hook"),
        ("def f(x):\n    return x.data_ptr()", "reaches for data_ptr"),
        ("def f(x):\n    return type('T', (), {})", "uses type"),
        ("def f(x):\n    print(x)", "uses print"),
        ("def f(x: print(1)):\n    return x", "calls a function while it is imported"),
        ("def f(x):\n    return '{0.gi_frame}'.format(x)", "reaches for format"),
        ("def k():\n    pass\ndef f(x):\n    k.add_pre_run_hook(f)", "reaches for add_pre_run_hook"),
        ("def f():\n    tl.inline_asm_elementwise('x')", "reaches for tl.inline_asm_elementwise"),
        ("def f():\n    tl.core.x", "reaches for tl.core"),
        ("TRAITS, N = {}, 1", "in a roundabout way"),
        ("N = (TRAITS := {})", "in a roundabout way"),
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
