"""The parts of a model that train, from the options: checked without weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from unsloth_pack.checkpoints.loading import auto_class, load_config
from unsloth_pack.checkpoints.new_tokens import rows_to_train
from unsloth_pack.config import flat
from unsloth_pack.config.options import AdapterOptions, ModelOptions
from unsloth_pack.errors import InputError, errors_of
from unsloth_pack.lora.targets import lora_targets, refuse_on_stacks
from unsloth_pack.lora.trained_parts import check_parts, check_rows_apart, refuse_adapted_rows
from unsloth_pack.modules import (
    check_matches,
    chosen_modules,
    compile_patterns,
    parameter_paths,
    train_only,
)
from unsloth_pack.run.from_adapter import LOADED_IN, adapted_by_options, check_same_parts, modules_meant

_LIMITING = ("target_modules", "train_modules", "freeze_modules", "layers_to_transform")
_FURTHER = ("layers_to_transform", "exclude_modules", "trainable_token_indices")
_NOT_ON_EXPERTS = ("lora_dropout", "use_dora", "loftq_config")


def check_names_of_modules(
    adapter: AdapterOptions, options: ModelOptions, source: str
) -> Iterator[InputError]:
    """Refuse names and patterns that the model does not have, before its weights are loaded.

    Args:
        source: folder or name of the base model.
    """
    named = (*_LIMITING, "modules_to_save", "trainable_token_indices")
    is_named = any(getattr(adapter, name) is not None for name in named)
    if not is_named and not any(getattr(adapter, name) for name in _NOT_ON_EXPERTS):
        return
    config = load_config(source)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    paths = parameter_paths(model)
    patterns = {name: getattr(adapter, name) or () for name in ("train_modules", "freeze_modules")}
    unmatched = [each for item in patterns.items() for each in errors_of(check_matches, *item, paths)]
    yield from unmatched
    yield from _check_frozen(model, adapter)
    if adapter.tuning == "full" and not unmatched:
        train_only(model, adapter.train_modules, adapter.freeze_modules)
    if adapter.tuning == "full":
        return
    arguments = adapter_arguments(model, adapter)
    further = {name: arguments[name] for name in _FURTHER if arguments.get(name) is not None}
    if adapter.init_adapter is not None and not adapter.merge_init_adapter:
        yield from errors_of(check_same_parts, model, adapter, arguments)
    saved = None if adapter.modules_to_save is None else [*adapter.modules_to_save]
    yield from errors_of(_check_targets, model, adapter, further)
    yield from errors_of(check_parts, model, adapter.bias, saved, further)
    yield from _check_rows_apart(model, adapter)
    yield from _check_quantised(model, options, arguments["modules_to_save"] or ())


def adapter_arguments(model: PreTrainedModel, adapter: AdapterOptions) -> dict[str, Any]:
    """The arguments of `FastLanguageModel.get_peft_model`, but for checkpointing.

    Args:
        model: the base model, with or without weights.
    """
    own = ("tuning", "train_modules", "freeze_modules", "add_tokens", "init_adapter", "merge_init_adapter")
    arguments = {name: value for name, value in flat(adapter).items() if name not in own}
    whole = chosen_modules(model, adapter.train_modules) if adapter.train_modules else []
    frozen = chosen_modules(model, adapter.freeze_modules) if adapter.freeze_modules else []
    whole = [path for path in whole if path not in frozen]
    if whole:
        arguments["modules_to_save"] = [*(arguments["modules_to_save"] or ()), *whole]
    if whole or frozen:
        arguments["exclude_modules"] = [*whole, *frozen]
    return {name: value for name, value in arguments.items() if name not in _FURTHER or value is not None}


def _check_frozen(model: PreTrainedModel, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse modules and rows that are to train and that `freeze_modules` freezes."""
    if not adapter.freeze_modules:
        return
    is_frozen = compile_patterns(adapter.freeze_modules)
    for path in sorted(modules_meant(model, adapter.modules_to_save or ())):
        if any(is_frozen(f"{path}.{name}") for name, _ in model.get_submodule(path).named_parameters()):
            yield InputError(
                f"modules_to_save trains {path} as a whole, and freeze_modules freezes it; give whole "
                "paths in modules_to_save, or freeze less"
            )
            break
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for option, n_ends in (("add_tokens", 1 + (adapter.tuning != "full")), ("trainable_token_indices", 1)):
        weights = [end.weight for end in ends[:n_ends] if end is not None]
        for path, parameter in model.named_parameters(remove_duplicate=False):
            is_asked = getattr(adapter, option) is not None and any(parameter is each for each in weights)
            if is_asked and is_frozen(path):
                yield InputError(
                    f"{option} trains rows of {path.rpartition('.')[0]}, and freeze_modules freezes that; "
                    f"freeze less, or leave out {option}"
                )
                break


def _check_targets(model: PreTrainedModel, adapter: AdapterOptions, further: Mapping[str, Any]) -> None:
    wanted = {**further, **{name: getattr(adapter, name) for name in _NOT_ON_EXPERTS}}
    targets = lora_targets(model, adapter.target_modules, wanted)
    refuse_on_stacks(targets, wanted)
    excluded, layers = further.get("exclude_modules"), further.get("layers_to_transform")
    if not adapted_by_options(model, adapter.target_modules, excluded, layers):
        given = [name for name in _LIMITING if getattr(adapter, name) is not None]
        raise InputError(f"no layer is left for an adapter by {' and '.join(given)}; choose others")
    refuse_adapted_rows(model, targets.paths, further.get("trainable_token_indices"), tied_head=True)
    if adapter.add_tokens is not None:
        refuse_adapted_rows(model, targets.paths, rows_to_train(model, [0]), "add_tokens", tied_head=True)


def _check_rows_apart(model: PreTrainedModel, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse rows of a layer that trains as a whole, by the options that ask for both."""
    new = None if adapter.add_tokens is None else rows_to_train(model, [0])
    whole = chosen_modules(model, adapter.train_modules) if adapter.train_modules else []
    rows = adapter.trainable_token_indices
    yield from errors_of(
        check_rows_apart, model, adapter.modules_to_save or (), new, tokens_option="add_tokens"
    )
    yield from errors_of(check_rows_apart, model, whole, new, "train_modules", "add_tokens")
    yield from errors_of(check_rows_apart, model, whole, rows, "train_modules")


def _check_quantised(
    model: PreTrainedModel, options: ModelOptions, modules: Sequence[str]
) -> Iterator[InputError]:
    """Refuse to train layers as a whole that will be quantised."""
    loaded = next((name for name in LOADED_IN if getattr(options, name)), None)
    for path, module in model.get_decoder().named_modules() if loaded else ():
        is_meant = any(f".{path}".endswith(f".{name}") or name.endswith(f".{path}") for name in modules)
        if isinstance(module, nn.Linear) and is_meant:
            yield InputError(
                f"{loaded} is set, and modules_to_save or train_modules names {path}, whose weight would be "
                f"quantised and has no gradient; drop {loaded}, or leave that module out"
            )
            return
