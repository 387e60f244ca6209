"""A bundle's kernels compile before the first step: what a step launches then is found in Triton's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.candidate import source
from kernel_templates.gated_activation.spec import Spec as GatedActivation
from kernel_templates.linear_cross_entropy.spec import Spec as Loss
from kernel_templates.moe.spec import Spec as Experts
from kernel_templates.norm.spec import Spec as Norm
from kernel_templates.registry import family_module
from kernel_templates.spec import OperatorSpec
from onboarding.stages.package.layout import KernelEntry, write_helpers, write_kernels
from onboarding.stages.package.shapes import training_shapes

ROOT = Path(__file__).parents[2]
TOKENS = 512

LATER = """
import json, sys
from pathlib import Path
from kernel_templates.loading import load_module
from kernel_templates.recording import compile_launch, record_launches
from kernel_templates import configs
import torch
root, tokens = Path(sys.argv[1]), int(sys.argv[2])
for entry in json.loads((root / "bundle.json").read_text())["kernels"]:
    folder = root / entry["path"]
    kernel = load_module(folder / "_kernel.py")
    shapes = {n: (tuple(round(a * tokens + b) for a, b in t["dims"]), t["dtype"]) for n, t in entry["shapes"].items()}
    made = {n: torch.empty(s[0], dtype=getattr(torch, s[1]), device="meta") for n, s in shapes.items()}
    config = configs.choose(configs.load(folder / "configs"), "nvidia_h200", kernel.bucket(made)).config
    for launches in record_launches(kernel, shapes, config).values():
        for launch in launches:
            compile_launch(launch, 90)
"""


def _outside(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """In a process that compiles rather than interprets, with a cache of its own."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )


def _bundle(folder: Path, specs: list[OperatorSpec]) -> Path:
    folder.mkdir()
    entries = [
        KernelEntry(digest=s.digest(), spec=s.to_dict(), words=s.words(), source=source(s), bindings=[], verified=[])
        for s in specs
    ]
    (folder / "bundle.json").write_text(json.dumps({"kernels": write_kernels(folder, entries)}))
    write_helpers(folder)
    return folder


def test_what_a_step_launches_is_in_the_cache(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle", [Norm(hidden=2304), GatedActivation(width=512)])
    done = _outside(tmp_path, str(bundle / "ahead.py"), "--tokens", str(TOKENS), "--no-verify")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == {}
    found = {path.parent.name for path in (tmp_path / "cache").rglob("*.cubin")}
    assert len(found) == report["compiled"] >= 4  # forward and backward of each
    done = _outside(tmp_path, "-c", LATER, str(bundle), str(TOKENS))
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.parent.name for path in (tmp_path / "cache").rglob("*.cubin")} == found


def test_a_kernel_that_does_not_compile_is_named_and_stops_nobody(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle", [Norm(hidden=2304), GatedActivation(width=512)])
    index = json.loads((bundle / "bundle.json").read_text())
    broken = bundle / index["kernels"][0]["path"] / "_kernel.py"
    broken.write_text(broken.read_text().replace("def forward(", "def lost("))
    done = _outside(tmp_path, str(bundle / "ahead.py"), "--tokens", str(TOKENS), "--no-verify")
    assert done.returncode == 1
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report["failed"]) == [index["kernels"][0]["name"]]
    assert report["compiled"] >= 2


def test_an_unsigned_bundle_is_refused(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle", [Norm(hidden=64)])
    done = _outside(tmp_path, str(bundle / "ahead.py"), "--tokens", "64")
    assert done.returncode != 0
    assert "BundleError" in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("tokens", [96, 640])
@pytest.mark.parametrize(
    "spec",
    [
        Norm(hidden=48, gate="silu"),
        Experts(experts=5, top_k=2, hidden=32, intermediate=16),
        Loss(hidden=48, vocabulary=300),
    ],
    ids=lambda spec: spec.family,
)
def test_shapes_are_those_of_real_inputs(spec: OperatorSpec, tokens: int) -> None:
    cases = family_module(spec.family, "cases")
    case = cases.training_case(spec, tokens)
    real = cases.make_tensors(spec, case, torch.Generator().manual_seed(0), torch.bfloat16, "cpu")
    told = training_shapes(spec)
    assert told is not None
    for name, tensor in real.items():
        if tensor is None:
            assert told[name] is None
        else:
            assert told[name]["dtype"] == str(tensor.dtype).removeprefix("torch.")
            assert [a * tokens + b for a, b in told[name]["dims"]] == list(tensor.shape)
