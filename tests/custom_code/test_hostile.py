"""Code that means harm, or that never ends: contained, named in a problem, and the caller lives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from onboarding.custom_code.confined import LIMITS, call
from onboarding.custom_code.definition import Definition
from onboarding.custom_code.load import install
from onboarding.problem import Problem
from onboarding.sandbox import Limits

Submit = Callable[..., Definition]
Names = Callable[..., list[str]]
SHORT = replace(LIMITS, wall_s=120.0, processes=40)
slow = pytest.mark.slow
MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.embed = nn.Embedding(64, hidden_size)
        self.head = nn.Linear(hidden_size, 64)

    def forward(self, ids):
        return self.head(self.embed(ids))
"""


def refused(names: Names, definition: Definition, limits: Limits = SHORT) -> Problem:
    with pytest.raises(Problem) as caught:
        names(definition, limits)
    return caught.value


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("raise RuntimeError('no')", "code-raised", "RuntimeError: no"),
        pytest.param("import sys; sys.exit(0)", "code-raised", "SystemExit", marks=slow),
        pytest.param("import os; os._exit(0)", "code-stopped", "before anything was answered", marks=slow),
        pytest.param("import os; os.kill(os.getpid(), 9)", "code-stopped", "SIGKILL", marks=slow),
        pytest.param("open('/usr/planted', 'w')", "code-raised", "OSError", marks=slow),
        pytest.param("import socket; socket.create_connection(('127.0.0.1', 22))", "code-raised", "Error", marks=slow),
        pytest.param("import not_a_package_at_all", "code-needs-package", "not_a_package_at_all", marks=slow),
        pytest.param("def f(): return f()\nf()", "code-raised", "without end", marks=slow),
        pytest.param("import os\nwhile True: os.fork()", "code-", "", marks=slow),
        pytest.param("x = 'a' * (64 << 30)", "code-raised", "MemoryError", marks=slow),
        pytest.param("print('x' * (64 << 20))", "code-stopped", "printed", marks=slow),
    ],
)
def test_harm_at_import_is_contained(submit: Submit, names: Names, line: str, kind: str, words: str) -> None:
    problem = refused(names, submit(f"{line}\n{MODEL}"))
    assert problem.kind.startswith(kind)
    assert words in problem.title + problem.detail
    if problem.kind == "code-raised":
        assert problem.extra["file"] == "model.py"
        assert problem.extra["line"] >= 1
    assert not os.path.exists("/usr/planted")


@slow
def test_a_loop_without_end_is_stopped_in_time(submit: Submit, names: Names) -> None:
    problem = refused(names, submit(f"while True: pass\n{MODEL}"), replace(SHORT, wall_s=6.0))
    assert (problem.kind, problem.extra["reason"]) == ("code-stopped", "time")


@slow
def test_a_shell_command_has_no_effect_outside(submit: Submit, names: Names, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    definition = submit(f"import os\nos.system('touch {marker}')\nos.environ['HOME'] = '/'\n{MODEL}")
    assert names(definition) == ["embed.weight", "head.weight", "head.bias"]
    assert not marker.exists()


@slow
def test_the_definition_itself_cannot_be_rewritten(submit: Submit, names: Names) -> None:
    definition = submit(f"open(__file__, 'w').write('')\n{MODEL}")
    assert refused(names, definition).kind == "code-raised"
    assert definition.code is not None
    assert "class Model" in (definition.code / "model.py").read_text()


@pytest.mark.parametrize(
    "plant",
    [
        "os.symlink('/etc/shadow', 'answer.json')",
        pytest.param("os.symlink('/dev/zero', 'answer.json')", marks=slow),
        pytest.param("os.mkfifo('answer.json')", marks=slow),
        pytest.param("os.mkdir('answer.json')", marks=slow),
        pytest.param("open('answer.json', 'w').write('[' * 100000)", marks=slow),
        pytest.param("open('answer.json', 'w').write('{\"problem\": 7}')", marks=slow),
    ],
)
def test_a_planted_answer_is_not_read(submit: Submit, names: Names, plant: str) -> None:
    problem = refused(names, submit(f"import os\n{plant}\nos._exit(0)\n{MODEL}"))
    assert problem.kind == "code-stopped"
    assert "root:" not in problem.detail


@slow
def test_a_forged_architecture_is_checked(submit: Submit, tmp_path: Path) -> None:
    from onboarding.stages.parse.plain import parse_definition

    forged = {"value": {"architecture": {"name": "x"}, "complete": True}}
    definition = submit(
        f"import os\nopen('answer.json', 'w').write({json.dumps(json.dumps(forged))})\nos._exit(0)\n{MODEL}"
    )
    with pytest.raises(Problem) as caught:
        parse_definition(definition, tokens=64, name="x", scratch=tmp_path)
    assert caught.value.kind == "code-wrong-answer"


def test_code_is_imported_in_the_sandbox_only(submit: Submit) -> None:
    definition = submit(MODEL)
    assert definition.code is not None
    with pytest.raises(RuntimeError, match="sandbox only"):
        install(definition.code)


def test_without_code_nothing_is_confined(tmp_path: Path) -> None:
    definition = Definition(config={"a": 1})
    found = call("json:dumps", definition, {"sort_keys": True}, scratch=tmp_path)
    assert found == '{"a": 1}'
    assert not list(tmp_path.iterdir())
