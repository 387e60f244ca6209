"""Mosaic: layers of three kinds with sizes of their own: local attention, latent attention, and a body that all looped
layers share and run twice, each with norms of its own."""

import math

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_mosaic import MosaicConfig


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x, table):
    """Pairs 2i and 2i + 1 as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * table[None, :, None]).flatten(-2).to(x.dtype)


def softmax_attention(q, k, v, hidden):
    """[B, T, H, D] each; written out."""
    score = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    weight = score.float().masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
    return torch.einsum("bhts,bshd->bthd", weight, v)


class LocalAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.size, self.window = config.local_heads, config.local_head_dim, config.local_window
        self.qkv = nn.Linear(config.hidden_size, 3 * self.heads * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def forward(self, x, tables):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.size)).unbind(2)
        q, k = rotate(q, tables[self.size]), rotate(k, tables[self.size])
        place = torch.arange(x.shape[1], device=x.device)
        far = place[:, None] - place[None]
        return self.out(softmax_attention(q, k, v, (far < 0) | (far >= self.window)).flatten(2))


class LatentAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.rope, self.nope, self.value = (
            config.num_attention_heads, config.rope_dim, config.nope_dim, config.head_dim,
        )  # fmt: skip
        self.q_proj = nn.Linear(config.hidden_size, self.heads * (self.nope + self.rope), bias=False)
        self.down = nn.Linear(config.hidden_size, config.kv_rank + self.rope, bias=False)
        self.down_norm = Norm(config.kv_rank, config.rms_norm_eps)
        self.up = nn.Linear(config.kv_rank, self.heads * (self.nope + self.value), bias=False)
        self.out = nn.Linear(self.heads * self.value, config.hidden_size, bias=False)
        self.rank = config.kv_rank

    def forward(self, x, tables):
        q_nope, q_rope = self.q_proj(x).unflatten(-1, (self.heads, -1)).split([self.nope, self.rope], -1)
        latent, k_rope = self.down(x).split([self.rank, self.rope], -1)
        k_nope, v = self.up(self.down_norm(latent)).unflatten(-1, (self.heads, -1)).split([self.nope, self.value], -1)
        k_rope = rotate(k_rope.unsqueeze(2), tables[self.rope]).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, tables[self.rope])), -1)
        place = torch.arange(x.shape[1], device=x.device)
        hidden = place[:, None] < place[None]
        return self.out(softmax_attention(q, torch.cat((k_nope, k_rope), -1), v, hidden).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config, inner):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, inner, bias=False)
        self.up = nn.Linear(config.hidden_size, inner, bias=False)
        self.down = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


class MosaicLayer(nn.Module):
    def __init__(self, config, kind, shared):
        super().__init__()
        self.times = config.loops if kind == "looped" else 1
        if kind == "looped":
            self.attention, self.feed_forward = shared
        else:
            self.attention = LocalAttention(config) if kind == "local" else LatentAttention(config)
            local = kind == "local"
            self.feed_forward = FeedForward(
                config, config.local_intermediate_size if local else config.intermediate_size
            )
        self.norms = nn.ModuleList(Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2 * self.times))

    def forward(self, x, tables):
        for turn in range(self.times):
            x = x + self.attention(self.norms[2 * turn](x), tables)
            x = x + self.feed_forward(self.norms[2 * turn + 1](x))
        return x


class MosaicForCausalLM(PreTrainedModel):
    config_class = MosaicConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        shared = (LatentAttention(config), FeedForward(config, config.intermediate_size))
        self.layers = nn.ModuleList(MosaicLayer(config, kind, shared) for kind in config.layer_kinds)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def forward(self, input_ids, labels=None, **kwargs):
        x = self.embed(input_ids)
        place = torch.arange(input_ids.shape[1], device=x.device, dtype=torch.float32)
        tables = {}
        for size in {self.config.local_head_dim, self.config.rope_dim}:
            slow = self.config.rope_theta ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
            angle = torch.outer(place, slow)
            tables[size] = torch.polar(torch.ones_like(angle), angle)
        for layer in self.layers:
            x = layer(x, tables)
        logits = self.lm_head(self.norm(x))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
