from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "gemma",
    norm_offset=1.0,
    tiny=dict(head_dim=32),
)
