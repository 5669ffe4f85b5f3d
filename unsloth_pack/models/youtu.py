from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "youtu",
    attention="latent_attention",
    projections=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    tiny=dict(
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
)
