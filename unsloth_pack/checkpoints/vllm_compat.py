"""Tell whether vLLM can serve an adapter as it is saved, by what its loader accepts."""

from collections.abc import Mapping
from typing import Any

# What vLLM 0.22 takes as --max-lora-rank; without the flag it is 16
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_RANK_BY_DEFAULT = 16
_ENDS = ("embed_tokens", "lm_head")


def note_on_vllm(config: Mapping[str, Any]) -> str | None:
    """One line on what keeps vLLM from serving an adapter, or on the flag that it needs; None if nothing."""
    targets = config.get("target_modules") or ()
    named = [name for name in _ENDS if not isinstance(targets, str) and name in targets]
    reasons = {
        "it takes no modules_to_save": config.get("modules_to_save"),
        "it takes no trained tokens": config.get("trainable_token_indices"),
        "it takes no DoRA": config.get("use_dora"),
        "it takes no trained biases": config.get("bias", "none") != "none" or config.get("lora_bias"),
        f"it takes no adapter on {' and '.join(named)}": named,
        "it takes names of modules, and target_modules is a pattern": isinstance(targets, str),
        "it takes no adapter on parameters, as of experts": config.get("target_parameters"),
    }
    broken = [reason for reason, holds in reasons.items() if holds]
    greatest = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if greatest > _RANKS[-1]:
        broken.append(f"its greatest rank is {_RANKS[-1]}, and this is {greatest}")
    if broken:
        return f"vLLM cannot serve this adapter, since {'; '.join(broken)}: merge it, and serve that model"
    if greatest > _RANK_BY_DEFAULT:
        enough = next(rank for rank in _RANKS if rank >= greatest)
        return f"to serve this adapter, vLLM needs --max-lora-rank {enough}"
    return None
