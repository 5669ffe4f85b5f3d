"""List the architectures that can be patched, as data."""

from difflib import get_close_matches

from unsloth_pack.errors import UnsupportedArchitecture
from unsloth_pack.models import gemma, hybrids, others, qwen
from unsloth_pack.models.spec import ArchSpec, VisionSpec

_FAMILIES = (others, qwen, gemma, hybrids)
_DECLARED = [declared for family in _FAMILIES for declared in vars(family).values()]
_SPECS = {spec.model_type: spec for spec in _DECLARED if isinstance(spec, ArchSpec)}
_VISION = {spec.model_type: spec for spec in _DECLARED if isinstance(spec, VisionSpec)}

# `config.model_type` of text models whose packed rows leak: their layers carry a state, or convolve, and take
# no boundaries of documents
LEAKING = frozenset((
    "bailing_hybrid", "falcon_mamba", "glm5_next_text", "jamba", "kimi_linear", "mamba", "minimax",
    "recurrent_gemma", "rwkv", "xlstm", "zamba", "zaya",
))  # fmt: skip


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
    if model_type in LEAKING:
        why = "its layers take no boundaries of documents"
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
