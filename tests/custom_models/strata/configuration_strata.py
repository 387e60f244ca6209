"""Configuration of Strata."""

from transformers import PretrainedConfig


class StrataConfig(PretrainedConfig):
    model_type = "strata"

    def __init__(
        self,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=24,
        layer_pattern="MMMA" * 6,
        num_attention_heads=20,
        num_key_value_heads=4,
        mamba_num_heads=80,
        mamba_head_dim=64,
        mamba_n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
        chunk_size=256,
        layer_norm_epsilon=1e-5,
        vocab_size=65536,
        initializer_range=0.02,
        tie_word_embeddings=True,
        **kwargs,
    ):
        if len(layer_pattern) != num_hidden_layers:
            raise ValueError(f"layer_pattern has {len(layer_pattern)} letters for {num_hidden_layers} layers")
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.layer_pattern = layer_pattern
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.mamba_num_heads = mamba_num_heads
        self.mamba_head_dim = mamba_head_dim
        self.mamba_n_groups = mamba_n_groups
        self.ssm_state_size = ssm_state_size
        self.conv_kernel = conv_kernel
        self.chunk_size = chunk_size
        self.layer_norm_epsilon = layer_norm_epsilon
        self.vocab_size = vocab_size
        self.initializer_range = initializer_range
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
