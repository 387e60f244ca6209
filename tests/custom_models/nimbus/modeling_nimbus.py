"""Nimbus: a dense decoder with grouped-query attention, qk-norm, and a window in three layers of four."""

from typing import Optional

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import is_torch_fx_available, logging

from .configuration_nimbus import NimbusConfig
from .layers import NimbusMLP, NimbusRMSNorm, rotate

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

if is_torch_fx_available():
    import torch.fx

logger = logging.get_logger(__name__)


class NimbusAttention(nn.Module):
    def __init__(self, config: NimbusConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        full = (layer_idx + 1) % config.full_attention_every == 0
        self.window = None if full else config.sliding_window
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = NimbusRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = NimbusRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden_states, cos, sin):
        q = rearrange(self.q_proj(hidden_states), "b t (h d) -> b t h d", d=self.head_dim)
        k = rearrange(self.k_proj(hidden_states), "b t (h d) -> b t h d", d=self.head_dim)
        v = rearrange(self.v_proj(hidden_states), "b t (h d) -> b t h d", d=self.head_dim)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        window = (-1, -1) if self.window is None else (self.window - 1, 0)
        if flash_attn_func is not None:
            out = flash_attn_func(q, k, v, causal=True, window_size=window)
        else:
            assert self.window is None, "the window needs flash-attn"
            q, k, v = (rearrange(x, "b t h d -> b h t d") for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out = rearrange(out, "b h t d -> b t h d")
        return self.o_proj(rearrange(out, "b t h d -> b t (h d)"))


class NimbusDecoderLayer(nn.Module):
    def __init__(self, config: NimbusConfig, layer_idx: int):
        super().__init__()
        self.self_attn = NimbusAttention(config, layer_idx)
        self.mlp = NimbusMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = NimbusRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = NimbusRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, cos, sin):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cos, sin)
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states,)


class NimbusPreTrainedModel(PreTrainedModel):
    config_class = NimbusConfig
    base_model_prefix = "model"
    _no_split_modules = ["NimbusDecoderLayer"]

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=std)


class NimbusModel(NimbusPreTrainedModel):
    def __init__(self, config: NimbusConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([NimbusDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = NimbusRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def forward(self, input_ids=None, attention_mask: Optional[torch.Tensor] = None, use_cache=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        half = torch.arange(0, self.config.head_dim, 2, device=input_ids.device).float() / self.config.head_dim
        position = torch.arange(input_ids.shape[1], device=input_ids.device).float()
        angle = torch.outer(position, self.config.rope_theta**-half)[:, None]
        cos, sin = angle.cos().to(hidden_states.dtype), angle.sin().to(hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos, sin)[0]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class NimbusForCausalLM(NimbusPreTrainedModel):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.model = NimbusModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def get_decoder(self):
        return self.model

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None, return_dict=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, attention_mask=attention_mask)[0]).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        return CausalLMOutputWithPast(loss=loss, logits=logits)
