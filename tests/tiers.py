"""Which tests run when. `CONTRIBUTING.md` says which tier to run; this file says what is in each.

- quick: rows, packing, options, specs as data, kernels' oracles. Starts no process, trains no model.
- the default: packed equals alone on every architecture, every other property on the fewest architectures
  that together use every field of `ArchSpec`, and on one vision model for each class of tower.
- nightly: everything times everything.
- gpu: what needs a CUDA device.
- extras: what needs packages that `pip install -e '.[test]'` does not bring.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields

from unsloth_pack.models import supported_architectures
from unsloth_pack.models.spec import ArchSpec

# Files whose tests are all quick, below this folder
QUICK: tuple[str, ...] = (
    *("test_package.py", "test_documents.py", "test_figures.py"),
    *(f"chat_templates/test_{name}.py" for name in ("by_name", "responses", "standardize")),
    *(f"data/test_{name}.py" for name in ("checks", "formats")),
    "kernels/test_reference.py",
    *(f"packing/test_{name}.py" for name in ("length_report", "offline", "packed_sampler", "plan", "stream")),
    *(f"config/test_option_{name}.py" for name in ("files", "schema", "values")),
    "run/test_resolve.py",
)
DESCRIPTIVE = ("model_type", "stands_alone")  # fields of a spec that no forward reads
A_FEW, A_FEW_WITH_IMAGES = 6, 3  # a test that names so many models has chosen them


def features_of(spec: ArchSpec) -> set[str]:
    """The fields in which a spec differs from a plain decoder."""
    plain = ArchSpec(spec.model_type)
    return {
        field.name
        for field in fields(spec)
        if field.name not in DESCRIPTIVE and getattr(spec, field.name) != getattr(plain, field.name)
    }


def smallest_cover(features: Mapping[str, set[str]]) -> tuple[str, ...]:
    """The fewest keys whose features together are the features of all keys."""
    smallest = tuple(features)

    def search(chosen: tuple[str, ...], missing: set[str]) -> None:
        nonlocal smallest
        if not missing:
            smallest = min(smallest, chosen, key=len)
        elif len(chosen) + 1 < len(smallest):
            rarest = min(sorted(missing), key=lambda name: sum(name in has for has in features.values()))
            for key in sorted(features, key=lambda key: -len(features[key] & missing)):
                if rarest in features[key]:
                    search((*chosen, key), missing - features[key])

    search((), set().union(*features.values()))
    return smallest


ARCHITECTURES = tuple(supported_architectures())
COVER = smallest_cover({name: features_of(spec) for name, spec in supported_architectures().items()})
VISION_MODELS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "idefics3", "smolvlm", "internvl"),
    *("llava_onevision", "mistral3", "gemma3"),
)
SAME_TOWER = {"qwen3_vl_moe": "qwen3_vl", "smolvlm": "idefics3"}
TOWERS = tuple(name for name in VISION_MODELS if name not in SAME_TOWER)


def nightly_models(items: Iterable) -> Iterable:
    """Choose the tests that run nightly: their function runs every day on an architecture like theirs.

    A function that is marked `every_architecture`, or that names only a few, runs every day on each.
    """
    by_function = defaultdict(list)
    for item in items:
        if "every_architecture" not in item.keywords and (models := _models_of(item)):
            by_function[item.path, item.originalname].append((item, models))
    for group in by_function.values():
        named = set().union(*(models for _, models in group))
        if len(named & {*ARCHITECTURES}) > A_FEW or len(named & {*VISION_MODELS}) > A_FEW_WITH_IMAGES:
            yield from (item for item, models in group if not models & {*COVER, *TOWERS})


def _models_of(item) -> set[str]:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {value for value in values if isinstance(value, str)} & {*ARCHITECTURES, *VISION_MODELS}
