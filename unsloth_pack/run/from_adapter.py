"""A run that begins with the adapter of another: the options of the adapter, and what may not differ."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, MODEL_CONFIG
from unsloth_pack.config.options import AdapterOptions
from unsloth_pack.errors import InputError, written

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Options of an adapter that its configuration has under the same names
_OF_ITS_OWN = ("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora")
LOADED_IN = ("load_in_4bit", "load_in_8bit", "load_in_fp8")
_MERGE = "give --merge_init_adapter to train a new adapter on top of it"


def values_of_adapter(adapter: AdapterOptions, given: Mapping[str, object]) -> dict[str, Any]:
    """The options, by name, that a run takes from the adapter that it begins with, if that is there.

    Args:
        given: options of the command line and of config files. `init_adapter_mistakes` refuses those that
            differ.

    Raises:
        InputError: it is no adapter that can be loaded.
    """
    folder, merges = adapter.init_adapter, adapter.merge_init_adapter
    if folder is None or not os.path.exists(folder):
        return {}
    saved = saved_config(folder)
    values: dict[str, Any] = {"model_name": saved["base_model_name_or_path"]}
    if not merges:
        values |= {name: saved[name] for name in _OF_ITS_OWN if name in saved}
    if not (merges or given.get("resume") or given.keys() & {*LOADED_IN}):
        # The adapter makes up for what its base lost in few bits
        values |= {name: value for name, value in held_by_run(Path(folder)).items() if name in LOADED_IN}
    return values


def init_adapter_mistakes(
    adapter: AdapterOptions, model_name: str, given: Mapping[str, Any]
) -> Iterator[InputError]:
    """Refuse given options that differ from the adapter that the run begins with.

    Args:
        adapter, model_name: with the values of the adapter.
    """
    folder, merges = adapter.init_adapter, adapter.merge_init_adapter
    if folder is None or not (Path(folder) / ADAPTER_CONFIG).is_file():
        return
    name = given.get("model_name")
    if name is not None and not _is_same_model(name, folder):
        yield InputError(
            f"init_adapter {folder!r} was trained on {model_name!r}, and model_name is {name!r}; leave out "
            "--model_name, or give an adapter of that model"
        )
    for name in () if merges else _OF_ITS_OWN:
        if name in given and given[name] != getattr(adapter, name):
            yield InputError(
                f"init_adapter {folder!r} has {name} {written(getattr(adapter, name))}, not "
                f"{written(given[name])}; leave out --{name}, or {_MERGE}"
            )


def held_by_run(folder: Path) -> dict[str, Any]:
    """The type and bits of the weights of the run in `folder`; empty where no run is."""
    options = options_of_run(folder)
    return {name: options[name] for name in ("dtype", *LOADED_IN) if name in options}


def options_of_run(folder: Path) -> dict[str, Any]:
    """The options of the run in `folder`, by name; empty where no run is."""
    from unsloth_pack.report.metrics import read_config

    try:
        return read_config(folder)
    except InputError:
        return {}


def saved_config(folder: str) -> dict[str, Any]:
    """The configuration of an adapter.

    Raises:
        InputError: the folder holds no adapter that can be loaded.
    """
    from unsloth_pack.checkpoints.loading import find_model

    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        remedy = "name a folder that train made"
        if path.with_name(MODEL_CONFIG).is_file():
            remedy = f"it holds a whole model, so give --model_name {folder!r} in place of it"
        raise InputError(f"init_adapter {folder!r} holds no {ADAPTER_CONFIG}; {remedy}")
    find_model(folder)  # refuses what cannot be read, and other tuners than LoRA
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _is_same_model(name: str, adapter: str) -> bool:
    from unsloth_pack.checkpoints.loading import find_model

    one, other = find_model(name)[0], find_model(adapter)[0]
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


def check_same_parts(model: "PreTrainedModel", adapter: AdapterOptions, arguments: Mapping[str, Any]) -> None:
    """Refuse options that name other parts of a model than the adapter has that the run begins with.

    Args:
        model: the base model, with or without weights.
        arguments: of `FastLanguageModel.get_peft_model`.

    Raises:
        InputError: names the option, and a module that only one of them trains.
    """
    folder = str(adapter.init_adapter)
    saved = saved_config(folder)
    excluded, layers = arguments.get("exclude_modules"), arguments.get("layers_to_transform")
    if adapter.target_modules is not None or layers is not None or excluded is not None:
        own = adapted_by_options(model, adapter.target_modules, excluded, layers)
        names = ("target_modules", "layers_to_transform", "train_modules", "freeze_modules")
        _refuse_difference(adapter, names, own, adapted_by(model, saved))
    whole = arguments.get("modules_to_save")
    if whole is not None:
        own, of_saved = (modules_meant(model, each) for each in (whole, saved.get("modules_to_save") or ()))
        _refuse_difference(adapter, ("modules_to_save", "train_modules"), own, of_saved)
    tokens, of_saved_tokens = arguments.get("trainable_token_indices"), saved.get("trainable_token_indices")
    if tokens is not None and tokens != of_saved_tokens:
        raise InputError(
            f"init_adapter {folder!r} has trainable_token_indices {written(of_saved_tokens)}, not {tokens}; "
            f"leave out --trainable_token_indices, or {_MERGE}"
        )


def adapted_by_options(
    model: "PreTrainedModel",
    targets: str | Sequence[str] | None,
    excluded: Sequence[str] | None,
    layers: Sequence[int] | None,
) -> set[str]:
    """As `adapted_by`, by arguments of `FastLanguageModel.get_peft_model`.

    Raises:
        InputError: a name or a number that the model does not have, or numbers beside a pattern.
    """
    from unsloth_pack.lora.targets import lora_targets

    if layers is not None and isinstance(targets, str):
        raise InputError(
            f"layers_to_transform is {written(layers)} and target_modules is {targets!r}, beside which PEFT "
            "takes no numbers of layers; give target_modules as names, such as q_proj,v_proj, or leave out "
            "one of the two"
        )
    limits = {"exclude_modules": excluded, "layers_to_transform": layers}
    chosen = lora_targets(model, targets, {name: each for name, each in limits.items() if each is not None})
    return adapted_by(
        model, {"target_modules": chosen.modules, "target_parameters": chosen.parameters, **limits}
    )


def adapted_by(model: "PreTrainedModel", config: Mapping[str, Any]) -> set[str]:
    """Paths of the layers, and of stacks of experts, that get an adapter by the fields of a `LoraConfig`."""
    import torch
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    fields = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    lora = LoraConfig(**{name: config[name] for name in fields if config.get(name)})
    head = model.get_output_embeddings()
    paths: set[str] = set()
    for path, module in model.named_modules():
        if lora.target_modules == "all-linear":
            is_adapted = isinstance(module, torch.nn.Linear) and module is not head
        else:
            is_layer = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
            is_adapted = is_layer and bool(check_target_module_exists(lora, path))
        paths |= {path} if is_adapted else set()
    names = config.get("target_parameters") or ()
    stacks = [path for path, _ in model.named_parameters()]
    return paths | {path for path in stacks if any(f".{path}".endswith(f".{name}") for name in names)}


def modules_meant(model: "PreTrainedModel", names: Collection[str]) -> set[str]:
    """Paths of modules, by their ends as PEFT reads them: `norm` is also the end of `input_layernorm`."""
    return {path for path, _ in model.named_modules() if path.endswith(tuple(names))}


def _refuse_difference(adapter: AdapterOptions, names: Sequence[str], own: set[str], saved: set[str]) -> None:
    """Refuse the first module that the options `names` and the adapter do not both train."""
    given = [name for name in names if getattr(adapter, name) is not None] or names[:1]
    for path in sorted(own ^ saved)[:1]:
        says = "which the options leave out" if path in saved else "which the options name, is not among them"
        raise InputError(
            f"init_adapter {adapter.init_adapter!r} has other {names[0]}: {path}, {says}; leave out "
            f"{' and '.join(f'--{name}' for name in given)}, or {_MERGE}"
        )
