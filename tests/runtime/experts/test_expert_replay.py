"""Reference section 2, recompute: ties, other checkpoints, load counters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.experts import replay
from runtime.experts.replay import replay_contexts
from runtime.experts.router import RouterMode
from runtime.parallel.config import BalanceConfig, ParallelConfig
from runtime.parallel.gradients import after_optimizer_step
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.prove import twins


def _model(recompute: bool, balance: BalanceConfig | None = None, name: str = "qwen3_moe") -> nn.Module:
    model = twins.build(name, torch.float64)
    if recompute:
        model.activation_checkpointing_enable(  # type: ignore[operator]
            activation_checkpointing_kwargs={"use_reentrant": False, "context_fn": replay_contexts}
        )
    parallelize(model, Meshes.alone("cpu"), ParallelConfig(balance=balance or BalanceConfig()))
    return model


IDS = torch.randint(0, twins.VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_case_16_ties_are_broken_once(name: str) -> None:
    """All router logits equal, and a topk that breaks ties differently at every call."""
    outcomes = []
    for recompute in (False, True):
        model = _model(recompute, name=name)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "gate.weight" in n or "router" in n:
                    p.zero_()
        calls = 0

        def fickle(self: RouterMode, scores: Tensor, k: int, *args: object, **kwargs: object) -> object:
            nonlocal calls
            tape = replay.current()
            if tape is not None and tape.replaying:
                chosen = tape.read()
            else:
                calls += 1
                # another choice at each decision
                chosen = (torch.arange(k) + calls).expand(*scores.shape[:-1], k) % scores.shape[-1]
                if tape is not None:
                    tape.record(chosen)
            self.ranked = scores
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))

        balance = ParallelConfig(balance=BalanceConfig(groups=1, groups_kept=1))
        for layer in model.__dict__["_onboard_parallel"].layers:
            layer.config = balance  # so that the selection is ours without recomputation too
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RouterMode, "_topk", fickle)
            outcomes.append(_gradients(model))
    for n, expected in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][n], expected, msg=n)


@pytest.mark.parametrize("method", ["none", "bias", "quantile"])
def test_case_18_recomputation_changes_no_gradient_and_no_counter(method: str) -> None:
    balance = BalanceConfig(method=method, aux_loss=0.1, capacity_factor=1.0)  # type: ignore[arg-type]
    reports, gradients = [], []
    for recompute in (False, True):
        model = _model(recompute, balance)
        gradients.append(_gradients(model))
        reports.append(after_optimizer_step(model))
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)
    first, second = reports
    assert first is not None
    assert second is not None
    assert torch.equal(first.load, second.load)
    assert torch.equal(first.dropped, second.dropped)
    assert first.dropped.sum() > 0
    assert first.load.sum() == 2 * IDS.numel() * 3 - first.dropped.sum()  # 2 layers, top 3


def test_selection_inside_a_tape_is_torch_topk() -> None:
    scores = torch.rand(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    mode = RouterMode(8, lambda ranked, _, k: ranked.topk(k, -1).indices, None)
    with mode:
        ours = torch.topk(scores.softmax(-1), 3)
    plain = torch.topk(scores.softmax(-1), 3)
    assert torch.equal(ours.indices, plain.indices)
    weights = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    (a,) = torch.autograd.grad((ours.values * weights).sum(), scores)
    (b,) = torch.autograd.grad((plain.values * weights).sum(), scores)
    torch.testing.assert_close(a, b)
    probabilities = mode.probabilities()
    assert probabilities is not None
    torch.testing.assert_close(probabilities, scores.softmax(-1))


def test_a_tape_that_runs_out_says_so() -> None:
    first, second = replay_contexts()
    with first:
        pass
    with second:
        current = replay.current()
        assert current is not None
        with pytest.raises(RuntimeError, match="did not take"):
            current.read()


def test_checkpointing_experts_without_replay_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        replay.refuse_other_checkpoints()
        return x * 2

    with pytest.raises(RuntimeError, match="context_fn=runtime"):
        checkpoint(step, x, use_reentrant=False)
    run = partial(checkpoint, use_reentrant=False, context_fn=replay_contexts)
    run(step, x).sum().backward()
