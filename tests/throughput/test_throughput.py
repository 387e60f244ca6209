"""The timed training, its breakdown, and the slice of the published width."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onboarding.devices import DEVICES
from onboarding.problem import Problem, StageSkipped
from onboarding.sandbox import Outcome
from onboarding.stages.throughput import child, stage
from onboarding.stages.throughput.breakdown import BlockTimes, Clock, part_of
from onboarding.stages.throughput.cut import cut
from onboarding.stages.throughput.report import Report
from onboarding.twin.search import derive
from tests.api.story import align_result, architecture

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EXAMPLES / name / "config.json").read_text())
    return found


class Block(nn.Module):
    """Sleeps as long as it is told in its two parts: that is what must be found."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.self_attn(hidden)
        time.sleep(self.seconds)
        result: torch.Tensor = hidden + self.mlp(hidden)
        return result


def taken_apart(
    model: nn.Module, blocks: list[nn.Module], labels: list[str], x: torch.Tensor
) -> tuple[dict[str, Any], float]:
    """Rows by label, and the milliseconds of the whole step."""
    clock = Clock(torch.device("cpu"))
    with BlockTimes(blocks, clock).watching() as watched:
        begin = clock.mark()
        model(x).sum().backward()
        watched.passed()
        time.sleep(0.006)  # an optimizer
        end = clock.mark()
    return {row["label"]: row for row in watched.table(labels, begin, end)}, clock.ms(begin, end)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_breakdown_is_the_whole_step(frozen: bool) -> None:
    blocks: list[nn.Module] = [Block(0.004), Block(0.012), Block(0.004)]
    model = nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 1))
    model[0].requires_grad_(not frozen)
    rows, step_ms = taken_apart(model, blocks, ["a", "b", "a"], torch.randn(2, 4))
    total = sum(row["forward_ms"] + row["backward_ms"] for row in rows.values())
    assert total == pytest.approx(step_ms, rel=1e-6)
    assert (rows["a"]["layers"], rows["b"]["layers"]) == (2, 1)
    assert rows["a"]["forward_ms"] >= 8
    assert rows["b"]["forward_ms"] >= 12
    assert rows["b"]["parts"]["mixer"] < 5
    assert min(rows["a"]["backward_ms"], rows["b"]["backward_ms"]) > 0
    assert rows["norm, clipping and optimizer"]["forward_ms"] >= 6
    assert rows["between blocks"]["forward_ms"] > 0
    assert (rows["embedding and input"]["backward_ms"] > 0) is not frozen
    before = model[1]._forward_hooks, model[1]._forward_pre_hooks
    assert [len(hooks) for hooks in before] == [0, 0], "nothing stays behind"


def test_a_recomputed_block_counts_its_parts_once() -> None:
    slow = Block(0.0)
    slow.self_attn.forward = lambda x: (time.sleep(0.02), x * 2.0)[1]  # type: ignore[method-assign, assignment, func-returns-value]
    blocks: list[nn.Module] = [Block(0.0), slow]
    for block in blocks:
        own = block.forward
        block.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)
    model = nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 1))
    rows, step_ms = taken_apart(model, blocks, ["a", "b"], torch.randn(2, 4))
    assert 20 <= rows["b"]["parts"]["mixer"] < 38
    assert rows["b"]["backward_ms"] >= 20, "it runs again in backward"
    assert sum(row["forward_ms"] + row["backward_ms"] for row in rows.values()) == pytest.approx(step_ms, rel=1e-6)


def test_parts_go_by_what_a_child_is() -> None:
    names = ("self_attn", "post_attention_layernorm", "mlp", "block_sparse_moe", "mamba", "short_conv", "dropout")
    assert [part_of(n) for n in names] == [
        "mixer", "norms", "feed-forward", "feed-forward", "mixer", "mixer", "other",
    ]  # fmt: skip


def test_a_twin_is_trained_and_timed() -> None:
    plan = derive(config("qwen3-30b-a3b"), layers_at_least=2, sequence_length=32)
    job = child.Job(
        plan=plan.to_json(), config={}, device="cpu", labels=["0"] * 48, seed=0, batch=1, sequence_length=32, warm=1,
        steps=3, bundles=[None], digests=[], adapters=False,
    )  # fmt: skip
    report = Report.model_validate(child.measure(job))
    (run,) = report.runs
    assert len(run.times_ms) == 3
    assert len(run.losses) == 4
    assert run.losses[0] == pytest.approx(5.77, abs=1.2), "ln 320, from random weights"
    whole = sum(row.forward_ms + row.backward_ms for row in run.breakdown)
    assert whole == pytest.approx(run.median_ms, rel=3), "one step, whatever else the machine does"
    assert run.breakdown[0].layers == 2
    again = Report.model_validate(child.measure(job))
    assert again.runs[0].losses == run.losses, "the same seed trains the same way"


