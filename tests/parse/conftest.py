"""The six examples, parsed once a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from onboarding.examples import example_config
from onboarding.stages.parse.analyse import Parsed, analyse

TOKENS = 8192
torch.set_num_threads(1)  # twins are small: two threads wait for each other longer than they work


@cache
def _parsed(name: str) -> Parsed:
    return analyse(example_config(name), tokens=TOKENS, name=name)


@pytest.fixture
def parsed() -> Callable[[str], Parsed]:
    """An example's parse by its name."""
    return _parsed
