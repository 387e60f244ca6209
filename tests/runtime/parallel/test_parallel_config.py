"""Impossible layouts are refused before anything starts, with the fix in the message."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.parallel.config import BalanceConfig, ParallelConfig
from runtime.parallel.meshes import build_meshes


@pytest.mark.parametrize(
    ("settings", "world", "experts", "fix"),
    [
        ({"ep": 3}, 8, 9, r"ep 3 does not divide the 8 ranks of a replica; use one of \[1, 2, 4, 8\]"),
        ({"ep": 4}, 8, 6, r"ep 4 does not divide 6 experts; use one of \[1, 2\]"),
        ({"ep": 2}, 8, 0, "without routed experts; use ep 1"),
        ({"dp_replicate": 3}, 8, 0, r"dp_replicate 3 does not divide the 8 ranks; use one of \[1, 2, 4, 8\]"),
        ({"ep": 8, "dp_replicate": 2}, 8, 16, r"ep 8 does not divide the 4 ranks of a replica"),
        ({"balance": BalanceConfig(groups=3, groups_kept=1)}, 1, 8, "3 groups do not divide 8 experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(settings: Any, world: int, experts: int, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        ParallelConfig(**settings).check(world, experts)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"ep": 0}, "ep must be at least 1"),
        ({"hierarchical": "yes"}, "hierarchical must be one of off, across_first, inside_first"),
        ({"hierarchical": "across_first", "ep": 4}, "needs ranks_per_node"),
        ({"hierarchical": "across_first", "ep": 6, "ranks_per_node": 4}, "use hierarchical off, or ep 4"),
        ({"compression": "int4"}, "compression must be one of none, bf16, fp8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Any, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"method": "magic"}, "method must be one of none, bias, quantile"),
        ({"overflow": "ignore"}, "overflow must be one of drop, reroute"),
        ({"groups": 4}, "set groups and groups_kept together"),
        ({"groups": 2, "groups_kept": 3}, "groups_kept at most groups"),
        ({"aux_loss": -1.0}, "cannot be negative"),
        ({"bias_speed": 0.0}, "must be positive"),
    ],
)
def test_balance_settings_are_checked(settings: Any, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        BalanceConfig(**settings)


def test_several_ranks_without_a_group_are_told_to_use_torchrun() -> None:
    with pytest.raises(ValueError, match="torchrun"):
        build_meshes(ParallelConfig(), 2, "cpu")


def test_the_published_layout_fits() -> None:
    config = ParallelConfig(ep=64, hierarchical="across_first", ranks_per_node=8)
    config.check(128, 896)
    assert config.efsdp(128) == 2
