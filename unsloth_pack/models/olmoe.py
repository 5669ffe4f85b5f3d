from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "olmoe",
    qk_norm="flat",
    only={"clip_qkv": None},
    tiny=dict(num_experts=4, num_experts_per_tok=2),
)
