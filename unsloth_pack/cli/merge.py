"""`unsloth-pack merge`: merge an adapter into its base model's weights, for use without this package."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, MODEL_CONFIG
from unsloth_pack.checkpoints.vllm_compat import note_on_rank
from unsloth_pack.config import Parser
from unsloth_pack.errors import InputError, printable
from unsloth_pack.run.from_adapter import LOADED_IN, held_by_run
from unsloth_pack.run.machine import check_new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run(arguments: Sequence[str]) -> int:
    """Save the adapter in `--model_name`, merged or as it is, to `--save_path`.

    An adapter makes up for what its base model lost in 4 bits, 8 bits or fp8. So the adapter of a run is
    merged into the weights that it was trained on, unless others are asked for.
    """
    if (parser := build_parser()).read(arguments).get("save_method") == "gguf":
        raise InputError("save_method is 'gguf'; write unsloth-pack export RUN --to gguf")
    flags = parser.parse(arguments)
    for name in ("model_name", "save_path"):
        if name not in flags:
            raise InputError(f"--{name} is missing; see `unsloth-pack merge --help`")
    source, target = Path(flags["model_name"]), Path(flags["save_path"])
    if not (source / ADAPTER_CONFIG).is_file():
        is_model = (source / MODEL_CONFIG).is_file()
        remedy = (
            "it holds a whole model, with nothing to merge" if is_model else "name a folder that train made"
        )
        raise InputError(f"model_name {str(source)!r} holds no {ADAPTER_CONFIG}; {remedy}")
    check_new_folder("save_path", target)

    from unsloth_pack.cli import quieten

    quieten()
    from unsloth_pack.images.processor import pick_processor
    from unsloth_pack.run.card import copy_card

    loading = held_by_run(source) | {name: flags[name] for name in LOADED_IN if name in flags}
    model, tokenizer = load_to_merge(str(source), loading)
    method = flags.get("save_method", "merged_16bit")
    model.save_pretrained_merged(target, pick_processor(model, str(source), tokenizer), save_method=method)
    copy_card(source, target, method)
    used = next((f", with {name}" for name in LOADED_IN if loading.get(name)), "")
    print(printable(f"saved {source} as {method}{used} in {target}"))
    if method == "lora_vllm":
        config = json.loads((target / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if note := note_on_rank(config):
            print(note)
    return 0


def load_to_merge(source: str, loading: Mapping[str, Any]) -> "tuple[Any, PreTrainedTokenizerBase]":
    """Load a model with the options of its run: in 16 bits on the CPU, where weights stay in their files."""
    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.checkpoints.loading import find_model, load_config

    loading = dict(loading)
    if not any(loading.get(name) for name in LOADED_IN):
        config = load_config(find_model(source)[0])
        loading["dtype"] = loading.get("dtype") or config.dtype or config.get_text_config().dtype
        loading["device_map"] = {"": "cpu"}
    # No row will be packed, so that any length will do.
    model, tokenizer = FastLanguageModel.from_pretrained(source, max_seq_length=1, **loading)
    return model, tokenizer


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = Parser(prog="unsloth-pack merge", description="Merge an adapter into 16-bit weights.")
    parser.add_option("model_name", "folder of the adapter; has to be given")
    parser.add_option("save_path", "folder to save in; new, or empty; has to be given")
    parser.add_option(
        "save_method",
        "what is saved; lora is the adapter alone, lora_vllm that for vLLM (default: merged_16bit)",
    )
    for name, kind in (("load_in_4bit", "NF4"), ("load_in_8bit", "int8"), ("load_in_fp8", "fp8")):
        default = "(default: as the run was trained, else false)"
        parser.add_option(name, f"merge into the weights as {kind} holds them {default}")
    return parser
