"""Roles read off the reduced twin, against what the models' own papers say; and lies that must show."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

from onboarding.architecture import Architecture, FeedForwardRole, MixerRole, ModelFacts
from onboarding.stages.parse.understand.prove import Understanding, understand, understand_twin
from onboarding.twin import TwinPlan, build, derive, models


@cache
def understood(model_type: str) -> Understanding:
    return understand({"model_type": model_type})


def mixer(model_type: str, layer: int) -> MixerRole:
    return understood(model_type).roles[layer].mixers[0]


def forward(model_type: str, layer: int) -> FeedForwardRole:
    return understood(model_type).roles[layer].feed_forwards[0]


def facts(model_type: str) -> ModelFacts:
    found = understood(model_type).facts
    assert found is not None
    return found


def holds(record: Any, **expected: Any) -> None:
    found = {name: getattr(record, name) for name in expected}
    assert found == expected


def unproven(found: Understanding) -> list[str]:
    return [f"{p.part}: {p.claim} ({p.reason})" for p in found.proofs if not p.proven]


FAST = ("llama", "gpt2", "bloom", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_next", "llama4_text", "mamba", "minimax")
SLOW = (
    "cohere", "granite", "mamba2", "falcon_h1", "lfm2", "phimoe", "jetmoe", "dbrx", "longcat_flash", "hy_v4",
    "deepseek_v4", "deepseek_v32", "zamba2", "recurrent_gemma", "rwkv", "muse_spark", "doge", "lara_mini",
)  # fmt: skip


@pytest.mark.parametrize("model_type", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_claim_is_proven(model_type: str) -> None:
    found = understood(model_type)
    assert found.proofs
    assert unproven(found) == []


# ---- what is known of the models ------------------------------------------------------------------------------------


def test_deepseek_v3_is_latent_attention_with_grouped_sigmoid_routing() -> None:
    holds(
        mixer("deepseek_v3", 0), kind="full", heads="MLA", query_heads=128, latent=512, query_latent=1536, head_dim=192,
        value_dim=128, positions="partial rope", rotary_dims=64, qk_norm=False, output_gate="",
    )  # fmt: skip
    holds(forward("deepseek_v3", 0), kind="dense", gated=True, activation="silu", width=18432)
    holds(
        forward("deepseek_v3", 3), kind="experts", experts=256, top_k=8, score="sigmoid", selection_bias=True, groups=8,
        kept_groups=4, renormalised=True, scaling=2.5, shared=1, width=2048,
    )  # fmt: skip
    assert facts("deepseek_v3").buffers == ["model.layers.*.mlp.gate.e_score_correction_bias"]


def test_gpt_oss_has_sinks_windows_and_its_own_gate() -> None:
    holds(mixer("gpt_oss", 0), kind="sliding", heads="GQA", window=128, sinks=True, positions="rope")
    holds(mixer("gpt_oss", 1), kind="full", window=None, sinks=True)
    holds(
        forward("gpt_oss", 0), layout="interleaved", limit=7.0, alpha=1.702, up_offset=1.0, bias=True, experts=128,
        top_k=4, score="softmax", renormalised=True,
    )  # fmt: skip
    assert facts("gpt_oss").positions == "rope, theta 150000, yarn x 32"
    assert facts("gpt_oss").auxiliary_losses == [
        "router_aux_loss_coef 0.001 x load-balancing loss (with output_router_logits)"
    ]


def test_qwen3_next_alternates_gated_delta_rule_and_gated_attention() -> None:
    holds(mixer("qwen3_next", 0), kind="linear", decay="head", delta=True, convolution=4)
    holds(
        mixer("qwen3_next", 3), kind="full", output_gate="sigmoid", qk_norm=True, positions="partial rope",
        rotary_dims=64, head_dim=256,
    )  # fmt: skip
    holds(forward("qwen3_next", 0), experts=512, top_k=10, shared_gate="sigmoid", shared=1)
    norms = {(n.form, n.place) for n in understood("qwen3_next").roles[0].norms}
    assert norms == {("RMSNorm (1 + w)", "pre"), ("RMSNorm, gated by silu", "output")}


def test_llama4_chunks_rotates_three_layers_in_four_and_weighs_what_experts_read() -> None:
    holds(mixer("llama4_text", 0), kind="chunked", chunk=8192, positions="rope", qk_norm=True)
    holds(mixer("llama4_text", 3), kind="full", positions="none", qk_norm=False)
    holds(forward("llama4_text", 0), experts=16, top_k=1, score="sigmoid", shared=1)
    assert any("weights on what experts read" in p.claim for p in understood("llama4_text").proofs)


def test_gemma2_caps_scores_and_logits_and_scales_its_embedding() -> None:
    holds(mixer("gemma2", 0), kind="sliding", window=4096, softcap=50.0)
    holds(mixer("gemma2", 1), kind="full", softcap=50.0)
    holds(facts("gemma2"), logit_softcap=30.0, tied_embeddings=True)
    assert facts("gemma2").embedding_scale == pytest.approx(2304**0.5, rel=1e-5)
    places = {n.place for n in understood("gemma2").roles[0].norms}
    assert places == {"pre", "post"}


def test_state_space_models() -> None:
    holds(mixer("mamba", 0), kind="mamba1", decay="state", convolution=4)
    holds(mixer("minimax", 1), kind="linear", decay="fixed", output_gate="sigmoid")


@pytest.mark.slow
def test_hybrids_in_one_layer_and_across_layers() -> None:
    holds(mixer("mamba2", 0), kind="mamba2", decay="head", convolution=4)
    both = understood("falcon_h1").roles[0].mixers
    assert [m.kind for m in both] == ["mamba2", "full"]
    holds(mixer("lfm2", 0), kind="full")


def test_older_models() -> None:
    holds(mixer("bloom", 0), kind="full", heads="MHA", positions="alibi")
    holds(mixer("gpt2", 0), kind="full", positions="learned")
    holds(forward("gpt2", 0), kind="dense", gated=False, activation="gelu_tanh", bias=True, width=3072)


@pytest.mark.slow
def test_residual_kinds() -> None:
    names = ("llama", "cohere", "granite", "deepseek_v4")
    residual = {name: understood(name).roles[0].residual for name in names}
    assert {name: r.kind for name, r in residual.items() if r} == {
        "llama": "plain",
        "cohere": "parallel",
        "granite": "plain",  # its multipliers are one by default
        "deepseek_v4": "hyper-connections",
    }


@pytest.mark.slow
def test_sparse_attention_and_its_idle_indexer() -> None:
    holds(mixer("deepseek_v32", 0), kind="sparse", heads="MLA", top_k=2048, indexer="relu of q . k, 64 weighted heads")
    idle = facts("deepseek_v32").without_gradient
    assert all(".indexer." in name for name in idle)
    assert len(idle) == 5
    holds(mixer("deepseek_v4", 3), kind="compressed", pool=4, top_k=512, sinks=True, window=128)


@pytest.mark.slow
def test_routers_that_are_not_one_product() -> None:
    assert forward("phimoe", 0).score == "sparsemixer"
    claims = [p.claim for p in understood("longcat_flash").proofs if "experts" in p.claim]
    assert any("without weights" in claim for claim in claims)


def test_complete_fills_in_an_architecture(parsed: Any) -> None:
    from onboarding.examples import example_config
    from onboarding.stages.parse.understand.prove import complete

    architecture: Architecture = complete(parsed("kimi-linear").architecture, example_config("kimi-linear"))
    assert all(block.roles for block in architecture.blocks)
    assert [p.claim for p in architecture.proofs if not p.proven] == []
    kda, mla = architecture.blocks[1].roles, architecture.blocks[2].roles
    assert kda is not None
    assert mla is not None
    holds(kda.mixers[0], kind="linear", decay="channel", delta=True, query_heads=32, head_dim=128)
    holds(mla.mixers[0], heads="MLA", positions="none", latent=512, query_latent=None)
    holds(kda.feed_forwards[0], experts=256, top_k=8, score="sigmoid", scaling=2.446)
    covered = {layer for p in architecture.proofs for layer in p.layers}
    assert covered == set(range(27))
    assert Architecture.model_validate_json(architecture.model_dump_json()) == architecture


@pytest.mark.slow
def test_attention_residuals_and_rows_of_positions() -> None:
    residual = understood("inkling2_text").roles[1].residual
    assert residual is not None
    assert residual.kind == "attention residuals"
    # mrope_section [11, 11, 10] at the twin's head size
    holds(mixer("qwen3_5_text", 3), positions="multimodal rope", rotary_dims=64)


# ---- lies -----------------------------------------------------------------------------------------------------------


@cache
def plan(model_type: str) -> TwinPlan:
    return derive({"model_type": model_type}, assume=True)


def examined(model_type: str, change: Any) -> Understanding:
    """What is found of a twin that was tampered with."""
    twin: Any = build(plan(model_type))
    change(twin)
    full = models.on_meta(models.resolve({"model_type": model_type}))
    return understand_twin(full, twin, list(plan(model_type).layers), [])


def wrapped(module: nn.Module, change: Any) -> None:
    """Let a module give back something else."""
    inner = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return change(inner(*args, **kwargs))

    module.forward = run


def test_a_look_ahead_is_not_causal() -> None:
    def peek(output: Any) -> Any:
        return (output[0] + 1e-3 * output[0].roll(-1, dims=1), *output[1:])

    found = examined("llama", lambda twin: wrapped(twin.model.layers[0].self_attn, peek))
    assert any("causal" in claim for claim in unproven(found))


def test_a_factor_inside_a_feed_forward_is_seen() -> None:
    def bend(output: Tensor) -> Tensor:
        return output + 1e-2 * output.tanh()

    found = examined("llama", lambda twin: wrapped(twin.model.layers[0].mlp, bend))
    assert any(claim.startswith("feed-forward") for claim in unproven(found))


def test_a_norm_with_a_twist_is_novel() -> None:
    def bend(output: Tensor) -> Tensor:
        return output * 1.01

    found = examined("llama", lambda twin: wrapped(twin.model.layers[0].input_layernorm, bend))
    claims = [p.claim for p in found.proofs if p.part == "norm"]
    assert "LlamaRMSNorm: novel, defined by its own subgraph" in claims
    reference = next(n for n in found.novel if n.module == "LlamaRMSNorm")
    assert "rsqrt" in reference.code
    assert reference.error < 1e-5


@pytest.mark.parametrize("what", ["weights", "choice", "gradient"])
def test_a_router_with_a_twist_is_not_proven(what: str) -> None:
    def bend(output: Any) -> Any:
        logits, weights, index = output
        if what == "weights":
            weights = weights * (1 + 1e-2 * logits[:, :1].sigmoid())
        elif what == "choice":
            index = (index + 1) % logits.shape[-1]
        else:
            weights = weights.detach() + 0.5 * (weights - weights.detach())
        return logits, weights, index

    found = examined("qwen3_moe", lambda twin: wrapped(twin.model.layers[0].mlp.gate, bend))
    assert any(claim.startswith("router") for claim in unproven(found))


def test_an_expert_with_a_twist_is_not_proven() -> None:
    def bend(output: Tensor) -> Tensor:
        return output + 1e-3

    found = examined("qwen3_moe", lambda twin: wrapped(twin.model.layers[0].mlp.experts, bend))
    assert any("experts" in claim for claim in unproven(found))


def test_a_residual_that_is_no_sum_is_not_plain() -> None:
    def bend(output: Any) -> Any:
        return output.tanh() if isinstance(output, Tensor) else (output[0].tanh(), *output[1:])

    found = examined("llama", lambda twin: wrapped(twin.model.layers[0], bend))
    residual = found.roles[0].residual
    assert residual is not None
    assert residual.kind == "novel"
    assert not any(p.claim.startswith("residual: ") for p in found.proofs)


def test_another_rotary_base_than_the_configuration_says_is_seen() -> None:
    def change(twin: Any) -> None:
        twin.model.rotary_emb.inv_freq.mul_(1.05)

    found = examined("llama", change)
    assert any("frequencies" in claim for claim in unproven(found))


def test_a_model_without_a_twin_says_so() -> None:
    found = understand({"model_type": "llama", "hidden_size": "wide"})
    assert [p.proven for p in found.proofs] == [False]
    assert "no reduced twin" in found.proofs[0].reason


@pytest.mark.slow
def test_all_hybrid_and_expert_models_are_fully_proven() -> None:
    from onboarding.stages.parse.understand.__main__ import hybrid_and_moe

    names = hybrid_and_moe()
    assert len(names) >= 70
    open_claims = {name: unproven(understood(name)) for name in names}
    assert {name: claims for name, claims in open_claims.items() if claims} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "name"), [("mamba", "selective_scan_fn"), ("minimax", "recurrence")])
def test_a_scan_without_a_family_is_a_gap(model_type: str, name: str) -> None:
    from onboarding.devices import find_device
    from onboarding.stages.gaps.analyse import analyse_gaps
    from onboarding.stages.parse.analyse import analyse
    from onboarding.stages.parse.understand.prove import complete

    config = {"model_type": model_type}
    architecture = complete(analyse(config, tokens=2048).architecture, config)
    gaps = analyse_gaps(architecture, find_device("h200"))
    scans = [row for row in gaps.rows if row.family == "scan"]
    assert [row.gap for row in scans if name in row.name] == [True]
    assert "" not in gaps.gaps
    assert any(block.sequence_dependent for block in architecture.blocks)
