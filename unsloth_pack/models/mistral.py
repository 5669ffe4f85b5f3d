from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec("mistral", window="config", tiny=dict(sliding_window=24, head_dim=32))
