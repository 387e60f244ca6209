"""``python -m onboarding.stages.judge CANDIDATE --spec SPEC.json [--seed N]``: a verdict without the service."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from kernel_templates.registry import load_spec
from onboarding.problem import Problem
from onboarding.stages.judge.judging import judge
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.judge.stage import choose_device


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 accepted, 1 refused, 2 could not be judged."""
    parser = argparse.ArgumentParser(prog="python -m onboarding.stages.judge", description=__doc__)
    parser.add_argument("candidate", type=Path)
    parser.add_argument("--spec", type=Path, help="JSON of the operator spec; by default the candidate's own SPEC")
    parser.add_argument("--seed", type=int, help="reproduce the verdict with this seed")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--unsafe-no-sandbox", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        source = options.candidate.read_bytes()
        spec = load_spec(_spec(source, options.spec))
        with tempfile.TemporaryDirectory(prefix="onboard-judge-") as folder:
            result = judge(
                source,
                spec,
                folder=Path(folder),
                device=choose_device(options.device),
                cases=options.cases,
                seed=options.seed,
                unsafe=options.unsafe_no_sandbox,
                progress=_show,
            )
    except Problem as problem:
        print(f"{problem.title}\n{problem.detail}", file=sys.stderr)
        return 2
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"cannot be judged: {error}", file=sys.stderr)
        return 2
    print(result.model_dump_json(indent=2) if options.json else in_words(result), flush=True)
    return 0 if result.outcome == "accepted" else 1


def _spec(source: bytes, path: Path | None) -> dict[str, object]:
    """The spec from a file, or the one that the candidate names, read without running it."""
    from onboarding.stages.judge.judging import declared

    found = json.loads(path.read_text()) if path else declared(source, "SPEC")
    if not isinstance(found, dict):
        raise ValueError("the candidate names no SPEC; pass --spec")
    return found


def _show(done: int, total: int, label: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{total} {label}", end="" if done < total else "\n", file=sys.stderr)


def in_words(result: JudgeResult) -> str:
    """The verdict for a terminal."""
    lines = [
        result.summary,
        f"  level {result.level} on {result.device}, seed {result.seed}, {result.seconds:.1f} s",
        f"  {result.sandbox}",
        f"  candidate {result.candidate[:16]}, judge {result.judge_version[:16]}, determinism {result.determinism}",
    ]
    for case in result.cases:
        worst = max(case.errors, key=lambda e: e.share, default=None)
        share = f"{worst.share:8.2f} of tolerance ({worst.tensor})" if worst else ""
        lines.append(f"  {'ok ' if case.passed else 'NO '} {case.dtype:8} {case.seconds:6.2f} s {share:42} {case.name}")
    lines += [f"  {'ok ' if held else 'NO '} {name}" for name, held in result.modes.items()]
    lines += [f"  not tried: sizes beyond {result.numbers_beyond}"] if result.numbers_beyond else []
    lines += [f"  not run: {what}" for what in result.not_run]
    lines += [f"  - {reason}" for reason in result.reasons]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
