"""From a match to the report that is stored, and the checks of both after a trip through the sandbox. Free of torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from pydantic import TypeAdapter

from onboarding.weights.index import Checkpoint, pattern
from onboarding.weights.result import PatternRow, Placement, WeightsReport
from onboarding.weights.stored import READABLE

PLACEMENTS = TypeAdapter(list[Placement])


def make_report(checkpoint: Checkpoint, matched: dict[str, Any]) -> tuple[WeightsReport, list[Placement]]:
    """The report and the mapping.

    Args:
        checkpoint: what the index says.
        matched: plain data of :func:`onboarding.weights.match.match_names` as ``matched_weights`` gives it.

    Raises:
        ValueError: the data names tensors that the checkpoint does not hold.
    """
    placements = PLACEMENTS.validate_python(matched["placements"])
    targets = {p.target for p in placements}
    known = set(checkpoint.entries) | targets
    if any(source not in known for p in placements for source in p.sources) or len(targets) != len(placements):
        raise ValueError("a mapping of tensors that are not there")
    missing, extra = [str(n) for n in matched["missing"]], [str(n) for n in matched["extra"]]
    why = {pattern(str(name)): str(text) for name, text in matched["why"].items()}
    report = WeightsReport(
        files=checkpoint.files,
        tensors=len(checkpoint.entries),
        total_bytes=checkpoint.total_bytes,
        placed=len(placements),
        expected=len(placements) + len(missing),
        rows=_rows(placements),
        missing=_counted(missing),
        extra=_counted(extra),
        extra_why={name: why[name] for name in dict.fromkeys(map(pattern, extra)) if name in why},
        wrong_shapes=[str(text) for text in matched["wrong_shapes"]][:20],
        hints=[*map(str, matched["hints"]), *_stored_hints(placements)][:20],
    )
    return report, placements


def _rows(placements: list[Placement]) -> list[PatternRow]:
    counts: dict[tuple[str, str, Any, str], list[int]] = defaultdict(lambda: [0, 0])
    for p in placements:
        sources = " + ".join(dict.fromkeys(map(pattern, p.sources)))
        count = counts[pattern(p.target), sources, p.how, p.stored]
        count[0] += 1
        count[1] += len(p.sources) if p.how != "tied" else 0
    return [
        PatternRow(target=key[0], sources=key[1], how=key[2], stored=key[3], parameters=n, tensors=m)
        for key, (n, m) in counts.items()
    ]


def _counted(names: list[str]) -> list[str]:
    return [f"{name} ({n})" if n > 1 else name for name, n in Counter(map(pattern, names)).items()]


def _stored_hints(placements: list[Placement]) -> list[str]:
    formats = {p.stored for p in placements if p.stored} - set(READABLE)
    return [f"{words}: dequantise first, training reads plain numbers and fp8 in blocks" for words in sorted(formats)]


def words(report: WeightsReport) -> str:
    """One line for the terminal and for the warnings."""
    hows = Counter[str]()
    for row in report.rows:
        hows[row.how] += row.parameters
    parts = [f"{n} {how}" for how, n in hows.most_common()]
    if report.missing:
        parts.append(f"{report.expected - report.placed} missing: {', '.join(report.missing[:3])}")
    if report.wrong_shapes:
        parts.append(f"of another shape: {report.wrong_shapes[0]}")
    unexplained = [e for e in report.extra if e.partition(" ")[0] not in report.extra_why]
    if unexplained:
        parts.append(f"without a place: {', '.join(unexplained[:3])}")
    stored = sorted({row.stored for row in report.rows if row.stored})
    return f"weights: {report.placed} of {report.expected} filled ({', '.join([*parts, *stored])})"
