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
import re
import sys
from collections.abc import Iterable, Mapping
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

    def write(self, kind: str, **values: object) -> None:
        """Append a line."""
        if not self.enabled:
            return
        line = line_of(kind, **values)
        if not self.path.exists():  # it appears with its first line, which says how to resume the run
            return self._replace([line])
        if self.path.is_symlink():
            return self._replace([*read_lines(self.path.parent), line])
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_encoded(line))

    def rewind(self, step: int) -> None:
        """Drop what the file holds of later steps, before a run goes on from `step`."""
        if self.enabled:
            self._replace(line for line in read_lines(self.path.parent) if _belongs(line, step))

    def _replace(self, lines: Iterable[Mapping[str, object]]) -> None:
        with write_file(self.path) as file:
            file.writelines(_encoded(line).encode() for line in lines)


def line_of(kind: str, **values: object) -> dict[str, Any]:
    """Make a line of a metrics file. Numbers that are not finite, which JSON lacks, are null."""
    return {"kind": kind, **_finite(values)}


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Read all lines of the run in `folder`, without a last one that a killed run left unfinished."""
    whole, _, _ = (folder / FILE_NAME).read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the options that the run in `folder` was started with, by name."""
    try:
        return dict(read_lines(folder)[0]["options"])
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(
            f"{folder / FILE_NAME}: no configuration of a run to resume; check --output_dir, or start anew"
        ) from None


def read_cwd(folder: Path) -> Path | None:
    """Read the folder in which the run in `folder` was started; None if its first line does not say."""
    cwd = read_lines(folder)[0].get("cwd")
    return None if cwd is None else Path(cwd)


def read_processes(folder: Path) -> int | None:
    """Read how many processes the run in `folder` was started on; None if its first line does not say."""
    return read_lines(folder)[0].get("processes")


def read_data(folder: Path, use: str) -> dict[str, Any] | None:
    """Read the `data` line of the run in `folder` for "train" or "eval"; None if there is none yet."""
    return next((x for x in read_lines(folder) if x["kind"] == "data" and x["use"] == use), None)


def read_losses(folder: Path) -> dict[int, float]:
    """Read the losses that the run in `folder` logged, by update, without those that were not finite."""
    logged = [line for line in read_lines(folder) if line["kind"] == "log"]
    return {line["step"]: line["loss"] for line in logged if line.get("loss") is not None}


def has_ended(folder: Path) -> bool:
    """Return whether the run in `folder` is complete."""
    return any(line["kind"] == "summary" for line in read_lines(folder))


def peak_memory() -> tuple[int, str]:
    """Return the peak of the GPU's memory in bytes, else of the process, and which it is."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "GPU memory allocated"
    if sys.platform == "linux":  # getrusage includes what the parent held when it forked
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if high_water := re.search(r"VmHWM:\s*(\d+) kB", status):
            return int(high_water[1]) * 1024, "process memory"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process memory"


def _belongs(line: Mapping[str, Any], step: int) -> bool:
    return line["kind"] in ("config", "data") or (
        line["kind"] in ("log", "nonfinite") and line["step"] <= step
    )


def _encoded(line: Mapping[str, object]) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


def _finite(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
