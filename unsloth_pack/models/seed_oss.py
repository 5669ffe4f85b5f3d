from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "seed_oss",
    tiny=dict(head_dim=32, attention_bias=True, attention_dropout=0.0, residual_dropout=0.0),
)
