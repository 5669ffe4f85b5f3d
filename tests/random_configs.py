"""Random configurations and adapters: most of the options that an architecture's `tiny` leaves out."""

from tiny import TINY, tiny_config

_ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new"]
_BIASES = ("attention_bias", "mlp_bias")
_YARN = ({}, {"attention_factor": 0.7}, {"truncate": False}, {"mscale": 0.7, "mscale_all_dim": 1.3})
_GRANITE = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

_FALCON = (
    *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "ssm_in_multiplier"),
    *("ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
)


def draw_overrides(spec, rng):
    """Overrides of `spec.tiny_config`, drawn by a `random.Random`."""
    known = tiny_config(spec.model_type)
    n_kv, groups, n_layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.randint(1, 4)
    n_heads, head_dim = n_kv * groups, rng.choice([4, 6, 10, 16])
    has_head_dim = "head_dim" in TINY[spec.model_type] or spec.model_type == "llama"
    has_head_dim = has_head_dim or getattr(known, "head_dim", head_dim) is None  # older files leave it out
    overrides = {
        "vocab_size": rng.choice([33, 64, 131]),
        "hidden_size": n_heads * (rng.choice([4, 8]) if has_head_dim else head_dim),
        "intermediate_size": rng.choice([10, 37, 64]),
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv,
        "max_position_embeddings": rng.choice([16, 64, 2048]),
        "tie_word_embeddings": rng.random() < 0.5,
        "initializer_range": rng.choice([0.2, 0.4]),
        "rms_norm_eps": rng.choice([1e-6, 1e-2]),
    }
    if has_head_dim:
        overrides["head_dim"] = head_dim
    act = "hidden_activation" if hasattr(known, "hidden_activation") else "hidden_act"
    overrides[act] = rng.choice(_ACTIVATIONS)
    overrides |= {name: rng.random() < 0.5 for name in _BIASES if hasattr(known, name)}
    overrides |= {name: rng.choice([1.0, 0.3, 3]) for name in _GRANITE if hasattr(known, name)}
    if hasattr(known, "attn_logit_softcapping"):
        overrides["attn_logit_softcapping"] = rng.choice([None, 1.0, 2.0, 4.0])
        overrides["final_logit_softcapping"] = rng.choice([None, 3.0, 10.0])
        overrides["query_pre_attn_scalar"] = rng.choice([1, 8])
    if getattr(known, "num_experts", None):
        n_experts = rng.choice([1, 3, 4])
        if spec.model_type == "gpt_oss":  # PEFT turns the update of a single transposed expert round
            n_experts = max(n_experts, 2)
        overrides["num_experts"] = n_experts
        overrides["num_experts_per_tok"] = rng.randint(1, n_experts)
        options = {
            "norm_topk_prob": rng.random() < 0.5,
            "decoder_sparse_step": rng.choice([1, 2]),
            "mlp_only_layers": rng.choice([[], [0]]),
        }
        overrides |= {name: value for name, value in options.items() if hasattr(known, name)}
    if spec.window != "none":
        overrides["sliding_window"] = rng.choice([1, 2, 7, 20, 1000])
        if hasattr(known, "use_sliding_window"):
            overrides["use_sliding_window"] = True
    if "layer_types" in TINY[spec.model_type] or hasattr(known, "max_window_layers"):
        kinds = [*spec.mixers, "full_attention"] if spec.mixers else ["sliding_attention", "full_attention"]
        overrides["layer_types"] = [rng.choice(kinds) for _ in range(n_layers)]
        if spec.mixers:  # one of each, which some ask for
            overrides["num_hidden_layers"] = n_layers + len(kinds)
            overrides["layer_types"] += kinds
    overrides |= _draw_states(known, overrides["hidden_size"], rng)
    if "kv_lora_rank" in TINY[spec.model_type]:
        overrides |= _draw_latent(rng, n_heads, n_layers)
    if "num_kv_shared_layers" in TINY[spec.model_type]:
        return overrides | _draw_shared_kv(rng, n_kv)
    if spec.rotary_per_layer_type:
        overrides["rope_parameters"] = {kind: _draw_rope(rng, head_dim) for kind in kinds}
    elif spec.model_type == "phi3":  # takes no other types
        overrides["rope_parameters"] = _draw_rope(rng, head_dim, ["default", "longrope"])
        overrides["rope_parameters"]["partial_rotary_factor"] = 1.0
        overrides["original_max_position_embeddings"] = 16
    else:
        overrides["rope_parameters"] = _draw_rope(rng, overrides.get("qk_rope_head_dim", head_dim))
        if "partial_rotary_factor" in (getattr(known, "rope_parameters", None) or {}):  # not 1 by default
            overrides["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    if spec.query_scale:
        scale = {"llama_4_scaling_beta": rng.choice([0.1, 0.5]), "original_max_position_embeddings": 16}
        overrides["rope_parameters"] |= scale
    if spec.rope_layers == "use_rope":
        overrides["no_rope_layers"] = [rng.randint(0, 1) for _ in range(n_layers)]
    return overrides


def _draw_states(known, width, rng):
    """Sizes of layers that carry a state."""
    drawn = {}
    if hasattr(known, "linear_num_key_heads"):
        drawn["linear_num_key_heads"] = n_heads = rng.choice([1, 2])
        drawn["linear_num_value_heads"] = n_heads * rng.choice([1, 3])
        drawn["linear_key_head_dim"], drawn["linear_value_head_dim"] = rng.choice([(4, 8), (16, 5)])
        drawn["linear_conv_kernel_dim"] = rng.choice([2, 4])
    if hasattr(known, "mamba_n_heads"):
        drawn["mamba_n_heads"] = n_heads = rng.choice([2, 4])
        drawn["mamba_n_groups"] = rng.choice([1, n_heads])
        drawn["mamba_d_head"] = known.mamba_expand * width // n_heads
        drawn["mamba_d_state"], drawn["mamba_d_conv"] = rng.choice([4, 10]), rng.choice([2, 4])
        drawn["mamba_chunk_size"] = rng.choice([8, 256])
        drawn["mamba_proj_bias"], drawn["mamba_conv_bias"] = rng.random() < 0.5, rng.random() < 0.5
        drawn["position_embedding_type"] = rng.choice([None, "rope"])
    if hasattr(known, "mamba_d_ssm"):
        drawn["mamba_d_ssm"] = rng.choice([None, 12 * drawn["mamba_n_heads"]])
        drawn["mamba_d_head"] = 12 if drawn["mamba_d_ssm"] else drawn["mamba_d_head"]
        drawn["mamba_rms_norm"], drawn["mamba_norm_before_gate"] = rng.random() < 0.5, rng.random() < 0.5
        drawn |= {name: rng.choice([1.0, 0.3, 3.0]) for name in _FALCON}
        for name, parts in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            drawn[name] = [rng.choice([0.5, 1.0, 2.0]) for _ in range(parts)]
    if hasattr(known, "conv_L_cache"):
        drawn["conv_L_cache"], drawn["conv_bias"] = rng.choice([2, 3, 5]), rng.random() < 0.5
    return drawn


def _draw_latent(rng, n_heads, n_layers):
    """Of multi-head latent attention, and of the experts that come with it."""
    n_groups = rng.choice([1, 2])
    n_experts = n_groups * rng.choice([2, 4])
    return {
        "num_key_value_heads": n_heads,
        "q_lora_rank": rng.choice([None, 6]),
        "kv_lora_rank": rng.choice([4, 10]),
        "qk_nope_head_dim": rng.choice([2, 6, 16]),
        "qk_rope_head_dim": rng.choice([4, 6, 16]),
        "v_head_dim": rng.choice([4, 10, 24]),
        "rope_interleave": rng.random() < 0.7,
        "first_k_dense_replace": rng.choice([0, 1]),
        "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(n_layers)],
        "n_routed_experts": n_experts,
        "num_experts_per_tok": rng.choice([1, 2]),
        "n_group": n_groups,
        "topk_group": 1,
        "norm_topk_prob": rng.random() < 0.5,
    }


def _draw_shared_kv(rng, n_kv):
    """Of layers that share keys and values, and of what else comes with them."""
    kinds = ["sliding_attention", "full_attention"]
    own = [rng.choice(kinds) for _ in range(rng.randint(0, 3))] + ["full_attention"]
    shared = [rng.choice(own) for _ in range(rng.randint(0, 2))]
    shared += ["full_attention"] if shared else []  # which the last layer has to be
    head_dims = dict(zip(kinds, (rng.choice([4, 6, 16]), rng.choice([4, 10, 16])), strict=True))
    # transformers' own forward needs embeddings by layer where layers share keys and values
    by_layer = rng.choice([4, 24] if shared else [0, 24])
    rope_kinds = ("default", "linear", "yarn", "llama3", "proportional")
    return {
        "num_hidden_layers": len(own) + len(shared),
        "layer_types": own + shared,
        "num_kv_shared_layers": len(shared),
        "head_dim": head_dims["sliding_attention"],
        "global_head_dim": head_dims["full_attention"],
        "attention_k_eq_v": rng.random() < 0.5,
        "num_global_key_value_heads": rng.choice([None, n_kv, 1]),
        "use_double_wide_mlp": rng.random() < 0.5,
        "hidden_size_per_layer_input": by_layer,
        "final_logit_softcapping": rng.choice([None, 3.0]),
        "rope_parameters": {kind: _draw_rope(rng, head_dims[kind], rope_kinds) for kind in kinds},
        "enable_moe_block": rng.random() < 0.3,
        "num_experts": 4,
        "top_k_experts": rng.randint(1, 4),
        "moe_intermediate_size": rng.choice([8, 20]),
    }


def _draw_rope(rng, rotated, kinds=("default", "linear", "yarn", "llama3", "longrope", "proportional")):
    """Not the dynamic type: transformers' own remembers the longest document."""
    kind = rng.choice(kinds)
    factors = [[round(rng.uniform(1, most), 2) for _ in range(rotated // 2)] for most in (1.5, 5)]
    scale, original = {"factor": rng.choice([2.0, 8.0])}, {"original_max_position_embeddings": 16}
    options = {
        "default": {},
        "linear": scale,
        "yarn": scale | original | rng.choice(_YARN),
        "llama3": scale | original | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": scale | original | {"short_factor": factors[0], "long_factor": factors[1]},
        "proportional": {"partial_rotary_factor": rng.choice([0.5, 1.0])},
    }
    return {"rope_type": kind, "rope_theta": rng.choice([1e4, 37.0]), **options[kind]}


def draw_lora(rng):
    """Fields of a `LoraConfig`."""
    lora = {"use_rslora": rng.random() < 0.5, "bias": rng.choice(["none", "all"])}
    return lora | rng.choice(
        [
            {},
            {"layers_to_transform": [0]},
            {"rank_pattern": {"(o|out)_proj": 5}, "alpha_pattern": {"(o|out)_proj": 2}},
            {"modules_to_save": ["embed_tokens"]},
            {"modules_to_save": ["mlp", "norm"]},
        ]
    )
