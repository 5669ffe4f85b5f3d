"""What of a model trains, from the options: checked without its weights."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from unsloth_pack.config import flat
from unsloth_pack.config.options import AdapterOptions, TrainOptions
from unsloth_pack.errors import Check, InputError, at_once, written

# What makes no sense where no adapter is made, and is kept where one goes on
OF_AN_ADAPTER = (
    *("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "loftq_config"),
    *("target_modules", "layers_to_transform", "modules_to_save", "trainable_token_indices"),
)


def check_tuning(options: TrainOptions) -> Iterator[InputError]:
    """Refuse options that contradict what is tuned."""
    model, adapter = options.model, options.adapter
    if adapter.tuning == "full":
        for name in ("load_in_4bit", "load_in_8bit", "load_in_fp8"):
            if getattr(model, name):
                yield InputError(
                    f"tuning is 'full' and {name} is set, but quantised weights have no gradient; drop "
                    f"{name}, or give --tuning lora",
                    about=("tuning", name),
                )
        if model.dtype == "float16":
            yield InputError(
                "tuning is 'full' and dtype is 'float16', in which small updates are lost and gradients "
                "cannot be scaled; give bfloat16 or float32",
                about=("tuning", "dtype"),
            )
        for name in ("fsdp", "deepspeed"):
            if getattr(options.training, name) is not None:
                yield InputError(
                    f"tuning is 'full' and {name} is set, but only adapters train on sharded weights; drop "
                    "one of them",
                    about=("tuning", name),
                )
        if (ratio := options.training.lora_plus_ratio) is not None:
            yield InputError(
                f"tuning is 'full' and lora_plus_ratio is {ratio:g}, but there is no LoRA; drop one of them",
                about=("tuning", "lora_plus_ratio"),
            )
        if options.output.save_method == "lora":
            yield InputError(
                "tuning is 'full' and save_method is 'lora', but there is no adapter; drop one",
                about=("tuning", "save_method"),
            )


def check_of_an_adapter(options: TrainOptions, given: Mapping[str, Any]) -> Iterator[InputError]:
    """Refuse values that somebody asked for and that say nothing about full tuning."""
    if options.adapter.tuning != "full":
        return
    defaults = flat(AdapterOptions())
    for name in OF_AN_ADAPTER:
        if given.get(name, defaults[name]) != defaults[name]:
            yield InputError(
                f"{name} is {written(given[name])} and tuning is 'full', which makes no adapter; leave out "
                f"--{name}, or give --tuning lora",
                about=(name, "tuning"),
            )


def check_names_of_modules(options: TrainOptions, source: str) -> None:
    """Refuse names and patterns that the model does not have, before its weights are loaded.

    Args:
        source: folder or name of the base model.

    Raises:
        InputError: names the option, and what the model has.
    """
    if not names_modules(options):
        return
    import torch

    from unsloth_pack.checkpoints.loading import auto_class, load_config
    from unsloth_pack.lora.trained_parts import check_parts
    from unsloth_pack.modules import check_matches, parameter_paths, train_only
    from unsloth_pack.run.from_adapter import check_same_parts
    from unsloth_pack.run.parameters import check_frozen, check_names_of_rates

    adapter = options.adapter
    config = load_config(source)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    paths = parameter_paths(model)
    patterns = {name: getattr(adapter, name) or () for name in ("train_modules", "freeze_modules")}
    checks: list[Check] = [partial(check_matches, name, given, paths) for name, given in patterns.items()]
    checks.append(partial(check_frozen, model, adapter))
    if adapter.tuning == "full":
        at_once(checks)
        train_only(model, adapter.train_modules, adapter.freeze_modules)
        check_names_of_rates(options, model, {})
        return
    arguments = adapter_arguments(model, adapter)
    given = {name: arguments[name] for name in _FURTHER if arguments.get(name) is not None}
    if adapter.init_adapter is not None and not adapter.merge_init_adapter:
        checks.append(partial(check_same_parts, model, adapter, arguments))
    saved = None if adapter.modules_to_save is None else [*adapter.modules_to_save]
    checks += [
        partial(_check_targets, model, adapter, given, _of_linear_layers(arguments)),
        partial(check_parts, model, adapter.bias, saved, given),
        partial(_check_rows_apart, model, adapter),
        partial(_refuse_quantised, options, model, arguments["modules_to_save"] or ()),
        partial(check_names_of_rates, options, model, arguments),
    ]
    at_once(checks)


def names_modules(options: TrainOptions) -> bool:
    """Whether an option names modules or tokens of the model."""
    adapter, training = options.adapter, options.training
    named: list[Any] = [adapter.target_modules, adapter.modules_to_save, adapter.train_modules]
    named += [adapter.freeze_modules, adapter.layers_to_transform, adapter.trainable_token_indices]
    named += [training.learning_rates, training.embedding_learning_rate]
    return any(each is not None for each in named) or any(_of_linear_layers(flat(adapter)).values())


def _of_linear_layers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What experts of the model may not have."""
    return {name: arguments[name] for name in ("lora_dropout", "use_dora", "loftq_config")}


