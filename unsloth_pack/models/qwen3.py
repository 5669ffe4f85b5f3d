from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec("qwen3", window="layer", qk_norm="head", tiny=dict(head_dim=32))
