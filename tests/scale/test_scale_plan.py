"""Layouts against the runtime's own meshes, the budget against a dry run of the runtime, and the plan as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from onboarding.architecture import Architecture, Growth, MemoryEstimate
from onboarding.devices import find_device
from onboarding.stages.scale import layout, limits, memory
from onboarding.stages.scale.plans import Planner
from onboarding.stages.scale.result import Hardware
from onboarding.step_time.hardware import SYSTEMS
from onboarding.step_time.work import Work, work_of
from onboarding.twin.search import derive
from runtime.dryrun import dry_run
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import build_meshes
from tests.api.story import architecture

GIB = 2**30


def hardware(nodes: int = 2, per_node: int = 8, memory_gib: int = 141) -> Hardware:
    return Hardware(
        name="NVIDIA H200 SXM", nodes=nodes, per_node=per_node, memory_bytes=memory_gib * GIB, link=450, nic=50
    )


def work(experts: int = 64) -> Work:
    return Work(
        name="m", layers=8, hidden=1024, vocabulary=32000, parameters=9e9, routed_parameters=8e9, linear_flops=2e9,
        attention_slope=1e5, expert_flops=1e9, moe_layers=8, experts=experts, top_k=4, expert_width=1024,
        expert_width_in=1024, block_dense=1.2e8, block_routed=1e9, outputs=1e5, routed_outputs=2e5,
    )  # fmt: skip


@pytest.mark.parametrize("ep", [2, 8, 16])
def test_groups_are_those_that_the_runtime_builds(ep: int) -> None:
    config = ParallelConfig(ep=ep, hierarchical="across_first" if ep > 8 else "off", ranks_per_node=8 if ep > 8 else 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    try:
        meshes = build_meshes(config, 16, "cpu")
        built = {"fsdp": meshes.dense["fsdp"], "ep": meshes.expert["ep"], "efsdp": meshes.expert["efsdp"]}  # type: ignore[index]
        if meshes.across is not None and meshes.inside is not None:
            built |= {"ep_across": meshes.across, "ep_inside": meshes.inside}
        ranks = {name: dist.get_process_group_ranks(mesh.get_group()) for name, mesh in built.items()}
    finally:
        dist.destroy_process_group()
    found = {group.name: group for group in layout.groups(hardware(), ep)}
    assert found.keys() == ranks.keys()
    for name, group in found.items():
        assert group.first == ranks[name], name
        assert group.size * group.count == 16
        away = sum(rank >= 8 for rank in ranks[name]) / len(ranks[name])
        assert group.between_nodes == pytest.approx(away), name


def test_expert_groups_tile_nodes_and_divide_the_experts() -> None:
    assert layout.possible(hardware(nodes=3), work(96)) == [1, 2, 4, 8, 24]
    assert layout.possible(hardware(nodes=16), work(48)) == [1, 2, 4, 8, 16]
    assert layout.possible(hardware(), work(0)) == [1]
    assert layout.expert_split(16, work(64)) == "rank r holds experts 4 (r mod 16) to 4 (r mod 16) + 3 of 64"


def test_the_budget_agrees_with_a_dry_run_of_the_runtime(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "qwen3-30b-a3b" / "config.json"
    plan = derive(json.loads(example.read_text()), layers_at_least=2, sequence_length=64)
    (tmp_path / "config.json").write_text(json.dumps(plan.config))
    seen = dry_run(tmp_path, ranks=8, parallel=ParallelConfig(ep=4), tokens=16)
    made = architecture().model_copy(deep=True)
    made.census.total = seen.parameters
    planned = memory.budget(made, work(), hardware(1), "full", ep=4, microbatch=1, tokens=16)
    # padding of uneven shards aside; the runtime's own moments are two float32 a weight, and a step count each
    assert planned.device["weights"] == pytest.approx(seen.weight_bytes, rel=0.05)
    assert planned.device["gradients"] == pytest.approx(seen.gradient_bytes, rel=0.05)
    assert planned.device["optimizer"] == pytest.approx(seen.optimizer_bytes, rel=0.05)


def test_two_blocks_are_gathered_at_a_time_and_logits_come_in_chunks() -> None:
    law = Growth(linear=6 * 32000 + 5e4)
    estimate = MemoryEstimate(weights=0, gradients=0, optimizer=0, activations=Growth(), recomputed=law)
    made = architecture().model_copy(update={"memory": estimate})
    planned = memory.budget(made, work(), hardware(), "adapters", ep=8, microbatch=2, tokens=8192)
    assert planned.device["gathered weights"] == 2 * 2 * (1.2e8 + 1e9 / 8)
    assert planned.device["activations"] == pytest.approx(2 * 8192 * 5e4)
    assert planned.device["logits"] == 1024 * 32000 * 12
    assert planned.device["communication buffers"] == 4 * 2 * 2 * 8192 * 1024 * 4
    assert planned.fits is (planned.device_total < 0.92 * 141 * GIB)


def planner(made: Architecture, of: Work, machines: Hardware) -> Planner:
    return Planner(
        architecture=made, work=of, device=find_device("h200"), system=SYSTEMS["H200"], hardware=machines,
        asked=machines, tokens=4096, microbatch=1, trial=(1.0, ""),
    )  # fmt: skip


def test_the_chosen_layout_is_the_fastest_that_fits() -> None:
    plan = planner(architecture(), work(), hardware(nodes=4)).plan("adapters")
    assert plan.projection is not None
    chosen = next(row for row in plan.layouts if row.chosen)
    assert chosen.fits
    assert chosen.step_s == min(row.step_s for row in plan.layouts if row.step_s is not None)
    p = plan.projection
    assert sum(part.seconds for part in p.parts) == pytest.approx(p.step_s)
    assert p.step_s == pytest.approx(chosen.step_s)
    assert p.low_s < p.step_s < p.high_s
    assert p.tokens_per_second_per_device * p.step_s == pytest.approx(4 * 4096)
    assert [point.devices for point in p.curve] == [8, 16, 32]
    assert p.curve[0].efficiency == 1
    assert p.curve[-1].step_s == pytest.approx(p.step_s)
    assert [u.imbalance for u in p.uneven] == [1.25, 1.5, 2.0]
    assert p.step_s < p.uneven[0].step_s < p.uneven[2].step_s
    assert any("projection" in line for line in p.basis)
    assert any("published" in line for line in p.basis)


def test_what_fits_nowhere_gets_no_projection_but_a_reason() -> None:
    made = architecture().model_copy(deep=True)
    made.census.total = 10**13
    plan = planner(made, work(), hardware(memory_gib=16)).plan("full")
    assert plan.projection is None
    assert "memory" in plan.reason
    chosen = next(row for row in plan.layouts if row.chosen)
    assert chosen.device_bytes == min(row.device_bytes for row in plan.layouts)
    assert all(row.step_s is None for row in plan.layouts)


def test_work_is_read_off_the_operator_graph() -> None:
    fields = {"shapes": "", "role": "mixer", "block": "K", "bytes_moved": 0.0, "matmul": True}
    made = architecture().model_copy(update={"graph": [], "sequence_length": 128})
    graph = [
        {"name": "mm", "phase": "forward", "count": 2, "flops": 1048576.0, **fields, "shapes": "128x64, 64x32"},
        {"name": "mm", "phase": "backward", "count": 4, "flops": 1e9, **fields},
        {"name": "attention", "phase": "forward", "count": 1, "flops": 128 * 129 / 2 * 40.0, **fields},
        {"name": "attention window 16", "phase": "forward", "count": 1, "flops": 128 * 7.0, **fields},
        {"name": "experts", "phase": "forward", "count": 1, "flops": 128 * 11.0, **fields},
    ]  # fmt: skip
    made = Architecture.model_validate({**made.model_dump(), "graph": graph})
    found = work_of(made)
    assert found.linear_flops == 2 * 2 * 64 * 32
    assert found.attention_slope == pytest.approx(40)
    assert found.attention_flops == pytest.approx(7)
    assert found.expert_flops == pytest.approx(11)
    assert found.attention(255) == pytest.approx(40 * 128 + 7)


def test_the_critical_batch_is_that_of_the_paper() -> None:
    """Kaplan et al. 2020, section 5.1: it doubles, roughly, for every 13 % that the loss falls."""
    for loss in (2.0, 3.0, 4.0):
        assert limits.critical_batch(0.87 * loss) / limits.critical_batch(loss) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("devices", "micro_batches"), [(8, 4), (128, 4), (224, 4), (256, 2), (468, 2), (512, 1), (8192, 1), (73728, 1)]
)
def test_micro_batches_keep_a_step_below_the_critical_batch(devices: int, micro_batches: int) -> None:
    assert limits.accumulated(devices, 1, 8192) == micro_batches


def test_devices_without_use_are_said_to_be_so_and_the_curve_falls() -> None:
    asked = hardware(nodes=9216)
    planned = limits.limited(asked, 1, 8192)
    assert planned.devices == 67_108_864 // 8192 == 8192
    assert limits.limited(hardware(nodes=16), 1, 8192) == hardware(nodes=16)
    assert limits.limited(hardware(nodes=4), 1, 67_108_864 * 2).nodes == 1
    told = limits.remarks(asked, planned, work(), microbatch=1, tokens=8192, ep=64)
    assert [words for line, words in zip(told, ("8,192 of 73,728", "critical batch", "8.0-fold", "1,024"), strict=True)
            if words in line] == ["8,192 of 73,728", "critical batch", "8.0-fold", "1,024"]  # fmt: skip
    made = Planner(
        architecture=architecture(), work=work(), device=find_device("h200"), system=SYSTEMS["H200"], hardware=planned,
        asked=asked, tokens=8192, microbatch=1, trial=(1.0, ""),
    ).plan("adapters")  # fmt: skip
    assert made.projection is not None
    curve = {point.devices: point for point in made.projection.curve}
    assert (curve[8192].usable, curve[16384].usable, curve[73728].usable) == (8192, 8192, 8192)
    assert curve[16384].efficiency == pytest.approx(curve[8192].efficiency / 2)
    assert curve[73728].efficiency == pytest.approx(curve[8192].efficiency / 9)


def test_nothing_is_said_where_nothing_stands_against_it() -> None:
    asked = hardware(nodes=16)
    assert limits.remarks(asked, asked, work(), microbatch=1, tokens=8192, ep=8) == []
    few = limits.remarks(asked, asked, work(4096), microbatch=1, tokens=8192, ep=1)
    assert len(few) == 1
    assert "8 rows" in few[0]
