"""What is measured: operators at published sizes, peers and floors; and one spec of every variant. Free of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from kernel_templates.attention_residual.spec import Spec as AttentionResidual
from kernel_templates.gated_activation.spec import Spec as GatedActivation
from kernel_templates.hyper_connection.spec import Spec as HyperConnection
from kernel_templates.indexer.spec import Spec as Indexer
from kernel_templates.linear_attention.spec import Spec as LinearAttention
from kernel_templates.linear_cross_entropy.spec import Spec as Loss
from kernel_templates.moe.spec import Spec as Experts
from kernel_templates.norm.spec import Spec as Norm
from kernel_templates.rotary.spec import Spec as Rotary
from kernel_templates.routing.spec import Spec as Routing
from kernel_templates.short_convolution.spec import Spec as ShortConvolution
from kernel_templates.sparse_attention.spec import Spec as SparseAttention
from kernel_templates.spec import OperatorSpec

COPY_BYTES_PER_S = 4.27e12
"""Measured on one H200: bytes read and written by a large copy."""
MATMUL_FLOPS = 685e12
"""Measured on one H200: bf16 products of 8192 x 8192 matrices."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One operator at one size."""

    name: str
    spec: OperatorSpec
    tokens: int
    """Tokens; rows for norms and activations."""
    frozen: tuple[str, ...] = ()
    """Inputs that need no gradient."""
    peers: tuple[str, ...] = ()
    """Keys of ``benchmarks.peers.PEERS``."""
    reduced: dict[str, Any] = field(default_factory=dict)
    """Dims for the check of numerics, where fp64 at full size would not fit."""
    reduced_tokens: int = 512
    tiny: dict[str, Any] = field(default_factory=dict)
    """Dims that the interpreter can run."""
    tiny_tokens: int = 24

    def floor_ms(self, backward: bool) -> float:
        """Least time on one H200 for forward, or forward and backward; frozen weights spare half of backward's FLOP."""
        forward = _bound_ms(self.spec.flops(self.tokens), self.spec.bytes_moved(self.tokens))
        if not backward:
            return forward
        share = 0.5 if self.frozen else 1.0
        flops, moved = self.spec.flops(self.tokens, True) * share, self.spec.bytes_moved(self.tokens, True) * share
        return forward + _bound_ms(flops, moved)

    def at(self, size: str) -> Benchmark:
        """This benchmark at ``full``, ``reduced`` or ``tiny`` size."""
        if size == "full":
            return self
        dims, tokens = (self.tiny, self.tiny_tokens) if size == "tiny" else (self.reduced, self.reduced_tokens)
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **dims), tokens=tokens)


def _bound_ms(flops: float, moved: float) -> float:
    return 1e3 * max(flops / MATMUL_FLOPS, moved / COPY_BYTES_PER_S)


def _experts(name: str, tokens: int, experts: int, top_k: int, hidden: int, width: int, frozen: bool) -> Benchmark:
    return Benchmark(
        name=name + ("_frozen" if frozen else ""),
        spec=Experts(experts=experts, top_k=top_k, hidden=hidden, intermediate=width),
        tokens=tokens,
        frozen=("gate_up", "down") if frozen else (),
        peers=("transformers.grouped_mm",),
        reduced={"experts": 8, "top_k": min(top_k, 4)},
        tiny={"experts": 4, "top_k": 2, "hidden": 32, "intermediate": 16},
    )


