from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "ernie4_5",
    rotary="pairs",
    tiny=dict(head_dim=32, use_bias=True),
)
