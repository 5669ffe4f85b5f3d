"""Runs a case in a process of its own, so that it shares neither memory nor patches with other cases."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import unsloth_pack
from unsloth_pack.bench.case import Case, Figures
from unsloth_pack.errors import InputError

_LAST_LINES = 2000  # characters of stderr that are kept of a process without an answer


class Failed(RuntimeError):
    """The run gave no figures. The message says why in one line."""


def measure_apart(case: Case) -> Figures:
    """Run `case` in a fresh Python process.

    Raises:
        InputError: this machine cannot run the case.
        Failed: anything else failed in the process, such as memory that ran out.
    """
    with TemporaryDirectory(prefix="unsloth-pack-bench-") as folder:
        Path(folder, "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
        # -P: no imports from the user's working folder
        command = [sys.executable, "-P", "-m", "unsloth_pack.bench.measure", folder, str(time.time())]
        paths = [str(Path(unsloth_pack.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            answer = json.loads(Path(folder, "answer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            said = " ".join(done.stderr[-_LAST_LINES:].strip().splitlines()[-1:])
            raise Failed(f"the process ended with {done.returncode}: {said or 'it said nothing'}") from None
    if "refused" in answer:
        raise InputError(answer["refused"])
    if "failed" in answer:
        raise Failed(answer["failed"])
    return Figures(**answer)
