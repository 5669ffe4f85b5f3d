"""Where a model may lie. This module imports no torch, so that options are checked without it."""

import os
from pathlib import Path
from typing import Any

from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, MODEL_CONFIG
from unsloth_pack.data.sources import HUB_NAME
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError

GGUF = "GGUF does not train; give the base model in safetensors"


def is_adapter(name: str) -> bool:
    """Whether a folder holds an adapter."""
    return os.path.isfile(os.path.join(name, ADAPTER_CONFIG))


def check_model_there(model_name: Any) -> None:
    """Refuse a path at which no model lies. What may be a name on the hub is not looked up.

    Raises:
        InputError: names the path.
    """
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
            raise InputError(
                f"{name} holds neither config.json nor adapter_config.json; name a model's folder"
            )
    elif os.path.exists(name):
        raise InputError(f"{name} is a file; name the folder of a model")
    elif "://" in name:
        raise InputError(
            f"cannot load {name}: no such folder; give one, or of a hub model its OWNER/NAME alone"
        )
    elif not HUB_NAME.fullmatch(name):
        raise InputError(f"cannot load {name}: no such folder; check the path, relative to {Path.cwd()}")
