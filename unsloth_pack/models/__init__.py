"""The architectures that can be patched: one small file of data each."""

from unsloth_pack.errors import UnsupportedArchitecture
from unsloth_pack.models import gemma2, gemma3, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, qwen3_moe
from unsloth_pack.models.spec import ArchSpec

_MODULES = (llama, mistral, qwen2, qwen3, qwen3_moe, gemma2, gemma3, phi3, granite, olmo2)


def supported_architectures() -> dict[str, ArchSpec]:
    """Every architecture that can be patched, by `config.model_type`."""
    return {module.SPEC.model_type: module.SPEC for module in _MODULES}


def spec_of(model_type: str) -> ArchSpec:
    """The declared differences of one architecture.

    Raises:
        UnsupportedArchitecture: none is declared for `model_type`.
    """
    specs = supported_architectures()
    if model_type not in specs:
        raise UnsupportedArchitecture(
            f"model type {model_type!r} has no patch; supported are {', '.join(sorted(specs))}"
        )
    return specs[model_type]
