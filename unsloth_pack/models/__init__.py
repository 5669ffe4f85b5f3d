"""The architectures that can be patched: one small file of data each."""

from unsloth_pack.errors import UnsupportedArchitecture
from unsloth_pack.models import (
    deepseek_v3,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe_lite,
    granite,
    llama,
    mistral,
    mistral4,
    olmo2,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_moe,
    youtu,
)
from unsloth_pack.models.spec import ArchSpec

_MODULES = (
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
    gemma2,
    gemma3,
    gemma4,
    phi3,
    granite,
    olmo2,
    deepseek_v3,
    glm4_moe_lite,
    mistral4,
    youtu,
    qwen2_5_vl,
)
_SPECS = {module.SPEC.model_type: module.SPEC for module in _MODULES}


def supported_architectures() -> dict[str, ArchSpec]:
    """Every causal language model that can be patched, by `config.model_type`."""
    return {name: spec for name, spec in _SPECS.items() if spec.stands_alone}


def spec_of(model_type: str) -> ArchSpec:
    """The declared differences of one architecture, a text model inside another included.

    Raises:
        UnsupportedArchitecture: none is declared for `model_type`.
    """
    if model_type not in _SPECS:
        raise UnsupportedArchitecture(
            f"model type {model_type!r} has no patch; supported are {', '.join(sorted(_SPECS))}"
        )
    return _SPECS[model_type]
