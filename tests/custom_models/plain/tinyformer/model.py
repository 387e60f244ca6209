"""The whole model; it knows nothing of transformers."""

from torch import nn

from tinyformer.parts import Block


class Tinyformer(nn.Module):
    def __init__(self, vocab_size, d_model, n_layers, n_heads, mlp_ratio=4):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList([Block(d_model, n_heads, mlp_ratio * d_model) for _ in range(n_layers)])
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
