"""The flags of `train`: names, types, defaults, and where a value comes from when several places give one."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from unsloth_pack.demo import DEMO_DEFAULTS
from unsloth_pack.errors import LAST_SEED, InputError
from unsloth_pack.packing import find_packs, read_manifest
from unsloth_pack.recipe.other_trainers import REMEDIES
from unsloth_pack.recipe.parser import (
    DTYPE_HELP,
    DTYPES,
    SAVE_METHODS,
    Parser,
    boolean,
    json_object,
    one_of,
    real,
    switch_or,
    whole,
)

MODEL, ADAPTER, DATA, TRAINING, OUTPUT = "model", "adapter", "data", "training", "output"
# What a resumed run may change: nothing that alters the data order, the steps or the weights.
_FREE_ON_RESUME = {"config", "resume", "output_dir", "debug", "logging_steps", "report_to"}
_FREE_ON_RESUME |= {"save_model", "save_method", "save_path", "save_steps", "attn_backend", "no_probe"}
_FREE_ON_RESUME |= {"use_gradient_checkpointing", "on_nonfinite"}
# The defaults of the demo are for packed rows; a batch of single documents holds about as many of them.
_DEMO_UNPACKED = {"per_device_train_batch_size": 16}


def _flag(
    group: str,
    default: Any,
    kind: Callable[[str], Any],
    help: str,
    unit: str = "",
    alias: str = "",
    bare: Any = None,
) -> Any:
    """A flag, and what it means `bare`, without a value; a switch is then true."""
    metadata = {"group": group, "kind": kind, "help": help, "unit": unit, "alias": alias, "bare": bare}
    return field(default=default, metadata=metadata)


def _choice(group: str, default: str | None, choices: Sequence[str], help: str) -> Any:
    """A flag that takes one word out of a few."""
    return _flag(group, default, one_of(*choices), help, "|".join(choices))


@dataclass(frozen=True)
class TrainOptions:
    """What `train` was asked for. Every field is a flag of its name; None where more decides."""

    model_name: str = _flag(MODEL, "demo", str, "the model: demo (bundled), a folder, or a hub name")
    max_seq_length: int = _flag(MODEL, 2048, whole(1), "longest document, or packed row", "TOKENS")
    dtype: str | None = _choice(MODEL, None, DTYPES, DTYPE_HELP)
    load_in_4bit: bool = _flag(MODEL, False, boolean, "hold the frozen weights in NF4 (bitsandbytes)")
    load_in_8bit: bool = _flag(MODEL, False, boolean, "hold the frozen weights in int8 (bitsandbytes)")
    load_in_fp8: bool = _flag(MODEL, False, boolean, "hold the frozen weights in fp8, on GPUs that have it")
    attn_backend: str = _flag(
        MODEL, "auto", str, "of packed attention: auto, flash, xformers or sdpa; see `unsloth-pack doctor`"
    )

    r: int = _flag(ADAPTER, 16, whole(1), "rank of the adapter")
    lora_alpha: float = _flag(ADAPTER, 16.0, real(above=0), "the adapter's output is scaled by alpha / r")
    lora_dropout: float = _flag(ADAPTER, 0.0, real(0, below=1), "probability of dropping an adapter's input")
    bias: str = _choice(ADAPTER, "none", ("none", "all", "lora_only"), "which biases train")
    use_gradient_checkpointing: bool | str = _flag(
        ADAPTER,
        False,
        switch_or("offload", "unsloth", "auto"),
        "recompute layers in the backward pass; offload (or unsloth) also holds their inputs in host memory; "
        "auto recomputes as few as memory allows",
        "true|false|offload|unsloth|auto",
    )
    random_state: int = _flag(ADAPTER, 3407, whole(0, LAST_SEED), "seed of the adapter's initial weights")
    use_rslora: bool = _flag(ADAPTER, False, boolean, "scale by alpha / sqrt(r)")
    use_dora: bool = _flag(ADAPTER, False, boolean, "learn the norm of every output apart")
    loftq_config: Mapping[str, Any] | None = _flag(
        ADAPTER, None, json_object, "arguments of PEFT's LoftQConfig; default: no LoftQ", "JSON"
    )

    dataset: str = _flag(
        DATA,
        "demo",
        str,
        "demo (bundled), a json, jsonl, csv, parquet or txt file, a folder (one that `pack` wrote, too), or "
        "a hub name",
    )
    eval_dataset: str | None = _flag(DATA, None, str, "likewise, evaluated ten times a run; default: none")
    sample_packing: bool = _flag(
        DATA, False, boolean, "put several documents in a row; none sees another", alias="--packing"
    )
    keep_examples_per_update: bool = _flag(
        DATA,
        False,
        boolean,
        "with packing, accumulate over fewer rows: as many documents an update as without",
    )
    padding_free: bool = _flag(DATA, False, boolean, "join a batch into one row instead of padding it")
    eval_packing: bool | None = _flag(
        DATA, None, boolean, "pack the evaluation data; default: as the training data"
    )
    max_token_loss: float = _flag(
        DATA,
        0.01,
        real(0),
        "stop where truncation and dropping discard a greater share of the tokens",
        "SHARE",
    )
    train_on_responses_only: bool = _flag(
        DATA, False, boolean, "no loss on what the user says in conversations"
    )

    per_device_train_batch_size: int | None = _flag(
        TRAINING, None, whole(1), "rows a step and device; default: 1 when packing, else 2", "ROWS"
    )
    per_device_eval_batch_size: int | None = _flag(
        TRAINING, None, whole(1), "likewise for evaluation; default: as for training", "ROWS"
    )
    gradient_accumulation_steps: int = _flag(TRAINING, 4, whole(1), "forward and backward passes an update")
    warmup_steps: int = _flag(TRAINING, 5, whole(0), "updates over which the learning rate rises", "UPDATES")
    max_steps: int | None = _flag(
        TRAINING, None, whole(1), "stop here; default: 400, or what num_train_epochs says", "UPDATES"
    )
    num_train_epochs: float | None = _flag(
        TRAINING,
        None,
        real(above=0),
        "passes over the data, where max_steps is not given; default: as many as it takes",
        "EPOCHS",
    )
    learning_rate: float = _flag(TRAINING, 2e-4, real(above=0), "at its peak")
    optim: str | None = _flag(
        TRAINING, None, str, "a name from transformers; default: adamw_torch, its fused form on CUDA"
    )
    weight_decay: float = _flag(TRAINING, 0.01, real(0), "of the trained weights")
    lr_scheduler_type: str = _flag(TRAINING, "linear", str, "a name from transformers: linear, cosine, ...")
    no_probe: bool = _flag(
        TRAINING, False, boolean, "skip the look for leaks between documents before the first packed step"
    )
    seed: int = _flag(TRAINING, 3407, whole(0, LAST_SEED), "of the data order and of dropout")

    fsdp: str | None = _flag(
        TRAINING,
        None,
        str,
        "shard the weights over torchrun's processes by FSDP2: full, keep (they stay gathered between "
        "forward and backward), or a json or yaml file of fsdp_config; the flag alone means full; default: "
        "each process holds all",
        "PRESET",
        bare="full",
    )
    deepspeed: str | None = _flag(
        TRAINING,
        None,
        str,
        "shard by DeepSpeed: zero2, zero3, or a json or yaml file of its settings; default: not",
        "PRESET",
    )
    on_nonfinite: str = _choice(
        TRAINING,
        "stop",
        ("stop", "skip"),
        "what the run does after an update whose loss or gradient is not finite, which is never applied",
    )

    output_dir: str | None = _flag(
        OUTPUT,
        None,
        str,
        "gets the adapter and the metrics; default: outputs/<model>-<dataset>-<time>",
        "FOLDER",
    )
    resume: bool = _flag(
        OUTPUT, False, boolean, "go on from the last checkpoint in output_dir, as it was started"
    )
    overwrite_output_dir: bool = _flag(OUTPUT, False, boolean, "replace the run that output_dir holds")
    logging_steps: int = _flag(OUTPUT, 1, whole(1), "log so often", "UPDATES")
    save_steps: int | None = _flag(
        OUTPUT,
        None,
        whole(1),
        "save a checkpoint so often, keep two; default: only where the run stops early",
        "UPDATES",
    )
    report_to: str = _flag(OUTPUT, "none", str, "none, all, or a tracker: tensorboard, wandb, ...")
    save_model: bool = _flag(OUTPUT, False, boolean, "also save the merged model at the end")
    save_method: str = _choice(OUTPUT, "merged_16bit", SAVE_METHODS, "how save_model saves")
    save_path: str | None = _flag(
        OUTPUT, None, str, "where save_model saves; default: merged in output_dir", "FOLDER"
    )
    config: str | None = _flag(
        OUTPUT, None, str, "flags by name in a yaml file; the command line wins; default: none", "FILE"
    )

    @property
    def is_demo(self) -> bool:
        """Whether the bundled model trains on the bundled data."""
        return self.model_name == self.dataset == "demo"

    @property
    def folder(self) -> Path:
        """`output_dir`, as `read_options` has filled it in."""
        return Path(str(self.output_dir))


def read_options(arguments: Sequence[str], epilog: str = "") -> TrainOptions:
    """The options of a run: the flags, over the file's, over the demo's or the resumed run's, over defaults.

    Raises:
        InputError: an unknown flag, a value out of range, a config file that cannot be read, or a resumed run
            that is not there or was started otherwise.
    """
    parser = train_parser(epilog)
    given = parser.parse(arguments)
    if "config" in given:
        given = parser.parse(_config_arguments(Path(given["config"]))) | given
    given.pop("debug", None)
    saved: dict[str, Any] = {}
    values: dict[str, Any] = {option.name: option.default for option in fields(TrainOptions)}
    if given.get("resume"):
        saved = _saved_options(given)
        values |= saved
    elif TrainOptions(**values | given).is_demo:
        packs = given.get("sample_packing", DEMO_DEFAULTS.get("sample_packing"))
        values |= DEMO_DEFAULTS | ({} if packs else _DEMO_UNPACKED)
    values |= given
    return _fill_in(values | _decided_by_packs(values, saved | given))


def train_parser(epilog: str = "") -> Parser:
    """The parser of `train`'s flags; `epilog` ends its help."""
    parser = Parser(
        REMEDIES,
        prog="unsloth-pack",
        usage="unsloth-pack [train] [flags]",
        description="Train a LoRA adapter. Without flags: the bundled model on the bundled data, whose own "
        f"defaults are {', '.join(f'{name} {value}' for name, value in DEMO_DEFAULTS.items())}.",
        epilog=epilog,
    )
    groups = {name: parser.add_argument_group(name) for name in (MODEL, ADAPTER, DATA, TRAINING, OUTPUT)}
    for option in fields(TrainOptions):
        about = option.metadata
        names = [f"--{option.name}"] + ([about["alias"]] if about["alias"] else [])
        arguments = {"dest": option.name, "type": about["kind"], "metavar": about["unit"] or "VALUE"}
        arguments["help"] = about["help"]
        if "bool" in str(option.type):
            arguments |= {"nargs": "?", "const": True, "metavar": about["unit"] or "true|false"}
            arguments["help"] += " (default: false)" if option.default is False else ""
        elif about["bare"] is not None:
            arguments |= {"nargs": "?", "const": about["bare"]}
        elif option.default is not None:
            arguments["help"] += f" (default: {option.default})"
        groups[about["group"]].add_argument(*names, **arguments)
    return parser


