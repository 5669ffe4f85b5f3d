"""The parts of a model of vision and language, and which of their layers an adapter goes on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

from torch import nn

from unsloth_pack.errors import InputError
from unsloth_pack.lora.targets import NO_LAYERS, default_names, expert_layers

Aligner = Literal["full", "lora", False]

# Paths inside the model that holds a tower and a decoder: of Qwen-VL, LLaVA and its like, Idefics and SmolVLM
_TOWERS = ("visual", "vision_tower", "vision_model")
_ALIGNERS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector", "connector")
_ATTENTION, _MLP = re.compile(r"\.(self_)?attn\.|\.attention\."), re.compile(r"\.mlp\.|\.feed_forward\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}


@dataclass(frozen=True)
class VisionParts:
    """Paths of modules.

    Args:
        tower: what makes features of images.
        aligner: what carries these into the embeddings of the decoder; a part of the tower's module in some
            models.
        decoder: the language model.
        head: of the language model, outside of it.
    """

    tower: str
    aligner: tuple[str, ...]
    decoder: str
    head: str

    @classmethod
    def of(cls, model: Any) -> "VisionParts":
        """The parts of a model.

        Raises:
            InputError: it has no tower of a known name.
        """
        paths = {module: path for path, module in model.named_modules()}
        decoder = paths[model.get_decoder()]
        around = decoder.rpartition(".")[0]
        known = {*paths.values()}
        tower, *_ = *_there(around, _TOWERS, known), ""
        aligner = tuple(_there(around, _ALIGNERS, known))
        if not tower or not aligner:
            raise InputError(
                f"model type {model.config.model_type!r} has no vision tower of a known name; use "
                "FastLanguageModel"
            )
        return cls(tower, aligner, decoder, paths.get(model.get_output_embeddings(), "lm_head"))

    def kind(self, path: str) -> Literal["aligner", "tower", "decoder", ""]:
        """The part that a module belongs to; "" for the head."""
        if any(_is_in(path, part) for part in self.aligner):
            return "aligner"
        if _is_in(path, self.tower):
            return "tower"
        return "decoder" if _is_in(path, self.decoder) else ""

    def owner(self, parameter: str) -> Literal["aligner", "tower", "decoder"]:
        """The part that a parameter freezes with. The head goes with the decoder.

        What is in no module of a part stands between images and text, as LLaVA-OneVision's `image_newline`:
        it goes with the aligner.
        """
        return self.kind(parameter) or ("decoder" if _is_in(parameter, self.head) else "aligner")


def _there(around: str, names: tuple[str, ...], known: set[str]) -> Iterator[str]:
    return (path for name in names if (path := f"{around}.{name}".lstrip(".")) in known)


def _is_in(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")


@dataclass(frozen=True)
class TrainedParts:
    """What of a model of vision and language is trained; the arguments of `get_peft_model`."""

    vision_layers: bool = False
    language_layers: bool = True
    attention_modules: bool = True
    mlp_modules: bool = True
    aligner: Aligner = "full"

    def check(self) -> None:
        """Refuse values that are none, and a choice that leaves no layer for an adapter.

        Raises:
            InputError: names the argument, its value and the remedy.
        """
        for name in ("vision_layers", "language_layers", "attention_modules", "mlp_modules"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InputError(f"finetune_{name} is {value!r}; give True or False")
        if self.aligner is not False and self.aligner not in ("full", "lora"):
            raise InputError(f"finetune_aligner is {self.aligner!r}; give 'full', 'lora' or False")
        wants_layers = self.vision_layers or self.language_layers
        has_layers = wants_layers and (self.attention_modules or self.mlp_modules)
        if not has_layers and (wants_layers or not self.aligner):
            raise InputError(
                f"finetune_vision_layers is {self.vision_layers}, finetune_language_layers "
                f"{self.language_layers}, finetune_attention_modules {self.attention_modules} and "
                f"finetune_mlp_modules {self.mlp_modules}, which leaves no layer for an adapter; set one of "
                "each pair, or both of the first to False and finetune_aligner='full'"
            )


def vision_targets(model: Any, trained: TrainedParts) -> tuple[str, list[str]]:
    """`target_modules` as one pattern of whole paths, and `modules_to_save`, of a `LoraConfig`.

    The pattern names the linear layers of the chosen parts alone, so that a name such as `gate_proj`, which
    some towers have too, never means a layer of another part.

    Where no layer gets an adapter, the pattern is `NO_LAYERS`, and what is saved trains alone.

    Raises:
        InputError: nothing is chosen, or the model has no such layers.
    """
    trained.check()
    parts = VisionParts.of(model)
    of_language = default_names(model)
    chosen = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and _is_chosen(path, parts.kind(path), trained, of_language)
    ]
    if trained.language_layers and trained.mlp_modules:
        chosen += expert_layers(model)
    wanted = {"tower": trained.vision_layers, "decoder": trained.language_layers}
    wanted["aligner"] = trained.aligner == "lora"
    for part in {part for part, is_wanted in wanted.items() if is_wanted} - {*map(parts.kind, chosen)}:
        raise InputError(
            f"an adapter is to go on the {part}, which has no linear layer of the chosen kinds; choose others"
            f"{', or give finetune_aligner=' + repr('full') if part == 'aligner' else ''}"
        )
    saved = [*whole_aligner(model, parts)] if trained.aligner == "full" else []
    return pattern_of(chosen) if chosen else NO_LAYERS, saved


def tower_layers(model: Any) -> list[str]:
    """The paths of the linear layers of the tower's attention and MLPs."""
    parts, trained = VisionParts.of(model), TrainedParts(vision_layers=True, language_layers=False)
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and _is_chosen(path, parts.kind(path), trained, [])
    ]


