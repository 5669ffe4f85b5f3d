from dataclasses import replace

from unsloth_pack.models.spec import ArchSpec

GRANITEMOEHYBRID = ArchSpec(
    "granitemoehybrid", mixers={"linear_attention": "mamba2"},
    names={
        "mlp": "shared_mlp",  # beside experts in `block_sparse_moe`, where there are any
        "gate_up_proj": "input_linear", "down_proj": "output_linear", "act_fn": "activation",
    },
    projections=("in_proj", "out_proj", "input_linear", "output_linear"),
    embedding_multiplier="embedding_multiplier", logit_divisor="logits_scaling",
)  # fmt: skip
BAMBA = ArchSpec(
    "bamba", mixers={"linear_attention": "mamba2"}, names={"norm": "final_layernorm", "mlp": "feed_forward"},
    projections=("in_proj", "out_proj"),
)  # fmt: skip
FALCON_H1 = ArchSpec(
    "falcon_h1", mixers={"hybrid": "mamba2 attention"},
    names={"norm": "final_layernorm", "mlp": "feed_forward"}, projections=("in_proj",),
    refused_by_peft=("out_proj",),  # which mamba_ssm reads past an adapter
    token_multiplier="embedding_multiplier", key_multiplier="key_multiplier",
    mlp_multipliers=("gate_multiplier", "down_multiplier"), logit_multiplier="lm_head_multiplier",
)  # fmt: skip

# A layer is a mixer or an MLP; nothing rotates.
NEMOTRON_H = ArchSpec(
    "nemotron_h", mixers={"linear_attention": "mamba2", "mlp": "", "moe": ""},
    names={"norm": "norm_f", "rotary_emb": "", "self_attn": "mixer", "mamba": "mixer", "mlp": "mixer"},
    projections=("in_proj",), norm_keeps_dtype=True,
    refused_by_peft=("out_proj",),  # which mamba_ssm reads past an adapter
)  # fmt: skip

LFM2 = ArchSpec(
    "lfm2", mixers={"conv": "short_convolution"},
    names={
        "norm": "embedding_norm", "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
        "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
        "packed_row": "seq_idx",  # what layers of transformers before 5.23 hand on
    },
    projections=("in_proj", "out_proj", "w1", "w2", "w3"), activation="silu", qk_norm="head",
)  # fmt: skip
LFM2_MOE = replace(LFM2, model_type="lfm2_moe", names={**LFM2.names, "rotary_emb": "pos_emb"})

OLMO_HYBRID = ArchSpec(
    "olmo_hybrid", mixers={"linear_attention": "gated_delta_net"}, projections=("a_proj", "b_proj", "g_proj"),
    qk_norm="flat", norm_keeps_dtype=True,
)  # fmt: skip
