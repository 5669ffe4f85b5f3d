"""Fast LoRA fine-tuning of language models on packed rows that never leak."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsloth_pack.api import FastLanguageModel, FastModel, is_bfloat16_supported
    from unsloth_pack.errors import BackendUnavailable, InputError, LeakFound, UnsupportedArchitecture
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
    "probe",
    "supported_architectures",
    "verify",
]

_HOMES = {
    "BackendUnavailable": "errors",
    "FastLanguageModel": "api",
    "FastModel": "api",
    "FastVisionModel": "vision_api",
    "InputError": "errors",
    "LeakFound": "errors",
    "SFTConfig": "training.notebooks",
    "SFTTrainer": "training.notebooks",
    "UnslothTrainer": "training.notebooks",
    "UnslothTrainingArguments": "training.notebooks",
    "UnslothVisionDataCollator": "vision_api",
    "UnsupportedArchitecture": "errors",
    "VisionDataCollator": "vision_api",
    "is_bfloat16_supported": "api",
    "patch_model": "patching.patch",
    "probe": "verification",
    "supported_architectures": "models",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
