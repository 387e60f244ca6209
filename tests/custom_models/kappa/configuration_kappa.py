"""Configuration of Kappa."""

from transformers.configuration_utils import PretrainedConfig


class KappaConfig(PretrainedConfig):
    model_type = "kappa"

    def __init__(
        self,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=93,
        num_attention_heads=96,
        num_key_value_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_num_heads=96,
        linear_head_dim=128,
        linear_conv_kernel=4,
        full_attention_every=4,
        n_routed_experts=896,
        num_experts_per_tok=16,
        n_shared_experts=2,
        moe_intermediate_size=3072,
        moe_latent_size=3584,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        attn_res_block_size=12,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        vocab_size=163840,
        initializer_range=0.02,
        layer_types=None,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.linear_num_heads = linear_num_heads
        self.linear_head_dim = linear_head_dim
        self.linear_conv_kernel = linear_conv_kernel
        self.full_attention_every = full_attention_every
        self.n_routed_experts = n_routed_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.n_shared_experts = n_shared_experts
        self.moe_intermediate_size = moe_intermediate_size
        self.moe_latent_size = moe_latent_size
        self.first_k_dense_replace = first_k_dense_replace
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.attn_res_block_size = attn_res_block_size
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.vocab_size = vocab_size
        self.initializer_range = initializer_range
        # every fourth layer and the last attend in full, the others carry a state
        full = {*range(full_attention_every - 1, num_hidden_layers, full_attention_every), num_hidden_layers - 1}
        self.layer_types = layer_types or [
            "full_attention" if i in full else "linear_attention" for i in range(num_hidden_layers)
        ]
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
