"""Methods of a loaded model that put it on the hub, or say which command writes another format."""

import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, HTTPError
from torch import nn

from unsloth_pack.errors import InputError, first_line
from unsloth_pack.files.saving import SaveMethod, save_pretrained_merged


def push_to_hub_merged(
    model: nn.Module,
    repo_id: str,
    tokenizer: Any = None,
    save_method: SaveMethod = "merged_16bit",
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Upload a model",
    revision: str | None = None,
) -> str:
    """Merge as `save_pretrained_merged` does, and upload the result to the Hugging Face hub.

    The repository is made first, so that a wrong name or token costs no time.

    Args:
        repo_id: "name/model" on the hub.
        tokenizer, save_method: as in `save_pretrained_merged`.
        token, private, commit_message, revision: as in huggingface_hub.

    Returns:
        The address of the repository.

    Raises:
        InputError: the hub cannot be reached or refuses; what `save_pretrained_merged` refuses.
    """
    hub = huggingface_hub.HfApi(token=token)
    try:
        made = hub.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained_merged(model, Path(folder, "model"), tokenizer, save_method)
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
    repo_id: str,
    tokenizer: Any = None,
    quantization_method: str | list[str] = "q8_0",
    **others: Any,
) -> None:
    """Not written here: refuses with the commands that write a GGUF file and upload it.

    Raises:
        InputError: always.
    """
    name = str(repo_id).rpartition("/")[2] or "model"
    commands, files = _gguf(name, quantization_method, others)
    uploads = ", ".join(f"`hf upload {repo_id} {file}`" for file in files)
    raise InputError(f"no GGUF files are written here; {commands}; then {uploads}")


_AS_CONVERTED = ("f32", "f16", "bf16", "q8_0")  # what llama.cpp's converter writes by itself


def _gguf(folder: str | Path, method: Any, others: dict[str, Any]) -> tuple[str, list[str]]:
    """The commands that make GGUF files of a model, and the files that were asked for."""
    methods = others.get("quantization_type") or method
    methods = [methods] if isinstance(methods, str) else list(methods)
    commands, files, name = [], [], str(folder).rstrip("/")
    for wanted in (str(one).lower() for one in methods):
        kind = {"not_quantized": "bf16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}.get(wanted, wanted)
        converted = kind if kind in _AS_CONVERTED else "bf16"
        begun, file = f"{name}-{converted}.gguf", f"{name}-{kind}.gguf"
        commands.append(f"python convert_hf_to_gguf.py {name} --outfile {begun} --outtype {converted}")
        if converted != kind:
            commands.append(f"llama-quantize {begun} {file} {kind.upper()}")
        files.append(file)
    steps = ", ".join(f"`{command}`" for command in dict.fromkeys(commands))
    return f"call model.save_pretrained_merged({name!r}, tokenizer), then run llama.cpp's {steps}", files
