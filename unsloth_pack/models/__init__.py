"""The architectures that can be patched: one small file of data each."""

from unsloth_pack.errors import UnsupportedArchitecture
from unsloth_pack.models import (
    apertus,
    arcee,
    cohere2,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    ministral,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
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
    phi3,
    granite,
    olmo2,
    qwen2_5_vl,
    olmo3,
    mixtral,
    gemma,
    ministral,
    ministral3,
    seed_oss,
    apertus,
    arcee,
    olmoe,
    qwen2_moe,
    glm4_moe,
    gpt_oss,
    smollm3,
    exaone4,
    cohere2,
    ernie4_5,
    glm4,
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
