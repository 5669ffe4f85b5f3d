from dataclasses import replace

from unsloth_pack.models.spec import DELTA_NET, EXPERTS, GRANITE_FACTORS, MAMBA2, ROPE, ArchSpec

GRANITEMOEHYBRID = ArchSpec(
    "granitemoehybrid", mixers={"linear_attention": "mamba2"},
    names={
        "mlp": "shared_mlp",  # beside experts in `block_sparse_moe`, where there are any
        "gate_up_proj": "input_linear", "down_proj": "output_linear", "act_fn": "activation",
    },
    projections=("in_proj", "out_proj", "input_linear", "output_linear"),
    embedding_multiplier="embedding_multiplier", logit_divisor="logits_scaling",
    tiny=dict(
        **GRANITE_FACTORS, **MAMBA2, layer_types=["linear_attention", "full_attention"], num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=48, position_embedding_type=None,
    ),
)  # fmt: skip
BAMBA = ArchSpec(
    "bamba", mixers={"linear_attention": "mamba2"}, names={"norm": "final_layernorm", "mlp": "feed_forward"},
    projections=("in_proj", "out_proj"), tiny=dict(**MAMBA2, attn_layer_indices=[1]),
)  # fmt: skip
FALCON_H1 = ArchSpec(
    "falcon_h1", mixers={"hybrid": "mamba2 attention"},
    names={"norm": "final_layernorm", "mlp": "feed_forward"}, projections=("in_proj",),
    refused_by_peft=("out_proj",),  # which mamba_ssm reads past an adapter
    token_multiplier="embedding_multiplier", key_multiplier="key_multiplier",
    mlp_multipliers=("gate_multiplier", "down_multiplier"), logit_multiplier="lm_head_multiplier",
    tiny=MAMBA2 | dict(
        mamba_d_ssm=64, mamba_d_head=8, embedding_multiplier=3.0, lm_head_multiplier=0.5, key_multiplier=1.5,
        attention_in_multiplier=0.75, attention_out_multiplier=1.25, ssm_in_multiplier=1.5,
        ssm_out_multiplier=0.75, ssm_multipliers=[1.25, 0.75, 1.5, 0.5, 1.25], mlp_multipliers=[1.5, 0.75],
    ),
)  # fmt: skip

# A layer is a mixer or an MLP; nothing rotates.
NEMOTRON_H = ArchSpec(
    "nemotron_h", mixers={"linear_attention": "mamba2", "mlp": "", "moe": ""},
    names={"norm": "norm_f", "rotary_emb": "", "self_attn": "mixer", "mamba": "mixer", "mlp": "mixer"},
    projections=("in_proj",),
    refused_by_peft=("out_proj",),  # which mamba_ssm reads past an adapter
    tiny=dict(
        num_hidden_layers=4, layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
        head_dim=32, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, chunk_size=32,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=32, rescale_prenorm_residual=False,
    ),
)  # fmt: skip

LFM2 = ArchSpec(
    "lfm2", mixers={"conv": "short_convolution"},
    names={
        "norm": "embedding_norm", "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
        "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
        "packed_row": "seq_idx",  # what layers of transformers before 5.23 hand on
    },
    projections=("in_proj", "out_proj", "w1", "w2", "w3"), activation="silu", qk_norm="head",
    tiny=dict(
        layer_types=["conv", "full_attention"], conv_L_cache=3, block_auto_adjust_ff_dim=False,
        rope_parameters=ROPE, tie_word_embeddings=True,
    ),
)  # fmt: skip
LFM2_MOE = replace(
    LFM2, model_type="lfm2_moe", names={**LFM2.names, "rotary_emb": "pos_emb"},
    tiny={**LFM2.tiny, **EXPERTS, "num_dense_layers": 1},
)  # fmt: skip

OLMO_HYBRID = ArchSpec(
    "olmo_hybrid", mixers={"linear_attention": "gated_delta_net"}, projections=("a_proj", "b_proj", "g_proj"),
    qk_norm="flat",
    # as in released models nothing rotates
    tiny=DELTA_NET | dict(linear_num_key_heads=4, rope_parameters=None),
)  # fmt: skip
