from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "bamba",
    mixers={"linear_attention": "mamba2"},
    names={"norm": "final_layernorm", "mlp": "feed_forward"},
    projections=("in_proj", "out_proj"),
    tiny=dict(
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_head=16,
        mamba_chunk_size=32,
    ),
)
