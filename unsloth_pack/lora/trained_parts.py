"""Parts of a model that train as a whole, by single tokens, or with an adapter on a vision tower."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from unsloth_pack.errors import InputError, errors_of, raise_together, require_whole
from unsloth_pack.lora.targets import NO_LAYERS, check_names, list_default_names, list_expert_layers

logger = logging.getLogger("unsloth_pack")

TokenIndices = Sequence[int] | Mapping[str, Sequence[int]]  # as PEFT's `trainable_token_indices`
Aligner = Literal["full", "lora", False]

# Paths beside the decoder: of Qwen-VL, LLaVA and the like, Idefics and SmolVLM
_TOWERS = ("visual", "vision_tower", "vision_model")
_ALIGNERS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector", "connector")
_ATTENTION, _MLP = re.compile(r"\.(self_)?attn\.|\.attention\."), re.compile(r"\.mlp\.|\.feed_forward\.")
_MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}


@dataclass(frozen=True)
class VisionParts:
    """Paths of modules."""

    tower: str  # the image encoder
    # the projection of its features into the decoder's embeddings; inside the tower in some models
    aligner: tuple[str, ...]
    decoder: str  # the language model
    head: str  # of the language model, outside the decoder

    @classmethod
    def locate(cls, model: PreTrainedModel) -> "VisionParts":
        """Locate the parts of a model; InputError without a tower of a known name."""
        paths = {module: path for path, module in model.named_modules()}
        decoder = paths[model.get_decoder()]
        parent, known = decoder.rpartition(".")[0], {*paths.values()}
        tower, *_ = *_existing(parent, _TOWERS, known), ""
        aligner = tuple(_existing(parent, _ALIGNERS, known))
        if not tower or not aligner:
            kind = f"model type {model.config.model_type!r}"
            raise InputError(f"{kind} has no vision tower of a known name; use FastLanguageModel")
        return cls(tower, aligner, decoder, paths.get(model.get_output_embeddings(), "lm_head"))

    def kind(self, path: str) -> Literal["aligner", "tower", "decoder", ""]:
        """Return the part of a module; "" for the head."""
        if any(_is_in(path, part) for part in self.aligner):
            return "aligner"
        if _is_in(path, self.tower):
            return "tower"
        return "decoder" if _is_in(path, self.decoder) else ""

    def owner(self, parameter: str) -> Literal["aligner", "tower", "decoder"]:
        """Return the part that a parameter freezes with: the head with the decoder.

        A parameter of no part is between images and text, such as LLaVA-OneVision's `image_newline`, and
        freezes with the aligner.
        """
        return self.kind(parameter) or ("decoder" if _is_in(parameter, self.head) else "aligner")


def _existing(parent: str, names: tuple[str, ...], known: set[str]) -> Iterator[str]:
    return (path for name in names if (path := f"{parent}.{name}".lstrip(".")) in known)


def _is_in(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")


@dataclass(frozen=True)
class TrainedParts:
    """The trained parts of a model of vision and language; arguments of `get_peft_model`."""

    vision_layers: bool = False
    language_layers: bool = True
    attention_modules: bool = True
    mlp_modules: bool = True
    aligner: Aligner = "full"

    def check(self) -> None:
        """Raise InputError for wrong values, and for a choice without a layer for an adapter."""
        if self.aligner is not False and self.aligner not in ("full", "lora"):
            raise InputError(f"finetune_aligner is {self.aligner!r}; give 'full', 'lora' or False")
        wants_layers = self.vision_layers or self.language_layers
        has_layers = wants_layers and (self.attention_modules or self.mlp_modules)
        if not has_layers and (wants_layers or not self.aligner):
            raise InputError("the finetune_ arguments leave no layer for an adapter; set one of each pair")


def vision_targets(model: PreTrainedModel, trained: TrainedParts) -> tuple[str, list[str]]:
    """Return `target_modules` as one pattern of whole paths, and `modules_to_save`.

    The pattern means linear layers of the chosen parts only: a name such as `gate_proj`, which some towers
    have too, never means a layer of another part. Without such layers it is `NO_LAYERS`.
    """
    trained.check()
    parts = VisionParts.locate(model)
    chosen = _choose_layers(model, parts, trained, list_default_names(model))
    if trained.language_layers and trained.mlp_modules:
        chosen += list_expert_layers(model)
    wanted = {"tower": trained.vision_layers, "decoder": trained.language_layers}
    wanted["aligner"] = trained.aligner == "lora"
    for part in {part for part, is_wanted in wanted.items() if is_wanted} - {*map(parts.kind, chosen)}:
        raise InputError(f"the {part} has no linear layer of the chosen kinds for an adapter; choose others")
    saved = [*list_aligner_modules(model, parts)] if trained.aligner == "full" else []
    return "|".join(map(re.escape, chosen)) or NO_LAYERS, saved


def list_tower_layers(model: PreTrainedModel) -> list[str]:
    """List the linear layers of the tower's attention and MLPs."""
    trained = TrainedParts(vision_layers=True, language_layers=False)
    return _choose_layers(model, VisionParts.locate(model), trained, [])


def _choose_layers(
    model: PreTrainedModel, parts: VisionParts, trained: TrainedParts, text_names: list[str]
) -> list[str]:
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [path for path in linear if _is_chosen(path, parts.kind(path), trained, text_names)]


