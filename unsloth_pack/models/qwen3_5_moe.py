from dataclasses import replace

from unsloth_pack.models import qwen3_5

SPEC = replace(
    qwen3_5.SPEC,
    model_type="qwen3_5_moe_text",
    tiny={
        **qwen3_5.SPEC.tiny,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    },
)
