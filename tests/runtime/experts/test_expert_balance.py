"""Balance rules against their formulas, written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kernel_templates.tolerance import assert_close
from runtime.experts.balance import quantile_bias
from runtime.parallel.config import BalanceConfig, ParallelConfig
from runtime.parallel.gradients import after_optimizer_step, counting
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.parallel.state import state_of
from runtime.prove import twins

IDS = torch.randint(0, twins.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))
TOP_K = 3


def _model(balance: BalanceConfig, name: str = "qwen3_moe") -> nn.Module:
    model = twins.build(name, torch.float64)
    parallelize(model, Meshes.alone("cpu"), ParallelConfig(balance=balance))
    return model


def _routers(model: nn.Module, name: str) -> list[tuple[Tensor, Tensor]]:
    """(logits, chosen) of every router in one forward."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        m.register_forward_hook(lambda _m, _i, out: seen.append((out[0], out[2])))
        for n, m in model.named_modules()
        if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]
    assert hooks, name
    model(input_ids=IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def test_load_counts_every_slot_once() -> None:
    model = _model(BalanceConfig())
    seen = _routers(model, "qwen3_moe")
    report = after_optimizer_step(model)
    assert report is not None
    for layer, (_, chosen) in enumerate(seen):
        assert report.load[layer].tolist() == torch.bincount(chosen.reshape(-1), minlength=8).tolist()
    again = after_optimizer_step(model)
    assert again is not None
    assert again.load.sum() == 0  # counting starts anew


def test_case_14_padding_is_no_load() -> None:
    model = _model(BalanceConfig(method="bias"))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:] = False
    with counting(model, mask):
        seen = _routers(model, "qwen3_moe")
    report = after_optimizer_step(model)
    assert report is not None
    for layer, (_, chosen) in enumerate(seen):
        real = chosen[mask.reshape(-1)]
        assert report.load[layer].tolist() == torch.bincount(real.reshape(-1), minlength=8).tolist()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_loss_free_rule_moves_the_bias_by_the_sign(name: str) -> None:
    model = _model(BalanceConfig(method="bias", bias_speed=0.01), name)
    biases = [b for n, b in model.named_buffers() if n.endswith(("selection_bias", "e_score_correction_bias"))]
    before = [b.clone() for b in biases]
    seen = _routers(model, name)
    report = after_optimizer_step(model)
    assert report is not None
    assert len(biases) == len(seen)
    for old, new, (_, chosen) in zip(before, biases, seen, strict=True):
        load = torch.bincount(chosen.reshape(-1), minlength=8).double()
        expected = old + 0.01 * (load.mean() - load).sign().to(old.dtype)
        torch.testing.assert_close(new, expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_selection_bias_chooses_but_does_not_weigh(name: str) -> None:
    model = _model(BalanceConfig(method="bias"), name)
    layer = state_of(model).layers[0]
    bias = layer.load.bias
    assert bias is not None
    bias[5] = 1e3
    weights = []
    hook = layer.site.experts.register_forward_pre_hook(lambda _m, args: weights.append(args))
    seen = _routers(model, name)
    hook.remove()
    logits, chosen = seen[0]
    assert bool((chosen == 5).any(1).all())
    picked = logits.softmax(-1).gather(1, chosen)
    torch.testing.assert_close(
        weights[0][2], (picked / picked.sum(1, keepdim=True)).to(weights[0][2].dtype), rtol=1e-6, atol=0
    )


def test_the_auxiliary_loss_has_the_gradient_of_its_formula() -> None:
    """E alpha sum_e f_e P_e through the routers' own logits, beside a loss of zero."""
    alpha = 0.5
    model = _model(BalanceConfig(aux_loss=alpha))
    with counting(model, global_tokens=IDS.numel()):
        (model(input_ids=IDS, use_cache=False).logits.sum() * 0).backward()
    gates = {n: p.grad for n, p in model.named_parameters() if n.endswith("gate.weight") and p.grad is not None}
    plain = twins.build("qwen3_moe", torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for logits, chosen in _routers(plain, "qwen3_moe"):
        share = torch.bincount(chosen.reshape(-1), minlength=8).double() / chosen.numel()
        loss = loss + alpha * 8 * (share * logits.softmax(-1).mean(0)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in plain.named_parameters():
        if name in gates:
            assert parameter.grad is not None
            assert_close(name, gates[name], parameter.grad, 1e-6)  # the router's softmax is fp32


def test_quantile_bias_gives_every_expert_its_share() -> None:
    """With b_e the k/E quantile of (cutoff - score_e), that share of the tokens has score + b above the cutoff."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(4000, 8, generator=generator, dtype=torch.float64) * torch.linspace(0.3, 1.0, 8).double()
    cutoff = scores.topk(2).values[:, -1]
    gap = cutoff.unsqueeze(1) - scores
    cells = ((gap + 1) / 2 * 1000).floor().clamp(0, 999).long()
    histogram = torch.stack([torch.bincount(cells[:, e], minlength=1000) for e in range(8)]).double()
    counts = torch.bincount(scores.topk(2).indices.reshape(-1), minlength=8).double()
    bias = quantile_bias(histogram, counts, 1.0)
    assert bias is not None
    expected = torch.stack([gap[:, e].quantile(2 / 8) for e in range(8)])
    torch.testing.assert_close(bias, expected - expected.mean(), rtol=0, atol=2e-3)  # two bins
    assert quantile_bias(torch.zeros(8, 1000).double(), torch.zeros(8).double(), 1.0) is None


@pytest.mark.parametrize(("method", "speed"), [("bias", 0.005), ("quantile", 1.0)])
def test_the_rules_even_out_a_skewed_router(method: str, speed: float) -> None:
    balance = BalanceConfig(method=method, bias_speed=speed)  # type: ignore[arg-type]
    model = _model(balance)
    ids = torch.randint(0, twins.VOCABULARY, (16, 16), generator=torch.Generator().manual_seed(1))
    violations = []
    for _ in range(25):
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        report = after_optimizer_step(model)
        assert report is not None
        violations.append(report.violation().max().item())
    assert violations[-1] < 0.5 * violations[0]


@pytest.mark.parametrize("overflow", ["drop", "reroute"])
def test_case_15_overflow_is_counted_never_silent(overflow: str) -> None:
    model = _model(BalanceConfig(capacity_factor=0.5, overflow=overflow))  # type: ignore[arg-type]
    model(input_ids=IDS, use_cache=False)
    report = after_optimizer_step(model)
    assert report is not None
    slots = IDS.numel() * TOP_K
    room = -(-slots // 2 // 8)
    assert report.load.max() <= room
    assert (report.load.sum(1) + report.dropped).tolist() == [slots, slots]
    assert (report.dropped >= slots - 8 * room).all()


def test_a_dropped_slot_adds_nothing_and_has_no_gradient() -> None:
    model = _model(BalanceConfig(capacity_factor=1e-9))  # room for one slot an expert
    layer = state_of(model).layers[0]
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    index = torch.arange(18).view(6, 3) % 8
    weights = torch.full((6, 3), 0.5, dtype=torch.float64, requires_grad=True)
    layer.dropped = torch.zeros(6, 3, dtype=torch.bool)
    layer.dropped[2] = True
    y = layer.run(x, index, weights)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert y[2].abs().sum() == 0
    assert weights.grad is not None
    assert x.grad is not None
    assert weights.grad[2].abs().sum() == 0
    assert x.grad[2].abs().sum() == 0
    assert (weights.grad[[0, 1, 3, 4, 5]] != 0).all()
