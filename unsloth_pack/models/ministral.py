from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "ministral",
    window="layer",
    tiny=dict(head_dim=32, sliding_window=24, layer_types=["sliding_attention", "full_attention"]),
)
