from dataclasses import replace

from unsloth_pack.models import lfm2

SPEC = replace(
    lfm2.SPEC,
    model_type="lfm2_moe",
    names={**lfm2.SPEC.names, "rotary_emb": "pos_emb"},
    tiny={
        **lfm2.SPEC.tiny,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
)
