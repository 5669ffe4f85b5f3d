from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "granite",
    embedding_multiplier="embedding_multiplier",
    logit_divisor="logits_scaling",
    tiny=dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0
    ),
)