def _is_chosen(path: str, kind: str, trained: TrainedParts, text_names: list[str]) -> bool:
    name = path.rpartition(".")[2]
    match kind:
        case "aligner":
            return trained.aligner == "lora"
        case "tower" if trained.vision_layers:
            is_attention, is_mlp = _ATTENTION.search(path) is not None, _MLP.search(path) is not None
        case "decoder" if trained.language_layers and name in text_names:
            is_mlp = name in _MLP_NAMES
            is_attention = not is_mlp
        case _:
            return False
    return (is_attention and trained.attention_modules) or (is_mlp and trained.mlp_modules)


def list_aligner_modules(model: PreTrainedModel, parts: VisionParts | None = None) -> Iterator[str]:
    """Iterate over the aligner's modules for `modules_to_save`; those of a list one by one."""
    for path in (parts or VisionParts.locate(model)).aligner:
        module = model.get_submodule(path)
        names = [f"{path}.{n}" for n in range(len(module))] if isinstance(module, nn.ModuleList) else [path]
        yield from (name.partition(".")[2] if name.startswith("model.") else name for name in names)


def list_unquantised_modules(config: PretrainedConfig) -> list[str] | None:
    """List modules that bitsandbytes must not quantise: tower, aligner, head. None for its own choice."""
    if not hasattr(config, "vision_config"):
        return None
    inside = dict.fromkeys(name.partition(".")[0] for name in (*_TOWERS, *_ALIGNERS))
    return ["lm_head", *(f"model.{name}" for name in inside)]


def check_parts(
    model: PreTrainedModel, bias: str, modules_to_save: Collection[str] | None, options: Mapping[str, object]
) -> None:
    """Refuse values of a `LoraConfig` that PEFT ignores silently, or fails on without an explanation."""
    if bias not in ("none", "all", "lora_only"):
        raise InputError(f"bias is {bias!r}; choose one of none, all, lora_only")
    n_layers = model.config.get_text_config().num_hidden_layers
    tokens, whole = options.get("trainable_token_indices"), modules_to_save or ()
    raise_together(
        errors_of(check_layers, options.get("layers_to_transform"), n_layers),
        errors_of(check_names, model, "modules_to_save", whole),
        errors_of(_check_can_train, model, whole),
        errors_of(_check_tokens, model, tokens),
        errors_of(check_rows_apart, model, whole, tokens),
    )


def warn_of_longer_names(model: PreTrainedModel, modules_to_save: Collection[str]) -> None:
    """Warn of modules that PEFT trains too, because their paths end with a name, such as `norm`."""
    paths = [path for path, _ in model.named_modules()]
    for name in modules_to_save:
        matches = [path for path in paths if path.endswith(name)]
        exact = [path for path in matches if f".{path}".endswith(f".{name}")]
        if longer := {path.rpartition(".")[2] for path in matches if path not in exact}:
            text = "modules_to_save names %s, and %s end so: all %d train as a whole; name %s for one alone"
            logger.warning(text, name, ", ".join(sorted(longer)), len(matches), (exact or [name])[0])


def _check_can_train(model: nn.Module, modules_to_save: Collection[str]) -> None:
    """Raise InputError for quantised modules: they have no gradient."""
    for path, weight in model.named_parameters():
        is_saved = any(f".{name}." in f".{path}" for name in modules_to_save)
        if is_saved and (not weight.is_floating_point() or weight.dtype == torch.float8_e4m3fn):
            remedy = "load without load_in_4bit, load_in_8bit or load_in_fp8"
            raise InputError(f"modules_to_save names {path}, which is quantised; {remedy}")


def check_layers(layers: int | list[int] | None, n_layers: int) -> None:
    """Raise InputError for numbers of layers that the model does not have."""
    for layer in [layers] if not isinstance(layers, list | tuple) else layers:
        if layer is not None:
            require_whole("layers_to_transform", layer, 0, n_layers - 1)


def _check_tokens(model: PreTrainedModel, tokens: TokenIndices | None) -> None:
    """Raise InputError unless the tokens are lists of ids of the embedding."""
    embedding: Any = model.get_input_embeddings()
    every = tokens.values() if isinstance(tokens, Mapping) else [tokens]
    for ids in () if tokens is None else every:
        if not isinstance(ids, list | tuple) or not ids:
            raise InputError(f"trainable_token_indices is {tokens!r}; give a list of token ids")
        for token in ids:
            require_whole("trainable_token_indices", token, 0, embedding.num_embeddings - 1)
        if len({*ids}) < len(ids):
            raise InputError(f"trainable_token_indices is {tokens!r}, with one twice; keep one")


def check_rows_apart(
    model: PreTrainedModel,
    names: Collection[str],
    tokens: TokenIndices | None,
    option: str = "modules_to_save",
    tokens_option: str = "trainable_token_indices",
    tied: bool = True,
) -> None:
    """Raise InputError for layers that `option` names, of whose weights `tokens_option` trains single rows.

    `names` are ends of paths. With `tied` also for layers that share such a weight.
    """
    if tokens is None:
        return
    layers: list[Any] = [model.get_input_embeddings()]
    if isinstance(tokens, Mapping):
        ends = {name.rpartition(".")[2] for name in tokens}
        layers = [module for path, module in model.named_modules() if path.rpartition(".")[2] in ends]
    weights = [layer.weight for layer in layers]
    for path, module in model.named_modules():
        is_one = module in layers or (tied and any(getattr(module, "weight", None) is w for w in weights))
        if is_one and any(path == name or path.endswith(f".{name}") for name in names):
            said = f"{option} names {path.rpartition('.')[2]}, and {tokens_option} trains single rows"
            raise InputError(f"{said} of its weight; leave one of them out")
