"""Group limits and capacities choose what a loop over tokens would choose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.experts import selection


def _scores(tokens: int, experts: int, seed: int) -> Tensor:
    return torch.rand(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_group_limits_keep_the_groups_with_the_best_two() -> None:
    scores = _scores(20, 12, seed=0)
    limited = selection.limit_groups(scores, groups=4, kept=2)
    for token in range(20):
        worth = [scores[token, 3 * g : 3 * g + 3].sort(descending=True).values[:2].sum().item() for g in range(4)]
        kept = sorted(range(4), key=lambda g: -worth[g])[:2]
        for expert in range(12):
            allowed = expert // 3 in kept
            assert limited[token, expert].item() == (scores[token, expert].item() if allowed else -math.inf)


@pytest.mark.parametrize("room", [0, 1, 3, 100])
def test_dropping_keeps_the_first_slots_of_each_expert(room: int) -> None:
    scores = _scores(17, 5, seed=1)
    chosen = scores.topk(2).indices
    fitted = selection.fit(chosen, scores, room, reroute=False)
    used = [0] * 5
    for token in range(17):
        for slot in range(2):
            expert = int(chosen[token, slot])
            assert bool(fitted.dropped[token, slot]) == (used[expert] >= room)
            used[expert] += 1
    assert torch.equal(fitted.chosen, chosen)


@pytest.mark.parametrize("seed", range(5))
def test_rerouting_respects_rooms_and_never_doubles_an_expert(seed: int) -> None:
    scores = _scores(24, 6, seed) ** 3 * torch.tensor([9.0, 4, 1, 1, 1, 1])  # everybody wants the first two
    chosen = scores.topk(2).indices
    room = 8  # exactly enough for all 48 slots
    fitted = selection.fit(chosen, scores, room, reroute=True)
    load = torch.bincount(fitted.chosen[~fitted.dropped], minlength=6)
    assert int(load.max()) <= room
    for token in range(24):
        taken = fitted.chosen[token][~fitted.dropped[token]].tolist()
        assert len(set(taken)) == len(taken)
    kept = ~fitted.dropped & (fitted.chosen == chosen)
    moved = ~fitted.dropped & (fitted.chosen != chosen)
    assert int(fitted.rerouted) == int(moved.sum()) > 0
    # a slot that kept its expert is one that came first
    assert torch.equal(kept, ~selection.fit(chosen, scores, room, reroute=False).dropped)


def test_rerouting_drops_only_what_no_expert_has_room_for() -> None:
    scores = _scores(10, 4, seed=3)
    fitted = selection.fit(scores.topk(2).indices, scores, room=4, reroute=True)
    assert int((~fitted.dropped).sum()) <= 16
    assert int(fitted.dropped.sum()) >= 4  # 20 slots, room for 16


def test_no_tokens() -> None:
    empty = torch.zeros(0, 2, dtype=torch.int64)
    fitted = selection.fit(empty, torch.zeros(0, 4), room=1, reroute=True)
    assert fitted.chosen.shape == (0, 2)


def test_capacity_is_rounded_up() -> None:
    assert selection.capacity(tokens=10, slots=3, experts=8, factor=1.0) == 4
