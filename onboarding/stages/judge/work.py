"""Proof that a candidate's kernels do its work, not torch: launches that do nothing, and a log of torch's operators."""

from __future__ import annotations

from typing import Any

from onboarding.stages.judge import exchange, verify
from onboarding.stages.judge.examinee import Examinee, Refusal
from onboarding.stages.judge.trials import Trial

# what host code may have torch do to floating tensors: make, move and convert them, and add up partial results; on
# integers (routing, offsets) anything
ALLOWED = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_full", "zeros",
    "zeros_like", "ones", "ones_like", "full", "full_like", "fill_", "zero_", "set_", "copy_", "clone",
    "_to_copy", "contiguous", "lift_fresh", "detach", "alias", "view", "_unsafe_view", "reshape",
    "_reshape_alias", "as_strided", "expand", "slice", "select", "split", "split_with_sizes", "narrow",
    "transpose", "permute", "t", "unsqueeze", "squeeze", "unbind", "unflatten", "flatten", "cat", "stack",
    "constant_pad_nd", "sum", "add", "add_",
}  # fmt: skip
PRODUCTS = {"mm", "addmm"}
"""Of a family whose spec says that dense products are the library's; what makes an answer of them is not allowed."""


def done_by_kernels(examinee: Examinee, trials: list[Trial]) -> tuple[list[str], dict[str, int]]:
    """Reasons why a candidate's kernels do not do its work; and torch's operators on floating tensors, counted.

    Every trial runs with kernels that do nothing, which costs little; the first one with its kernels, too.

    Raises:
        Refusal: its process died or hung, or it raised with its kernels at work.
    """
    used: dict[str, int] = {}
    for trial in trials:
        reasons, names = _hollow(examinee, trial)
        used |= names
        if reasons:
            return [f"case {trial.case.name}: {reason}" for reason in reasons], used
    sent = exchange.send(examinee, 0, trials[0].calls[0], large=False)
    said = _counts(examinee.ask({"kind": "operators", "calls": [sent.request]}))
    return _left_to_torch(said, trials[0]), used | said


def _hollow(examinee: Examinee, trial: Trial) -> tuple[list[str], dict[str, int]]:
    """Reasons, and torch's operators, of one call with kernels that do nothing."""
    call = trial.calls[0]
    sent = exchange.send(examinee, 0, call, large=False)
    try:
        answer = examinee.ask({"kind": "hollow", "calls": [sent.request], "out": str(examinee.work)})
    except Refusal as refusal:
        return [f"with kernels that do nothing, {refusal}"], {}
    used = _counts(answer)
    reports = answer.get("calls")
    if reports is None:  # an exception over garbage is as good as garbage
        return _left_to_torch(used, trial), used
    returned = verify.read_call(call, exchange.checked(reports, 1)[0], examinee.work, 0)
    # exact zeros are right without any work: they tell nothing
    reasons = [
        f"{name} is right although its kernels did nothing: something else computes it"
        for name, tensor in returned.tensors.items()
        if name in trial.sensitivity and call.expected[name].compare(tensor).error <= call.expected[name].limit
    ]
    return reasons + _left_to_torch(used, trial), used


def _counts(answer: dict[str, Any]) -> dict[str, int]:
    said = answer.get("operators")
    if not isinstance(said, dict) or not all(type(count) is int for count in said.values()):
        raise Refusal("its process wrote noise instead of an answer")
    return {str(name)[:80]: count for name, count in said.items()}


def _left_to_torch(used: dict[str, int], trial: Trial) -> list[str]:
    allowed = ALLOWED | PRODUCTS if trial.spec.library_products else ALLOWED
    names = sorted(n for n in used if n.removeprefix("aten::") not in allowed)
    return [f"its host code leaves work to torch: {', '.join(names)}"] if names else []
