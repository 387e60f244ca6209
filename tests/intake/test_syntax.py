"""Many threads parse Python at once, as the API's do."""

from __future__ import annotations

import ast
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from onboarding import syntax
from onboarding.stages.intake.contradictions import contradictions
from onboarding.stages.package.stage import bundle_name


def test_threads_parse_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, met = 0, threading.Event()
    stock = ast.parse

    def watched(source: str, filename: str) -> ast.Module:
        nonlocal inside
        inside += 1
        if inside > 1:
            met.set()
        tree = stock(source, filename=filename)
        met.wait(0.02)  # long enough for another thread to come in, if it could
        inside -= 1
        return tree

    # undone before anything is asserted: pytest parses, too
    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as pool:
        patched.setattr(ast, "parse", watched)
        trees = list(pool.map(lambda n: syntax.parse(f"x = {n}", f"{n}.py"), range(12)))
    assert not met.is_set()
    assert [ast.unparse(tree) for tree in trees] == [f"x = {n}" for n in range(12)]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("kimi-linear", "kimi-linear-0.1.0"),
        ("<b>x</b>/../../etc", "b-x-b-..-..-etc-0.1.0"),
        ('My "best" model; $(id)', "My-best-model-id-0.1.0"),
        ("../..", "model-0.1.0"),
        ("模型", "model-0.1.0"),
    ],
)
def test_a_bundle_has_a_name_that_every_shell_takes(name: str, folder: str) -> None:
    assert bundle_name(name) == folder


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_routed_experts": 64, "n_group": 7, "topk_group": 3}, ["n_group"]),
        ({"n_routed_experts": 256, "n_group": 8, "topk_group": 9}, ["topk_group"]),
        ({"num_experts": 256, "num_expert_group": 3}, ["num_expert_group"]),
        ({"n_routed_experts": 64, "n_group": 7, "topk_method": "greedy"}, []),
        ({"n_routed_experts": 256, "n_group": 8, "topk_group": 4}, []),
        ({"n_routed_experts": 64, "n_group": None}, []),
    ],
)
def test_groups_of_experts_that_do_not_fit_are_named(fields: dict[str, object], named: list[str]) -> None:
    found = list(contradictions(fields))
    assert [each.field for each in found] == named
    assert all(each.certain for each in found)
