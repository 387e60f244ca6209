"""Definitions with code of their own, parsed in the sandbox: what they are is known from their configurations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from onboarding.architecture import Architecture
from onboarding.custom_code.definition import Definition, write_code
from onboarding.stages.intake.check import check_definition
from onboarding.stages.parse.plain import ParsedDefinition, check_answer, parse_definition

MODELS = Path(__file__).parents[1] / "custom_models"
OWN = "onboard_definition."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One scratch folder for all."""
    return tmp_path_factory.mktemp("code")


@cache
def _parse(name: str, folder: Path) -> ParsedDefinition:
    checked = check_definition(MODELS / name)
    code = write_code(checked.config, checked.files, folder / name)
    definition = Definition(config=checked.config, code=code)
    return parse_definition(definition, tokens=8192, name=name, scratch=folder)


def parsed(name: str, folder: Path) -> Architecture:
    result = _parse(name, folder)
    assert result.complete
    return result.architecture


def config(name: str) -> dict[str, int]:
    values: dict[str, int] = json.loads((MODELS / name / "config.json").read_text())
    return values


def families(architecture: Architecture) -> dict[str, int]:
    """Family -> calls in one forward."""
    counts: dict[str, int] = {}
    for use in architecture.uses:
        family = str(use.spec["family"])
        counts[family] = counts.get(family, 0) + use.calls
    return counts


def test_a_latent_mixture_at_the_published_sizes_of_k3(folder: Path) -> None:
    c, a = config("kappa"), parsed("kappa", folder)
    # every fourth layer and the last attend in full, counted from one
    full = {i for i in range(1, c["num_hidden_layers"] + 1) if i % 4 == 0} | {c["num_hidden_layers"]}
    assert a.strip == "".join("M" if i in full else "K" for i in range(1, c["num_hidden_layers"] + 1))
    assert (a.strip.count("K"), a.strip.count("M")) == (69, 24)
    d, inner, latent = c["hidden_size"], c["moe_intermediate_size"], c["moe_latent_size"]
    moe_layers = c["num_hidden_layers"] - c["first_k_dense_replace"]
    experts = moe_layers * c["n_routed_experts"] * 3 * latent * inner
    assert a.census.by_role["routed experts"] == experts
    assert a.census.total == pytest.approx(2.8e12, rel=0.02)
    idle = experts * (1 - c["num_experts_per_tok"] / c["n_routed_experts"])
    assert a.census.active == pytest.approx(a.census.total - idle, rel=1e-6)
    assert a.census.by_role["embedding"] == a.census.by_role["head"] == c["vocab_size"] * d
    found = families(a)
    assert found["linear_attention"] == 69
    assert found["moe"] == moe_layers
    assert found["gated_activation"] == moe_layers + c["first_k_dense_replace"]
    experts_use = next(use for use in a.uses if use.spec["family"] == "moe")
    assert experts_use.spec["hidden"] == latent, "experts work in the latent width"
    targets = {b.target for use in a.uses for b in use.bindings}
    assert {f"{OWN}modeling_kappa:KappaDeltaAttention", f"{OWN}modeling_kappa:KappaExperts"} <= targets
    # fla's own class, by the place that it has in fla
    assert "fla.modules.fused_norm_gate:FusedRMSNormGated" in targets


@pytest.mark.slow
def test_remote_code_with_a_window(folder: Path) -> None:
    c, a = config("nimbus"), parsed("nimbus", folder)
    assert a.strip == "SSSA" * 8
    assert {block.mixer for block in a.blocks} == {"sliding GQA (4096)", "GQA"}
    assert {block.feed_forward for block in a.blocks} == {"dense 14336"}, "whatever order w1, w2 and w3 come in"
    attention = 2 * c["hidden_size"] * c["head_dim"] * (c["num_attention_heads"] + c["num_key_value_heads"])
    layer = attention + 3 * c["hidden_size"] * c["intermediate_size"] + 2 * c["hidden_size"] + 2 * c["head_dim"]
    total = c["num_hidden_layers"] * layer + c["hidden_size"] * (2 * c["vocab_size"] + 1)
    assert a.census.total == total
    windows = {block.roles.mixers[0].window for block in a.blocks if block.roles}
    assert windows == {None, 4096}, "flash attention's window is proven on the twin"
    found = families(a)
    assert found["norm"] == 4 * 32 + 1
    assert found["gated_activation"] == 32
    # a window of w keys over T tokens: w T - w (w - 1) / 2 pairs, each 2 x 2 x 128 FLOPs in 32 heads
    windowed = sum(
        row.flops for row in a.graph if row.name == "attention" and row.block == "S" and row.phase == "forward"
    )
    pairs = 4096 * 8192 - 4096 * 4095 / 2
    assert windowed == pytest.approx(24 * 32 * 4 * 128 * pairs, rel=1e-3)


@pytest.mark.slow
def test_a_state_space_hybrid(folder: Path) -> None:
    c, a = config("strata"), parsed("strata", folder)
    assert a.strip.replace("A", "") == a.strip[0] * 18
    assert [i for i, letter in enumerate(a.strip) if letter == "A"] == list(range(3, 24, 4))
    assert a.blocks[0].sequence_dependent
    assert a.census.tied_embeddings
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    channels = inner + 2 * c["mamba_n_groups"] * c["ssm_state_size"]
    mamba = c["hidden_size"] * (2 * inner + channels - inner + c["mamba_num_heads"]) + c["hidden_size"] * inner
    mamba += channels * (c["conv_kernel"] + 1) + 3 * c["mamba_num_heads"] + inner
    assert mixers(a)[1] == [("full", "GQA", c["num_key_value_heads"], None)], "attention without positions"
    block = next(b for b in a.blocks if b.sequence_dependent)
    assert block.parameters == mamba + 3 * c["hidden_size"] * c["intermediate_size"] + 2 * c["hidden_size"]


