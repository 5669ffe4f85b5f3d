from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec("olmo2", qk_norm="flat")
