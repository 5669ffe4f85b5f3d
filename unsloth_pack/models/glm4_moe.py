from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "glm4_moe",
    qk_norm="head",
    tiny=dict(
        head_dim=32,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
    ),
)
