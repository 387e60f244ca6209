"""Proof that a candidate's kernels do its work, not torch: launches that do nothing, and a log of torch's operators."""

from __future__ import annotations

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


def done_by_kernels(examinee: Examinee, trial: Trial) -> tuple[list[str], dict[str, int]]:
    """Reasons why a candidate's kernels do not do its work; and torch's operators on floating tensors, counted.

    Raises:
        Refusal: its process died or hung, or it raised with its kernels at work.
    """
    call = trial.calls[0]
    reasons = []
    try:
        (report,) = exchange.ask(examinee, [exchange.send(examinee, 0, call, large=False)], "hollow")
        returned = verify.read_call(call, report, examinee.work, 0)
        # exact zeros (a gradient through a softmax over one key) are right without any work: they tell nothing
        for name, tensor in ((n, t) for n, t in returned.tensors.items() if n in trial.sensitivity):
            if call.expected[name].compare(tensor).error <= call.expected[name].limit:
                reasons.append(f"{name} is right although its kernels did nothing: something else computes it")
    except Refusal as refusal:
        # an exception over garbage is as good as garbage; a dead process is not
        if "it raised" not in str(refusal):
            return [f"with kernels that do nothing, {refusal}"], {}
    sent = exchange.send(examinee, 0, call, large=False)
    answer = examinee.ask({"kind": "operators", "calls": [sent.request]})
    said = answer.get("operators", {})
    used = {str(n)[:80]: int(c) for n, c in said.items()} if isinstance(said, dict) else {}
    allowed = ALLOWED | PRODUCTS if call.spec.library_products else ALLOWED
    names = sorted(n for n in used if n.removeprefix("aten::") not in allowed)
    if names:
        reasons.append(f"its host code leaves work to torch: {', '.join(names)}")
    return reasons, used