def _is_chosen(path: str, kind: str, trained: TrainedParts, of_language: list[str]) -> bool:
    name = path.rpartition(".")[2]
    match kind:
        case "aligner":
            return trained.aligner == "lora"
        case "tower" if trained.vision_layers:
            is_attention, is_mlp = _ATTENTION.search(path) is not None, _MLP.search(path) is not None
        case "decoder" if trained.language_layers and name in of_language:
            is_mlp = name in _MLP_NAMES
            is_attention = not is_mlp
        case _:
            return False
    return (is_attention and trained.attention_modules) or (is_mlp and trained.mlp_modules)


def whole_aligner(model: Any, parts: VisionParts | None = None) -> Iterator[str]:
    """The modules of the aligner that have a forward of their own, as `modules_to_save`: those in a list, one
    by one."""
    for path in (parts or VisionParts.of(model)).aligner:
        module = model.get_submodule(path)
        names = [f"{path}.{n}" for n in range(len(module))] if isinstance(module, nn.ModuleList) else [path]
        yield from (name.partition(".")[2] if name.startswith("model.") else name for name in names)


def pattern_of(paths: list[str]) -> str:
    """A regular expression that matches these paths alone: one alternative for all that differ in numbers."""
    numbers: dict[str, list[list[str]]] = {}
    for path in paths:
        numbers.setdefault(_NUMBER.sub("#", path), []).append(_NUMBER.findall(path))
    written = []
    for shape, found in sorted(numbers.items()):
        choices = [f"({'|'.join(dict.fromkeys(column))})" for column in zip(*found, strict=True)]
        pieces = [re.escape(piece) for piece in shape.split("#")]
        written.append("".join(chain.from_iterable(zip_longest(pieces, choices, fillvalue=""))))
    return "|".join(written)


def kept_in_16_bits(config: Any) -> list[str] | None:
    """Modules that bitsandbytes leaves as they are: tower, aligner and head. None for its own choice."""
    if not hasattr(config, "vision_config"):
        return None
    inside = dict.fromkeys(name.partition(".")[0] for name in (*_TOWERS, *_ALIGNERS))
    return ["lm_head", *(f"model.{name}" for name in inside)]
