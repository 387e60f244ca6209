"""Novel operators: the signature, the reference in its sandbox, the verdicts, and the package that ships."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import operators
import pytest
import torch

from kernel_templates.novel import Dim, NovelSpec, Signature, TensorSignature
from kernel_templates.registry import load_spec
from onboarding.problem import Problem
from onboarding.stages.generate.compose import ComposeError, compose, stated_tables
from onboarding.stages.judge import novel
from onboarding.stages.judge.judging import judge
from onboarding.stages.package.layout import KernelEntry, write_kernels

SPEC = operators.spec()


def test_a_spec_survives_json_and_knows_its_bytes() -> None:
    assert load_spec(json.loads(json.dumps(SPEC.to_dict()))) == SPEC
    # x and y of 4096 x 256 and a scale of 256, two bytes each
    assert SPEC.bytes_moved(1) == 2 * (2 * 4096 * 256 + 256)
    assert SPEC.call.bind({"x": (3, 5), "scale": (5,)}) == {"N": 3, "D": 5}


WRONG: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "shape that does not fit": ({"x": (3, 5), "scale": (4,)}, "does not fit"),
    "too few dims": ({"x": (3,), "scale": (5,)}, "has shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_does_not_fit_is_named(name: str) -> None:
    shapes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        SPEC.call.bind(shapes)


def test_signatures_that_make_no_sense_are_refused() -> None:
    x = TensorSignature(name="x", shape=("N",))
    bad = {
        "unknown dim": Signature(dims={"M": Dim(full=2)}, inputs=(x,), outputs=(dataclasses.replace(x, name="y"),)),
        "same name twice": Signature(dims={"N": Dim(full=2)}, inputs=(x,), outputs=(x,)),
        "no output": Signature(dims={"N": Dim(full=2)}, inputs=(x,), outputs=()),
        "impossible size": Signature(dims={"N": Dim(full=0)}, inputs=(x,), outputs=(dataclasses.replace(x, name="y"),)),
    }
    for name, signature in bad.items():
        with pytest.raises(ValueError, match=r"."):
            NovelSpec(name=name, source="", signature=signature.to_json())
    with pytest.raises(ValueError, match="not a signature"):
        Signature.from_json('{"dims": 3}')


def test_a_candidate_states_its_configurations_as_constants() -> None:
    assert [t["device"] for t in stated_tables(operators.BODY)] == ["interpreter", "nvidia_h200"]
    for source in ("x = 1", "CONFIGS = []", "CONFIGS = [open('/etc/passwd')]", "CONFIGS = {'a': 1}"):
        with pytest.raises(ComposeError):
            stated_tables(source)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def reference(x, scale):\n    return x[:, :1]\n", "not float64"),
        ("def reference(x, scale):\n    return x / 0\n", "not finite"),
        ("def reference(x):\n    return x\n", "TypeError"),
        ("import os\nos._exit(0)\n", "closed the channel|ended early|noise"),
        ("open('/etc/hostname', 'w')\n", "OSError|PermissionError|Read-only"),
    ],
)
def test_a_bad_reference_is_a_problem_of_its_own(source: str, why: str, tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, source=source)
    evaluator = novel.Evaluator(spec, tmp_path)
    tensors = {"x": torch.ones(2, 3, dtype=torch.float64), "scale": torch.ones(3, dtype=torch.float64)}
    try:
        with pytest.raises(Problem) as caught:
            evaluator.evaluate(tensors, frozenset(), {}, "")
    finally:
        evaluator.close()
    assert caught.value.kind == "reference-failed"
    assert any(word in caught.value.detail for word in why.split("|")), caught.value.detail


@pytest.mark.sandbox
def test_the_confined_reference_equals_torch_forward_and_backward(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, scale, dy = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((5, 7), (7,), (5, 7)))
    with novel.FAMILY.opened(SPEC, tmp_path):
        given = {"x": x.requires_grad_(), "scale": scale.requires_grad_()}
        y = novel.FAMILY.reference(dict(given), SPEC)["y"]
        found = torch.autograd.grad(y, [x, scale], dy)
    own = torch.relu(x).square() * torch.sigmoid(scale)
    expected = torch.autograd.grad(own, [x, scale], dy)
    torch.testing.assert_close(y, own, rtol=0, atol=1e-15)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["WRONG_GRADIENT", "NO_MASK", "TORCH_DOES_IT"])
def test_wrong_kernels_are_refused(name: str, tmp_path: Path) -> None:
    source = compose(getattr(operators, name), SPEC).encode()
    assert judge(source, SPEC, folder=tmp_path / "j", cases=4, seed=3).outcome == "refused"


@pytest.mark.slow
@pytest.mark.sandbox
def test_the_example_that_authors_see_is_accepted(tmp_path: Path) -> None:
    verdict = judge(compose(operators.BODY, SPEC).encode(), SPEC, folder=tmp_path / "j", cases=8, seed=5)
    assert verdict.outcome == "accepted", verdict.reasons


def test_a_package_of_a_novel_kernel_works_alone(tmp_path: Path) -> None:
    entry = KernelEntry(
        digest=SPEC.digest(),
        spec=SPEC.to_dict(),
        words=SPEC.words(),
        source=compose(operators.BODY, SPEC),
        bindings=[],
        verified=[],
    )
    (index,) = write_kernels(tmp_path, [entry])
    package = tmp_path / index["path"]
    name = "_novel_package_for_test"
    found = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
        x = torch.randn(9, 17, generator=torch.Generator().manual_seed(1)).requires_grad_()
        scale = torch.linspace(-1, 1, 17).requires_grad_()
        (y,) = module.op(x=x, scale=scale)
        expected = torch.relu(x).square() * torch.sigmoid(scale)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        got = torch.autograd.grad(y.sum(), [x, scale])
        for a, b in zip(got, torch.autograd.grad(expected.sum(), [x, scale]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    finally:
        del sys.modules[name]
