from unsloth_pack.models.spec import ArchSpec

LLAMA = ArchSpec("llama", tiny=dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)))

APERTUS = ArchSpec(
    "apertus", qk_norm="head",
    tiny=dict(
        rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
)  # fmt: skip

SMOLLM3 = ArchSpec(
    "smollm3", window="layer", rope_layers="use_rope",
    tiny=dict(
        no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
)  # fmt: skip

ARCEE = ArchSpec("arcee")
