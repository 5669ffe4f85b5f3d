"""The architectures that can be patched: one small file of data each."""

from difflib import get_close_matches

from unsloth_pack.errors import UnsupportedArchitecture
from unsloth_pack.models import (
    apertus,
    arcee,
    bamba,
    cohere2,
    deepseek_v3,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granitemoehybrid,
    hunyuan_v1_dense,
    idefics3,
    internvl,
    lfm2,
    lfm2_moe,
    llama,
    llava_onevision,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
    smolvlm,
    youtu,
)
from unsloth_pack.models.refused import LEAKING
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.models.vision_spec import VisionSpec

_MODULES = (
    llama,
    mistral,
    ministral,
    ministral3,
    mixtral,
    qwen2,
    qwen3,
    qwen2_moe,
    qwen3_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    deepseek_v3,
    youtu,
    olmo2,
    olmo3,
    olmoe,
    olmo_hybrid,
    cohere2,
    ernie4_5,
    exaone4,
    hunyuan_v1_dense,
    smollm3,
    granite,
    granitemoehybrid,
    phi3,
    seed_oss,
    apertus,
    arcee,
    lfm2,
    lfm2_moe,
    bamba,
    falcon_h1,
    nemotron_h,
    qwen2_vl,
    qwen2_5_vl,
    qwen3_vl,
    qwen3_vl_moe,
    mistral4,
)
_SPECS = {module.SPEC.model_type: module.SPEC for module in _MODULES}
_WITH_IMAGES = (
    qwen2_vl,
    qwen2_5_vl,
    qwen3_vl,
    qwen3_vl_moe,
    idefics3,
    smolvlm,
    llava_onevision,
    internvl,
    mistral3,
    gemma3,
)
_VISION = {module.VISION.model_type: module.VISION for module in _WITH_IMAGES}


def vision_spec_of(model_type: str) -> VisionSpec | None:
    """How the images of a model of vision and language are packed; None where they are not."""
    return _VISION.get(model_type)


def supported_architectures() -> dict[str, ArchSpec]:
    """Every causal language model that can be patched, by `config.model_type`."""
    return {name: spec for name, spec in _SPECS.items() if spec.stands_alone}


def spec_of(model_type: str) -> ArchSpec:
    """The declared differences of one architecture, a text model inside another included.

    Raises:
        UnsupportedArchitecture: none is declared for `model_type`, or its packed rows leak.
    """
    if model_type in LEAKING:
        raise UnsupportedArchitecture(
            f"model type {model_type!r} cannot be packed: {LEAKING[model_type]}; train it unpacked, in "
            "transformers"
        )
    if model_type not in _SPECS:
        inner = f"{model_type}_text"  # of a model of vision and language
        alike = [inner] if inner in _SPECS else get_close_matches(model_type, _SPECS, n=1)
        near = f"the nearest name is {alike[0]!r}; " if alike else ""
        raise UnsupportedArchitecture(
            f"model type {model_type!r} has no patch; {near}add a file to unsloth_pack/models, see "
            f"CONTRIBUTING.md; supported are {', '.join(sorted(_SPECS))}"
        )
    return _SPECS[model_type]
