"""The worked examples that authors are shown: the judge accepts each, and the one with the right structure is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from agents.roles import examples
from benchmarks.agents import suite
from kernel_templates.novel import Dim, NovelSpec
from onboarding.stages.generate.compose import compose
from onboarding.stages.judge.judging import judge


def spec_of(example: examples.Example) -> NovelSpec:
    signature = suite.signature_in(example.reference)
    return NovelSpec(name=example.name, source=example.reference, signature=signature.to_json(), dtype="bfloat16")


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "name", ["rows", pytest.param("attention"), pytest.param("recurrence", marks=pytest.mark.slow)]
)
def test_an_example_is_accepted_by_the_judge(name: str, tmp_path: Path) -> None:
    example = examples.load(name)
    spec = spec_of(example)
    verdict = judge(compose(example.kernel, spec).encode(), spec, folder=tmp_path, device="cpu", cases=6)
    assert verdict.outcome == "accepted", verdict.reasons
    assert verdict.worst_share < 1


@pytest.mark.sandbox
def test_gradients_that_are_exactly_zero_are_no_evidence_of_hollow_kernels(tmp_path: Path) -> None:
    """With a single key the gradients of queries and keys are zeros, and so are those of kernels that do nothing."""
    example = examples.load("attention")
    call = suite.signature_in(example.reference)
    single = dataclasses.replace(call, dims={**call.dims, "T": Dim(full=1, choices=(1,))})
    spec = dataclasses.replace(spec_of(example), signature=single.to_json())
    verdict = judge(compose(example.kernel, spec).encode(), spec, folder=tmp_path, device="cpu", cases=2)
    assert verdict.outcome == "accepted", verdict.reasons


@pytest.mark.parametrize(
    ("operator", "example"),
    [
        ("mlstm", "attention"),
        ("log_linear_attention", "attention"),
        ("gated_slot_attention", "recurrence"),
        ("rg_lru", "recurrence"),
        ("sparsemax", "rows"),
        ("dynamic_tanh", "rows"),
    ],
)
def test_the_example_of_an_operator_has_its_structure(operator: str, example: str) -> None:
    assert examples.nearest(suite.load(operator).source).name == example


def test_the_reference_of_an_injected_definition_chooses_an_example_and_nothing_else() -> None:
    assert examples.nearest("this is no python: for @").name == "rows"
