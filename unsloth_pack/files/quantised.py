"""How bitsandbytes quantises the weights of a model that is loaded."""

import torch
from transformers import BitsAndBytesConfig


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
