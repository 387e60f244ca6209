"""The evaluation suite: its operators run at odd sizes and agree with torch where torch has them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from llm_server import LlmServer, Said, message
from torch import Tensor
from torch.nn import functional as F

from agents.llm.cassette import Player
from benchmarks.agents import suite
from benchmarks.agents.run import drawn, main, score
from kernel_templates.loading import load_source
from kernel_templates.novel import NovelSpec
from kernel_templates.registry import FAMILIES, load_spec
from onboarding.stages.judge import novel
from onboarding.stages.judge.novel_child import entry_point


def tensors_of(spec: NovelSpec, case: Any, seed: int = 0) -> dict[str, Tensor]:
    made = novel.FAMILY.make_tensors(spec, case, torch.Generator().manual_seed(seed), torch.float32, "cpu")
    found = {}
    for role in spec.inputs():
        t = made[role.name]
        assert t is not None
        found[role.name] = t.double().requires_grad_(role.differentiable) if t.is_floating_point() else t
    return found


def test_the_suite_has_at_least_24_operators_and_none_is_a_family() -> None:
    assert len(suite.names()) >= 24
    assert not set(suite.names()) & set(FAMILIES)


@pytest.mark.parametrize("name", suite.names())
def test_an_operator_is_defined_at_odd_sizes(name: str, tmp_path: Any) -> None:
    spec = suite.load(name)
    assert load_spec(spec.to_dict()) == spec
    run = entry_point(load_source(spec.source, tmp_path), spec.call)
    cases = novel.FAMILY.cases(spec, random.Random(1), 4, "interpreted")
    for case in [cases[0], cases[3]]:
        given = tensors_of(spec, case)
        result = run(given)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        promised, _ = novel.FAMILY.outputs_like(dict(given), spec, {})
        assert [o.shape for o in outputs] == [p.shape for p in promised.values()]
        leaves = [t for t in given.values() if t.requires_grad]
        found = torch.autograd.grad([o.square().sum() for o in outputs], leaves)
        assert all(t.isfinite().all() for t in [*outputs, *found])
        assert outputs[0].any()


def run(name: str, folder: Any) -> tuple[NovelSpec, dict[str, Tensor], Tensor]:
    spec = suite.load(name)
    given = tensors_of(spec, novel.FAMILY.typical(spec))
    return spec, given, entry_point(load_source(spec.source, folder), spec.call)(given)


def close(a: Tensor, b: Tensor) -> bool:
    return float(((a - b).norm() / b.norm()).detach()) < 1e-10


def test_attentions_agree_with_torchs_own(tmp_path: Any) -> None:
    sdpa = F.scaled_dot_product_attention
    _, t, o = run("differential_attention", tmp_path)
    maps = [sdpa(t[f"q{i}"], t[f"k{i}"], t["v"], is_causal=True) for i in (1, 2)]
    assert close(o, maps[0] - t["lam"][:, None, None] * maps[1])
    _, t, o = run("value_residual_attention", tmp_path)
    part = torch.sigmoid(t["share"])[:, None, None]
    assert close(o, sdpa(t["q"], t["k"], part * t["v"] + (1 - part) * t["v_first"], is_causal=True))
    _, t, o = run("forgetting_attention", tmp_path)
    total = t["g"].cumsum(-1)
    bias = (total[..., :, None] - total[..., None, :]).masked_fill(
        torch.ones(o.shape[2], o.shape[2]).triu(1) > 0, -1e300
    )
    assert close(o, sdpa(t["q"], t["k"], t["v"], attn_mask=bias))
    _, t, o = run("kv_shared_cross_attention", tmp_path)
    keys = F.rms_norm(t["kv"], t["kv"].shape[-1:], t["gain"], 1e-6)[:, None].expand(-1, o.shape[1], -1, -1)
    assert close(o, sdpa(t["q"], keys, t["kv"][:, None].expand_as(keys)))


def test_others_agree_with_torchs_own(tmp_path: Any) -> None:
    _, t, y = run("group_norm_swish_gate", tmp_path)
    n, h, d = y.shape
    normed = F.group_norm(t["x"].reshape(n, h * d), h, t["gain"].flatten() * 0 + 1, eps=1e-5).reshape(n, h, d)
    assert close(y, (normed * t["gain"] + t["shift"]) * F.silu(t["gate"]))
    _, t, loss = run("smoothed_z_loss", tmp_path)
    smoothed = F.cross_entropy(t["logits"], t["label"], label_smoothing=0.1, reduction="none")
    assert close(loss, smoothed + 1e-2 * t["logits"].logsumexp(-1).square())
    _, t, y = run("gated_long_convolution", tmp_path)
    width = t["taps"].shape[1]
    x = (t["x"] * t["before"]).transpose(1, 2)
    conv = F.conv1d(F.pad(x, (width - 1, 0)), t["taps"].flip(-1)[:, None], groups=x.shape[1]).transpose(1, 2)
    assert close(y, t["after"] * conv)
    _, t, y = run("sparsemax", tmp_path)
    assert bool((y >= 0).all())
    assert close(y.sum(-1), torch.ones_like(y.sum(-1)))


def test_what_is_drawn_depends_on_the_seed_only() -> None:
    assert drawn("", 12, 5) == drawn("", 12, 5)
    assert len(set(drawn("", 12, 5))) == 12
    assert drawn("min_gru,mlstm", 0, 0) == ["min_gru", "mlstm"]
    with pytest.raises(SystemExit, match="no operator"):
        drawn("nonsense", 0, 0)


def test_the_score_counts_what_was_accepted() -> None:
    spent = {"tokens": 10, "money": 0.5, "gpu_s": 0.0, "wall_s": 1.0}
    rows = {
        "a": {"accepted": True, "tries": [1], "spent": spent, "seconds": 1.0},
        "b": {"accepted": True, "tries": [1, 2], "spent": spent, "seconds": 1.0},
        "c": {"accepted": False, "tries": [1], "spent": spent, "seconds": 1.0},
    }
    told = score(rows)
    assert (told["operators"], told["accepted"], told["accepted_first_try"], told["tokens"]) == (3, 2, 1, 30)


def test_a_run_writes_what_was_drawn_and_what_came_out(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(body: dict[str, Any], number: int) -> Said:
        return message(json.dumps({"plan": "p", "decomposition": "", "source": "def forward(tensors, config): ..."}))

    out, tape = tmp_path / "results.json", tmp_path / "tape.jsonl"
    with LlmServer(script) as server:
        for name, value in (("BASE_URL", server.url), ("MODEL", "scripted"), ("ROUNDS", "1"), ("PRICE_OUT", "2")):
            monkeypatch.setenv(f"ONBOARD_LLM_{name}", value)
        options = ["--draw", "2", "--seed", "3", "--home", str(tmp_path / "home"), "--out", str(out)]
        assert main([*options, "--cassette", str(tape), "--responder", "a scripted server"]) == 0
        asked = len(server.requests)
    told = json.loads(out.read_text())
    assert told["drawn"] == drawn("", 2, 3) == list(told["operators"])
    assert asked == 2
    assert told["score"]["accepted"] == 0
    assert told["score"]["tokens"] == 2 * 150
    assert all(row["tries"][0]["rung"] == "nothing" for row in told["operators"].values())
    assert Player(tape).made["responder"] == "a scripted server"
