"""The benchmark registry against published floors, and the whole path at sizes for the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.peers import PEERS
from benchmarks.registry import BENCHMARKS, VARIANTS
from kernel_templates.registry import FAMILIES

BY_NAME = {b.name: b for b in BENCHMARKS}


def test_names_are_unique_and_peers_known() -> None:
    assert len(BY_NAME) == len(BENCHMARKS)
    assert {peer for b in BENCHMARKS for peer in b.peers} == set(PEERS)
    assert {b.spec.family for b in BENCHMARKS} == {s.family for s in VARIANTS.values()} == set(FAMILIES)
    assert len({s.digest() for s in VARIANTS.values()}) == len(VARIANTS)


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        # 5 passes over 65536 x 2304 in bf16; 8 for SwiGLU; 18 R D I and 12 R D I FLOP for the experts
        ("norm_65536x2304", 0.354),
        ("swiglu_65536x2304", 0.566),
        ("experts_e256_k8_d2304_i1024_t8192", 4.06),
        ("experts_e256_k8_d2304_i1024_t8192_frozen", 2.71),
        # 2 N D V FLOP for each of three products, of two with a frozen weight
        ("loss_8192x2304x163840", 27.1),
        ("loss_8192x2304x163840_frozen", 18.06),
    ],
)
def test_floors_are_the_published_ones(name: str, milliseconds: float) -> None:
    assert BY_NAME[name].floor_ms(True) == pytest.approx(milliseconds, rel=5e-3)


def test_the_registry_needs_no_torch() -> None:
    code = "import sys, benchmarks.registry; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(run.__file__).parent.parent, check=True)


def test_every_benchmark_shrinks_to_the_interpreter() -> None:
    for benchmark in BENCHMARKS:
        for size in ("reduced", "tiny"):
            small = benchmark.at(size)
            assert small.spec.flags() == benchmark.spec.flags()
            assert small.tokens < benchmark.tokens


def test_the_path_from_specialiser_to_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path), "--tiny", "--peers", "--only", "norm_8192", "--only", "e128"]
    assert run.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [row["name"] for row in record["rows"]] == ["norm_8192x4096", "experts_e128_k8_d2048_i768_t16384"]
    for row in record["rows"]:
        assert row["status"] == "ok"
        assert row["size"] == "tiny"
        assert all(0 < e["error"] <= e["limit"] for e in row["numerics"].values())
        assert row["times"]["onboard"]["forward_backward_ms"] > 0
    assert "torch.rms_norm" in record["rows"][0]["times"]
    assert "liger.rms_norm" in record["rows"][0]["times"] | record["rows"][0]["peers_absent"]
    assert "experts_e128_k8_d2048_i768_t16384" in capsys.readouterr().out


def test_a_spent_budget_is_said(tmp_path: Path) -> None:
    assert run.main(["--out", str(tmp_path), "--tiny", "--only", "swiglu", "--budget", "0"]) == 1
    (path,) = tmp_path.glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["status"] == "not run: the time budget was used up"
    assert "times" not in row
