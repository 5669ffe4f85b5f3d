"""Save a loaded model under the names of Unsloth's methods; refuse GGUF with the commands for it."""

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
    """Save a model for use without this package, or its adapter alone.

    Args:
        save_directory, tokenizer, save_method, state_dict: as in
            `unsloth_pack.checkpoints.saving.save_pretrained_merged`. `save_method` is "merged_16bit", or
            "lora" for the adapter alone.
        others: Unsloth's further arguments; those that would change the result are refused.

    Raises:
        InputError: as that function; a further argument asks for something that is not supported.
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

    The repository is created first, so that a wrong name or token costs no time.

    Args:
        repo_id: "name/model" on the hub.
        tokenizer, save_method, others: as in `save_pretrained_merged`.
        token, private, commit_message, revision: as in huggingface_hub.

    Returns:
        The address of the repository.

    Raises:
        InputError: the hub cannot be reached or refuses; or as `save_pretrained_merged`.
    """
    take_saving_arguments(others, "push_to_hub_merged")
    check_save_method(model, save_method)
    hub = huggingface_hub.HfApi(token=token)
    try:
        repository = hub.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            saving.save_pretrained_merged(model, Path(folder, "model"), tokenizer, save_method)
            hub.upload_folder(
                repo_id=repository.repo_id,
                folder_path=Path(folder, "model"),
                commit_message=commit_message,
                revision=revision,
            )
    except (HTTPError, HFValidationError, OSError) as error:
        raise InputError(
            f"cannot push to {repo_id!r}: {first_line(error) or type(error).__name__}; check the name, the "
            "token and the network, or save it with save_pretrained_merged and give the folder to `hf upload`"
        ) from error
    return str(repository)


def save_pretrained_gguf(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    quantization_method: str | list[str] = "q8_0",
    **others: Any,
) -> None:
    """Refuse with the commands that write a GGUF file.

    Raises:
        InputError: always.
    """
    commands, _ = _build_gguf_commands(save_directory, quantization_method, others)
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
    """Refuse with the commands that write a GGUF file and upload it.

    Args:
        name: of the repository; with `repo_id`, of the folder.

    Raises:
        InputError: always.
    """
    repository = str(repo_id or name or "NAME/MODEL")
    folder = str(name or repository).rpartition("/")[2] or "model"
    commands, files = _build_gguf_commands(folder, quantization_method, others)
    uploads = ", ".join(f"`{shlex.join(['hf', 'upload', repository, file])}`" for file in files)
    raise InputError(f"no GGUF files are written here; {commands}; then {uploads}")


_CONVERTER_TYPES = ("f32", "f16", "bf16", "q8_0")  # which llama.cpp's converter writes itself
_UNSLOTH_TYPES = {"not_quantized": "bf16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}
_QUANTIZE_TYPES = re.compile(r"(i?q\d|tq\d|mxfp4)[a-z0-9_]*")  # arguments of its llama-quantize


def _build_gguf_commands(folder: str | Path, method: Any, others: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the commands that write the requested GGUF files of a model, and the files."""
    methods = others.get("quantization_type") or method or "q8_0"
    methods = [methods] if isinstance(methods, str) else list(methods)
    commands, files, name = [], [], str(folder).rstrip("/")
    for requested in (str(one).lower() for one in methods):
        kind = _UNSLOTH_TYPES.get(requested, requested)
        if kind not in _CONVERTER_TYPES and not _QUANTIZE_TYPES.fullmatch(kind):
            raise InputError(
                f"quantization_method is {requested!r}; give one of llama.cpp's, such as 'q4_k_m'"
            )
        converted = kind if kind in _CONVERTER_TYPES else "bf16"
        converted_file, file = f"{name}-{converted}.gguf", f"{name}-{kind}.gguf"
        options = ["--outfile", converted_file, "--outtype", converted]
        commands.append(shlex.join(["python", "convert_hf_to_gguf.py", name, *options]))
        if converted != kind:
            commands.append(shlex.join(["llama-quantize", converted_file, file, kind.upper()]))
        files.append(file)
    steps = ", ".join(f"`{command}`" for command in dict.fromkeys(commands))
    return f"call model.save_pretrained_merged({name!r}, tokenizer), then run llama.cpp's {steps}", files
