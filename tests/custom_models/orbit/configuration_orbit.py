"""Configuration of Orbit."""

from transformers import PretrainedConfig


class OrbitConfig(PretrainedConfig):
    model_type = "orbit"

    def __init__(
        self,
        width=2048,
        rounds=6,
        blocks_per_round=2,
        n_query=16,
        n_kv=4,
        inner=5632,
        keep_share=0.25,
        sharing_every=3,
        vocab_size=49152,
        rope_base=10000.0,
        norm_eps=1e-6,
        initializer_range=0.02,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.width = width
        self.rounds = rounds
        self.blocks_per_round = blocks_per_round
        self.n_query = n_query
        self.n_kv = n_kv
        self.inner = inner
        self.keep_share = keep_share
        self.sharing_every = sharing_every
        self.vocab_size = vocab_size
        self.rope_base = rope_base
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    @property
    def hidden_size(self):
        return self.width

    @property
    def num_hidden_layers(self):
        return self.rounds * self.blocks_per_round
