from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "phi3",
    names={"act_fn": "activation_fn"},
    window="config",
    fused_qkv=True,
    tiny=dict(
        sliding_window=24,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
)
