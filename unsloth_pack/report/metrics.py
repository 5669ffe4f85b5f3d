"""`metrics.jsonl`: one JSON object a line, each with its `kind`.

config    the first line: the options of the run by name, without sections; versions; the number of processes;
          `cwd`, the folder in which the run was started, to which its relative paths belong
data      a line each for the training and the evaluation data: the token ledger, the fill of the rows, the
          fingerprint of ids and labels, and how uneven the work of several ranks is
log       what the trainer logs, with `step`, the `seconds` since this process began to train, and
          `memory_bytes`, the peak of its memory so far; with a loss also `tflops`, `mfu` and `hfu` since the
          line before (`training/flops.py`), the latter two where the peak of the chip is known. `loss/NAME`
          and `eval_loss/NAME` are means of each data set of a mixture
demo      exact match on held-out rows, before and after
nonfinite an update that was left out, with its `step`, rows and documents
stopped   a signal ended the run after `step`
summary   the last line of a complete run: its figures, and the ledger once more
"""

import json
from pathlib import Path
from typing import Any

from unsloth_pack.checkpoints.names import METRICS as FILE_NAME
from unsloth_pack.errors import InputError


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


def read_fact(folder: Path, name: str) -> Any:
    """Read `cwd` or `processes` from the first line of the run in `folder`; None if it does not say."""
    return read_lines(folder)[0].get(name)


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
