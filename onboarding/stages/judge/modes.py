"""One call in every mode that training may ask for: each must give the same results.

Every subset of the inputs may require a gradient; two calls may be alive at once, their backwards in either order; a
block may be recomputed (``torch.utils.checkpoint``); backward may run twice over one graph; the model may be compiled
(``torch.compile``, traced through the operator's fake kernel and its autograd formula).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from onboarding.stages.judge import exchange, trials, verify
from onboarding.stages.judge.examinee import Examinee
from onboarding.stages.judge.oracle import Call
from onboarding.stages.judge.trials import Trial

ALL_SUBSETS = 4
"""Up to so many differentiable inputs every subset is tried; beyond, none, each alone, all but one, and some others."""


def in_every_mode(
    examinee: Examinee, trial: Trial, rng: random.Random, *, compiled: bool, twice: bool
) -> tuple[dict[str, bool], list[str]]:
    """What was tried and whether it held; and the reasons where it did not.

    Args:
        compiled: try ``torch.compile``.
        twice: run backward twice over one graph; an operator that gives its saved tensors away cannot.

    Raises:
        Refusal: the candidate raised, died or hung.
    """
    first, second, _ = trial.calls
    calls: list[tuple[str, Call]] = [("two calls alive", first), ("two calls alive", second)]
    sent = [exchange.send(examinee, 0, first, large=False), exchange.send(examinee, 1, second, large=True)]
    for needs in subsets(first.needs, rng):
        label = "every subset of gradients" if len(first.needs) <= ALL_SUBSETS else "subsets of gradients"
        calls.append((label, trials.restricted(first, needs)))
        sent.append(exchange.again(0, needs))
    calls.append(("recomputed", first))
    sent.append(exchange.again(0, first.needs, "recompute"))
    if twice:
        calls.append(("backward twice", first))
        sent.append(exchange.again(0, first.needs, "twice"))
    if compiled:
        calls.append(("torch.compile", first))
        sent.append(exchange.again(0, first.needs, "compile"))
    reports = exchange.ask(examinee, sent, interleaved=True)
    checks: dict[str, bool] = {}
    reasons = []
    for number, (label, call) in enumerate(calls):
        returned = verify.read_call(call, reports[number], examinee.work, number)
        _, wrong = verify.compare(call, returned, {})
        found = [*returned.wrong, *wrong]
        checks[label] = checks.get(label, True) and not found
        which = f" ({', '.join(sorted(call.needs)) or 'none'})" if "subset" in label else ""
        reasons += [f"{label}{which}: {text}" for text in found]
    changed = [text for number in (0, 1) for text in verify.changed_in(sent[number], examinee.work, number)]
    return checks, changed + reasons


def subsets(needs: frozenset[str], rng: random.Random) -> Iterator[frozenset[str]]:
    """Proper subsets of the inputs that may require a gradient, the empty one included."""
    names = sorted(needs)
    if len(names) <= ALL_SUBSETS:
        for size in range(len(names)):
            yield from map(frozenset, itertools.combinations(names, size))
        return
    yield frozenset()
    for name in names:
        yield frozenset({name})
    yield frozenset(names) - {rng.choice(names)}
    for _ in range(2):
        yield frozenset(rng.sample(names, rng.randint(2, len(names) - 2)))
