"""What a user reads of a problem's further members."""

from __future__ import annotations

from onboarding.problem import Problem


def test_facts_are_lines_and_empty_ones_are_left_out() -> None:
    problem = Problem(
        "model-not-traced",
        "it does not run",
        field="num_local_experts",
        partial={"class_name": "Mixtral", "parameters": 1_604_587_520, "layers": 2, "kinds": [[0], [1]]},
        repairs=["head_dim taken as 64", "n_kv taken as 2"],
        missing=[],
        errors=[{"loc": "x"}],
    )
    assert problem.facts() == {
        "field": "num_local_experts",
        "partial": "class name Mixtral, parameters 1,604,587,520, layers 2, kinds 2",
        "repairs": "head_dim taken as 64; n_kv taken as 2",
    }
