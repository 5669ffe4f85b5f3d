from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "hunyuan_v1_dense",
    names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    qk_norm="head",
    qk_norm_after_rope=True,
    tiny=dict(
        head_dim=32,
        attention_bias=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=50.0),
    ),
)
