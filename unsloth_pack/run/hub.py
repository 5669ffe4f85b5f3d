"""The repository on the Hugging Face hub that gets what a run trained."""

import shlex
from pathlib import Path

from unsloth_pack.errors import InputError, RunStopped, first_line

_LATER = "leave it out, and give the folder to `hf upload` later"
_NOT_UPLOADED = ["checkpoint-*/*", ".*", "merged/*"]


def check_repository(repository: str) -> None:
    """Refuse what is no name of a repository.

    Raises:
        InputError: says what such a name is.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise _refused(repository, f": {first_line(error).rstrip('.')}", "give OWNER/NAME") from None


def check_hub(repository: str) -> None:
    """Refuse to begin a run whose result could not be uploaded.

    Raises:
        InputError: the name is none, the process is offline, there is no token, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants, get_token

    check_repository(repository)
    if constants.HF_HUB_OFFLINE:
        raise _refused(repository, ", and HF_HUB_OFFLINE is set, so nothing can be uploaded")
    if get_token() is None:
        raise _refused(repository, ", and no token of the hub is there", f"call `hf auth login`, or {_LATER}")
    try:
        HfApi().whoami()
    except Exception as error:  # of any of the libraries below
        reason = first_line(error).rstrip(".") or type(error).__name__
        raise _refused(repository, f", and the hub cannot be used ({reason})") from None


def _refused(repository: str, why: str, remedy: str = _LATER) -> InputError:
    return InputError(f"push_to_hub is {repository!r}{why}; {remedy}")


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
