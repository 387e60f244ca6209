"""compute-sanitizer as a step of a verdict on a GPU: accesses out of bounds, races, reads of memory never written.

A fresh confined process runs one case under each tool. Only what a tool reports refuses a candidate; a tool that is
absent or does not run is named in the verdict. It works on memory as it is: nothing is filled beforehand, every tensor
is an allocation of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from onboarding.problem import Problem
from onboarding.stages.judge import exchange
from onboarding.stages.judge.examinee import Examinee, Refusal
from onboarding.stages.judge.trials import Trial

TOOLS = ("memcheck", "racecheck", "initcheck")
ANSWER_S = 600.0
"""A kernel under a tool takes ten to a hundred times as long."""
_ERRORS = re.compile(r"^=+ ERROR SUMMARY: (\d+) error|^=+ RACECHECK SUMMARY: (\d+) hazard", re.M)
_LINE = re.compile(
    r"^=+ +((?:Invalid|Uninitialized|Misaligned|Error: |Race |Program hit).*(?:\n=+ +and (?:Read|Write) access .*)?)$",
    re.M,
)


def find() -> str:
    """The tool's path; empty if it is not installed."""
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), str(beside)])) or ""


def command(path: str, tool: str, log: str) -> list[str]:
    """What a program's command line is put behind."""
    return [path, "--tool", tool, "--target-processes", "application-only", "--log-file", log]


def errors_in(log: str) -> list[str] | None:
    """What a tool reported, each kind once; None if it did not run to its end."""
    summary = _ERRORS.search(log)
    if summary is None:
        return None
    if int(summary[1] or summary[2]) == 0:
        return []
    return list(dict.fromkeys(re.sub(r"\n=+ +", " ", line).strip() for line in _LINE.findall(log))) or [
        "errors that its log does not name"
    ]


def examine(judged: Examinee, trial: Trial) -> tuple[list[str], list[str]]:
    """Reasons to refuse, and what could not be run.

    Args:
        judged: the process that the candidate was judged in; its sandbox, limits and given files are used again.
    """
    path = find()
    if not path:
        return [], ["compute-sanitizer: it is not installed here"]
    # each in a process of its own, which imports torch and compiles again: side by side
    with ThreadPoolExecutor(len(TOOLS)) as threads:
        both = list(threads.map(lambda tool: _one(judged, trial, path, tool), TOOLS))
    return [reason for reasons, _ in both for reason in reasons], [why for _, absent in both for why in absent]


def _one(judged: Examinee, trial: Trial, path: str, tool: str) -> tuple[list[str], list[str]]:
    """What one tool reports: reasons, and what could not be run."""
    folder = judged.given.parent / f"sanitizer-{tool}"
    log = folder / "work" / "sanitizer.log"
    try:
        _run(judged, folder, trial, command(path, tool, str(log)))
        found = errors_in(log.read_text(errors="replace"))
    except (OSError, Refusal, Problem) as failure:
        return [], [f"compute-sanitizer {tool}: {str(failure)[:200]}"]
    if found is None:
        return [], [f"compute-sanitizer {tool}: it did not run to its end"]
    return [f"compute-sanitizer {tool}: {line}" for line in found[:3]], []


def _run(judged: Examinee, folder: Path, trial: Trial, prefix: list[str]) -> None:
    examinee = Examinee(
        judged.sandbox,
        folder,
        "cuda",
        judged.limits,
        ANSWER_S,
        arguments=["unfilled"],
        prefix=prefix,
        # every tensor an allocation of its own: in a block of torch's cache a tool sees no bounds and nothing unwritten
        env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    try:
        examinee.ready()
        source, tables = (examinee.given / name for name in ("candidate.py", "configs"))
        shutil.copyfile(judged.given / source.name, source)
        shutil.copytree(judged.given / tables.name, tables)
        examinee.ask({"kind": "load", "candidate": str(source), "configs": str(tables)})
        exchange.ask(examinee, [exchange.send(examinee, 0, trial.calls[0], large=False)])
        examinee.leave()
    finally:
        examinee.close()
