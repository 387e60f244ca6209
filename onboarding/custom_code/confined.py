"""Runs a function on a definition: here when transformers serves it, in the sandbox when it brings code. Free of torch.

This is the one door through which a definition's own code is executed. The function takes the configuration and plain
arguments and returns plain data; what comes back from the sandbox was made by code that is not trusted, so callers
validate it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onboarding.custom_code.definition import CONFINED, Definition
from onboarding.problem import Problem
from onboarding.sandbox import Limits, Outcome, Sandbox
from onboarding.sandbox.files import read_left_behind

ANSWER_BYTES = 64 * 2**20
LIMITS = Limits(wall_s=600.0, memory_bytes=6 * 2**30, processes=64)
"""Ample for tracing a model at its full size; real limits for code that never ends or that grows."""
_WORDS = {
    "time": "it ran longer than {0.wall_s:g} s",
    "memory": "it took more than {0.memory_bytes} bytes of memory",
    "processes": "it started more than {0.processes} processes",
    "output": "it printed more than {0.output_bytes} bytes",
    "disk": "it wrote more than {0.scratch_bytes} bytes",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the confined side is asked to do."""

    function: str
    config: dict[str, Any]
    code: str
    arguments: dict[str, Any]


def call(
    function: str,
    definition: Definition,
    arguments: dict[str, Any],
    *,
    scratch: Path,
    unsafe: bool = False,
    limits: Limits = LIMITS,
    on_line: Callable[[str], None] | None = None,
) -> Any:
    """``function(config, **arguments)``, confined if the definition has code.

    Args:
        function: ``module:name``; it returns what JSON holds.
        definition: configuration and code.
        arguments: what JSON holds.
        scratch: a folder below which the confined side gets a fresh one.
        unsafe: the operator allows running without a sandbox where none works.
        limits: of the confined side.
        on_line: called with each line that the confined side prints.

    Raises:
        Problem: whatever the function raised, or ``code-raised``, ``code-needs-package``, ``code-stopped``.
    """
    module, _, name = function.partition(":")
    if definition.code is None:
        return getattr(importlib.import_module(module), name)(definition.config, **arguments)
    sandbox = Sandbox(unsafe=unsafe)
    folder = _fresh(scratch, name)
    request = Request(
        function=function, config=definition.config, code=str(definition.code.resolve()), arguments=arguments
    )
    (folder / "request.json").write_text(json.dumps(asdict(request)))
    outcome = sandbox.run_module(
        "onboarding.custom_code",
        ["request.json", "answer.json"],
        scratch=folder,
        read_only=[definition.code.resolve()],
        limits=limits,
        env={"OMP_NUM_THREADS": "1", **CONFINED},
        on_line=on_line,
    )
    return _answer(folder / "answer.json", outcome, limits)


def _fresh(scratch: Path, name: str) -> Path:
    index = 0
    while (folder := scratch / f"confined-{name}-{index}").exists():
        index += 1
    folder.mkdir(parents=True)
    return folder


def _answer(path: Path, outcome: Outcome, limits: Limits) -> Any:
    if not outcome.ok:
        raise stopped(outcome, limits)
    try:
        answer = json.loads(read_left_behind(path, ANSWER_BYTES))
        if not isinstance(answer, dict) or not ({"value", "problem"} & set(answer)):
            raise ValueError("neither a value nor a problem")
        if "problem" in answer:
            problem = Problem.from_dict(answer["problem"])
    except (OSError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise Problem(
            "code-stopped",
            "the definition's code ended its process before anything was answered",
            f"{type(error).__name__}: {error}",
        ) from None
    if "problem" in answer:
        raise problem
    return answer["value"]


def stopped(outcome: Outcome, limits: Limits) -> Problem:
    """A confined run of the definition's code that reached a limit or died, as a problem."""
    why = _WORDS.get(outcome.reason, "it ended by {1}").format(limits, outcome.reason)
    last = outcome.stderr_tail.strip().splitlines()[-1:]
    return Problem(
        "code-stopped",
        f"the definition's code was stopped: {why}",
        " ".join(["it runs in the sandbox and changed nothing outside.", *last])[:500],
        reason=outcome.reason,
    )
