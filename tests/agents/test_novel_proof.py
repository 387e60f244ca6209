"""Looking at a novel module and proving claims about it, its own code in the sandbox: only right ones pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import novel_module as novel
import pytest

from onboarding.custom_code.definition import Definition, write_code
from onboarding.novel.confined import prove, survey
from onboarding.novel.facts import NovelModule, OperatorProposal, Proof
from onboarding.stages.intake.check import check_definition
from onboarding.twin.confined import derive_twin

pytestmark = [pytest.mark.sandbox, pytest.mark.slow, pytest.mark.timeout(900)]
MODEL = Path(__file__).parents[1] / "custom_models" / "quadra"
Prove = Callable[[OperatorProposal], Proof]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[NovelModule, Prove]:
    """What is seen of the planted module, and a way to prove claims about it."""
    folder = tmp_path_factory.mktemp("quadra")
    files = {path.name: path.read_bytes() for path in sorted(MODEL.iterdir()) if path.is_file()}
    checked = check_definition(files)
    code = write_code(checked.config, checked.files, folder / "definition")
    definition = Definition(config=checked.config, code=code)
    plan = derive_twin(definition, layers_at_least=2, sequence_length=64, scratch=folder)
    (module,) = survey(definition, plan, ["QuadraAttention"], scratch=folder)
    return module, lambda claim: prove(definition, plan, module, claim, 2048, scratch=folder)


def test_what_is_seen_is_what_the_file_says(seen: tuple[NovelModule, Prove]) -> None:
    module = seen[0]
    assert module.target == "onboard_definition.modeling_quadra:QuadraAttention"
    assert len(module.paths) == 16
    cores = {core.function: core for core in module.cores}
    assert "position_embeddings" in cores[""].obstacle
    core = cores["rectified_attention"]
    # 32 heads of 64 after the keys are repeated, batch 1
    for tensor in core.tensors:
        assert tensor.published(2048) == [1, 32, 2048, 64]
    assert [t.argument for t in core.tensors] == ["query", "key", "value"]
    assert core.calls == 16
    # the scores, their mask and square: more than two T x T tensors of each head are moved, in 16 layers
    assert core.moved[2] > 16 * 32 * 2 * 2
    assert core.source.startswith("def rectified_attention")


def test_the_right_claim_is_proven(seen: tuple[NovelModule, Prove]) -> None:
    proof = seen[1](novel.proposal())
    assert proof.proven, proof.reasons
    assert proof.error is not None
    assert proof.error < 1e-12, "two ways of writing one function differ by rounding in float64 only"
    assert proof.checks >= 8


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another offset": ({"source": novel.REFERENCE.replace("+ 1).square", "+ 0.9).square")}, "o is off by"),
    "a detached gradient": ({"source": novel.REFERENCE.replace(") @ v", ") @ v.detach()")}, "grad v"),
    "the sizes of the twin": ({"source": novel.REFERENCE.replace("q.shape[2]", "24")}, "at T = "),
    "a constant of the twin": ({"source": novel.REFERENCE.replace("q.shape[-1] ** -0.5", "0.25")}, "at D = "),
    "a scale that does not follow": ({"constants": [{"argument": "scaling", "value": "D ** -1"}]}, "scaling is 0.25"),
    "a reference that raises": ({"source": "def reference(q, k, v):\n    raise SystemExit\n"}, "SystemExit|raises"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_claim_is_refuted(case: str, seen: tuple[NovelModule, Prove]) -> None:
    changes, why = WRONG[case]
    proof = seen[1](novel.proposal(**changes))
    assert not proof.proven
    assert any(word in " ".join(proof.reasons) for word in why.split("|")), proof.reasons
