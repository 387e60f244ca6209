"""The six shipped definitions against published totals and closed forms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from onboarding.examples import example_config, example_names
from onboarding.problem import Problem
from onboarding.stages.intake.model_types import known_model_types
from onboarding.stages.parse.analyse import Parsed, analyse
from onboarding.stages.parse.stage import summary

PUBLISHED = {
    model["model_type"]: model
    for model in json.loads(Path(__file__).with_name("published_models.json").read_text())["models"]
}
TOKENS = 8192
Parse = Callable[[str], Parsed]


def flops(parsed: Parsed, *, names: tuple[str, ...], phase: str = "forward", role: str | None = None) -> float:
    rows = parsed.architecture.graph
    return sum(r.flops for r in rows if r.name in names and r.phase == phase and role in (None, r.role))


@pytest.mark.parametrize("name", example_names())
def test_totals_are_within_half_a_percent_of_the_published_weights(parsed: Parse, name: str) -> None:
    architecture = parsed(name).architecture
    published = PUBLISHED[architecture.model_type]["published_total"]
    assert architecture.census.total == pytest.approx(published, rel=5e-3)
    built = sum(architecture.census.by_role.values())
    assert built == PUBLISHED[architecture.model_type]["computed_total"]
    assert built + sum(architecture.census.not_built.values()) == architecture.census.total


def test_multi_token_prediction_layers_of_the_checkpoints(parsed: Parse) -> None:
    # the checkpoint's layer element by element: a full-attention MoE layer, the projection, the norms
    key = "multi-token prediction"
    assert parsed("qwen3-next-80b-a3b").architecture.census.not_built[key] == 1642076672 + 8388608 + 6144
    # DeepSeek-V3's also repeats embedding and head, which its configuration does not say
    assert parsed("deepseek-v3").architecture.census.not_built == {
        key: 11507286016 + 102760448 + 21504,
        "its embedding and head": 1853358080,
    }
    assert parsed("kimi-linear").architecture.census.not_built == {}


@pytest.mark.parametrize(
    ("name", "strip"),
    [
        ("kimi-linear", "KKKM" * 6 + "KKM"),
        ("qwen3-next-80b-a3b", "GGGA" * 12),
        ("qwen3-30b-a3b", "A" * 48),
        ("deepseek-v3", "M" * 61),
        ("glm-5.3-flash", "KKKD" * 11 + "K"),
        ("llama-3.1-8b", "A" * 32),
    ],
)
def test_strips(parsed: Parse, name: str, strip: str) -> None:
    architecture = parsed(name).architecture
    assert architecture.strip == strip
    assert sorted(i for block in architecture.blocks for i in block.layers) == list(range(len(strip)))


def test_kimi_blocks(parsed: Parse) -> None:
    architecture = parsed("kimi-linear").architecture
    dense, kda, mla = architecture.blocks
    assert (dense.layers, dense.feed_forward) == ([0], "dense 9216")
    assert kda.feed_forward == mla.feed_forward == "MoE 256 experts, top 8, 1 shared"
    layers = Counter(block.mixer for block in architecture.blocks for _ in block.layers)
    assert layers == {"KDA": 20, "MLA": 7}
    assert kda.sequence_dependent
    assert not mla.sequence_dependent
    assert kda.sparse_memory_access
    assert not dense.sparse_memory_access
    # 256 experts of 3 x 2304 x 1024, of which 8 are used
    experts = 3 * 2304 * 1024
    assert kda.parameters - kda.active_parameters == (256 - 8) * experts
    assert "20 KDA + 7 MLA" in summary(architecture)
    assert "49.1 B total" in summary(architecture)


def test_census_roles_of_kimi(parsed: Parse) -> None:
    by_role = parsed("kimi-linear").architecture.census.by_role
    assert by_role["embedding"] == by_role["head"] == 163840 * 2304
    assert by_role["dense ffn"] == 3 * 2304 * 9216
    assert by_role["routed experts"] == 26 * 256 * 3 * 2304 * 1024
    assert by_role["shared experts"] == 26 * 3 * 2304 * 1024
    assert by_role["router"] == 26 * 256 * 2304
    # two block norms a layer, the final one, 20 output norms of a head, 7 latent norms
    assert by_role["norm"] == (2 * 27 + 1) * 2304 + 20 * 128 + 7 * 512


def test_glm_is_multimodal_and_sparse(parsed: Parse) -> None:
    architecture = parsed("glm-5.3-flash").architecture
    assert architecture.class_name == "Glm5NextForConditionalGeneration"
    assert architecture.modality == "text + image"
    assert 0.4e9 < architecture.census.by_role["vision tower"] < 0.7e9
    sparse = next(block for block in architecture.blocks if block.letter == "D")
    assert sparse.mixer == "sparse MLA (top 2048)"
    assert sparse.sparse_memory_access
    uses = {use.words: use for use in architecture.uses}
    streams = uses["hyper-connection, 4 streams of 4096, 20 Sinkhorn rounds, bfloat16"]
    assert (streams.calls, streams.bindings[0].attributes["returns"]) == (2 * 45, "post comb h")


def test_llama_flops_are_the_closed_forms(parsed: Parse) -> None:
    llama = parsed("llama-3.1-8b")
    census = llama.architecture.census
    weights = census.total - census.by_role["embedding"] - census.by_role["norm"]
    linear = ("mm", "addmm", "bmm")
    assert flops(llama, names=linear) == pytest.approx(2 * weights * TOKENS, rel=1e-6)
    assert flops(llama, names=linear, phase="backward") == pytest.approx(4 * weights * TOKENS, rel=1e-6)
    # 4 x d for each of the T (T + 1) / 2 visible pairs, 32 heads of 128, 32 layers
    pairs = TOKENS * (TOKENS + 1) / 2
    assert flops(llama, names=("attention",)) == 4 * pairs * 32 * 128 * 32
    assert flops(llama, names=("attention",), phase="backward") == 2.5 * 4 * pairs * 32 * 128 * 32


def test_kimi_flops_are_the_closed_forms(parsed: Parse) -> None:
    kimi = parsed("kimi-linear")
    assert flops(kimi, names=("experts",)) == 6 * TOKENS * 8 * 2304 * 1024 * 26
    shared = 3 * 2304 * 1024
    assert flops(kimi, names=("mm",), role="shared experts") == pytest.approx(2 * TOKENS * shared * 26)
    assert flops(kimi, names=("mm",), role="head") == pytest.approx(2 * TOKENS * 2304 * 163840)
    # MLA: 192 for the scores, 128 for the values, 32 heads, 7 layers
    assert flops(kimi, names=("attention",)) == 2 * TOKENS * (TOKENS + 1) / 2 * (192 + 128) * 32 * 7
    # a depthwise convolution of width 4 over 3 x 4096 channels
    forward = flops(kimi, names=("causal_conv1d_fn",))
    assert forward == 2 * 4 * 3 * 4096 * TOKENS * 20
    assert flops(kimi, names=("causal_conv1d_fn",), phase="backward") == 2 * forward


def test_sparse_attention_counts_the_selected_pairs_only(parsed: Parse) -> None:
    glm = parsed("glm-5.3-flash")
    pairs = 2048 * 2049 / 2 + (TOKENS - 2048) * 2048
    assert flops(glm, names=("attention top 2048",)) == 2 * pairs * (256 + 256) * 64 * 11


def test_uses_of_kimi(parsed: Parse) -> None:
    uses = {use.words: use for use in parsed("kimi-linear").architecture.uses}
    families = {"norm", "gated_activation", "moe", "linear_attention", "short_convolution"}
    assert families <= {use.spec["family"] for use in uses.values()}
    filtered = uses["short convolution, 12288 channels, 4 taps, silu, bfloat16"]
    assert (filtered.calls, filtered.bindings[0].function) == (20, "causal_conv1d_fn")
    kda = uses["delta rule, decay per channel, 32 heads of 128, bfloat16"]
    assert (kda.calls, kda.bindings[0].function) == (20, "chunk_kimi_delta_attention")
    assert kda.bindings[0].module_paths[:4] == [f"model.layers.{i}.self_attn" for i in (0, 1, 2, 4)]
    assert uses["RMSNorm 128, gated by sigmoid, bfloat16"].bindings[0].hook == "gated_norm"
    norm = uses["RMSNorm 2304, bfloat16"]
    assert (norm.calls, norm.spec["eps"]) == (55, 1e-5)
    # the class default of the latent norm differs from the configuration's
    assert uses["RMSNorm 512, bfloat16"].spec["eps"] == 1e-6
    experts = uses["256 experts, top 8, 2304 x 1024, silu, bfloat16"]
    assert experts.bindings[0].attributes == {"gate_up": "gate_up_proj", "down": "down_proj"}
    assert experts.calls == 26


def test_every_bound_module_exists_and_has_its_attributes(parsed: Parse) -> None:
    for name in example_names():
        result = parsed(name)
        modules = dict(result.model.named_modules())
        for use in result.architecture.uses:
            assert sum(len(b.module_paths) for b in use.bindings) > 0
            for binding in use.bindings:
                for path in binding.module_paths:
                    module = modules[path]
                    assert f"{type(module).__module__}:{type(module).__qualname__}" == binding.target
                    named = {n: a for n, a in binding.attributes.items() if n != "returns"}
                    assert all(hasattr(module, attribute) for attribute in named.values())


def test_flags_of_the_other_examples(parsed: Parse) -> None:
    qwen = {u.role: u.spec for u in parsed("qwen3-next-80b-a3b").architecture.uses}
    assert qwen["block norm, final norm"]["offset"] is True
    assert qwen["output norm"]["gate"] == "silu"
    assert (qwen["linear attention"]["decay"], qwen["linear attention"]["value_heads"]) == ("head", 32)
    assert (qwen["routed experts"]["experts"], qwen["routed experts"]["top_k"]) == (512, 10)
    glm = {u.role: u.spec for u in parsed("glm-5.3-flash").architecture.uses}
    assert glm["routed experts"]["limit"] == glm["dense ffn"]["limit"] == 10.0


def test_the_graph_adds_up_to_the_blocks(parsed: Parse) -> None:
    architecture = parsed("deepseek-v3").architecture
    inside = sum(row.flops for row in architecture.graph if row.block and row.phase == "forward")
    assert inside == pytest.approx(sum(block.flops * len(block.layers) for block in architecture.blocks))


def test_model_types_known_without_importing_transformers() -> None:
    assert sorted(known_model_types()) == sorted(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model_type": "brand_new"}, "custom-code-not-run"),
        ({"num_key_value_heads": 0}, "model-not-built"),
        ({"hidden_act": "no_such_activation"}, "model-not-built"),
    ],
)
def test_what_cannot_be_built_is_a_problem(change: dict[str, object], kind: str) -> None:
    with pytest.raises(Problem) as caught:
        analyse({**example_config("llama-3.1-8b"), **change}, tokens=128)
    assert caught.value.kind == kind


def test_a_model_without_language_is_a_problem() -> None:
    with pytest.raises(Problem) as caught:
        analyse({"model_type": "vit"}, tokens=128)
    assert caught.value.kind == "no-language-model"
