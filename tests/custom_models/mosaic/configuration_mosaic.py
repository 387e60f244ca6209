"""Configuration of Mosaic."""

from transformers import PretrainedConfig


class MosaicConfig(PretrainedConfig):
    model_type = "mosaic"

    def __init__(
        self,
        hidden_size=3072,
        num_hidden_layers=24,
        layer_kinds=None,
        num_attention_heads=24,
        head_dim=128,
        local_heads=16,
        local_head_dim=64,
        local_window=1024,
        kv_rank=512,
        rope_dim=64,
        nope_dim=64,
        intermediate_size=8192,
        local_intermediate_size=12288,
        loops=2,
        vocab_size=100352,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        **kwargs,
    ):
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.layer_kinds = layer_kinds or ["local", "local", "latent", "looped"] * (num_hidden_layers // 4)
        self.num_attention_heads = num_attention_heads
        self.head_dim = head_dim
        self.local_heads = local_heads
        self.local_head_dim = local_head_dim
        self.local_window = local_window
        self.kv_rank = kv_rank
        self.rope_dim = rope_dim
        self.nope_dim = nope_dim
        self.intermediate_size = intermediate_size
        self.local_intermediate_size = local_intermediate_size
        self.loops = loops
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        super().__init__(vocab_size=vocab_size, **kwargs)
