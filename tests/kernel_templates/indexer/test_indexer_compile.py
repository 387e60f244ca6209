"""Every kernel compiles for Hopper at the shipped configurations: no spills, no product fed from registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kernel_templates
from kernel_templates import configs
from kernel_templates.aot import Job, compile_all
from kernel_templates.indexer.spec import Spec
from onboarding.stages.generate.specialize import specialise

FOLDER = Path(kernel_templates.__file__).parent / "indexer"
SELECTION = {
    "score_kernel", "narrow_kernel", "select_kernel", "mark_kernel", "offsets_kernel", "gradient_kernel", "add_kernel",
}  # fmt: skip
WARP = 32


def _job(folder: Path, tokens: int, **fields: Any) -> Job:
    spec = Spec(context=tokens, **fields)
    source = folder / f"{spec.digest()}.py"
    source.write_text(specialise(FOLDER / "template.py", spec).source)
    sizes = {"top_k": spec.top_k, "pool": spec.pool}
    if spec.operation == "objective":
        shapes: dict[str, Any] = {
            "scores": ((1, tokens, spec.top_k), "float32"),
            "target": ((1, tokens, spec.top_k), "float32"),
            "count": ((1, tokens), "int32"),
        }
    elif spec.operation == "compression":
        shapes = dict.fromkeys(("k", "gate"), ((1, tokens, spec.head_dim), spec.dtype))
        shapes |= {"bias": ((spec.pool, spec.head_dim), spec.dtype), "start": ((1, tokens // spec.pool), "int32")}
    else:
        shapes = {
            "q": ((1, tokens, spec.heads, spec.head_dim), spec.dtype),
            "k": ((1, tokens, spec.head_dim), spec.dtype),
            **({"weights": ((1, tokens, spec.heads), spec.dtype)} if spec.weighted else {}),
            "begin": ((1, tokens), "int32"),
            "end": ((1, tokens), "int32"),
            "slots": ((spec.top_k,), "int32"),
        }
        sizes |= {"heads": spec.heads, "keys": tokens, "fp32": 65536 if spec.dtype == "float32" else 1}
    config = configs.choose(configs.load(FOLDER / "configs"), "nvidia_h200", sizes).config
    return Job(source=source, tensors=shapes, config=config, label=spec.words())


def _check(jobs: list[Job], kernels: set[str]) -> None:
    reports = compile_all(jobs)
    assert {r.kernel for r in reports} == kernels
    for report in reports:
        where = f"{report.label}: {report.kernel}"
        assert not report.error, f"{where}: {report.error}"
        assert report.spill_bytes == 0, where
        assert report.register_operands == 0, where
        assert report.shared_bytes <= 227 * 1024, where
        assert report.registers * report.num_warps * WARP <= 65536, where


def test_published_deepseek(tmp_path: Path) -> None:
    _check([_job(tmp_path, 32768, top_k=2048, heads=64)], SELECTION)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_sizes_and_flags(tmp_path: Path) -> None:
    others = {f"{name}{kind}_kernel" for name in ("objective", "compression") for kind in ("", "_gradient")}
    jobs = [
        _job(tmp_path, 8192, top_k=2048, heads=32),
        _job(tmp_path, 131072, top_k=2048, heads=16),
        _job(tmp_path, 8192, top_k=16, heads=4, weighted=False, activation="none"),
        _job(tmp_path, 512, top_k=128, heads=32, head_dim=64),
        _job(tmp_path, 1000, top_k=100, heads=5, head_dim=60),
        _job(tmp_path, 8192, top_k=2048, heads=64, dtype="float32"),
        _job(tmp_path, 32768, operation="objective", top_k=2048),
        _job(tmp_path, 4096, operation="objective", top_k=33),
        _job(tmp_path, 131072, operation="compression", top_k=1),
    ]
    _check(jobs, SELECTION | others)
