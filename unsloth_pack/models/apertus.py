from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "apertus",
    qk_norm="head",
    tiny=dict(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
    ),
)
