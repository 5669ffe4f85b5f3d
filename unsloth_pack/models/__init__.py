"""List the architectures that can be patched, as data."""

from difflib import get_close_matches

from unsloth_pack.errors import UnsupportedArchitecture
from unsloth_pack.models import gemma, hybrids, others, qwen
from unsloth_pack.models.spec import ArchSpec, VisionSpec

_FAMILIES = (others, qwen, gemma, hybrids)
_DECLARED = [declared for family in _FAMILIES for declared in vars(family).values()]
_SPECS = {spec.model_type: spec for spec in _DECLARED if isinstance(spec, ArchSpec)}
_VISION = {spec.model_type: spec for spec in _DECLARED if isinstance(spec, VisionSpec)}

_KDA = "its Kimi delta attention hands no boundaries of documents to its kernels"
_MAMBA_1 = "the selective scan of its Mamba layers takes no boundaries of documents"
LEAKING = {  # `config.model_type` of text models whose packed rows leak -> why
    **dict.fromkeys(("bailing_hybrid", "glm5_next_text", "kimi_linear"), _KDA),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), _MAMBA_1),
    "minimax": "its lightning attention takes no boundaries of documents",
    "recurrent_gemma": "its recurrent units take no boundaries of documents",
    "rwkv": "its recurrence takes no boundaries of documents",
    "xlstm": "its memory cells take no boundaries of documents",
    "zaya": "its convolutions take no boundaries of documents",
}


def vision_spec_for(model_type: str) -> VisionSpec | None:
    """Return how the images of a model of vision and language are packed, or None if they are not."""
    return _VISION.get(model_type)


def supported_architectures() -> dict[str, ArchSpec]:
    """Return every causal language model that can be patched, by `config.model_type`."""
    return {name: spec for name, spec in _SPECS.items() if spec.stands_alone}


def arch_spec_for(model_type: str) -> ArchSpec:
    """Return the declared differences of an architecture, or of a text model inside another.

    Raises:
        UnsupportedArchitecture: none is declared for `model_type`, or its packed rows leak.
    """
    if why := LEAKING.get(model_type):
        raise UnsupportedArchitecture(f"model type {model_type!r} cannot be packed: {why}; train it unpacked")
    if model_type not in _SPECS:
        inner = f"{model_type}_text"  # of a model of vision and language
        alike = [inner] if inner in _SPECS else get_close_matches(model_type, _SPECS, n=1)
        near = f"the nearest name is {alike[0]!r}; " if alike else ""
        raise UnsupportedArchitecture(
            f"model type {model_type!r} has no patch; {near}add it to unsloth_pack/models, see "
            f"CONTRIBUTING.md; supported are {', '.join(sorted(_SPECS))}"
        )
    return _SPECS[model_type]
