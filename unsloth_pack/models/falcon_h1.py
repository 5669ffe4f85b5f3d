from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "falcon_h1",
    mixers={"hybrid": "mamba2 attention"},
    names={"norm": "final_layernorm", "mlp": "feed_forward"},
    projections=("in_proj",),
    refused_by_peft=("out_proj",),  # which mamba_ssm reads past an adapter
    token_multiplier="embedding_multiplier",
    key_multiplier="key_multiplier",
    mlp_multipliers=("gate_multiplier", "down_multiplier"),
    logit_multiplier="lm_head_multiplier",
    tiny=dict(
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=32,
        embedding_multiplier=3.0,
        lm_head_multiplier=0.5,
        key_multiplier=1.5,
        attention_in_multiplier=0.75,
        attention_out_multiplier=1.25,
        ssm_in_multiplier=1.5,
        ssm_out_multiplier=0.75,
        ssm_multipliers=[1.25, 0.75, 1.5, 0.5, 1.25],
        mlp_multipliers=[1.5, 0.75],
    ),
)
