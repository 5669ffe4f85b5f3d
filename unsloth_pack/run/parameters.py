"""The parts of a model of vision and language that train, and the learning rates of groups of weights."""

from collections.abc import Collection
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from unsloth_pack.config.options import ImageOptions, TrainingOptions
from unsloth_pack.errors import InputError
from unsloth_pack.lora.targets import NO_LAYERS, limit_to_text_model, list_expert_layers
from unsloth_pack.lora.trained_parts import (
    TrainedParts,
    VisionParts,
    build_pattern,
    list_aligner_modules,
    list_tower_layers,
    vision_targets,
)
from unsloth_pack.training.optimizers import LearningRates


def rates_of(training: TrainingOptions, images: ImageOptions) -> LearningRates:
    """The learning rates of groups of weights."""
    return LearningRates(
        training.lora_plus_ratio,
        training.embedding_learning_rate,
        dict(training.learning_rates or {}),
        images.vit_lr,
        images.aligner_lr,
    )


_FROZEN = {"tower": "freeze_vit", "aligner": "freeze_aligner", "decoder": "freeze_llm"}


def with_parts(model: PreTrainedModel, arguments: dict[str, Any], images: ImageOptions) -> dict[str, Any]:
    """Arguments of `get_peft_model` that put an adapter on the parts that are not frozen.

    Args:
        arguments: for the language model.

    Raises:
        InputError: the tower is to have an adapter beside all linear layers of a model with experts, or a
            module is to train whole in a part that an option freezes.
    """
    _refuse_frozen(model, arguments["modules_to_save"] or (), images)
    whole = [] if images.freeze_aligner else [*list_aligner_modules(model)]
    saved = [*dict.fromkeys([*(arguments["modules_to_save"] or ()), *whole])]
    targets = _targets(model, arguments["target_modules"], images)
    return arguments | {"target_modules": targets, "modules_to_save": saved or None}


def _refuse_frozen(model: PreTrainedModel, modules: Collection[str], images: ImageOptions) -> None:
    """Refuse modules that train whole, by the ends of their paths, in a part that does not train."""
    parts = VisionParts.locate(model)
    for path, _ in model.named_modules():
        name = next((name for name in modules if path == name or path.endswith(f".{name}")), None)
        option = _FROZEN[parts.owner(path)]
        if name is not None and option != "freeze_vit" and getattr(images, option):  # that is its default
            raise InputError(
                f"{option} is true, and modules_to_save names {name}, of what it freezes; leave out one of "
                "them"
            )


def _targets(model: PreTrainedModel, names: str | Collection[str] | None, images: ImageOptions) -> Any:
    if isinstance(names, str) and names != "all-linear":  # a pattern of whole paths, of any part
        return names
    if images.freeze_vit:
        return NO_LAYERS if images.freeze_llm else names
    if images.freeze_llm or names is None:
        trained = TrainedParts(vision_layers=True, language_layers=not images.freeze_llm, aligner=False)
        return vision_targets(model, trained)[0]
    of_experts = list_expert_layers(model)
    if of_experts and names == "all-linear":
        raise InputError(
            "freeze_vit is false and target_modules 'all-linear', which would mean routers of experts too; "
            "give --target_modules names"
        )
    of_text = limit_to_text_model(model, names if isinstance(names, str) else [*names], {}, [])
    chosen = [path for path in of_experts if path.rpartition(".")[2] in names]
    return build_pattern([*list_tower_layers(model), *of_text, *chosen])


def freeze_parts(model: nn.Module, images: ImageOptions, begun_with: str | None = None) -> None:
    """Freeze the parts that the options freeze in a model whose weights train already.

    Args:
        begun_with: the adapter that the run goes on with; each part that is not frozen has to train in it.

    Raises:
        InputError: a part that is to train does not, or nothing is left.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    parts = VisionParts.locate(base)
    trains = dict.fromkeys(_FROZEN, False)
    for path, parameter in model.named_parameters():
        part = parts.owner(path.removeprefix("base_model.model."))
        if getattr(images, _FROZEN[part]):
            parameter.requires_grad_(False)
        else:
            trains[part] = trains[part] or parameter.requires_grad
    for name, option in _FROZEN.items():
        if begun_with is not None and not getattr(images, option) and not trains[name]:
            raise InputError(
                f"{option} is false, and init_adapter {begun_with!r} has nothing of that part; give "
                f"--{option}, or --merge_init_adapter to train a new adapter on top of it"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the options freeze all that would train; freeze less")
