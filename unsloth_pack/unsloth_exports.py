"""Methods of a loaded model that put it on the hub, or say which command writes another format."""

import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, HTTPError
from torch import Tensor, nn

from unsloth_pack.checkpoints import saving
from unsloth_pack.checkpoints.saving import SaveMethod, check_save_method
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.unsloth_arguments import take_saving_arguments


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    save_method: SaveMethod = "merged_16bit",
    state_dict: dict[str, Tensor] | None = None,
    **others: Any,
) -> None:
    """Save a model for use without this package, or its adapter alone: the method of a loaded model.

    Args:
        save_directory, tokenizer, save_method, state_dict: as in
            `unsloth_pack.checkpoints.saving.save_pretrained_merged`. `save_method` is "merged_16bit", or
            "lora" for the adapter alone.
        others: Unsloth's further arguments; those that would change what is saved are refused.

    Raises:
        InputError: as that function; a further argument that asks for what is not here.
    """
    take_saving_arguments(others, "save_pretrained_merged")
    saving.save_pretrained_merged(model, save_directory, tokenizer, save_method, state_dict)


def push_to_hub_merged(
    model: nn.Module,
    repo_id: str,
    tokenizer: Any = None,
    save_method: SaveMethod = "merged_16bit",
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Upload a model",
    revision: str | None = None,
    **others: Any,
) -> str:
    """Merge as `save_pretrained_merged` does, and upload the result to the Hugging Face hub.

    The repository is made first, so that a wrong name or token costs no time.

    Args:
        repo_id: "name/model" on the hub.
        tokenizer, save_method: as in `save_pretrained_merged`.
        token, private, commit_message, revision: as in huggingface_hub.
        others: as in `save_pretrained_merged`.

    Returns:
        The address of the repository.

    Raises:
        InputError: the hub cannot be reached or refuses; what `save_pretrained_merged` refuses.
    """
    take_saving_arguments(others, "push_to_hub_merged")
    check_save_method(model, save_method)
    hub = huggingface_hub.HfApi(token=token)
    try:
        made = hub.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            saving.save_pretrained_merged(model, Path(folder, "model"), tokenizer, save_method)
            hub.upload_folder(
                repo_id=made.repo_id,
                folder_path=Path(folder, "model"),
                commit_message=commit_message,
                revision=revision,
            )
    except (HTTPError, HFValidationError, OSError) as error:
        raise InputError(
            f"cannot push to {repo_id!r}: {first_line(error) or type(error).__name__}; check the name, the "
            "token and the network, or save it with save_pretrained_merged and give the folder to `hf upload`"
        ) from error
    return str(made)


def save_pretrained_gguf(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    quantization_method: str | list[str] = "q8_0",
    **others: Any,
) -> None:
    """Not written here: refuses with the commands that write a GGUF file.

    Raises:
        InputError: always.
    """
    commands, _ = _gguf(save_directory, quantization_method, others)
    raise InputError(f"no GGUF files are written here; {commands}")


def push_to_hub_gguf(
    model: nn.Module,
    name: str | None = None,
    tokenizer: Any = None,
    quantization_method: str | list[str] = "q8_0",
    *,
    repo_id: str | None = None,
    **others: Any,
) -> None:
    """Not written here: refuses with the commands that write a GGUF file and upload it.

    Args:
        name: of the repository; where `repo_id` is given, of the folder.

    Raises:
        InputError: always.
    """
    repository = str(repo_id or name or "NAME/MODEL")
    folder = str(name or repository).rpartition("/")[2] or "model"
    commands, files = _gguf(folder, quantization_method, others)
    uploads = ", ".join(f"`{shlex.join(['hf', 'upload', repository, file])}`" for file in files)
    raise InputError(f"no GGUF files are written here; {commands}; then {uploads}")


_AS_CONVERTED = ("f32", "f16", "bf16", "q8_0")  # what llama.cpp's converter writes by itself
_OF_UNSLOTH = {"not_quantized": "bf16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}
_BY_LLAMA_CPP = re.compile(r"(i?q\d|tq\d|mxfp4)[a-z0-9_]*")  # what its llama-quantize is called with


def _gguf(folder: str | Path, method: Any, others: dict[str, Any]) -> tuple[str, list[str]]:
    """The commands that make GGUF files of a model, and the files that were asked for."""
    methods = others.get("quantization_type") or method or "q8_0"
    methods = [methods] if isinstance(methods, str) else list(methods)
    commands, files, name = [], [], str(folder).rstrip("/")
    for wanted in (str(one).lower() for one in methods):
        kind = _OF_UNSLOTH.get(wanted, wanted)
        if kind not in _AS_CONVERTED and not _BY_LLAMA_CPP.fullmatch(kind):
            raise InputError(f"quantization_method is {wanted!r}; give one of llama.cpp's, such as 'q4_k_m'")
        converted = kind if kind in _AS_CONVERTED else "bf16"
        begun, file = f"{name}-{converted}.gguf", f"{name}-{kind}.gguf"
        options = ["--outfile", begun, "--outtype", converted]
        commands.append(shlex.join(["python", "convert_hf_to_gguf.py", name, *options]))
        if converted != kind:
            commands.append(shlex.join(["llama-quantize", begun, file, kind.upper()]))
        files.append(file)
    steps = ", ".join(f"`{command}`" for command in dict.fromkeys(commands))
    return f"call model.save_pretrained_merged({name!r}, tokenizer), then run llama.cpp's {steps}", files
