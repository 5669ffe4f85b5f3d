"""Fast LoRA fine-tuning of language models on packed rows that never leak."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsloth_pack.api import FastLanguageModel, FastModel, is_bfloat16_supported
    from unsloth_pack.errors import BackendUnavailable, InputError, LeakFound, UnsupportedArchitecture
    from unsloth_pack.losses.pooling import pool_documents
    from unsloth_pack.models import supported_architectures
    from unsloth_pack.patching.patch import patch_model
    from unsloth_pack.training.notebooks import (
        SFTConfig,
        SFTTrainer,
        UnslothTrainer,
        UnslothTrainingArguments,
    )
    from unsloth_pack.verification import probe, verify
    from unsloth_pack.vision_api import FastVisionModel, UnslothVisionDataCollator, VisionDataCollator

__version__ = "0.2.0"
__all__ = [
    "BackendUnavailable",
    "FastLanguageModel",
    "FastModel",
    "FastVisionModel",
    "InputError",
    "LeakFound",
    "SFTConfig",
    "SFTTrainer",
    "UnslothTrainer",
    "UnslothTrainingArguments",
    "UnslothVisionDataCollator",
    "UnsupportedArchitecture",
    "VisionDataCollator",
    "is_bfloat16_supported",
    "patch_model",
    "pool_documents",
    "probe",
    "supported_architectures",
    "verify",
]

_NAMES = {
    "api": ("FastLanguageModel", "FastModel", "is_bfloat16_supported"),
    "errors": ("BackendUnavailable", "InputError", "LeakFound", "UnsupportedArchitecture"),
    "losses.pooling": ("pool_documents",),
    "models": ("supported_architectures",),
    "patching.patch": ("patch_model",),
    "training.notebooks": ("SFTConfig", "SFTTrainer", "UnslothTrainer", "UnslothTrainingArguments"),
    "verification": ("probe", "verify"),
    "vision_api": ("FastVisionModel", "UnslothVisionDataCollator", "VisionDataCollator"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
