"""Small models of every kind of routed experts, in transformers' own code."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 64
EXPERTS = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_MLA: dict[str, Any] = {
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}


def _qwen3_moe() -> Any:
    """Softmax router, weights renormalised, no shared expert; tied embeddings."""
    return transformers.Qwen3MoeConfig(
        **_COMMON,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )


def _deepseek_v3() -> Any:
    """Sigmoid router with a selection bias and groups, a shared expert, latent attention, a dense first layer."""
    return transformers.DeepseekV3Config(
        **_COMMON, **_MLA, num_key_value_heads=2, q_lora_rank=8, n_group=4, topk_group=2, head_dim=4
    )


def _gpt_oss() -> Any:
    """Softmax over the chosen, transposed interleaved weights, biases, clamped gates, attention sinks."""
    settings = {k: v for k, v in _COMMON.items() if k not in ("intermediate_size", "moe_intermediate_size")}
    return transformers.GptOssConfig(
        **settings,
        intermediate_size=12,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=EXPERTS,
        num_experts_per_tok=3,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _kimi_linear() -> Any:
    """Sigmoid router with a selection bias, a shared expert, linear attention beside latent attention, fp32 decays."""
    return transformers.KimiLinearConfig(
        **_COMMON,
        **{k: v for k, v in _MLA.items() if k != "n_routed_experts"},
        n_routed_experts=EXPERTS,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        n_group=1,
        topk_group=1,
    )


TWINS = {
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "kimi_linear": _kimi_linear,
}


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """The twin ``name`` with weights that are a function of their names, in ``dtype``."""
    config = TWINS[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager", attn_implementation="eager"
        )
    fill(model)
    model.to(dtype).train()
    return model


def fill(model: nn.Module, only: str = "") -> None:
    """Set parameters whose name contains ``only``: matrices normal with deviation 0.3, vectors near their value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only not in name:
                continue
            generator = torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
            )
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if parameter.ndim >= 2 and "norm" not in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_(0.1 * noise)
