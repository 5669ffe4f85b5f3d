"""`metrics.jsonl`: one JSON object a line, each with its `kind`.

config    the options of the run and the versions it ran with; the first line
data      the token ledger and the fill of the rows, one line each for the training and evaluation data; the
          fingerprint of training data that was packed on disk
log       what the trainer logs, with `step`
demo      exact match on held-out rows, before and after
stopped   where a signal ended the run
summary   the last line of a run that came to its end
"""

import json
import math
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends to the metrics of a run; the file is complete after every line.

    Args:
        folder: made where it is missing.
        enabled: False in all but one of the processes that train together.
    """

    def __init__(self, folder: Path, enabled: bool = True):
        self.path = folder / FILE_NAME
        self.enabled = enabled
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **values: Any) -> None:
        """Append a line. Numbers that are not finite, which JSON lacks, become null."""
        if not self.enabled:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **_finite(values)}, ensure_ascii=False) + "\n")

    def rewind(self, step: int) -> None:
        """Drop what the file holds beyond `step`, before a run goes on from there."""
        if not self.enabled:
            return
        lines = [line for line in _read(self.path) if _belongs(line, step)]
        beside = self.path.with_suffix(".tmp")
        beside.write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
        )
        beside.replace(self.path)


def read_config(folder: Path) -> dict[str, Any]:
    """The options that the run in `folder` was started with.

    Raises:
        InputError: there is no metrics file, or it does not begin with them.
    """
    path = folder / FILE_NAME
    try:
        options = _read(path)[0]["options"]
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(
            f"{path}: no configuration of a run to resume; check --output_dir, or start anew"
        ) from None
    return options


def _belongs(line: dict[str, Any], step: int) -> bool:
    return line["kind"] in ("config", "data") or (line["kind"] == "log" and line["step"] <= step)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
