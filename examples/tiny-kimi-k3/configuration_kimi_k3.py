"""Configurations of the tiny Kimi K3: the text model and the multimodal wrapper around it.

Field names follow the released checkpoints, so that code which reads them (`linear_attn_config`, `text_config`,
`attn_res_block_size`, ...) finds them here too. Layer numbers inside `linear_attn_config` are 1-based, as released.
"""

from transformers import PretrainedConfig


class KimiLinearConfig(PretrainedConfig):
    """Text model: KDA and gated MLA layers, attention residuals, latent mixture of experts.

    Every layer must be listed exactly once, 1-based, in `linear_attn_config["kda_layers"]` or `["full_attn_layers"]`.
    `gate_lower_bound` is the most negative log decay of one KDA step; the chunked kernel relies on it.

    Raises:
        ValueError: when the two layer lists do not cover each layer exactly once, or the gate bound is out of range.
    """

    model_type = "kimi_linear"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size=2048,
        hidden_size=160,
        intermediate_size=384,
        num_hidden_layers=9,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_attn_config=None,
        attn_res_block_size=3,
        first_k_dense_replace=1,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=80,
        routed_expert_hidden_size=80,
        routed_scaling_factor=2.0,
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        rms_norm_eps=1e-5,
        initializer_range=0.04,
        max_position_embeddings=1048576,
        use_cache=True,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.linear_attn_config = linear_attn_config or {
            "full_attn_layers": [4, 8, 9],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        }
        self.attn_res_block_size = attn_res_block_size
        self.first_k_dense_replace = first_k_dense_replace
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.num_shared_experts = num_shared_experts
        self.moe_intermediate_size = moe_intermediate_size
        self.routed_expert_hidden_size = routed_expert_hidden_size
        self.routed_scaling_factor = routed_scaling_factor
        self.activation_situ_beta = activation_situ_beta
        self.activation_situ_linear_beta = activation_situ_linear_beta
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self._check_linear_attn_config()

    def is_kda_layer(self, layer_idx):
        """True when layer `layer_idx` (0-based) is linear attention, False when it is full attention."""
        return layer_idx + 1 in self.linear_attn_config["kda_layers"]

    def _check_linear_attn_config(self):
        kda, full = self.linear_attn_config["kda_layers"], self.linear_attn_config["full_attn_layers"]
        if sorted(kda + full) != list(range(1, self.num_hidden_layers + 1)):
            raise ValueError(
                f"linear_attn_config lists kda_layers {kda} and full_attn_layers {full}; expected every 1-based layer "
                f"from 1 to {self.num_hidden_layers} exactly once, because a layer is one or the other. Correct them."
            )
        bound = self.linear_attn_config["gate_lower_bound"]
        if not -5.0 <= bound < 0.0:
            raise ValueError(
                f"linear_attn_config['gate_lower_bound'] is {bound}; expected a number from -5 up to but not 0: "
                "the gate is a log decay and the chunked kernel is exact in float32 down to -5 a step."
            )


class KimiK3Config(PretrainedConfig):
    """Multimodal wrapper: the text model under `text_config` and a small vision stub.

    A prompt holds one `media_placeholder_token_id` per image; the model replaces it by that image's positions.
    `mask_token_id` is a reserved token no text contains: block drafts use it for the slots they fill in.
    """

    model_type = "kimi_k3"
    sub_configs = {"text_config": KimiLinearConfig}
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        text_config=None,
        vision_config=None,
        media_placeholder_token_id=2026,
        mask_token_id=2027,
        tie_word_embeddings=False,
        **kwargs,
    ):
        if isinstance(text_config, KimiLinearConfig):
            self.text_config = text_config
        else:
            self.text_config = KimiLinearConfig(**(text_config or {}))
        self.vision_config = vision_config or {"patch_size": 14, "hidden_size": 32, "merge_size": 2}
        self.media_placeholder_token_id = media_placeholder_token_id
        self.mask_token_id = mask_token_id
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
