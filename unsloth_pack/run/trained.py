"""The parts of a model that train, from the options: checked without weights, chosen, and frozen."""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from unsloth_pack.checkpoints.loading import auto_class, load_config
from unsloth_pack.checkpoints.new_tokens import rows_to_train
from unsloth_pack.config import flat
from unsloth_pack.config.options import AdapterOptions, ImageOptions
from unsloth_pack.errors import InputError, errors_of, raise_together
from unsloth_pack.lora.targets import (
    NO_LAYERS,
    limit_to_text_model,
    list_expert_layers,
    lora_targets,
    refuse_on_stacks,
)
from unsloth_pack.lora.trained_parts import (
    TokenIndices,
    TrainedParts,
    VisionParts,
    check_parts,
    check_rows_apart,
    list_aligner_modules,
    list_tower_layers,
    vision_targets,
)
from unsloth_pack.modules import base_of, check_matches, chosen_modules, compile_patterns, train_only

_FURTHER = ("layers_to_transform", "exclude_modules", "trainable_token_indices")
_NOT_ON_EXPERTS = ("lora_dropout", "use_dora", "loftq_config")
_NAMED = (
    *("target_modules", "train_modules", "freeze_modules", "layers_to_transform", "modules_to_save"),
    *("trainable_token_indices", *_NOT_ON_EXPERTS),
)
_FROZEN = {"tower": "freeze_vit", "aligner": "freeze_aligner", "decoder": "freeze_llm"}


def check_names_of_modules(adapter: AdapterOptions, source: str) -> Iterator[InputError]:
    """Refuse names and patterns that the model does not have, before its weights are loaded."""
    if not any(getattr(adapter, name) for name in _NAMED):
        return
    config = load_config(source)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)  # type: ignore[no-untyped-call]
    paths = [path for path, _ in model.named_parameters(remove_duplicate=False)]
    patterns = {name: getattr(adapter, name) or () for name in ("train_modules", "freeze_modules")}
    unmatched = [each for item in patterns.items() for each in errors_of(check_matches, *item, paths)]
    yield from unmatched
    yield from _check_frozen(model, adapter)
    if adapter.tuning == "full":
        if not unmatched:
            train_only(model, adapter.train_modules, adapter.freeze_modules)
        return
    arguments = adapter_arguments(model, adapter)
    further = {name: arguments[name] for name in _FURTHER if arguments.get(name) is not None}
    yield from errors_of(_check_targets, model, adapter, further)
    yield from errors_of(check_parts, model, adapter.bias, adapter.modules_to_save, further)
    whole = chosen_modules(model, adapter.train_modules or ())
    by_option = {"modules_to_save": adapter.modules_to_save or (), "train_modules": whole}
    yield from _check_rows_apart(model, adapter, by_option)


def adapter_arguments(model: PreTrainedModel, adapter: AdapterOptions) -> dict[str, Any]:
    """The arguments of `FastLanguageModel.get_peft_model`, but for checkpointing."""
    own = ("tuning", "train_modules", "freeze_modules", "add_tokens", "init_adapter", "merge_init_adapter")
    arguments = {name: value for name, value in flat(adapter).items() if name not in own}
    frozen = chosen_modules(model, adapter.freeze_modules or ())
    whole = [path for path in chosen_modules(model, adapter.train_modules or ()) if path not in frozen]
    if whole:
        arguments["modules_to_save"] = [*(arguments["modules_to_save"] or ()), *whole]
    if whole or frozen:
        arguments["exclude_modules"] = [*whole, *frozen]
    return {name: value for name, value in arguments.items() if name not in _FURTHER or value is not None}


def _check_frozen(model: PreTrainedModel, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse modules and rows that are to train and that `freeze_modules` freezes."""
    is_frozen = compile_patterns(adapter.freeze_modules or ())
    # PEFT reads the ends of paths: `norm` is also the end of `input_layernorm`
    whole = tuple(adapter.modules_to_save or ("/",))
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    n_new = 0 if adapter.add_tokens is None else 1 if adapter.tuning == "full" else 2
    wanted = {
        "modules_to_save": [module for path, module in model.named_modules() if path.endswith(whole)],
        "add_tokens": ends[:n_new],
        "trainable_token_indices": ends[: adapter.trainable_token_indices is not None],
    }
    for option, modules in wanted.items():
        weights = {weight for module in modules if module is not None for weight in module.parameters()}
        for path, weight in model.named_parameters(remove_duplicate=False):
            if weight in weights and is_frozen(path):
                yield InputError(
                    f"{option} trains {path.rpartition('.')[0]}, and freeze_modules freezes it; freeze less, "
                    f"or change {option}"
                )
                break


def _check_targets(model: PreTrainedModel, adapter: AdapterOptions, further: Mapping[str, Any]) -> None:
    wanted = {**further, **{name: getattr(adapter, name) for name in _NOT_ON_EXPERTS}}
    targets = lora_targets(model, adapter.target_modules, wanted)
    refuse_on_stacks(targets, wanted)
    raise_together(_check_rows_apart(model, adapter, {"target_modules": targets.paths}))


def _check_rows_apart(
    model: PreTrainedModel, adapter: AdapterOptions, whole: Mapping[str, Collection[str]]
) -> Iterator[InputError]:
    """Refuse rows of layers that train otherwise too; `whole` has the layers by option."""
    rows: dict[str, TokenIndices | None] = {"trainable_token_indices": adapter.trainable_token_indices}
    if adapter.add_tokens is not None:
        rows["add_tokens"] = rows_to_train(model, [0])
    for (option, names), (tokens_option, tokens) in product(whole.items(), rows.items()):
        yield from errors_of(check_rows_apart, model, names, tokens, option, tokens_option)


def with_parts(model: PreTrainedModel, arguments: dict[str, Any], images: ImageOptions) -> dict[str, Any]:
    """Arguments of `get_peft_model` that put an adapter on the parts that are not frozen."""
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
    return "|".join(map(re.escape, [*list_tower_layers(model), *of_text, *chosen]))


def freeze_parts(model: nn.Module, images: ImageOptions, begun_with: str | None = None) -> None:
    """Freeze parts of a model whose weights train already; `begun_with` has to train each of the others."""
    parts = VisionParts.locate(base_of(model))
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
