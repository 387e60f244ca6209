"""Work that needs torch, done here in a child process: the command line itself stays free of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from api.cli import output
from onboarding.problem import Problem

LLM_DOCTOR = "import sys; sys.argv[1:] = ['--json']; from agents.llm.probe import main; main()"
DOCTOR = "import json; from onboarding.doctor import checks; print(json.dumps([vars(c) for c in checks()]))"


def run_parse(what: str, *, sequence_length: int, target: str, quiet: bool) -> dict[str, Any]:
    """Intake, parse and gaps of a path or an example.

    Raises:
        Problem: refused, as the stage said it.
    """
    command = [sys.executable, "-P", "-m", "onboarding.local", what, str(sequence_length), target]
    with output.console(stderr=True).status("reading", spinner="dots") as status:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None
        answer: dict[str, Any] | None = None
        for line in child.stdout:
            message = json.loads(line)
            if message["kind"] == "progress" and not quiet:
                status.update(f"{message['stage']}  {message['label']}")
            elif message["kind"] in ("result", "problem"):
                answer = message
        _, errors = child.communicate()
    if answer is None:
        raise crashed("parse", child.returncode, errors)
    if answer["kind"] == "problem":
        raise Problem.from_dict(answer["problem"])
    return {name: answer[name] for name in ("intake", "parse", "gaps", "reasons")}


def run_diff(before: str, after: str, *, sequence_length: int, target: str, quiet: bool) -> dict[str, Any]:
    """Parse two definitions here and compare them.

    Raises:
        Problem: one of them is refused.
    """
    from onboarding.architecture import Architecture
    from onboarding.comparison import compare

    parsed = []
    for what in (before, after):
        outcome = run_parse(what, sequence_length=sequence_length, target=target, quiet=quiet)
        parsed.append(Architecture.model_validate(outcome["parse"]["architecture"]))
    return compare(*parsed).model_dump(mode="json")


def run_doctor(program: str = DOCTOR) -> list[dict[str, Any]]:
    """Every check of this machine, or (``LLM_DOCTOR``) of the language model's endpoint."""
    child = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    if child.returncode != 0:
        raise crashed("doctor", child.returncode, child.stderr)
    checks: list[dict[str, Any]] = json.loads(child.stdout.strip().splitlines()[-1])
    return checks


def crashed(name: str, status: int, errors: str) -> Problem:
    """A child that ended without an answer; what it said goes to a log."""
    from onboarding.settings import Settings

    log: Path = Settings().resolved_home / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log.write_text(errors)
    last = errors.strip().splitlines()[-1] if errors.strip() else f"exit status {status}"
    return Problem("child-failed", f"{name} failed: {last}", f"what it said is in {log}")
