"""Which line of the definition's code an error comes from. Free of torch."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from pathlib import Path

from onboarding.problem import Problem

LONGEST = 500


def as_problem(error: BaseException, code: Path) -> Problem:
    """The error as a problem, with file and line of the definition's code where one is to blame."""
    place = next((found for cause in _causes(error) if (found := innermost(cause, code))), None)
    if isinstance(error, Problem):
        if place is not None and "line" not in error.extra:
            file, line = place
            error.extra |= {"file": file, "line": line}
            error.detail = f"{error.detail} (at {file}, line {line}: {_source(code, file, line)})"
        return error
    if isinstance(error, ModuleNotFoundError | ImportError) and place is not None:
        return _missing(error, place)
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST]
    if place is None:
        ours = traceback.extract_tb(error.__traceback__)[-1:]
        where = f"raised at {Path(ours[0].filename).name}:{ours[0].lineno}" if ours else ""
        return Problem("code-not-handled", f"this definition's code could not be handled: {what}", where, status=500)
    file, line = place
    if isinstance(error, RecursionError):
        what = f"{what}; the code calls itself without end"
    return Problem("code-raised", f"{file}, line {line} raised {what}", _source(code, file, line), file=file, line=line)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def innermost(error: BaseException, code: Path) -> tuple[str, int] | None:
    """(file, line) of the deepest frame that lies in the folder of the definition's code."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(code):
            found = (path.relative_to(code).as_posix(), line)
    return found


def _source(code: Path, file: str, line: int) -> str:
    return linecache.getline(str(code / file), line).strip()[:200]


def _missing(error: ImportError, place: tuple[str, int]) -> Problem:
    file, line = place
    package = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError):
        hint = f"install {package} beside Onboard, guard the import with try/except, or add the file that is missing"
    else:
        hint = "another version of that package has it: change the import"
    return Problem(
        "code-needs-package",
        f"{file}, line {line}: {' '.join(str(error).split())[:LONGEST]}",
        hint,
        file=file,
        line=line,
        package=package,
    )
