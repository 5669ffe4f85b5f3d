"""Fast LoRA fine-tuning of language models on packed rows that never leak."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.checks import probe, verify
    from unsloth_pack.errors import BackendUnavailable, InputError, LeakFound, UnsupportedArchitecture
    from unsloth_pack.models import supported_architectures
    from unsloth_pack.patching.patch import patch_model

__version__ = "0.1.0"
__all__ = [
    "BackendUnavailable",
    "FastLanguageModel",
    "InputError",
    "LeakFound",
    "UnsupportedArchitecture",
    "patch_model",
    "probe",
    "supported_architectures",
    "verify",
]

_HOMES = {
    "BackendUnavailable": "errors",
    "FastLanguageModel": "api",
    "InputError": "errors",
    "LeakFound": "errors",
    "UnsupportedArchitecture": "errors",
    "patch_model": "patching.patch",
    "probe": "checks",
    "supported_architectures": "models",
    "verify": "checks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
