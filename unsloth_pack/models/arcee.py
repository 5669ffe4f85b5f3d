from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "arcee",
)
