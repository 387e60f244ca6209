"""Strata: Mamba-2 layers with attention between them, every layer followed by a gated feed-forward."""

import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.triton.layernorm_gated import RMSNorm as RMSNormGated
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_strata import StrataConfig


class StrataRMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class StrataMamba(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.groups, self.state = config.mamba_n_groups, config.ssm_state_size
        self.chunk_size = config.chunk_size
        self.inner = self.heads * self.head_dim
        channels = self.inner + 2 * self.groups * self.state
        self.in_proj = nn.Linear(config.hidden_size, self.inner + channels + self.heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels, padding=config.conv_kernel - 1)
        self.dt_bias = nn.Parameter(torch.ones(self.heads))
        self.A_log = nn.Parameter(torch.log(torch.arange(1, self.heads + 1, dtype=torch.float32)))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = RMSNormGated(self.inner, eps=config.layer_norm_epsilon, norm_before_gate=False)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        batch, length, _ = hidden_states.shape
        z, xbc, dt = torch.split(
            self.in_proj(hidden_states),
            [self.inner, self.inner + 2 * self.groups * self.state, self.heads],
            dim=-1,
        )
        xbc = causal_conv1d_fn(
            xbc.transpose(1, 2), self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu"
        ).transpose(1, 2)
        x, b, c = torch.split(xbc, [self.inner, self.groups * self.state, self.groups * self.state], dim=-1)
        y = mamba_chunk_scan_combined(
            x.reshape(batch, length, self.heads, self.head_dim),
            dt,
            -torch.exp(self.A_log.float()),
            b.reshape(batch, length, self.groups, self.state),
            c.reshape(batch, length, self.groups, self.state),
            chunk_size=self.chunk_size,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        return self.out_proj(self.norm(y.reshape(batch, length, self.inner), z))


class StrataAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.qkv_proj = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        batch, length, _ = hidden_states.shape
        qkv = self.qkv_proj(hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class StrataMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class StrataLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        attention = config.layer_pattern[layer_idx] == "A"
        self.mixer = StrataAttention(config, layer_idx) if attention else StrataMamba(config)
        self.mlp = StrataMLP(config)
        self.norm = StrataRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp_norm = StrataRMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.mixer(self.norm(hidden_states))
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class StrataForCausalLM(PreTrainedModel):
    config_class = StrataConfig
    base_model_prefix = "backbone"
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.backbone = nn.ModuleDict(
            {
                "embeddings": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList([StrataLayer(config, i) for i in range(config.num_hidden_layers)]),
                "norm_f": StrataRMSNorm(config.hidden_size, config.layer_norm_epsilon),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.backbone["embeddings"]

    def get_output_embeddings(self):
        return self.lm_head

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        hidden_states = self.backbone["embeddings"](input_ids)
        for layer in self.backbone["layers"]:
            hidden_states = layer(hidden_states)
        logits = self.lm_head(self.backbone["norm_f"](hidden_states))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