def _check_targets(
    model: Any, adapter: AdapterOptions, given: Mapping[str, Any], of_linear_layers: Mapping[str, Any]
) -> None:
    from unsloth_pack.checkpoints.new_tokens import rows_to_train
    from unsloth_pack.lora.targets import lora_targets, refuse_on_stacks
    from unsloth_pack.lora.trained_parts import refuse_adapted_rows
    from unsloth_pack.run.from_adapter import adapted_by_options

    wanted = {**given, **of_linear_layers}
    targets = lora_targets(model, adapter.target_modules, wanted)
    refuse_on_stacks(targets, wanted)
    excluded, layers = given.get("exclude_modules"), given.get("layers_to_transform")
    if not adapted_by_options(model, adapter.target_modules, excluded, layers):
        given_so = [name for name in _LIMITING if getattr(adapter, name) is not None]
        raise InputError(
            f"no layer is left for an adapter by {' and '.join(given_so)}; choose others", about=given_so
        )
    refuse_adapted_rows(model, targets.paths, given.get("trainable_token_indices"), tied_head=True)
    if adapter.add_tokens is not None:
        refuse_adapted_rows(model, targets.paths, rows_to_train(model, [0]), "add_tokens", tied_head=True)


def _check_rows_apart(model: Any, adapter: AdapterOptions) -> None:
    """Refuse rows of a layer that trains as a whole, by the options that ask for both."""
    from unsloth_pack.checkpoints.new_tokens import rows_to_train
    from unsloth_pack.lora.trained_parts import check_rows_apart
    from unsloth_pack.modules import chosen_modules

    new = None if adapter.add_tokens is None else rows_to_train(model, [0])
    saved, chosen = adapter.modules_to_save or (), adapter.train_modules
    trained = chosen_modules(model, chosen) if chosen else []
    at_once(
        [
            partial(check_rows_apart, model, saved, new, asked="add_tokens"),
            partial(check_rows_apart, model, trained, new, "train_modules", "add_tokens"),
            partial(check_rows_apart, model, trained, adapter.trainable_token_indices, "train_modules"),
        ]
    )


_LIMITING = ("target_modules", "train_modules", "freeze_modules", "layers_to_transform")
_FURTHER = ("layers_to_transform", "exclude_modules", "trainable_token_indices")


def adapter_arguments(model: Any, adapter: AdapterOptions) -> dict[str, Any]:
    """What the options mean for `FastLanguageModel.get_peft_model`, but for checkpointing.

    Args:
        model: the base model, with or without weights.
    """
    from unsloth_pack.modules import chosen_modules

    own = ("tuning", "train_modules", "freeze_modules", "add_tokens", "init_adapter", "merge_init_adapter")
    found = {name: value for name, value in flat(adapter).items() if name not in own}
    whole = chosen_modules(model, adapter.train_modules) if adapter.train_modules else []
    frozen = chosen_modules(model, adapter.freeze_modules) if adapter.freeze_modules else []
    whole = [path for path in whole if path not in frozen]
    if whole:
        found["modules_to_save"] = [*(found["modules_to_save"] or ()), *whole]
    if whole or frozen:
        found["exclude_modules"] = [*whole, *frozen]
    given = {name: _as_list(value) for name, value in found.items()}
    return {name: value for name, value in given.items() if name not in _FURTHER or value is not None}


def _as_list(value: Any) -> Any:
    return [*value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _refuse_quantised(options: TrainOptions, model: Any, modules: Sequence[str]) -> None:
    """Refuse to train layers as a whole that will be held in few bits."""
    from torch import nn

    held = flat(options.model)
    loaded = next((name for name in ("load_in_4bit", "load_in_8bit", "load_in_fp8") if held[name]), None)
    if loaded is None:
        return
    for path, module in model.get_decoder().named_modules():
        is_meant = any(f".{path}".endswith(f".{name}") or name.endswith(f".{path}") for name in modules)
        if isinstance(module, nn.Linear) and is_meant:
            raise InputError(
                f"{loaded} is set, and modules_to_save or train_modules names {path}, whose weight would be "
                f"quantised and has no gradient; drop {loaded}, or leave that module out",
                about=(loaded, "modules_to_save", "train_modules"),
            )
