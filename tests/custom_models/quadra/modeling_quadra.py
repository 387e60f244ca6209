"""Quadra: Llama whose softmax attention gave way to one that nobody has a kernel for."""

import torch
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    apply_rotary_pos_emb,
    repeat_kv,
)

from .configuration_quadra import QuadraConfig


def rectified_attention(query, key, value, scaling):
    """Squared rectified scores of all keys so far, divided by their number."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    length = scores.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
    weight = torch.relu(scores + 1.0).square().masked_fill(~causal, 0.0)
    seen = torch.arange(1, length + 1, device=scores.device, dtype=scores.dtype)
    return torch.matmul(weight / seen[:, None], value)


class QuadraAttention(nn.Module):
    def __init__(self, config: QuadraConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = repeat_kv(key, self.groups), repeat_kv(value, self.groups)
        out = rectified_attention(query, key, value, self.scaling)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


class QuadraDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: QuadraConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = QuadraAttention(config, layer_idx)


class QuadraModel(LlamaModel):
    config_class = QuadraConfig

    def __init__(self, config: QuadraConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([QuadraDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.post_init()


class QuadraForCausalLM(LlamaForCausalLM):
    config_class = QuadraConfig

    def __init__(self, config: QuadraConfig):
        super().__init__(config)
        self.model = QuadraModel(config)
        self.post_init()
