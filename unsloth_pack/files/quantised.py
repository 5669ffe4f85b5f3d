"""How bitsandbytes quantises the weights of a model that is loaded."""

from typing import Any

import torch
from transformers import BitsAndBytesConfig

from unsloth_pack.errors import InputError


def refuse_stored_quantised(source: str, config: Any, in_4bit: bool, in_8bit: bool, in_fp8: bool) -> None:
    """Refuse to quantise weights that are stored in another quantised form.

    Raises:
        InputError: names the form and what to do.
    """
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    asked = [name for name, given in (("4bit", in_4bit), ("8bit", in_8bit), ("fp8", in_fp8)) if given]
    held = [name for name in ("4bit", "8bit") if stored.get(f"load_in_{name}")]  # by bitsandbytes
    method = stored.get("quant_method") or "".join(held)
    if not asked or not method or asked == held:
        return
    remedy = "leave that out, or load weights in 16 bits"
    if method == "mxfp4":
        remedy = (
            "leave that out, and its weights are dequantised to 16 bits; to train them in fewer, load what "
            "save_pretrained_merged makes of them"
        )
    raise InputError(f"load_in_{asked[0]}=True, but {source} is stored in {method} already; {remedy}")


def quantization(
    in_4bit: bool, in_8bit: bool, dtype: torch.dtype, kept: list[str] | None = None
) -> BitsAndBytesConfig | None:
    """How bitsandbytes quantises the weights: NF4 that computes in `dtype`, int8, or not at all.

    Args:
        kept: paths of modules that stay as they are; None for the head alone.
    """
    if in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=kept,
        )
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept) if in_8bit else None
