from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "exaone4",
    window="is_sliding",
    qk_norm="head",
    rope_layers="windowed_if_any",
    tiny=dict(
        head_dim=32,
        sliding_window=24,
        sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
)
