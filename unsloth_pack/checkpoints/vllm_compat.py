"""Tell whether vLLM can serve an adapter as it is saved, by what its loader accepts."""

from collections.abc import Mapping
from typing import Any

# What vLLM 0.33 takes as --max-lora-rank; without the flag it is 16
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_RANK_BY_DEFAULT = 16
# Most models take none on their ends; latent attention reads the weight of kv_b_proj past an adapter
_NOT_TAKEN = ("embed_tokens", "lm_head", "kv_b_proj")


def note_on_vllm(config: Mapping[str, Any]) -> str | None:
    """One line on what keeps vLLM from serving an adapter, or on what it needs for that; None if nothing."""
    if why := why_not_served(config):
        return why
    if isinstance(config.get("target_modules"), str) or config.get("target_parameters"):
        return "vLLM serves this adapter as `unsloth-pack merge --save_method lora_vllm` saves it"
    return note_on_rank(config)


def why_not_served(config: Mapping[str, Any]) -> str | None:
    """One line on why vLLM serves an adapter in no form."""
    targets = config.get("target_modules") or ()
    names = {} if isinstance(targets, str) else {target.rpartition(".")[2] for target in targets}
    named = [name for name in _NOT_TAKEN if name in names]
    reasons = {
        "it takes no modules_to_save": config.get("modules_to_save"),
        "it takes no trained tokens": config.get("trainable_token_indices"),
        "it takes no DoRA": config.get("use_dora"),
        "it takes no trained biases": config.get("bias", "none") != "none" or config.get("lora_bias"),
        f"it takes no adapter on {' and '.join(named)}": named,
    }
    broken = [reason for reason, holds in reasons.items() if holds]
    if (greatest := _greatest_rank(config)) > _RANKS[-1]:
        broken.append(f"its greatest rank is {_RANKS[-1]}, and this is {greatest}")
    return not_served(*broken) if broken else None


def not_served(*reasons: str) -> str:
    """The line for reasons."""
    return f"vLLM cannot serve this adapter, since {'; '.join(reasons)}: merge it, and serve that model"


def note_on_rank(config: Mapping[str, Any]) -> str | None:
    """One line on the flag that vLLM needs for the rank of an adapter, if any."""
    if (greatest := _greatest_rank(config)) > _RANK_BY_DEFAULT:
        enough = next(rank for rank in _RANKS if rank >= greatest)
        return f"to serve this adapter, vLLM needs --max-lora-rank {enough}"
    return None


def _greatest_rank(config: Mapping[str, Any]) -> int:
    ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(ranks)
