from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "glm4",
    rotary="pairs",
    tiny=dict(
        head_dim=32,
        attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
)