def _config_arguments(path: Path) -> list[str]:
    """The flags that a yaml file spells as `name: value`."""
    import yaml

    if path.exists() and not path.is_file():
        raise InputError(f"config is {str(path)!r}: no ordinary file; write one")
    try:
        text = path.read_text(encoding="utf-8")
        node, values = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"config is {str(path)!r}: {error.strerror}; check the path") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)  # what stands there may be a secret
        place = f" (line {mark.line + 1})" if mark else ""
        raise InputError(f"config is {str(path)!r}: not yaml{place}; correct it") from None
    if node is None or not isinstance(values, dict):
        raise InputError(f"config is {str(path)!r}: it holds no `name: value` lines; write one a flag")
    names = [name.value for name, _ in node.value]
    for name, value in values.items():
        if name in ("config", "debug", "help"):
            raise InputError(
                f"config is {str(path)!r}: {name} cannot be set there; give it on the command line"
            )
        if names.count(str(name)) > 1:
            raise InputError(f"config is {str(path)!r}: {name} is there twice; keep one")
        parts = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(part, list | dict) for part in parts):
            raise InputError(f"config is {str(path)!r}: {name} is a list, or nested; give one value")
    return _as_arguments(values)


def _as_arguments(values: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={_as_text(value)}" for name, value in values.items() if value is not None]


def _as_text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, dict) else str(value)


