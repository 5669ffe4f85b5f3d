from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "qwen2_moe",
    window="layer",
    tiny=dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
)
