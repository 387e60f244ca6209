"""``python -m onboarding.stages.parse PATH [--json] [--tokens N]``: parse without a service.

Exit code 0: complete; 3: partial, with reasons in ``warnings``; 1: refused, with the problem on stdout (``--json``) or
stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from onboarding.custom_code.definition import Definition, write_code
from onboarding.problem import Problem
from onboarding.stages.intake.check import find_definition
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.parse.stage import summary
from onboarding.weights.index import read_checkpoint


def main() -> int:
    """Parse one definition and print it."""
    parser = argparse.ArgumentParser(prog="python -m onboarding.stages.parse")
    parser.add_argument("path", help="config.json, a folder, an archive, or an example's name")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--tokens", type=int, default=8192, help="sequence length for FLOPs and bytes")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        checked = find_definition(options.path)
        from onboarding.stages.parse.plain import parse_definition

        with tempfile.TemporaryDirectory(prefix="onboard-parse-") as scratch:
            folder = Path(scratch)
            code = write_code(checked.config, checked.files, folder / "definition") if checked.runs_code else None
            parsed = parse_definition(
                Definition(config=checked.config, code=code),
                tokens=options.tokens,
                name=checked.name or checked.model_type,
                checkpoint=read_checkpoint(checked.files),
                scratch=folder,
            )
    except Problem as problem:
        if options.json:
            print(json.dumps(problem.to_dict()))
        else:
            print(f"{problem.title}\n{problem.detail}", file=sys.stderr)
        return 1
    architecture = parsed.architecture
    result = ParseResult(
        summary=summary(architecture),
        architecture=architecture,
        weights=parsed.weights,
        seconds=round(time.monotonic() - started, 2),
    )
    print(result.model_dump_json() if options.json else f"{architecture.strip}\n{result.summary}")
    return 0 if parsed.complete else 3


if __name__ == "__main__":
    sys.exit(main())
