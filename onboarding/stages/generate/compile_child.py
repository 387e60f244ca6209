"""Compiles a candidate's kernels for an H200, confined: ``python -m onboarding.stages.generate.compile_child JOB``.

``JOB`` is a file with one request of :mod:`kernel_templates.aot`; the answer is one JSON line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from kernel_templates.aot import _compile_jobs


def main() -> None:
    """Compile and report."""
    reports = _compile_jobs(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps({"compiled": [asdict(report) for report in reports]}))


if __name__ == "__main__":
    main()
