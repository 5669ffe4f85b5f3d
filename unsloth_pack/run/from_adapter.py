"""A run that begins with the adapter of another: the options that it takes from it, and what differs."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, MERGED_BASE, MODEL_CONFIG
from unsloth_pack.config import changed, flat
from unsloth_pack.config.options import AdapterOptions, TrainOptions
from unsloth_pack.errors import InputError, about, written

# Options of an adapter that its configuration has under the same names
_OF_ITS_OWN = ("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora")
LOADED_IN = ("load_in_4bit", "load_in_8bit", "load_in_fp8")
_MERGE = "give --merge_init_adapter to train a new adapter on top of it"


def with_init_adapter(options: TrainOptions, given: Mapping[str, Any]) -> TrainOptions:
    """The options with those of the adapter that the run begins with, whatever was asked for.

    Args:
        given: the values that somebody asked for, by name. `check_init_adapter` refuses those that differ.

    Raises:
        InputError: it is no adapter that can be loaded.
    """
    folder, merges = options.adapter.init_adapter, options.adapter.merge_init_adapter
    if folder is None:
        return options
    saved = saved_config(folder)
    values: dict[str, Any] = {"model_name": saved["base_model_name_or_path"]}
    if not merges:
        values |= {name: saved[name] for name in _OF_ITS_OWN if name in saved}
    held = {} if merges or given.get("resume") or given.keys() & {*LOADED_IN} else held_by_run(Path(folder))
    values |= {name: held[name] for name in LOADED_IN if name in held}  # which it makes up the loss of
    return changed(options, values)


def check_init_adapter(options: TrainOptions, given: Mapping[str, Any]) -> Iterator[InputError]:
    """Refuse what was asked for and is not of the adapter that the run begins with.

    Args:
        options: of `with_init_adapter`.
    """
    adapter, values = options.adapter, flat(options)
    folder, merges = adapter.init_adapter, adapter.merge_init_adapter
    if folder is None:
        if merges:
            yield InputError(
                "merge_init_adapter is set without an adapter; give --init_adapter",
                about="merge_init_adapter",
            )
        return
    if adapter.tuning == "full" and not merges:
        yield InputError(
            f"tuning is 'full' and init_adapter is {folder!r}, which is no whole model; give "
            "--merge_init_adapter, or --tuning lora",
            about=("tuning", "init_adapter"),
        )
        return
    if adapter.loftq_config is not None and not merges:
        yield InputError(
            f"loftq_config is set and init_adapter {folder!r} has weights; leave out one",
            about=("loftq_config", "init_adapter"),
        )
    if not (Path(folder) / ADAPTER_CONFIG).is_file():  # an earlier run may have yet to make it
        return
    name = given.get("model_name")
    if name is not None and not _is_same_model(name, folder):
        yield InputError(
            f"init_adapter {folder!r} was trained on {values['model_name']!r}, and model_name is {name!r}; "
            "leave out --model_name, or give an adapter of that model",
            about=("init_adapter", "model_name"),
        )
    for name in () if merges else _OF_ITS_OWN:
        if given.get(name, values[name]) != values[name]:
            yield InputError(
                f"init_adapter {folder!r} has {name} {written(values[name])}, not {written(given[name])}; "
                f"leave out --{name}, or {_MERGE}",
                about=("init_adapter", name),
            )


def held_by_run(folder: Path) -> dict[str, Any]:
    """How the run in `folder` held its weights: type and bits; empty where no run is."""
    options = _options_of_run(folder)
    return {name: options[name] for name in ("dtype", *LOADED_IN) if name in options}


def has_merged_base(folder: Path) -> bool:
    """Whether the run in `folder` has put the base model there that it trains on."""
    return bool(_options_of_run(folder).get("merge_init_adapter"))


def _options_of_run(folder: Path) -> dict[str, Any]:
    from unsloth_pack.report.metrics import read_config

    try:
        return read_config(folder)
    except InputError:
        return {}


def check_merged_base(options: TrainOptions) -> None:
    """Refuse a folder that is in the way of the base model that the run merges, or that it would be in.

    Raises:
        InputError: names the folder.
    """
    if not options.adapter.merge_init_adapter:
        return
    output, base = options.output, options.folder / MERGED_BASE
    is_replaced = (output.overwrite_output_dir or output.resume) and has_merged_base(options.folder)
    if os.path.lexists(base) and not is_replaced:
        raise InputError(
            f"merge_init_adapter puts the merged model into {str(base)!r}, which is there already; give "
            "another --output_dir",
            about=("merge_init_adapter", "output_dir"),
        )
    if output.save_path is not None and Path(output.save_path).resolve().is_relative_to(base.resolve()):
        raise InputError(
            f"save_path is {output.save_path!r}, where merge_init_adapter puts the model that the run begins "
            "with; give another folder",
            about=("save_path", "merge_init_adapter"),
        )


def saved_config(folder: str) -> dict[str, Any]:
    """The configuration of an adapter.

    Raises:
        InputError: the folder holds no adapter that can be loaded.
    """
    from unsloth_pack.checkpoints.loading import resolve

    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        remedy = "name a folder that train made"
        if path.with_name(MODEL_CONFIG).is_file():
            remedy = f"it holds a whole model, so give --model_name {folder!r} in place of it"
        raise InputError(f"init_adapter {folder!r} holds no {ADAPTER_CONFIG}; {remedy}", about="init_adapter")
    with about("init_adapter"):
        resolve(folder)  # refuses what cannot be read, and other tuners than LoRA
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _is_same_model(name: str, adapter: str) -> bool:
    from unsloth_pack.checkpoints.loading import resolve

    one, other = resolve(name)[0], resolve(adapter)[0]
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


def check_same_parts(model: Any, adapter: AdapterOptions, arguments: Mapping[str, Any]) -> None:
    """Refuse options that name other parts of a model than the adapter has that the run begins with.

    Args:
        model: the base model, with or without weights.
        arguments: what the options mean for `FastLanguageModel.get_peft_model`.

    Raises:
        InputError: names the option, and a module that one of them trains alone.
    """
    folder = str(adapter.init_adapter)
    saved = saved_config(folder)
    excluded, layers = arguments.get("exclude_modules"), arguments.get("layers_to_transform")
    if adapter.target_modules is not None or layers is not None or excluded is not None:
        own = adapted_by_options(model, adapter.target_modules, excluded, layers)
        of_saved = adapted_by(model, saved)
        given = _given(adapter, "target_modules", "layers_to_transform", "train_modules", "freeze_modules")
        _refuse_difference(folder, "target_modules", own, of_saved, given)
    whole = arguments.get("modules_to_save")
    if whole is not None:
        own = modules_meant(model, whole)
        of_saved = modules_meant(model, saved.get("modules_to_save") or ())
        given = _given(adapter, "modules_to_save", "train_modules")
        _refuse_difference(folder, "modules_to_save", own, of_saved, given)
    tokens = arguments.get("trainable_token_indices")
    held = saved.get("trainable_token_indices")
    if tokens is not None and tokens != held:
        raise InputError(
            f"init_adapter {folder!r} has trainable_token_indices {written(held)}, not {tokens}; leave out "
            f"--trainable_token_indices, or {_MERGE}",
            about=("init_adapter", "trainable_token_indices"),
        )


def adapted_by_options(model: Any, targets: Any, excluded: Sequence[str] | None, layers: Any) -> set[str]:
    """As `adapted_by`, by what the options mean for `FastLanguageModel.get_peft_model`.

    Raises:
        InputError: a name or a number that the model does not have, or numbers beside a pattern.
    """
    from unsloth_pack.lora.targets import lora_targets

    if layers is not None and isinstance(targets, str):
        raise InputError(
            f"layers_to_transform is {written(layers)} and target_modules is {targets!r}, beside which PEFT "
            "takes no numbers of layers; give target_modules as names, such as q_proj,v_proj, or leave out "
            "one of the two",
            about=("layers_to_transform", "target_modules"),
        )
    given = {"exclude_modules": excluded, "layers_to_transform": layers}
    found = lora_targets(model, targets, {name: value for name, value in given.items() if value is not None})
    return adapted_by(
        model, {"target_modules": found.modules, "target_parameters": found.parameters, **given}
    )


def adapted_by(model: Any, config: Mapping[str, Any]) -> set[str]:
    """Paths of the layers, and of stacks of experts, that get an adapter by the fields of a `LoraConfig`."""
    import torch
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    fields = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    lora = LoraConfig(**{name: config[name] for name in fields if config.get(name)})
    head = model.get_output_embeddings()
    found: set[str] = set()
    for path, module in model.named_modules():
        is_layer = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        if lora.target_modules == "all-linear":
            is_adapted = isinstance(module, torch.nn.Linear) and module is not head
        else:
            is_adapted = is_layer and bool(check_target_module_exists(lora, path))
        found |= {path} if is_adapted else set()
    names = config.get("target_parameters") or ()
    stacks = [path for path, _ in model.named_parameters()]
    return found | {path for path in stacks if any(f".{path}".endswith(f".{name}") for name in names)}


def modules_meant(model: Any, names: Collection[str]) -> set[str]:
    """Paths of modules, by their ends as PEFT reads them: `norm` is also the end of `input_layernorm`."""
    return {path for path, _ in model.named_modules() if path.endswith(tuple(names))}


def _given(adapter: AdapterOptions, *names: str) -> list[str]:
    return [name for name in names if getattr(adapter, name) is not None]


def _refuse_difference(
    folder: str, field: str, own: set[str], saved: set[str], given: Collection[str]
) -> None:
    """Refuse modules that differ in a field of the adapter, by the options that were given for it."""
    named = given or [field]
    options = " and ".join(f"--{name}" for name in named)
    for path in sorted(own ^ saved):
        says = "which the options leave out" if path in saved else "which the options name, is not among them"
        raise InputError(
            f"init_adapter {folder!r} has other {field}: {path}, {says}; leave out {options}, or {_MERGE}",
            about=("init_adapter", *named),
        )
