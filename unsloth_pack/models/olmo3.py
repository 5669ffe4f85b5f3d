from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "olmo3",
    window="layer",
    qk_norm="flat",
    rotary_per_layer_type=True,
    tiny=dict(
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=dict(rope_type="default", rope_theta=1e6),
        ),
    ),
)
