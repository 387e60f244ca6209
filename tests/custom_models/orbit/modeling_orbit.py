"""Orbit: rounds of blocks; the keys and values of a round's first block serve the whole round; half of the blocks
process only the tokens that a scorer picks (mixture of depths)."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_orbit import OrbitConfig


class UnitScale(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.gain.float())).to(x.dtype)


def turn(x, angle):
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Looking(nn.Module):
    """Attention that makes keys and values of its own, or looks at those of the round."""

    def __init__(self, config, owns_memory):
        super().__init__()
        self.heads, self.kv_heads = config.n_query, config.n_kv
        self.size = config.width // config.n_query
        self.ask = nn.Linear(config.width, self.heads * self.size, bias=False)
        self.remember = nn.Linear(config.width, 2 * self.kv_heads * self.size, bias=False) if owns_memory else None
        self.answer = nn.Linear(self.heads * self.size, config.width, bias=False)

    def forward(self, x, angle, memory):
        q = turn(self.ask(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2), angle)
        if self.remember is not None:
            k, v = self.remember(x).unflatten(-1, (2, self.kv_heads, self.size)).unbind(2)
            memory = (turn(k.transpose(1, 2), angle), v.transpose(1, 2))
        out = F.scaled_dot_product_attention(q, memory[0], memory[1], is_causal=True, enable_gqa=True)
        return self.answer(out.transpose(1, 2).flatten(2)), memory


class Thinking(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_and_gate = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.back = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x):
        gate, up = self.up_and_gate(x).chunk(2, dim=-1)
        return self.back(F.silu(gate) * up)


class SparseThinking(nn.Module):
    """The same for the best-scored share of the tokens only; a token's score scales what it gets."""

    def __init__(self, config):
        super().__init__()
        self.score = nn.Linear(config.width, 1, bias=False)
        self.body = Thinking(config)
        self.share = config.keep_share

    def forward(self, x):
        score = self.score(x).squeeze(-1)
        kept = max(1, int(x.shape[1] * self.share))
        best, place = score.topk(kept, dim=-1)
        place = place.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        done = self.body(x.gather(1, place)) * torch.sigmoid(best).unsqueeze(-1)
        return torch.zeros_like(x).scatter(1, place, done)


class OrbitBlock(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.look = Looking(config, owns_memory=number % config.sharing_every == 0)
        self.think = SparseThinking(config) if number % 2 else Thinking(config)
        self.before_look = UnitScale(config.width, config.norm_eps)
        self.before_think = UnitScale(config.width, config.norm_eps)

    def forward(self, x, angle, memory):
        seen, memory = self.look(self.before_look(x), angle, memory)
        x = x + seen
        return x + self.think(self.before_think(x)), memory


class OrbitForCausalLM(PreTrainedModel):
    config_class = OrbitConfig
    base_model_prefix = "core"

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.stack = nn.ModuleList(OrbitBlock(config, i) for i in range(config.num_hidden_layers))
        self.last = UnitScale(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.lm_head

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
        x = self.table(input_ids)
        size = self.config.width // self.config.n_query
        place = torch.arange(input_ids.shape[1], device=x.device, dtype=torch.float32)
        slow = self.config.rope_base ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
        angle, memory = torch.outer(place, slow), None
        for block in self.stack:
            x, memory = block(x, angle, memory)
        logits = self.lm_head(self.last(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
