from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "smollm3",
    window="layer",
    rope_layers="use_rope",
    tiny=dict(
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
)
