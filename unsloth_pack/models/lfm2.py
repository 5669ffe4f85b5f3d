from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "lfm2",
    mixers={"conv": "short_convolution"},
    names={
        "norm": "embedding_norm",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "packed_row": "seq_idx",  # what layers of transformers before 5.23 hand on
    },
    projections=("in_proj", "out_proj", "w1", "w2", "w3"),
    activation="silu",
    qk_norm="head",
    tiny=dict(
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
        tie_word_embeddings=True,
    ),
)
