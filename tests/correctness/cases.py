"""The cases of the grid: the whole product of what changes how a step is computed."""

from dataclasses import dataclass

import image_models
import torch
from tiny import TINY

from unsloth_pack import supported_architectures
from unsloth_pack.attention import BACKENDS

DTYPES = {  # what the model computes in; NF4 weights are dequantised to it
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "nf4": torch.bfloat16,
}
VARIANTS = {  # fields of a LoraConfig, or no adapter at all; the names of all norms end in "norm"
    "plain": {},
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.5},
    "bias": {"bias": "all"},
    "dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "trained tokens": {"trainable_token_indices": [5, 40, 99, 200]},
    "branches": {},  # documents begin alike, in a padded batch that shares their prefixes
    "distillation": {},  # from the base, which the model is without its adapter; see `DIVERGENCES`
    "reverse_kl": {},  # likewise; its arithmetic and that of jsd differ in the head alone, see `_HEADS`
    "jsd": {},
    "sharded": {},  # in parts, one in each of two ranks with a row of its own, see `sharded.py`
    "two stages": {},  # its adapter comes from a folder, see `STAGES`
    "full": {"tuning": "full"},
    "frozen parts": {"tuning": "full", "frozen": ["embed_tokens", r"layers\.0"]},
}
STAGES = (
    "two stages",
)  # variants whose adapter a first stage has saved: plain PEFT loads it, or the package
DIVERGENCES = {"distillation": "forward_kl", "reverse_kl": "reverse_kl", "jsd": "jsd"}  # by variant
_HEADS = ("llama", "granite", "cohere2", "gemma2")  # logits that are plain, divided, multiplied and capped
CHECKPOINTING = {"False": False, "True": True, "offload": "offload", "auto": "auto"}
WITH_IMAGES = image_models.MODELS
WINDOWS = {"short": 24, "long": 1000}  # against documents of up to 129 tokens; "none" where there is none


@dataclass(frozen=True)
class Case:
    """One model and one way to train it. It is measured uncaptured and captured, which gives two rows."""

    arch: str
    window: str
    variant: str
    dtype: str
    backend: str
    checkpointing: str


def values_of(images=False):
    """What every field of a case may be, in the order in which cases come.

    Args:
        images: of the grid of models with images; there a variant is what trains, see `image_models.made`.
    """
    return {
        "arch": list(WITH_IMAGES if images else supported_architectures()),
        "window": ["none"] if images else [*WINDOWS, "none"],
        "variant": list(image_models.TRAINED if images else VARIANTS),
        "dtype": list(DTYPES),
        "backend": list(BACKENDS),
        "checkpointing": list(CHECKPOINTING),
    }


def cases(images=False, **only):
    """Every case, or those whose fields are among the values given. Neighbours share a model."""
    chosen = [[]]
    for name, values in values_of(images).items():
        kept = [value for value in values if not only.get(name) or value in only[name]]
        chosen = [[*before, value] for before in chosen for value in kept]
    return [case for case in (Case(*each) for each in chosen) if _exists(case)]


def _exists(case):
    has_variant = case.variant not in ("reverse_kl", "jsd") or case.arch in _HEADS
    return has_variant and case.window in windows_of(case.arch)


def windows_of(arch):
    if arch in WITH_IMAGES:
        return ("none",)
    has_window = supported_architectures()[arch].window != "none" and "sliding_window" in TINY[arch]
    return tuple(WINDOWS) if has_window else ("none",)