@pytest.mark.slow
def test_a_plain_module(folder: Path) -> None:
    c, a = config("plain"), parsed("plain", folder)
    d = c["d_model"]
    assert a.census.total == 2 * c["vocab_size"] * d + c["n_layers"] * (4 * d * d + 3 * 4 * d * d + 3 * d) + d
    assert families(a)["norm"] == 2 * 12 + 1
    target = next(b.target for use in a.uses for b in use.bindings if use.spec["family"] == "gated_activation")
    assert target == f"{OWN}tinyformer.parts:GatedMLP"
    paths = [path for use in a.uses for b in use.bindings for path in b.module_paths]
    assert "blocks.3.norm1" in paths, "module names are those of the user's own instance"


def mixers(architecture: Architecture) -> list[list[tuple[str, str, int, int | None]]]:
    """Of each kind of layer: kind, heads, key-value heads, window."""
    return [
        [(m.kind, m.heads, m.key_heads, m.window) for m in block.roles.mixers] if block.roles else []
        for block in architecture.blocks
    ]


@pytest.mark.slow
def test_rounds_that_share_keys_and_think_about_some_tokens(folder: Path) -> None:
    """No field counts the layers, half of them make no keys, and half of the feed-forwards choose their tokens."""
    c, a = config("orbit"), parsed("orbit", folder)
    depth, d, inner, heads = c["rounds"] * c["blocks_per_round"], c["width"], c["inner"], c["n_query"]
    assert a.num_layers == depth
    owners = len(range(0, depth, c["sharing_every"]))
    keys = 2 * c["n_kv"] * (d // heads) * d
    total = 2 * c["vocab_size"] * d + depth * (2 * d * d + 3 * d * inner + 2 * d) + owners * keys + depth // 2 * d + d
    assert a.census.total == total
    look = ("full", "GQA", c["n_kv"], None)
    assert sorted(mixers(a)) == sorted([[look], [look, ("novel", "", 0, None)]] * 2)
    assert [p.claim for p in a.proofs if not p.proven] == ["causal"] * 2, "tokens are chosen by looking at all of them"
    assert "SparseThinking" in {n.module for n in a.novel_references}
    norm = next(use for use in a.uses if use.spec["family"] == "norm")
    assert norm.spec["offset"]
    assert norm.bindings[0].attributes == {"weight": "gain"}


@pytest.mark.slow
def test_layers_of_three_kinds_with_sizes_of_their_own(folder: Path) -> None:
    """Attention written out with einsum, local and latent, and a body that looped layers share and run twice."""
    c, a = config("mosaic"), parsed("mosaic", folder)
    local = ("sliding", "MHA", c["local_heads"], c["local_window"])
    latent = ("full", "MLA", c["num_attention_heads"], None)
    assert mixers(a) == [[local], [latent], [latent, latent]]
    d, h = c["hidden_size"], c["num_attention_heads"]
    own = 4 * d * c["local_heads"] * c["local_head_dim"] + 3 * d * c["local_intermediate_size"]
    body = d * h * (c["nope_dim"] + c["rope_dim"]) + d * (c["kv_rank"] + c["rope_dim"]) + c["kv_rank"]
    body += c["kv_rank"] * h * (c["nope_dim"] + c["head_dim"]) + h * c["head_dim"] * d + 3 * d * c["intermediate_size"]
    norms = d * (12 * 2 + 6 * 2 + 6 * 2 * c["loops"] + 1)
    assert a.census.total == 2 * c["vocab_size"] * d + 12 * own + (6 + 1) * body + norms, "the shared body counts once"
    assert not [p for p in a.proofs if not p.proven]
    roles = [block.roles.mixers[0] for block in a.blocks if block.roles]
    assert [(m.positions, m.rotary_dims) for m in roles] == [
        ("rope", c["local_head_dim"]), ("partial rope", c["rope_dim"]), ("partial rope", c["rope_dim"]),
    ]  # fmt: skip


def test_an_answer_is_checked(folder: Path) -> None:
    from kernel_templates.registry import load_spec

    good = parsed("kappa", folder)
    check_answer(good, 8192, load_spec)
    use = good.uses[0]

    def bent(**changes: object) -> Architecture:
        return good.model_copy(update={"uses": [use.model_copy(update=changes), *good.uses[1:]]})

    binding = use.bindings[0].model_copy(update={"target": "os:system('x')"})
    function = use.bindings[0].model_copy(update={"function": "x;y"})
    for wrong in (
        bent(digest="0" * 16),
        bent(calls=0),
        bent(bindings=[binding]),
        bent(bindings=[function]),
        good.model_copy(update={"num_layers": 4}),
        good.model_copy(update={"sequence_length": 1}),
        good.model_copy(update={"blocks": good.blocks[:1]}),
    ):
        with pytest.raises(ValueError, match=r".+"):
            check_answer(wrong, 8192, load_spec)
