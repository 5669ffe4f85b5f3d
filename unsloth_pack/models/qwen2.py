from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "qwen2",
    window="layer",
    tiny=dict(use_sliding_window=True, sliding_window=24, max_window_layers=1, num_key_value_heads=1),
)