def _saved_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options that the run in `output_dir` was started with."""
    from unsloth_pack.report.metrics import read_config

    if "output_dir" not in given:
        raise InputError("--resume needs --output_dir; name the folder of the run to go on with")
    if given.get("overwrite_output_dir"):
        raise InputError("--resume and --overwrite_output_dir contradict each other; give one of them")
    folder = Path(given["output_dir"])
    saved = read_config(folder)
    known = {option.name for option in fields(TrainOptions)} - {"overwrite_output_dir"}  # done when it began
    saved = {name: value for name, value in saved.items() if name in known}
    try:
        train_parser().parse(_as_arguments(saved))
    except InputError as error:
        raise InputError(f"{folder}: no configuration of a run to resume ({error})") from None
    for name, value in given.items():
        if name not in _FREE_ON_RESUME and value != saved.get(name, value):
            raise InputError(
                f"--resume goes on as the run was started: {name} was {saved[name]!r}, not {value!r}; "
                f"leave out --{name}, or start a new run"
            )
    return saved


def _decided_by_packs(values: dict[str, Any], explicit: dict[str, Any]) -> dict[str, Any]:
    """What rows that are packed on disk decide: how long they are, and that they are trained on as packed.

    Args:
        values: of all options, defaults among them.
        explicit: those of them that somebody asked for.
    """
    decided: dict[str, Any] = {}
    if folder := find_packs(values["dataset"]):
        packs = read_manifest(folder)
        decided = {"sample_packing": True, "padding_free": True}
        decided["train_on_responses_only"] = packs.train_on_responses_only
        _refuse_otherwise(explicit, decided, folder)
        decided["max_seq_length"] = explicit.get("max_seq_length", packs.capacity)
        _check_capacity(folder, packs.capacity, decided["max_seq_length"])
    values = values | decided
    if values["eval_dataset"] and (folder := find_packs(values["eval_dataset"])):
        packs = read_manifest(folder)
        _refuse_otherwise(
            values,
            {"sample_packing": True, "train_on_responses_only": packs.train_on_responses_only},
            folder,
        )
        decided["eval_packing"] = True
        _refuse_otherwise(explicit, {"eval_packing": True}, folder)
        _check_capacity(folder, packs.capacity, values["max_seq_length"])
    return decided


def _refuse_otherwise(asked: dict[str, Any], decided: dict[str, Any], folder: Path) -> None:
    for name, value in decided.items():
        if asked.get(name, value) != value:
            raise InputError(
                f"{name} is {asked[name]}, but {value} for the packed rows in {folder}; "
                f"give --{name} {str(value).lower()}, or other data"
            )


def _check_capacity(folder: Path, capacity: int, max_seq_length: int) -> None:
    if max_seq_length < capacity:
        raise InputError(
            f"max_seq_length is {max_seq_length} and {folder} holds rows of up to {capacity} tokens; "
            f"give --max_seq_length {capacity}, or pack the data anew"
        )


def _fill_in(values: dict[str, Any]) -> TrainOptions:
    """The defaults that depend on other values."""
    if values["per_device_train_batch_size"] is None:
        values["per_device_train_batch_size"] = 1 if values["sample_packing"] else 2
    if values["per_device_eval_batch_size"] is None:
        values["per_device_eval_batch_size"] = values["per_device_train_batch_size"]
    if values["max_steps"] is None and values["num_train_epochs"] is None:
        values["max_steps"] = 400
    if values["output_dir"] is None:
        model, dataset = (_as_name(Path(values[name]).stem) for name in ("model_name", "dataset"))
        values["output_dir"] = f"outputs/{model}-{dataset}-{datetime.now():%Y%m%d-%H%M%S}"
    if values["save_path"] is None and values["save_model"]:
        values["save_path"] = str(Path(values["output_dir"]) / "merged")
    return TrainOptions(**values)


def _as_name(text: str) -> str:
    """A part of a folder's name: letters, digits, dots and dashes, not too many."""
    return re.sub(r"[^\w.-]+", "-", text)[:50] or "run"