def _attention(name: str, tokens: int, key_heads: int, decay: str, peer: str) -> Benchmark:
    return Benchmark(
        name=name,
        spec=LinearAttention(key_heads=key_heads, value_heads=32, key_dim=128, value_dim=128, decay=decay),
        tokens=tokens,
        peers=(peer,),
        reduced={"key_heads": 2 * key_heads // 32 or 1, "value_heads": 2},
        tiny={"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16},
        tiny_tokens=40,
    )


def _indexer(name: str, tokens: int, heads: int) -> Benchmark:
    return Benchmark(
        name=name,
        spec=Indexer(top_k=2048, heads=heads, context=tokens),
        tokens=tokens,
        peers=("torch.indexer",),
        reduced={"top_k": 512, "context": 4096},
        reduced_tokens=4096,
        tiny={"top_k": 8, "heads": 2, "head_dim": 16, "context": 24},
    )


MLA: dict[str, Any] = {"key_dim": 512, "value_dim": 512, "rope": True, "rope_dim": 64, "scale": 192**-0.5}
"""Multi-head latent attention after its projections were absorbed into the queries."""


def _sparse(name: str, tokens: int, keys: int, **fields: Any) -> Benchmark:
    spec = SparseAttention(**{"heads": 64, "top_k": 2048, "keys": keys, **MLA, **fields})
    return Benchmark(
        name=name,
        spec=spec,
        tokens=tokens,
        peers=("torch.gathered_attention", "torch.masked_attention"),
        reduced={"heads": 16, "top_k": 512, "keys": 1024},
        tiny={"heads": 3, "top_k": 9, "keys": 40, "key_dim": 24, "value_dim": 24, "rope_dim": 8 * spec.rope},
    )


def _norm(name: str, rows: int, peers: tuple[str, ...], spec: Norm) -> Benchmark:
    return Benchmark(name=name, spec=spec, tokens=rows, peers=peers, tiny={"hidden": 48})


LOSS_PEERS = ("liger.fused_linear_cross_entropy", "fla.fused_linear_cross_entropy", "torch.compile.cross_entropy")


def _loss(name: str, rows: int, hidden: int, vocabulary: int, frozen: bool) -> Benchmark:
    return Benchmark(
        name=name + ("_frozen" if frozen else ""),
        spec=Loss(hidden=hidden, vocabulary=vocabulary, frozen=frozen),
        tokens=rows,
        peers=LOSS_PEERS,
        reduced={"vocabulary": 16384},
        tiny={"hidden": 48, "vocabulary": 300},
    )


BENCHMARKS: tuple[Benchmark, ...] = (
    _norm("norm_65536x2304", 65536, ("torch.rms_norm", "liger.rms_norm"), Norm(hidden=2304)),
    _norm("norm_8192x4096", 8192, ("torch.rms_norm", "liger.rms_norm"), Norm(hidden=4096)),
    _norm("gated_norm_262144x128", 262144, ("fla.rms_norm_gated",), Norm(hidden=128, gate="sigmoid")),
    _norm("layer_norm_16384x4096", 16384, ("torch.layer_norm",), Norm(hidden=4096, centred=True, bias=True, eps=1e-5)),
    Benchmark(
        name="rotary_8192_h40_d128",
        spec=Rotary(heads=40, key_heads=1, head_dim=128, rotary_dim=128, keys=False),
        tokens=8192,
        peers=("torch.rotary", "torch.compile.rotary"),
        tiny={"heads": 3, "head_dim": 16, "rotary_dim": 16},
    ),
    Benchmark(
        name="head_norm_rotary_8192_h40_d128",
        spec=Rotary(heads=40, key_heads=1, head_dim=128, rotary_dim=128, keys=False, norm=True),
        tokens=8192,
        peers=("torch.rotary", "torch.compile.rotary"),
        tiny={"heads": 3, "head_dim": 16, "rotary_dim": 16},
    ),
    Benchmark(
        name="routing_8192_k8_e256",
        spec=Routing(experts=256, top_k=8, activation="sigmoid", bias=True, renormalise=True, dtype="float32"),
        tokens=8192,
        peers=("torch.routing", "torch.compile.routing"),
        tiny={"experts": 16, "top_k": 3},
    ),
    Benchmark(
        name="attention_residual_8192x7168_l9",
        spec=AttentionResidual(hidden=7168, sources=9),
        tokens=8192,
        peers=("fla.attention_residual", "torch.compile.attention_residual"),
        tiny={"hidden": 24},
    ),
    Benchmark(
        name="attention_residual_32768x4096_l8",
        spec=AttentionResidual(hidden=4096, sources=8),
        tokens=32768,
        peers=("fla.attention_residual", "torch.compile.attention_residual"),
        tiny={"hidden": 24},
    ),
    _indexer("indexer_8192_h64_k2048", 8192, 64),
    _indexer("indexer_32768_h32_k2048", 32768, 32),
    _indexer("indexer_32768_h64_k2048", 32768, 64),
    Benchmark(
        name="indexer_compression_131072_r16",
        spec=Indexer(operation="compression", top_k=128, context=131072),
        tokens=131072,
        peers=("torch.compile.compression",),
        tiny={"head_dim": 24, "pool": 4},
    ),
    Benchmark(
        name="indexer_objective_32768_k2048",
        spec=Indexer(operation="objective", top_k=2048, context=32768),
        tokens=32768,
        peers=("torch.compile.kl_divergence",),
        tiny={"top_k": 40},
    ),
    _sparse("sparse_mla_4096_of_8192_h64_k2048", 4096, 8192),
    _sparse("sparse_mla_4096_of_8192_h128_k2048", 4096, 8192, heads=128),
    _sparse("sparse_mla_8192_h64_k2048", 8192, 8192),
    _sparse(
        "sparse_256_4096_of_8192_h64_k2048", 4096, 8192, key_dim=256, value_dim=256, rope=False, rope_dim=0, scale=None
    ),
    Benchmark(
        name="swiglu_65536x2304",
        spec=GatedActivation(width=2304),
        tokens=65536,
        peers=("liger.swiglu",),
        tiny={"width": 48},
    ),
    Benchmark(
        name="short_conv_8192x12288",
        spec=ShortConvolution(channels=12288),
        tokens=8192,
        peers=("fla.causal_conv1d", "torch.conv1d"),
        tiny={"channels": 24},
    ),
    Benchmark(
        name="hyper_connection_32768x4x4096",
        spec=HyperConnection(hidden=4096),
        tokens=32768,
        peers=("transformers.hyper_connection", "torch.compile.hyper_connection"),
        tiny={"hidden": 24},
    ),
    _loss("loss_8192x2304x163840", 8192, 2304, 163840, False),
    _loss("loss_8192x2304x163840", 8192, 2304, 163840, True),
    _loss("loss_8192x4096x154880", 8192, 4096, 154880, False),
    _experts("experts_e256_k8_d2304_i1024_t8192", 8192, 256, 8, 2304, 1024, False),
    _experts("experts_e256_k8_d2304_i1024_t8192", 8192, 256, 8, 2304, 1024, True),
    _experts("experts_e896_k16_d1024_i512_t8192", 8192, 896, 16, 1024, 512, True),
    _experts("experts_e288_k8_d4096_i2048_t4096", 4096, 288, 8, 4096, 2048, True),
    _experts("experts_e128_k8_d2048_i768_t16384", 16384, 128, 8, 2048, 768, False),
    _attention("gdn_t8192_h16_32", 8192, 16, "head", "fla.gated_delta_rule"),
    _attention("gdn_t8192_h32", 8192, 32, "head", "fla.gated_delta_rule"),
    _attention("gdn_t32768_h32", 32768, 32, "head", "fla.gated_delta_rule"),
    _attention("kda_t8192_h32", 8192, 32, "channel", "fla.kda"),
    _attention("kda_t32768_h32", 32768, 32, "channel", "fla.kda"),
)
"""In the order of running: cheap ones first, peers that tune themselves for a minute last."""

GPT_OSS: dict[str, Any] = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}

VARIANTS: dict[str, OperatorSpec] = {
    "norm": Norm(hidden=2304),
    "norm, 1 + w": Norm(hidden=2048, offset=True),
    "norm, unweighted": Norm(hidden=128, weighted=False),
    "norm, sigmoid gate": Norm(hidden=128, gate="sigmoid"),
    "norm, silu gate": Norm(hidden=128, gate="silu"),
    "norm, fused add": Norm(hidden=4096, residual=True),
    "layer norm": Norm(hidden=4096, centred=True, bias=True),
    "layer norm, fused add": Norm(hidden=4096, centred=True, residual=True),
    "silu gate": GatedActivation(width=9216),
    "gelu gate, halves": GatedActivation(width=1024, activation="gelu", layout="concatenated"),
    "gelu_tanh gate": GatedActivation(width=4096, activation="gelu_tanh"),
    "relu2 gate": GatedActivation(width=1024, activation="relu2"),
    "clamped gate, interleaved": GatedActivation(width=2880, layout="interleaved", **GPT_OSS),
    "short convolution": ShortConvolution(channels=12288),
    "short convolution, bias, states": ShortConvolution(channels=6144, bias=True, states=True),
    "short convolution, 3 taps, no activation": ShortConvolution(channels=2048, width=3, activation="none"),
    "hyper-connection": HyperConnection(hidden=4096),
    "hyper-connection, independent": HyperConnection(hidden=4096, rounds=0, post_factor=1.5, post_floor=1e-6),
    "hyper-connection, collapse": HyperConnection(hidden=4096, rounds=0, post=False),
    "attention residual": AttentionResidual(hidden=7168),
    "attention residual, 2 sources": AttentionResidual(hidden=4096, sources=2),
    "attention residual, 24 sources, scaled": AttentionResidual(hidden=2048, sources=24, scale=0.25, eps=1e-5),
    "loss": Loss(hidden=2304, vocabulary=163840),
    "loss, frozen": Loss(hidden=2304, vocabulary=163840, frozen=True),
    "loss, capped": Loss(hidden=2304, vocabulary=256000, softcap=30.0),
    "loss, everything": Loss(
        hidden=2304, vocabulary=163840, bias=True, label_smoothing=0.1, z_loss=1e-4, logit_scale=0.25, reduction="sum"
    ),
    "loss by row": Loss(hidden=2304, vocabulary=163840, reduction="none"),
    "loss of a vocabulary's shard": Loss(hidden=2304, vocabulary=20480, reduction="statistics", label_smoothing=0.1),
    "rotary": Rotary(heads=32, key_heads=8, head_dim=128, rotary_dim=128),
    "rotary, partial": Rotary(heads=16, key_heads=2, head_dim=256, rotary_dim=64),
    "rotary, interleaved": Rotary(heads=32, key_heads=8, head_dim=128, rotary_dim=128, pairs="interleaved"),
    "rotary, DeepSeek": Rotary(
        heads=128, key_heads=1, head_dim=64, rotary_dim=64, pairs="interleaved", angles="pair", regrouped=True
    ),
    "rotary, multimodal": Rotary(heads=28, key_heads=4, head_dim=128, rotary_dim=128, temporal=16, height=24),
    "rotary after a head norm": Rotary(heads=32, key_heads=4, head_dim=128, rotary_dim=128, norm=True),
    "routing": Routing(experts=128, top_k=8, renormalise=True),
    "routing, sigmoid": Routing(
        experts=256, top_k=8, activation="sigmoid", bias=True, renormalise=True, scale=2.446, dtype="float32"
    ),
    "routing, groups": Routing(
        experts=256, top_k=8, activation="sigmoid", bias=True, groups=8, top_groups=4, renormalise=True, dtype="float32"
    ),
    "routing, sqrt-softplus": Routing(experts=256, top_k=6, activation="sqrt_softplus", bias=True, dtype="float32"),
    "indexer": Indexer(top_k=2048, heads=64),
    "indexer, 32 heads": Indexer(top_k=2048, heads=32),
    "indexer, 16 heads": Indexer(top_k=2048, heads=16),
    "indexer, plain sum": Indexer(top_k=2048, heads=4, activation="none", weighted=False),
    "indexer, no activation": Indexer(top_k=2048, heads=32, activation="none"),
    "indexer, pools": Indexer(top_k=128, heads=32, context=512),
    "indexer compression": Indexer(operation="compression", top_k=128),
    "indexer objective": Indexer(operation="objective", top_k=2048),
    "sparse attention": SparseAttention(heads=64, top_k=2048, **MLA),
    "sparse attention, 128 heads, target": SparseAttention(heads=128, top_k=2048, target=True, **MLA),
    "sparse attention, sink": SparseAttention(heads=64, top_k=512, key_dim=256, value_dim=256, sink=True, target=True),
    "sparse attention, key heads": SparseAttention(
        heads=64, kv_heads=4, top_k=2048, key_dim=128, value_dim=128, separate=True
    ),
    "sparse attention, unordered sums": SparseAttention(heads=64, top_k=2048, deterministic=False, **MLA),
    "experts": Experts(experts=256, top_k=8, hidden=2304, intermediate=1024),
    "experts, gelu, interleaved": Experts(
        experts=64, top_k=4, hidden=1024, intermediate=512, activation="gelu", gate_up_layout="interleaved"
    ),
    "experts, gpt-oss": Experts(
        experts=32,
        top_k=4,
        hidden=2880,
        intermediate=2880,
        bias=True,
        transposed=True,
        gate_up_layout="interleaved",
        **GPT_OSS,
    ),
    "KDA": LinearAttention(key_heads=32, value_heads=32, key_dim=128, value_dim=128),
    "KDA, normed outside": LinearAttention(key_heads=32, value_heads=32, key_dim=128, value_dim=128, qk_l2norm=False),
    "gated delta rule": LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128, decay="head"),
    "delta rule": LinearAttention(key_heads=8, value_heads=8, key_dim=128, value_dim=128, decay="none"),
    "gated linear attention": LinearAttention(
        key_heads=8, value_heads=8, key_dim=128, value_dim=128, delta=False, qk_l2norm=False
    ),
}
"""One spec of every variant that the families offer."""
