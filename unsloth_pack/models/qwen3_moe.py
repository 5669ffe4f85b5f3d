from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "qwen3_moe",
    window="layer",
    qk_norm="head",
    tiny=dict(
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
)
