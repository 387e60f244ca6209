"""Small models of several kinds for the runtime's tests: one definition folder each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 320
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON},
    "qwen3-tied": {"model_type": "qwen3", **COMMON, "tie_word_embeddings": True},
    "qwen3-moe": {"model_type": "qwen3_moe", **COMMON, **MOE},
    "qwen3-next": {
        "model_type": "qwen3_next",
        **COMMON,
        **MOE,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **{k: v for k, v in COMMON.items() if k not in ("head_dim", "num_key_value_heads")},
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def definition(folder: Path, name: str, **changes: Any) -> Path:
    """Write the config of a small model and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return folder


def text_file(path: Path, lines: int = 60, seed: int = 0) -> Path:
    """A JSONL file of short documents that a small model can learn."""
    words = ["sun", "moon", "star", "rain", "wind", "snow", "tree", "bird"]
    records = []
    for i in range(lines):
        picks = [words[(seed + i * 7 + j * (i % 3 + 1)) % len(words)] for j in range(3 + i % 5)]
        records.append(json.dumps({"text": " ".join(picks)}))
    path.write_text("\n".join(records) + "\n")
    return path
