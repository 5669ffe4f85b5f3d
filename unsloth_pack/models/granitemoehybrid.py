from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "granitemoehybrid",
    mixers={"linear_attention": "mamba2"},
    names={
        "mlp": "shared_mlp",  # beside experts in `block_sparse_moe`, where there are any
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
        "act_fn": "activation",
    },
    projections=("in_proj", "out_proj", "input_linear", "output_linear"),
    embedding_multiplier="embedding_multiplier",
    logit_divisor="logits_scaling",
    tiny=dict(
        layer_types=["linear_attention", "full_attention"],
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.0,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        position_embedding_type=None,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_head=16,
        mamba_chunk_size=32,
    ),
)