def test_a_bundle_that_fails_leaves_the_other_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = derive(config("qwen3-30b-a3b"), layers_at_least=2, sequence_length=32)
    (tmp_path / "apply.py").write_text("def apply(*a, **k):\n    raise ValueError('kernel refused')\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "apply", raising=False)
    job = child.Job(
        plan=plan.to_json(), config={}, device="cpu", labels=["0"] * 48, seed=0, batch=1, sequence_length=32, warm=0,
        steps=1, bundles=[None, str(tmp_path)], digests=[], adapters=False,
    )  # fmt: skip
    report = Report.model_validate(child.measure(job))
    assert [run.bundle for run in report.runs] == [False]
    assert report.bundle_failure == "ValueError: kernel refused"
    monkeypatch.delitem(sys.modules, "apply")


def test_a_slice_of_published_width_trains_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = derive(config("kimi-linear"), layers_at_least=2, sequence_length=32)
    monkeypatch.setattr(child, "memory_of", lambda device: 1 * GIB)
    job = child.Job(
        plan="", config=plan.config, device="cpu", labels=["0", "1", "2"], seed=0, batch=1, sequence_length=32, warm=1,
        steps=2, bundles=[None], digests=[], adapters=True,
    )  # fmt: skip
    report = Report.model_validate(child.measure(job))
    assert report.layers == [0, 1, 2]
    assert all(torch.isfinite(torch.tensor(report.runs[0].losses)))


@pytest.mark.parametrize(
    ("name", "memory", "layers", "experts"),
    [
        ("kimi-linear", 141, (0, 1, 2, 3), None),
        ("llama-3.1-8b", 80, (0, 1, 2, 3), None),
        ("deepseek-v3", 141, (0, 1, 2, 3), None),
        ("deepseek-v3", 24, (0, 1, 2, 3), "1/4 of the published number"),
    ],
)
def test_the_widest_slice_that_fits(name: str, memory: int, layers: tuple[int, ...], experts: str | None) -> None:
    published = config(name)
    plan = cut(published, memory * GIB)
    assert plan.layers == layers
    assert plan.sizes.get("experts") == experts
    for field in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads"):
        assert plan.config.get(field) == published.get(field) or field not in published
    assert 2 * int(plan.sizes["parameters"]) <= 0.6 * memory * GIB


def test_what_fits_nowhere_is_refused_with_every_reason() -> None:
    with pytest.raises(Problem) as problem:
        cut(config("llama-3.1-8b"), GIB // 2)
    assert problem.value.kind == "slice-too-large"
    assert "GiB of weights" in problem.value.detail


def outcome(**changes: Any) -> Outcome:
    plain = {"returncode": 0, "reason": "", "wall_s": 1.0, "stdout_tail": "", "stderr_tail": ""}
    return Outcome(**{**plain, **changes})


def test_a_child_that_fails_or_lies_skips_the_stage_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StageSkipped, match="ValueError: no"):
        stage._read(tmp_path, outcome(reason="exit 1", stderr_tail="Traceback\nValueError: no"))
    (tmp_path / "report.json").write_text('{"runs": []}')
    with pytest.raises(StageSkipped, match="unreadable"):
        stage._read(tmp_path, outcome())


def report(bundle: bool, ms: float) -> dict[str, Any]:
    return {
        "bundle": bundle, "times_ms": [ms, ms * 1.1, ms * 0.9], "losses": [6.0, 5.9, 5.8, 5.7], "median_ms": ms,
        "flops_per_token": 2e10, "peak_bytes": GIB, "kernels": 7 * bundle,
        "breakdown": [
            {"label": "0", "layers": 2, "forward_ms": ms / 4, "backward_ms": ms / 2, "parts": {"mixer": 1.0}},
            {"label": "head and loss", "forward_ms": ms / 4, "backward_ms": 0.0},
        ],
    }  # fmt: skip


def test_figures_of_a_gpu_run() -> None:
    made = architecture()
    align = align_result().model_copy(update={"device": "NVIDIA H200"})
    job = {"device": "cuda", "batch": 1, "sequence_length": 8192, "adapters": True}
    told = Report.model_validate(
        {"sizes": {"layers": 2}, "layers": [0, 1], "runs": [report(False, 400.0), report(True, 200.0)]}
    )
    result = stage._result(made, align, job, told, kernels=3, begun=0.0)
    assert result.speedup == pytest.approx(2)
    fast = result.runs[1]
    assert fast.tokens_per_second == pytest.approx(8192 / 0.2)
    assert fast.tflops == pytest.approx(2e10 * 8192 / 0.2 / 1e12)
    assert fast.mfu == pytest.approx(fast.tflops / 989)
    (point,) = result.points
    # two layers of 2e12 FLOPs each in 50 ms, 2e12 / 3e9 FLOPs a byte: under the flat roof
    assert point.tflops == pytest.approx(2 * 2e12 / 0.05 / 1e12)
    assert point.intensity == pytest.approx(2e12 / 3e9)
    assert point.share == pytest.approx(point.tflops / DEVICES["h200"].tflops)
    assert sum(row.share for row in result.breakdown) == pytest.approx(1)
    assert result.breakdown_ms == pytest.approx(200)


def test_a_cpu_claims_no_speed_of_kernels() -> None:
    job = {"device": "cpu", "batch": 1, "sequence_length": 64, "adapters": False}
    told = Report.model_validate({"sizes": {}, "layers": [0], "runs": [report(False, 30.0)]})
    result = stage._result(architecture(), align_result(), job, told, kernels=3, begun=0.0)
    assert (result.speedup, result.points, result.runs[0].mfu) == (None, [], None)
    assert [run.name for run in result.runs] == ["without the bundle"]
    assert any("interpreter" in sentence for sentence in result.not_measured)
    assert "no kernel was timed" in result.summary
