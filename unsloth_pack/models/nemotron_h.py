from unsloth_pack.models.spec import ArchSpec

# A layer is a mixer or an MLP; nothing rotates.
SPEC = ArchSpec(
    "nemotron_h",
    mixers={"linear_attention": "mamba2", "mlp": "", "moe": ""},
    names={"norm": "norm_f", "rotary_emb": "", "self_attn": "mixer", "mamba": "mixer", "mlp": "mixer"},
    projections=("in_proj",),
    refused_by_peft=("out_proj",),  # which mamba_ssm reads past an adapter
    tiny=dict(
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=32,
        rescale_prenorm_residual=False,
    ),
)
