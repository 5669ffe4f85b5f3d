"""`metrics.jsonl`: one JSON object a line, each with its `kind`.

config    the first line: the options of the run by name, without sections; versions; the number of processes;
          `cwd`, the folder in which the run was started, to which its relative paths belong
data      a line each for the training and the evaluation data: the token ledger, the fill of the rows, the
          fingerprint of ids and labels, and how uneven the work of several ranks is
log       what the trainer logs, with `step`, the `seconds` since this process began to train, and
          `memory_bytes`, the peak of its memory so far
demo      exact match on held-out rows, before and after
nonfinite an update that was left out, with its `step`, rows and documents
stopped   a signal ended the run after `step`
summary   the last line of a complete run: its figures, and the ledger once more
"""

import json
import math
from pathlib import Path
from typing import Any

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import METRICS as FILE_NAME
from unsloth_pack.errors import InputError


class MetricsFile:
    """Appends to the metrics of a run; the file is complete after every line, and never a link.

    Args:
        folder: made where it is missing.
        enabled: False in all but one of the processes that train together.
    """

    def __init__(self, folder: Path, enabled: bool = True):
        self.path = folder / FILE_NAME
        self.enabled = enabled
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **values: Any) -> None:
        """Append a line."""
        if not self.enabled:
            return
        line = line_of(kind, **values)
        if not self.path.exists():  # it appears with its first line, which says how to resume the run
            return self._replace([line])
        if self.path.is_symlink():
            return self._replace([*_read(self.path), line])
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_encoded(line))

    def rewind(self, step: int) -> None:
        """Drop what the file holds of later steps, before a run goes on from `step`."""
        if not self.enabled:
            return
        self._replace([line for line in _read(self.path) if _belongs(line, step)])

    def _replace(self, lines: list[dict[str, Any]]) -> None:
        with write_file(self.path) as file:
            file.writelines(_encoded(line).encode() for line in lines)


def line_of(kind: str, **values: Any) -> dict[str, Any]:
    """A line of a metrics file. Numbers that are not finite, which JSON lacks, are null."""
    return {"kind": kind, **_finite(values)}


def read_config(folder: Path) -> dict[str, Any]:
    """The options that the run in `folder` was started with, by name.

    Raises:
        InputError: there is no metrics file, or it does not begin with options.
    """
    path = folder / FILE_NAME
    try:
        return dict(_read(path)[0]["options"])
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(
            f"{path}: no configuration of a run to resume; check --output_dir, or start anew",
            about=("output_dir", "resume"),
        ) from None


def read_cwd(folder: Path) -> Path | None:
    """The folder in which the run in `folder` was started; None if its first line does not say."""
    cwd = _read(folder / FILE_NAME)[0].get("cwd")
    return None if cwd is None else Path(cwd)


def read_processes(folder: Path) -> int | None:
    """On how many processes the run in `folder` was started; None if its first line does not say."""
    return _read(folder / FILE_NAME)[0].get("processes")


def read_data(folder: Path, use: str) -> dict[str, Any] | None:
    """The `data` line of the run in `folder` for "train" or "eval"; None if there is none yet."""
    lines = _read(folder / FILE_NAME)
    return next((line for line in lines if line["kind"] == "data" and line["use"] == use), None)


def read_losses(folder: Path) -> dict[int, float]:
    """The losses that the run in `folder` logged, by update, without those that were not finite."""
    logged = [line for line in _read(folder / FILE_NAME) if line["kind"] == "log"]
    return {line["step"]: line["loss"] for line in logged if line.get("loss") is not None}


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """All lines of the run in `folder`, one that a killed run left unfinished aside."""
    return _read(folder / FILE_NAME)


def has_ended(folder: Path) -> bool:
    """Whether the run in `folder` is complete."""
    return any(line["kind"] == "summary" for line in _read(folder / FILE_NAME))


def _belongs(line: dict[str, Any], step: int) -> bool:
    return line["kind"] in ("config", "data") or (
        line["kind"] in ("log", "nonfinite") and line["step"] <= step
    )


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without a last one that a killed run left unfinished."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _encoded(line: dict[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
