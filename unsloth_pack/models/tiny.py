"""Share parts of the smallest configurations: `ArchSpec.tiny`."""

from typing import Any

Part = dict[str, Any]
ROPE: Part = dict(rope_type="default", rope_theta=1e4)
HALF_ROPE: Part = dict(**ROPE, partial_rotary_factor=0.5)
ROPE_BY_TYPE: Part = dict(sliding_attention=ROPE, full_attention=dict(rope_type="default", rope_theta=1e6))
YARN: Part = dict(rope_type="yarn", rope_theta=1e4, beta_fast=32.0, beta_slow=1.0)
WINDOWED: Part = dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"])
EXPERTS: Part = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
ROUTED: Part = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
# v begins behind the nope part of k, and torch's attention on a GPU loads 16 bytes at a time
LATENT: Part = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8,
    v_head_dim=16,
)  # fmt: skip
DELTA_NET: Part = dict(
    layer_types=["linear_attention", "full_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=16,
    linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
MAMBA2: Part = dict(
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_head=16, mamba_chunk_size=32,
)  # fmt: skip
GRANITE_FACTORS: Part = dict(
    embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
)  # fmt: skip
