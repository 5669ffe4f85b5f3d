from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "ministral3",
    window="config",
    query_scale=True,
    tiny=dict(
        head_dim=32,
        sliding_window=24,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e6,
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=32.0,
            beta_slow=1.0,
            llama_4_scaling_beta=0.2,
        ),
    ),
)
