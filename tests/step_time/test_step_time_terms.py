"""Work and terms against published figures and against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onboarding.step_time.hardware import SYSTEMS
from onboarding.step_time.models import WORKS
from onboarding.step_time.published import published
from onboarding.step_time.terms import Setting, terms

# TFLOP of training one token, as the pages print them beside the speeds (tokens of the row in brackets).
PRINTED = {
    ("deepseek-v3", 4096): 0.249,
    ("deepseek-v3-mtp", 4096): 0.260,
    ("kimi-k2", 4096): 0.204,
    ("qwen3-235b-a22b", 4096): 0.148,
    ("qwen3-30b-a3b", 4096): 0.0231,
    ("llama3-405b", 8192): 2.52,
    ("llama3-70b", 8192): 0.449,
    ("llama3-70b", 4096): 0.433,
    ("gpt-oss-120b", 4096): 0.0326,
}
PARAMETERS = {
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.9e9,
    "qwen3-30b-a3b": 30.53e9,
    "qwen3-235b-a22b": 235.1e9,
    "deepseek-v3": 671.0e9,
    "kimi-k2": 1026e9,
    "gpt-oss-120b": 116.8e9,
    "gpt-oss-20b": 20.9e9,
    "nemotron-3-nano": 31.6e9,
    "nemotron-3-super": 120.6e9,
}


@pytest.mark.parametrize(("model", "tokens"), PRINTED)
def test_flops_agree_with_what_the_pages_print(model: str, tokens: int) -> None:
    assert 3 * WORKS[model].forward(tokens) / 1e12 == pytest.approx(PRINTED[model, tokens], rel=0.01)


@pytest.mark.parametrize("model", PARAMETERS)
def test_parameters_agree_with_the_published_totals(model: str) -> None:
    assert WORKS[model].parameters == pytest.approx(PARAMETERS[model], rel=0.005)


def kimi(**changes: object) -> Setting:
    """K2 on H100s, EP 16 over two nodes."""
    plain = Setting(
        work=WORKS["kimi-k2"], system=SYSTEMS["H100"], precision="bf16", gpus=64, gbs=128, mbs=1, seq=4096, ep=16
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields of a frozen dataclass


def test_products_take_their_flops_at_the_peak() -> None:
    setting = kimi()
    tokens = 128 * 4096 / 64
    assert terms(setting).linear == pytest.approx(3 * setting.work.linear_flops * tokens / 989e12)
    assert terms(replace(setting, adapters=True)).linear == pytest.approx(terms(setting).linear * 2 / 3)
    assert terms(replace(setting, recompute=True)).experts == pytest.approx(terms(setting).experts * 4 / 3)


def test_the_exchange_moves_each_token_once_to_a_node_that_it_goes_to() -> None:
    tokens, row, layers = 128 * 4096 / 64, 7168 * 2, 60
    found = terms(kimi())
    # two nodes: the other one is reached by 1 - 1/2^8 of the tokens; dispatch and combine, forward and backward
    between = 4 * tokens * layers * row * (1 - 0.5**8)
    assert found.exchange_between == pytest.approx(between / 50e9)
    inside_one = terms(kimi(ep=8))
    assert inside_one.exchange_between == 0
    # once to each of the 8 ranks that holds one of its 8 experts: 8 (1 - (7/8)^8) of them, one in eight at home
    ranks = 8 * (1 - (7 / 8) ** 8)
    assert inside_one.exchange_inside == pytest.approx(4 * tokens * layers * row * ranks * (1 - 1 / 8) / 450e9)
    assert terms(kimi(ep=1)).exchange_inside == 0


def test_an_uneven_load_costs_what_the_busiest_rank_has() -> None:
    even, skewed = terms(kimi()), terms(kimi(imbalance=1.5))
    for name in ("experts", "exchange_inside", "exchange_between", "routed_vector"):
        assert getattr(skewed, name) == pytest.approx(1.5 * getattr(even, name)), name
    assert skewed.linear == even.linear


def test_the_bubble_of_an_interleaved_pipeline() -> None:
    setting = kimi(pp=8, vp=4, ep=8)  # 128 sequences over 8 pipelines
    assert setting.microbatches == 16
    assert terms(setting).bubble == pytest.approx(7 / (4 * 16))


def test_sharded_weights_cross_to_every_other_device() -> None:
    work = WORKS["llama3-70b"]
    setting = Setting(work=work, system=SYSTEMS["H200"], precision="bf16", gpus=8, gbs=8, mbs=1, seq=8192, fsdp=8)
    # gathered for forward and backward, gradients scattered once: three times the weights in bfloat16, 7/8 from others
    assert terms(setting).weights_inside == pytest.approx(3 * 2 * work.parameters * 7 / 8 / 450e9)
    assert terms(setting).weights_between == 0
    frozen = terms(replace(setting, adapters=True))
    assert frozen.weights_inside == pytest.approx(terms(setting).weights_inside * 2 / 3)


def test_every_published_row_is_a_possible_layout() -> None:
    runs = published()
    assert len(runs) > 300
    for run in runs:
        s = run.setting
        assert s.gpus % (s.tp * s.pp * s.cp) == 0, run
        assert s.microbatches == int(s.microbatches) >= 1, run
        assert not s.work.experts or s.work.experts % s.ep == 0, run
        share = 3 * s.work.forward(s.seq) * run.tokens_per_second / s.system.peak(s.precision)
        assert 0.02 < share < 0.85, (run, share)
