"""Blocks."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_heads, d // self.n_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class GatedMLP(nn.Module):
    def __init__(self, d_model, d_inner):
        super().__init__()
        self.gate = nn.Linear(d_model, d_inner, bias=False)
        self.up = nn.Linear(d_model, d_inner, bias=False)
        self.down = nn.Linear(d_inner, d_model, bias=False)
        self.act = nn.GELU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, d_model, n_heads, d_inner):
        super().__init__()
        self.norm1 = nn.RMSNorm(d_model, eps=1e-6)
        self.attention = Attention(d_model, n_heads)
        self.norm2 = nn.RMSNorm(d_model, eps=1e-6)
        self.mlp = GatedMLP(d_model, d_inner)
        self.scale = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        x = x + self.scale * self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))
