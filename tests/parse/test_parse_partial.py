"""A definition that cannot be parsed still says what was read of it."""

from __future__ import annotations

from onboarding.artifacts import ArtifactRef
from onboarding.stages.intake.result import IntakeResult
from onboarding.stages.parse.stage import what_was_read


def intake(**changes: object) -> IntakeResult:
    base = {
        "name": "x", "model_type": "x", "source": "folder", "digest": "0" * 64, "config": {}, "files": ["config.json"],
        "definition": ArtifactRef(digest="0" * 64, name="d", media_type="application/x-tar", size=1),
        "has_code": False, "has_tokenizer": False,
    }  # fmt: skip
    return IntakeResult.model_validate({**base, **changes})


def test_sizes_and_code_are_told() -> None:
    config = {"text_config": {"num_hidden_layers": 93, "hidden_size": 7168, "n_routed_experts": 896}, "vocab_size": 7}
    told = what_was_read(intake(config=config, files=["a", "b"], imports=["fla"], suspicious=["m.py:1 os.system()"]))
    for part in ("2 files", "imports fla", "os.system", "layers 93", "hidden 7168", "experts 896", "vocabulary 7"):
        assert part in told
    assert what_was_read(intake()).endswith("config.json gives no sizes")
    assert "layers" not in what_was_read(intake(config={"num_hidden_layers": "many"}))
