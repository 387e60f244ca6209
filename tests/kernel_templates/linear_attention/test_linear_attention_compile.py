"""Every kernel compiles for Hopper with its configuration, within its resources and without a known miscompile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kernel_templates
from kernel_templates import configs
from kernel_templates.aot import Job, KernelReport, compile_all
from kernel_templates.linear_attention.spec import Spec
from kernel_templates.linear_attention.template import tile_dim
from kernel_templates.spec import DTYPE_BYTES
from onboarding.stages.generate.specialize import specialise

FOLDER = Path(kernel_templates.__file__).parent / "linear_attention"
SCANS = {"scan_kernel", "output_kernel", "reverse_kernel"}
CHANNEL = SCANS | {"prepare_kernel", "gram_kernel", "score_gradient_kernel", "gradient_kernel"}
HEAD = SCANS | {"head_gram_kernel", "head_gradient_kernel"}
LENGTH = 1024


def compiled(folder: Path, *, packed: bool = False, heads: int = 32, **fields: Any) -> list[KernelReport]:
    """Reports of every kernel of one operator; what holds for all of them is asserted."""
    spec = Spec(**{"key_heads": heads, "value_heads": 32, "key_dim": 128, "value_dim": 128, **fields})
    source = folder / "candidate.py"
    source.write_text(specialise(FOLDER / "template.py", spec).source)
    tensors: dict[str, Any] = dict.fromkeys(("q", "k"), ((1, LENGTH, spec.key_heads, spec.key_dim), spec.dtype))
    tensors["v"] = ((1, LENGTH, 32, spec.value_dim), spec.dtype)
    if spec.decay != "none":
        tensors["g"] = ((1, LENGTH, 32, *((spec.key_dim,) if spec.decay == "channel" else ())), "float32")
    if spec.delta:
        tensors["beta"] = ((1, LENGTH, 32), spec.dtype)
    tensors["initial_state"] = ((1, 32, spec.key_dim, spec.value_dim), "float32")
    tensors["cu_seqlens"] = ((2,), "int64") if packed else None
    sizes = {
        "tokens": LENGTH,
        "heads": 32,
        "key_dim": tile_dim(spec.key_dim),
        "value_dim": tile_dim(spec.value_dim),
        "decay_dim": tile_dim(spec.key_dim) if spec.decay == "channel" else 1,
        "element_bytes": DTYPE_BYTES[spec.dtype],
    }
    config = configs.choose(configs.load(FOLDER / "configs"), "nvidia_h200", sizes).config
    reports = compile_all([Job(source=source, tensors=tensors, config=config)])
    expected = CHANNEL if spec.decay == "channel" else HEAD
    assert {r.kernel for r in reports} == expected - ({"output_kernel"} if config["scan_output"] else set())
    for report in reports:
        assert not report.error, f"{report.kernel}: {report.error}"
        assert report.shared_bytes <= 227 * 1024, report
        # ptxas before 13.3 lets an asynchronous product read registers that are already overwritten
        assert report.register_operands == 0, report
    return reports


def spills(reports: list[KernelReport]) -> dict[str, int]:
    return {r.kernel: r.spill_bytes for r in reports if r.spill_bytes}


@pytest.mark.timeout(600)
def test_kda(tmp_path: Path) -> None:
    found = spills(compiled(tmp_path))
    # more programs a multiprocessor are worth a few spills to these two, as measured
    assert set(found) <= {"gradient_kernel", "gram_kernel"}
    assert max(found.values()) <= 512


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        # head_gradient_kernel spills 496 and 528 bytes; smaller tiles and more warps were slower on an H200
        ({"decay": "head"}, 640),
        ({"decay": "head", "heads": 16}, 640),
        ({"decay": "head", "packed": True}, 640),
        ({"packed": True}, 512),
        ({"decay": "none"}, 640),
        ({"decay": "head", "delta": False, "qk_l2norm": False}, 512),
        ({"delta": False, "qk_l2norm": False}, 512),
        ({"key_dim": 64, "value_dim": 64}, 512),
        ({"key_dim": 64, "value_dim": 64, "decay": "head"}, 512),
        ({"key_dim": 60, "value_dim": 100}, 512),
        ({"key_dim": 192, "value_dim": 256}, 512),
        ({"key_dim": 256, "value_dim": 256}, 512),
        ({"key_dim": 256, "value_dim": 256, "decay": "head"}, 2048),
        ({"dtype": "float16"}, 512),
        ({"dtype": "float16", "decay": "head"}, 2048),
        ({"dtype": "float32"}, 4096),
        ({"dtype": "float32", "decay": "head"}, 8192),
        ({"dtype": "float32", "key_dim": 256, "value_dim": 256}, 8192),
    ],
    ids=str,
)
def test_other_variants(tmp_path: Path, flags: dict[str, Any], allowed: int) -> None:
    assert max(spills(compiled(tmp_path, **flags)).values(), default=0) <= allowed
