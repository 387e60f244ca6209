"""The sweep: one row an entry whatever the entry does, resumable, and the page that is written from the rows."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto

from benchmarks.coverage.entries import CAUSAL, IMAGE_TEXT, Entry, all_entries
from benchmarks.coverage.report import write_report
from benchmarks.coverage.row import Row
from benchmarks.coverage.sweep import read_rows, sweep

# Python 3.12 warns of a fork beside threads; the children here only run the functions below
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def entry(name: str) -> Entry:
    return Entry(mapping=CAUSAL, model_type=name, class_name=name.title())


def behave(one: Entry) -> Row:
    """A measurement that does what the entry is called."""
    if one.model_type == "crash":
        os._exit(3)
    if one.model_type == "hang":
        time.sleep(3600)
    if one.model_type == "raise":
        raise RuntimeError("no")
    return Row(mapping=one.mapping, model_type=one.model_type, class_name=one.class_name, forward=True, total=7)


def test_every_entry_gets_a_row_and_known_rows_are_read_back(tmp_path: Path) -> None:
    results, seen = tmp_path / "rows.jsonl", list[str]()
    names = ["fine", "crash", "hang", "raise", "last"]
    sweep(
        [entry(n) for n in names], results, behave, jobs=2, seconds=0.5, gigabytes=64.0,
        report=lambda row: seen.append(row.model_type),
    )  # fmt: skip
    rows = read_rows(results)
    assert sorted(seen) == sorted(names)
    assert rows["causal-lm/fine"] == behave(entry("fine"))
    assert rows["causal-lm/last"].forward
    problems = {name: (rows[f"causal-lm/{name}"].problem or {}).get("title", "") for name in names}
    assert "exit code 3" in problems["crash"]
    assert "not done after" in problems["hang"]
    assert "exit code 1" in problems["raise"]
    # measured again: the last line counts
    with results.open("a") as file:
        file.write(behave(entry("fine")).to_json().replace('"total": 7', '"total": 8') + "\n")
    assert read_rows(results)["causal-lm/fine"].total == 8


def test_all_entries_are_those_of_transformers() -> None:
    entries = all_entries()
    count = {mapping: sum(one.mapping == mapping for one in entries) for mapping in (CAUSAL, IMAGE_TEXT)}
    assert count[CAUSAL] == len(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert count[IMAGE_TEXT] == len(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert len({one.key for one in entries}) == len(entries)


def test_the_page_shows_totals_rows_and_reasons(tmp_path: Path) -> None:
    whole = Row(
        mapping=CAUSAL, model_type="fine", class_name="Fine", instantiates=True, forward=True, backward=True,
        total=3_000_000, layers=4, kinds=2, twin=True, twin_losses=(6.0, 1.0), seconds=1.5,
        warnings=["head_dim taken as 64: width / heads"], roles_proven=5, roles_claimed=6,
    )  # fmt: skip
    broken = Row(
        mapping=CAUSAL, model_type="broken", class_name="Broken", instantiates=True, seconds=0.5,
        problem={"title": "the forward does not run", "detail": "field x"},
    )  # fmt: skip
    page = tmp_path / "coverage.md"
    entries = [entry("fine"), entry("broken"), entry("later")]
    write_report({row.key: row for row in (whole, broken)}, entries, page)
    text = page.read_text()
    assert "| causal-lm | 3 | 2 | 1 | 1 | 0 of 0 | 1 | 1 | 0 | 1.0 | 2 |" in text
    assert "| fine | Fine | yes | yes | yes | - | 4 (2) | 3 | 5 of 6 | 6.00 -> 1.00 | 1.5 |" in text
    assert "| later | Later | not measured |" in text
    assert "- `causal-lm/broken`: the forward does not run: field x" in text
    assert "head_dim taken as 64: width / heads" in text
    assert whole.complete
    assert not broken.complete
