"""The gate: every submission of ``exploits/`` is refused for its own reason, every one of ``honest/`` is accepted.

A file is appended to an honest candidate (a gated norm). An exploit's header names its class and, after ``refused
because:``, words of which one must be in the reasons; after ``cases:`` how many it takes, if more than two. What came
of each is printed as a table at the end of the run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planting import NORM, candidate, make_spec, verdict
from warmed import warm_parent  # noqa: F401  (a fixture)

from onboarding.sandbox import Limits
from onboarding.stages.judge.structure import findings

pytestmark = pytest.mark.sandbox
HERE = Path(__file__).parent
EXPLOITS = sorted((HERE / "exploits").glob("*.py"))
HONEST = sorted((HERE / "honest").glob("*.py"))
LIMITS = Limits(wall_s=240.0, memory_bytes=2 * 2**30, processes=128, output_bytes=2**20, scratch_bytes=256 * 2**20)
WAITS = {"hangs_deaf", "forks_without_end", "takes_all_memory", "fills_the_disk", "prints_without_end"}
"""Ended by a limit: the seconds that it takes are the limit's."""
SLOW = WAITS - {"hangs_deaf"} | {
    "backdoor_outside_the_sandbox", "acts_after_many_calls", "borrows_the_template", "side_stream", "background_thread",
    "patches_the_clock", "last_saved_only", "replayed_workspace", "all_gradients_or_none", "random_rounding",
    "leaves_by_exception", "not_python", "installs_packages", "lazy_subclass", "statistical_shortcut", "other_dtype",
    "works_once", "fallback_in_except", "other_runs_kernels", "counts_in_the_seed", "state_in_a_default",
    "state_in_the_configuration", "reseeds_the_generator", "writes_files_through_numpy", "imports_everything",
    "side_stream_by_another_name", "type_made_at_run_time", "no_epsilon", "torch_for_some_sizes", "notices_the_judge",
    "reads_what_nobody_wrote", "corrupts_the_context",
    "atomics_by_word_only", "finds_builtins_in_a_frame", "other_bits_by_needs", "only_one_number_of_elements",
    "wrong_from_so_many_elements", "state_under_another_name",
}  # fmt: skip
FAST_HONEST = {
    "atomic_weight_gradient", "columns_in_blocks", "two_kernels", "own_allocations", "scratch_in_place", "autotuned",
    "gradients_in_two_launches", "pads_its_rows",
}  # fmt: skip


def marked(paths: list[Path], slow: set[str]) -> list[object]:
    return [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in slow else []) for p in paths]


@pytest.mark.parametrize("exploit", marked(EXPLOITS, SLOW))
def test_exploits_are_refused(exploit: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = exploit.read_text()
    kind, words = header(text)
    source = candidate(make_spec("norm", NORM)) + b"\n\n" + text.encode()
    answer_s = 3.0 if exploit.stem in WAITS else 30.0
    cases = re.search(r"^# cases: (\d+)$", text, re.M)
    count = int(cases[1]) if cases else 2
    found = verdict(source, make_spec("norm", NORM), tmp_path, limits=LIMITS, answer_s=answer_s, cases=count)
    said = " | ".join(found.reasons)
    first = next((reason for reason in found.reasons if any(word in reason for word in words)), said)
    request.node.user_properties.append(("corpus", (kind, exploit.stem, found.outcome, first)))
    assert found.outcome == "refused"
    assert any(word in said for word in words), said


@pytest.mark.parametrize("honest", marked(HONEST, {p.stem for p in HONEST} - FAST_HONEST))
def test_honest_kernels_are_accepted(honest: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = candidate(make_spec("norm", NORM)) + b"\n\n" + honest.read_bytes()
    found = verdict(source, make_spec("norm", NORM), tmp_path, cases=2)
    request.node.user_properties.append(("corpus", ("honest", honest.stem, found.outcome, found.summary)))
    assert found.outcome == "accepted", found.reasons
    assert findings(source) == []
    assert all(found.modes.values())


def header(text: str) -> tuple[str, list[str]]:
    """The class of an exploit, and the words of which one must be in the reasons."""
    kind = re.search(r"^# (class(?:es)? [\d, ]+|bad input): ", text, re.M)
    words = re.search(r"^# refused because: (.*)$", text, re.M)
    assert kind, "the file must name its class"
    assert words, "the file must say why it is to be refused"
    return kind[1].strip(), [word.strip() for word in words[1].split("|")]


def test_every_class_that_can_exist_has_a_submission() -> None:
    """The table in ``exploits/README.md`` says of the 34 known classes which cannot exist here, and why."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|$", (HERE / "exploits" / "README.md").read_text(), re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, 35))
    by_class: dict[int, set[str]] = {}
    for path in EXPLOITS:
        kind, _ = header(path.read_text())
        for number in re.findall(r"\d+", kind):
            by_class.setdefault(int(number), set()).add(path.stem)
    for number, name, shown in rows:
        listed = set(re.findall(r"`(\w+)`", shown))
        assert listed == by_class.get(int(number), set()), (number, name)
        assert listed or shown.startswith("cannot exist: "), (number, name)


def test_a_verdict_can_be_reproduced(tmp_path: Path) -> None:
    spec = make_spec("norm", NORM)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = verdict(candidate(spec), spec, tmp_path / "a", seed=None, cases=2)
    again = verdict(candidate(spec), spec, tmp_path / "b", seed=first.seed, cases=2)
    assert [c.errors for c in first.cases] == [c.errors for c in again.cases]
    assert [c.name for c in first.cases] == [c.name for c in again.cases]
