from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "mixtral",
    window="config",
    tiny=dict(sliding_window=24, num_local_experts=4, num_experts_per_tok=2),
)
