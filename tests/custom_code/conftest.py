"""Definitions with code of their own, and a way to run one through intake and parse as a job does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onboarding.custom_code.confined import LIMITS, call
from onboarding.custom_code.definition import Definition, write_code
from onboarding.sandbox import Limits
from onboarding.stages.intake.check import check_definition

MODELS = Path(__file__).parents[1] / "custom_models"
CONFIG = {"model_type": "custom_test", "hidden_size": 32, "num_hidden_layers": 1, "entry_point": "model:Model"}
Submit = Callable[..., Definition]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """``submit(code, **config)``: a checked definition whose ``model.py`` is the code."""

    def checked(code: str, **changes: Any) -> Definition:
        config = {**CONFIG, **changes}
        files = {"config.json": json.dumps(config).encode(), "model.py": code.encode()}
        passed = check_definition(files)
        return Definition(config=passed.config, code=write_code(passed.config, passed.files, tmp_path / "definition"))

    return checked


@pytest.fixture
def names(tmp_path: Path) -> Callable[..., list[str]]:
    """The names of what a checkpoint of the definition holds: its model is built in the sandbox, under limits."""

    def run(definition: Definition, limits: Limits = LIMITS) -> list[str]:
        function = "onboarding.weights.expected:expected_tensors"
        found = call(function, definition, {}, scratch=tmp_path, limits=limits)
        return [str(tensor["name"]) for tensor in found]

    return run
