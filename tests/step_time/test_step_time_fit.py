"""The fit finds what made the data, corrects by what runs have in common, and never sees what it is judged by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onboarding.step_time import validate
from onboarding.step_time.fit import Fitted, _table, fit
from onboarding.step_time.hardware import SYSTEMS
from onboarding.step_time.law import MEDIANS, NAMES, PRIORS, Table, log_seconds, parts, plain
from onboarding.step_time.predict import fitted, predict, stored
from onboarding.step_time.published import Run, published
from onboarding.step_time.terms import Setting
from onboarding.step_time.validate import PROTOCOLS, Judged, judge, rank_correlation, summary
from onboarding.step_time.work import Work


def made(logs: np.ndarray, runs: list[Run]) -> list[Run]:
    """The same layouts with step times that the law itself gives."""
    seconds = np.exp(log_seconds(_table(runs), logs))
    return [replace(r, tokens_per_second=r.setting.tokens / s) for r, s in zip(runs, seconds, strict=True)]


def test_parts_sum_up_to_the_step() -> None:
    runs = list(published())[::7]
    table = _table(runs)
    found = parts(table, MEDIANS)
    assert np.allclose(sum(found.values()), np.exp(log_seconds(table, MEDIANS)))
    assert all((values >= -1e-12).all() for values in found.values())


def test_a_fit_predicts_layouts_that_it_has_not_seen_where_the_law_holds() -> None:
    truth = MEDIANS.copy()
    for name, factor in (("products blackwell:mxfp8", 1.2), ("launch", 0.6), ("tensor", 1.5), ("vector", 1.3)):
        truth[NAMES.index(name)] += np.log(factor)
    runs = made(truth, list(published()))
    held = [run for i, run in enumerate(runs) if i % 9 == 0]
    rest = [run for i, run in enumerate(runs) if i % 9]
    found = fit(rest)
    errors = np.abs(found.seconds(held) / np.array([run.step_s for run in held]) - 1)
    assert errors.max() < 0.02
    assert np.exp(found.logs[NAMES.index("products blackwell:mxfp8")]) == pytest.approx(0.6, rel=0.05)


def test_a_stack_that_is_slower_by_a_factor_is_told_by_its_other_runs() -> None:
    runs = made(MEDIANS, list(published()))
    slow = [r for r in runs if r.stack == "torchtitan"]
    runs = [replace(r, tokens_per_second=r.tokens_per_second / 1.3) if r in slow else r for r in runs]
    held = [r for r in runs if r.stack == "torchtitan"][::3]
    found = fit([r for r in runs if r not in held])
    assert np.allclose(found.corrections(held), 1.3, rtol=0.08)


def test_the_stored_fit_is_the_fit_of_the_published_runs() -> None:
    anew = fit(published())
    kept = stored()
    assert kept["runs"] == len(published())
    assert plain(anew.logs) == pytest.approx(kept["parameters"], rel=0.02)
    assert list(kept["parameters"]) == list(PRIORS)


def test_a_group_is_judged_by_a_fit_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list(published())
    seen: list[set[str]] = []

    def watching(rest: list[Run]) -> Fitted:
        seen.append({validate._system(run) for run in rest})
        return Fitted(runs=tuple(rest), logs=MEDIANS, scales=fitted().scales)

    monkeypatch.setattr(validate, "fit", watching)
    protocol = next(p for p in PROTOCOLS if p.name == "unseen system")
    judged = judge(runs, protocol)
    systems = sorted({validate._system(run) for run in runs})
    assert [set(systems) - known for known in seen] == [{system} for system in systems]
    assert {id(row.run) for row in judged} <= {id(run) for run in runs}


def test_the_same_layout_in_another_release_is_held_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = next(p for p in PROTOCOLS if p.name == "another layout")
    runs = [r for r in published() if r.setting.work.name == "kimi-k2"]  # one layout, four releases
    monkeypatch.setattr(validate, "fit", lambda rest: pytest.fail("nothing is left to fit on"))
    assert judge(runs, protocol) == []


def test_rank_correlation_and_summary() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)  # ties by their mean rank
    assert rank_correlation([1, 2], [1, 2]) is None
    run = published()[0]
    rows = [Judged(run=run, predicted_s=run.step_s * f) for f in (1.0, 1.1, 0.8)]
    found = summary(rows)
    assert (found["runs"], found["median"], found["worst"]) == (3, pytest.approx(0.1), pytest.approx(0.2))


def test_a_trial_run_scales_what_runs_on_the_device_only() -> None:
    setting = next(r.setting for r in published() if r.setting.work.name == "qwen3-30b-a3b")
    plainly, slower = predict([setting])[0], predict([setting], trial=2.0)[0]
    assert slower.parts["experts"] == pytest.approx(2 * plainly.parts["experts"])
    assert slower.parts["all-to-all"] == pytest.approx(plainly.parts["all-to-all"])
    assert slower.seconds == pytest.approx(sum(slower.parts.values()))


def alone(work: Work, tokens: int) -> dict[str, float]:
    """Parts of one forward and backward on one H200."""
    one = Setting(work=work, system=SYSTEMS["H200"], precision="bf16", gpus=1, gbs=1, mbs=1, seq=tokens)
    found = parts(Table([one], [False]), fitted().logs)
    return {name: float(values[0]) for name, values in found.items()}


def test_operators_that_were_measured_on_an_h200_and_not_fitted_on() -> None:
    empty = {"name": "m", "layers": 1, "vocabulary": 1, "parameters": 1.0}
    # a matrix product of 8192^3: 685 TFLOP/s
    product = Work(hidden=8192, linear_flops=2.0 * 8192 * 8192, **empty)  # type: ignore[arg-type]  # a dict of mixed values
    seconds = alone(product, 8192)["shared matrix products"]
    assert 3 * 2 * 8192**3 / seconds / 1e12 == pytest.approx(685, rel=0.1)
    # KDA, 32 heads of 128 x 128, 8192 tokens, forward and backward by fla: 5.13 ms
    scan = Work(hidden=2304, linear_flops=1.0, scan_flops=4.0 * 32 * 128 * 128, **empty)  # type: ignore[arg-type]
    assert alone(scan, 8192)["recurrences"] == pytest.approx(5.13e-3, rel=0.15)
