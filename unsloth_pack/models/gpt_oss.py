from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "gpt_oss",
    window="layer",
    angles="once",
    sinks=True,
    tiny=dict(
        head_dim=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1.5e5,
            factor=4.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=64,
        ),
    ),
)
