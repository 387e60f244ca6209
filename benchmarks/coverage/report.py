"""The table of ``docs/coverage.md``: totals on top, one row an architecture, every exception with its reason."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.coverage.entries import CAUSAL, IMAGE_TEXT, Entry
from benchmarks.coverage.row import Row

_HEAD = """# Coverage

Every entry of transformers' causal-LM and image-text-to-text mappings, from its class's default configuration: built at
full size with no memory, one training step traced forward and backward (one layer of each kind runs and counts for all
that are alike), the vision tower traced on one image, parameters counted, a reduced twin derived and trained.

`make coverage-report` measures what has no row yet (each entry in a process of its own, with limits on time and memory)
and writes this page; `python -m benchmarks.coverage --help` tells how to measure some of it again.

- **twin trains**: the derived twin holds every kind of layer of the published model, all values of 20 AdamW steps are
  finite, and the loss falls (first -> last).
- **roles**: claims about roles and variants that hold numerically on the twin, of all that were made.
- **tower**: the vision tower's forward and backward graphs are known; `-` where there is none.
- seconds are those of the parse, on one core of two that other work shared; the sums are of all rows.
- a row holds the last measurement of each of its parts; `--again` repeats what is not complete.
- backbones of the package timm are not traced: timm needs torchvision, whose wheels load beside a build of torch for
  CUDA only, so that neither is a dependency here.
"""


def write_report(rows: dict[str, Row], entries: Sequence[Entry], path: Path) -> None:
    """Write the page.

    Args:
        rows: by key.
        entries: all of them, in order; one without a row is shown as not measured.
        path: of the page.
    """
    parts = [_HEAD, _totals(rows, entries)]
    for mapping in (CAUSAL, IMAGE_TEXT):
        chosen = [entry for entry in entries if entry.mapping == mapping]
        parts.append(_table(mapping, rows, chosen))
    parts += [_exceptions(rows, entries), _repairs(rows, entries)]
    path.write_text("\n".join(parts).rstrip() + "\n")


def _totals(rows: dict[str, Row], entries: Sequence[Entry]) -> str:
    lines = [
        "| | entries | instantiate | forward | backward | tower | twin trains | complete | roles all proven | median s "
        "| sum s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mapping in (CAUSAL, IMAGE_TEXT):
        keys = [entry.key for entry in entries if entry.mapping == mapping]
        found = [rows[key] for key in keys if key in rows]
        towers = [row for row in found if row.tower is not None]
        seconds = [row.seconds for row in found] or [0.0]
        cells: list[object] = [mapping, len(keys)]
        cells += [sum(getattr(row, name) for row in found) for name in ("instantiates", "forward", "backward")]
        cells += [f"{sum(bool(row.tower) for row in towers)} of {len(towers)}", sum(row.twin for row in found)]
        proven = sum(row.roles_claimed == row.roles_proven > 0 for row in found)
        cells += [
            sum(row.complete for row in found),
            proven,
            f"{statistics.median(seconds):.1f}",
            f"{sum(seconds):.0f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _mark(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "**no**"


def _table(mapping: str, rows: dict[str, Row], entries: Sequence[Entry]) -> str:
    lines = [
        f"## {mapping}\n",
        "| model type | class | instantiates | forward | backward | tower | layers (kinds) | parameters, M | roles "
        "| twin trains | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        row = rows.get(entry.key)
        if row is None:
            lines.append(f"| {entry.model_type} | {entry.class_name} | not measured | | | | | | | | |")
            continue
        losses = f"{row.twin_losses[0]:.2f} -> {row.twin_losses[1]:.2f}" if row.twin_losses else ""
        cells = [entry.model_type, entry.class_name, _mark(row.instantiates), _mark(row.forward), _mark(row.backward)]
        cells += [_mark(row.tower), f"{row.layers} ({row.kinds})" if row.layers else ""]
        cells += [f"{row.total / 1e6:.0f}" if row.total else ""]
        cells += [f"{row.roles_proven} of {row.roles_claimed}" if row.roles_claimed else "not measured"]
        cells += [losses if row.twin else "**no**", f"{row.seconds:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _exceptions(rows: dict[str, Row], entries: Sequence[Entry]) -> str:
    lines = ["## What is not complete, and why\n"]
    for entry in entries:
        row = rows.get(entry.key)
        if row is None or row.complete:
            continue
        reasons = [f"{p.get('title', '')}: {p.get('detail', '')}" for p in (row.problem, row.twin_problem) if p]
        if row.tower is False:
            reasons += [warning for warning in row.warnings if "vision tower" in warning]
        if row.forward and not row.backward:
            reasons += [warning for warning in row.warnings if "backward" in warning]
        text = " / ".join(dict.fromkeys(" ".join(reason.split())[:400] for reason in reasons))
        lines.append(f"- `{entry.key}`: {text.replace('|', ' ')}")
    return "\n".join(lines) + "\n"


def _repairs(rows: dict[str, Row], entries: Sequence[Entry]) -> str:
    lines = [
        "## Default configurations that their own class leaves broken\n",
        "What was filled in, and from where; only fields that the configuration does not state. `assumed` sizes are "
        "those of no published model.\n",
    ]
    for entry in entries:
        row = rows.get(entry.key)
        words = [w for w in row.warnings if " taken as " in w] if row is not None else []
        if words:
            lines.append(f"- `{entry.key}`: {'; '.join(words)}")
    return "\n".join(lines) + "\n"
