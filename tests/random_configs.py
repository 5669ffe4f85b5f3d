"""Random configurations and adapters: most of the options that an architecture's `tiny` leaves out."""

_ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new"]
_BIASES = ("attention_bias", "mlp_bias")
_GRANITE = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def draw_overrides(spec, rng):
    """Overrides of `spec.tiny_config`, drawn by a `random.Random`."""
    known = spec.tiny_config()
    n_kv, groups, n_layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.randint(1, 4)
    n_heads, head_dim = n_kv * groups, rng.choice([4, 6, 10, 16])
    has_head_dim = "head_dim" in spec.tiny or spec.model_type == "llama"
    has_head_dim |= getattr(known, "head_dim", head_dim) is None  # older files leave it out
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
    if hasattr(known, "num_experts"):
        overrides["num_experts"] = n_experts = rng.choice([1, 3, 4])
        overrides["num_experts_per_tok"] = rng.randint(1, n_experts)
        overrides["norm_topk_prob"] = rng.random() < 0.5
        overrides["decoder_sparse_step"] = rng.choice([1, 2])
        overrides["mlp_only_layers"] = rng.choice([[], [0]])
    if spec.window != "none":
        overrides["sliding_window"] = rng.choice([1, 2, 7, 20, 1000])
        if hasattr(known, "use_sliding_window"):
            overrides["use_sliding_window"] = True
    if "layer_types" in spec.tiny or hasattr(known, "max_window_layers"):
        kinds = ["sliding_attention", "full_attention"]
        overrides["layer_types"] = [rng.choice(kinds) for _ in range(n_layers)]
    if spec.rotary_per_layer_type:
        overrides["rope_parameters"] = {kind: _draw_rope(rng, head_dim) for kind in kinds}
    elif spec.model_type == "phi3":  # takes no other types
        overrides["rope_parameters"] = _draw_rope(rng, head_dim, ["default", "longrope"])
        overrides["rope_parameters"]["partial_rotary_factor"] = 1.0
        overrides["original_max_position_embeddings"] = 16
    else:
        overrides["rope_parameters"] = _draw_rope(rng, head_dim)
    if spec.query_scale:
        scale = {"llama_4_scaling_beta": rng.choice([0.1, 0.5]), "original_max_position_embeddings": 16}
        overrides["rope_parameters"] |= scale
    if spec.rope_layers == "use_rope":
        overrides["no_rope_layers"] = [rng.randint(0, 1) for _ in range(n_layers)]
    return overrides


def _draw_rope(rng, rotated, kinds=("default", "linear", "yarn", "llama3", "longrope", "proportional")):
    """Not the dynamic type: transformers' own remembers the longest document."""
    kind = rng.choice(kinds)
    factors = [[round(rng.uniform(1, most), 2) for _ in range(rotated // 2)] for most in (1.5, 5)]
    scale, original = {"factor": rng.choice([2.0, 8.0])}, {"original_max_position_embeddings": 16}
    options = {
        "default": {},
        "linear": scale,
        "yarn": scale | original | rng.choice([{}, {"attention_factor": 0.7}, {"truncate": False}]),
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
            {"rank_pattern": {"o_proj": 5}, "alpha_pattern": {"o_proj": 2}},
            {"modules_to_save": ["embed_tokens"]},
            {"modules_to_save": ["mlp", "norm"]},
        ]
    )
