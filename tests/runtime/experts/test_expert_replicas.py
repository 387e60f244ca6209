"""Where copies of busy experts go."""

from __future__ import annotations

import pytest

from runtime.experts.replicas import Placement, _exchange_plan, _places, place


def _rank_loads(load: list[float], placement: Placement) -> list[float]:
    table, counts = placement.table()
    loads = [0.0] * placement.ranks
    for expert, slots in enumerate(table):
        for slot in slots[: counts[expert]]:
            loads[slot // placement.width] += load[expert] / counts[expert]
    return loads


def test_a_hot_expert_is_copied_until_ranks_are_even() -> None:
    load = [96.0, 0, 0, 0, 0, 0, 0, 0]
    placement = place(load, ranks=4, spare=1)
    assert placement.copies == ((), (0,), (0,), (0,))
    assert _rank_loads(load, placement) == [24.0] * 4


@pytest.mark.parametrize("spare", [1, 2, 3])
def test_copies_never_raise_the_busiest_rank(spare: int) -> None:
    load = [float((7 * e * e + 3) % 50) for e in range(16)]
    before = max(_rank_loads(load, place(load, 4, 0)))
    placement = place(load, 4, spare)
    assert max(_rank_loads(load, placement)) <= before
    assert sum(_rank_loads(load, placement)) == pytest.approx(sum(load))
    for rank, held in enumerate(placement.copies):
        assert len(held) <= spare
        assert all(e // placement.own != rank for e in held)  # a copy beside the original would be of no use
        assert len(set(held)) == len(held)


def test_no_load_no_copies() -> None:
    assert place([0.0] * 8, ranks=2, spare=3).copies == ((), ())


def test_what_ranks_send_is_what_ranks_expect() -> None:
    placement = place([float(e % 5) + 1 for e in range(12)], ranks=4, spare=2)
    plans = [_exchange_plan(placement, rank) for rank in range(4)]
    for sender in range(4):
        for receiver in range(4):
            assert plans[sender][1][receiver] == plans[receiver][2][sender]
    # what arrives at a rank, in order, lands in the place that wants that expert
    for receiver in range(4):
        arriving = []
        for sender in range(4):
            sent, send, _ = plans[sender]
            start = sum(send[:receiver])
            arriving += [e + sender * placement.own for e in sent[start : start + send[receiver]]]
        wanted = [placement.copies[receiver][p] for p in _places(placement, receiver)]
        assert arriving == wanted
