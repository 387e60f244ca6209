"""How the command line speaks: answers to stdout, everything else to stderr, never a traceback."""

from __future__ import annotations

import sys
import traceback
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from onboarding.problem import Problem

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 200
"""Columns where there is no terminal to fit into."""

OK, FAILED, USAGE, PARTIAL, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130


@lru_cache(maxsize=2)
def console(*, stderr: bool = False) -> Console:
    """The console for answers, or for messages."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def say(text: str = "") -> None:
    """Print a line as it is: what came from elsewhere is never markup."""
    console().print(text, markup=False)


def tell(text: str) -> None:
    """Print a message that is not the answer."""
    console(stderr=True).print(text, markup=False)


def show_problem(problem: Problem) -> None:
    """Title, detail, and the facts that help to fix it."""
    from rich.text import Text

    err = console(stderr=True)
    err.print(Text.assemble(("error  ", "bold red"), (problem.title, "bold")))
    if problem.detail:
        err.print(Text(f"       {problem.detail}"))
    for name, value in problem.facts().items():
        err.print(Text(f"       {name}: {value}", style="dim"))


def show_crash(error: BaseException) -> None:
    """Write the traceback to a log and say where."""
    from onboarding.settings import Settings

    log = Settings().resolved_home / "logs" / "cli.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with log.open("a") as file:
            file.write(f"--- {datetime.now(UTC).isoformat()} {' '.join(sys.argv)}\n")
            traceback.print_exception(error, file=file)
        where = f"the traceback is in {log}"
    except OSError:
        where = "and its log could not be written"
    show_problem(Problem("internal-error", f"onboard failed: {type(error).__name__}: {error}", where))
