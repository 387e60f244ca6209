"""The confined side: ``python -m onboarding.custom_code REQUEST ANSWER``, started by ``confined.call`` only."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from onboarding.custom_code.blame import as_problem
from onboarding.custom_code.load import install
from onboarding.problem import Problem


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """``{"value": ...}``, or ``{"problem": ...}`` with the place in the definition's code."""
    code = Path(request["code"])
    try:
        install(code)
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        return {"value": function(request["config"], **request["arguments"])}
    except BaseException as error:  # SystemExit and KeyboardInterrupt may come from the definition's code too
        traceback.print_exc()
        return {"problem": as_problem(error, code).to_dict()}


def main() -> int:
    """Entry point."""
    asked, answered = sys.argv[1:]
    answer = answer_to(json.loads(Path(asked).read_text()))
    try:
        text = json.dumps(answer)
    except (TypeError, ValueError, RecursionError) as error:
        problem = Problem("code-stopped", "the definition's code made a result that is no plain data", str(error)[:300])
        text = json.dumps({"problem": problem.to_dict()})
    Path(answered).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
