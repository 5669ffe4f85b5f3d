"""The repository on the Hugging Face hub that gets what a run trained."""

import shlex
from pathlib import Path

from unsloth_pack.errors import InputError, RunStopped, first_line

_NOT_UPLOADED = ["checkpoint-*/*", ".*", "merged/*"]


def check_hub(repository: str) -> None:
    """Refuse to begin a run whose result could not be uploaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        HfApi().whoami()
    except Exception as error:  # of any of the libraries below
        reason = first_line(error).rstrip(".") or type(error).__name__
        raise InputError(
            f"push_to_hub is {repository!r}, and nothing can be uploaded ({reason}); leave it out, and give "
            "the folder to `hf upload` later"
        ) from None


def upload(folder: Path, repository: str) -> None:
    """Upload what a run saved in `folder`, without its checkpoints.

    Raises:
        RunStopped: says how to repeat the upload alone.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, ignore_patterns=_NOT_UPLOADED)
    except Exception as error:  # of any of the libraries below
        without = " ".join(f"--exclude '{pattern}'" for pattern in _NOT_UPLOADED)
        again = f"hf upload {repository} {shlex.quote(str(folder))} . --private {without}"
        said = first_line(error).rstrip(".") or type(error).__name__
        raise RunStopped(
            f"all is saved, but {repository} was not uploaded ({said}); repeat it with\n{again}"
        ) from error
