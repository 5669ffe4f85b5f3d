from dataclasses import replace

from unsloth_pack.models import qwen3_moe, qwen3_vl

SPEC = replace(
    qwen3_vl.SPEC, model_type="qwen3_vl_moe_text", tiny={**qwen3_moe.SPEC.tiny, **qwen3_vl.SPEC.tiny}
)
VISION = replace(qwen3_vl.VISION, model_type="qwen3_vl_moe")
