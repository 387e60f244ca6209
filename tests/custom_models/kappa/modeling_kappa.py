"""Kappa: Kimi delta attention and gated latent attention without positions, experts in a latent width, attention
residuals over blocks of layers."""

import torch
import torch.nn.functional as F
from fla.modules import FusedRMSNormGated, ShortConvolution
from fla.ops.kda import chunk_kda
from fla.ops.kda.gate import fused_kda_gate
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_kappa import KappaConfig


class KappaRMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class KappaMLP(nn.Module):
    def __init__(self, config, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class KappaDeltaAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.linear_num_heads, config.linear_head_dim
        inner = self.num_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.q_conv1d = ShortConvolution(inner, config.linear_conv_kernel, activation="silu")
        self.k_conv1d = ShortConvolution(inner, config.linear_conv_kernel, activation="silu")
        self.v_conv1d = ShortConvolution(inner, config.linear_conv_kernel, activation="silu")
        self.A_log = nn.Parameter(torch.log(torch.empty(self.num_heads, dtype=torch.float32).uniform_(1, 16)))
        self.dt_bias = nn.Parameter(torch.zeros(inner, dtype=torch.float32))
        self.f_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.g_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.g_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.o_norm = FusedRMSNormGated(self.head_dim, eps=config.rms_norm_eps, activation="sigmoid")
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:2], self.num_heads, self.head_dim)
        q = self.q_conv1d(self.q_proj(hidden_states))[0].view(shape)
        k = self.k_conv1d(self.k_proj(hidden_states))[0].view(shape)
        v = self.v_conv1d(self.v_proj(hidden_states))[0].view(shape)
        g = fused_kda_gate(self.f_b_proj(self.f_a_proj(hidden_states)).view(shape), self.A_log, dt_bias=self.dt_bias)
        beta = self.b_proj(hidden_states).float().sigmoid()
        o, _ = chunk_kda(q=q, k=k, v=v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        gate = self.g_b_proj(self.g_a_proj(hidden_states)).view(shape)
        return self.o_proj(self.o_norm(o, gate).flatten(2))


class KappaLatentAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank = config.kv_lora_rank
        self.nope, self.shared, self.v_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = KappaRMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * (self.nope + self.shared), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + self.shared, bias=False)
        self.kv_a_layernorm = KappaRMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, self.num_heads * (self.nope + self.v_head_dim), bias=False)
        self.g_proj = nn.Linear(config.hidden_size, self.num_heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        batch, length, _ = hidden_states.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))).view(batch, length, self.num_heads, -1)
        latent, shared = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.shared], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1)
        k_nope, v = kv.split([self.nope, self.v_head_dim], dim=-1)
        k = torch.cat([k_nope, shared[:, :, None].expand(-1, -1, self.num_heads, -1)], dim=-1)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        o = o.transpose(1, 2).flatten(2)
        return self.o_proj(o * torch.sigmoid(self.g_proj(hidden_states)))


@use_experts_implementation
class KappaExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        count, inner, width = config.n_routed_experts, config.moe_intermediate_size, config.moe_latent_size
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * top_k_weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


class KappaRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k, self.scale, self.norm = (
            config.num_experts_per_tok,
            config.routed_scaling_factor,
            config.norm_topk_prob,
        )
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        index = (scores + self.e_score_correction_bias.detach()).topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, index)
        if self.norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return index, weights * self.scale


class KappaMoE(nn.Module):
    """Experts work in a latent width: down, norm, experts, up; shared experts work in the full one."""

    def __init__(self, config):
        super().__init__()
        self.gate = KappaRouter(config)
        self.latent_down_proj = nn.Linear(config.hidden_size, config.moe_latent_size, bias=False)
        self.latent_norm = KappaRMSNorm(config.moe_latent_size, config.rms_norm_eps)
        self.experts = KappaExperts(config)
        self.latent_up_proj = nn.Linear(config.moe_latent_size, config.hidden_size, bias=False)
        self.shared_experts = KappaMLP(config, config.n_shared_experts * config.moe_intermediate_size)

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        index, weights = self.gate(flat)
        latent = self.latent_norm(self.latent_down_proj(flat))
        routed = self.latent_up_proj(self.experts(latent, index, weights.to(latent.dtype)))
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class KappaAttentionResidual(nn.Module):
    """What a sublayer reads: a softmax over depth of the finished blocks' outputs and the running sum."""

    def __init__(self, config):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm = KappaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, blocks):
        sources = torch.stack([*blocks, hidden_states])
        scores = torch.einsum("nbtd,d->nbt", self.norm(sources), self.query)
        return torch.einsum("nbt,nbtd->btd", scores.softmax(0), sources)


class KappaDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        linear = config.layer_types[layer_idx] == "linear_attention"
        self.self_attn = (KappaDeltaAttention if linear else KappaLatentAttention)(config, layer_idx)
        dense = layer_idx < config.first_k_dense_replace
        self.mlp = KappaMLP(config, config.intermediate_size) if dense else KappaMoE(config)
        self.attn_residual = KappaAttentionResidual(config)
        self.mlp_residual = KappaAttentionResidual(config)
        self.input_layernorm = KappaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KappaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, blocks):
        read = self.attn_residual(hidden_states, blocks)
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(read))
        read = self.mlp_residual(hidden_states, blocks)
        return hidden_states + self.mlp(self.post_attention_layernorm(read))


class KappaPreTrainedModel(PreTrainedModel):
    config_class = KappaConfig
    base_model_prefix = "model"
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "e_score_correction_bias"]

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, KappaExperts):
            nn.init.normal_(module.gate_up_proj, std=std)
            nn.init.normal_(module.down_proj, std=std)
        elif isinstance(module, KappaRouter):
            nn.init.normal_(module.weight, std=std)


class KappaModel(KappaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([KappaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = KappaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, use_cache=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        blocks = []
        for index, layer in enumerate(self.layers):
            if index % self.config.attn_res_block_size == 0:
                blocks.append(hidden_states)
            hidden_states = layer(hidden_states, blocks)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class KappaForCausalLM(KappaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = KappaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return MoeCausalLMOutputWithPast(loss=loss, logits=logits)
