"""Names of the files of models, adapters, tokenizers and runs, which of them a save replaces, where they lie.

This module imports no torch, so that options are checked without it.
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from unsloth_pack.data.sources import HUB_NAME
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError

GGUF = "GGUF does not train; give the base model in safetensors"
METRICS = "metrics.jsonl"  # of a run
RUN_CONFIG = "config.yaml"  # likewise
MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
CARD = "README.md"
MERGED_BASE = "base"  # folder of a run: its base model, into which the adapter of another was merged
SAVED_BY = {"saved_by": "unsloth_pack"}  # in the header or the index of merged weights

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"}
TOKENIZER = {  # what transformers' tokenizers write, and read again
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
    *("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model"),
}
# Likewise, but not read where there is a tokenizer.json
VOCABULARY = {"vocab.json", "merges.txt", "vocab.txt"}

_CONFIGS = {MODEL_CONFIG, "generation_config.json"}
_SHARD = r"-\d{5}-of-\d{5}"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = re.compile(
    rf"model({_SHARD})?\.safetensors|model\.safetensors\.index\.json"
    rf"|pytorch_model({_SHARD})?\.bin|pytorch_model\.bin\.index\.json"
)


def layer_of(name: str) -> str:
    """The path to the numbered layer that a weight lies in, or its own name."""
    layer = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
    return layer[0] if layer else name


def holds_model(folder: Path) -> bool:
    """Whether a model's configuration or weights are in `folder`."""
    return any(name == MODEL_CONFIG or _is_weights(name) for name in _names(folder))


def model_files(folder: Path) -> list[str]:
    """The names of a model's configuration and weights in `folder`."""
    return [name for name in _names(folder) if name in _CONFIGS or _is_weights(name)]


def replaced_by_a_model(folder: Path, with_tokenizer: bool) -> Callable[[str], bool]:
    """Which names in `folder` a merged model replaces; InputError over the adapter of a run."""
    if os.path.lexists(folder / METRICS) and os.path.lexists(folder / ADAPTER_CONFIG):
        said = f"{str(folder)!r} holds a run with its adapter, which a merged model would replace"
        raise InputError(f"{said}; give another folder")
    names = ADAPTER | _CONFIGS | (TOKENIZER if with_tokenizer else set())
    return lambda name: name in names or _is_weights(name)


def replaced_by_an_adapter(folder: Path, with_tokenizer: bool) -> Callable[[str], bool]:
    """Which names in `folder` an adapter replaces; InputError over a model that was not saved here."""
    weights = [name for name in _names(folder) if _is_weights(name)]
    if theirs := sorted(set(weights) - _saved_here(folder)):
        raise InputError(f"{str(folder)!r} holds a model ({theirs[0]}); give the adapter another folder")
    names = ADAPTER | (_CONFIGS if weights else set()) | (TOKENIZER if with_tokenizer else set())
    return lambda name: name in names or _is_weights(name)


def _is_weights(name: str) -> bool:
    return _WEIGHTS.fullmatch(name) is not None


def _saved_here(folder: Path) -> set[str]:
    """The names of the weights in `folder` that `save_pretrained_merged` saved, in one file or in several."""
    names: set[str] = set()
    with suppress(SafetensorError, OSError), safe_open(folder / _SINGLE, "np") as file:
        if SAVED_BY.items() <= (file.metadata() or {}).items():
            names.add(_SINGLE)
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no index, or a broken one
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if SAVED_BY.items() <= index["metadata"].items():
            names |= {_INDEX, *index["weight_map"].values()}
    return names


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def is_adapter(name: str) -> bool:
    """Whether a folder holds an adapter."""
    return os.path.isfile(os.path.join(name, ADAPTER_CONFIG))


def check_model_there(model_name: object) -> None:
    """Refuse a path at which no model lies. What may be a name on the hub is not looked up."""
    if not isinstance(model_name, str | Path) or not str(model_name).strip():
        raise InputError(f"model_name is {model_name!r}; give demo, a folder, or a hub name")
    name = str(model_name)
    if name in BUNDLED_MODELS or is_adapter(name):
        return
    has_gguf = os.path.isdir(name) and any(Path(name).glob("*.gguf"))
    if name.endswith(".gguf") or (has_gguf and not any(Path(name).glob("*.safetensors"))):
        raise InputError(f"cannot load {name}: {GGUF}")
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, MODEL_CONFIG)):
            raise InputError(f"{name} holds neither config.json nor adapter_config.json; name another folder")
    elif os.path.exists(name):
        raise InputError(f"{name} is a file; name the folder of a model")
    elif not HUB_NAME.fullmatch(name):
        raise InputError(f"cannot load {name}: no such folder; check the path, relative to {Path.cwd()}")
