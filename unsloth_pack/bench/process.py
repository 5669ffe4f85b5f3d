"""A run in a process of its own: its memory is nobody else's, and what it patches dies with it."""

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

_LAST_LINES = 2000  # characters of what a process said before it died without an answer


class Failed(RuntimeError):
    """The run gave no figures. The message says why in one line."""


def measure_apart(case: Case) -> Figures:
    """Run `case` in a fresh Python process.

    Raises:
        InputError: the case asks for what cannot be done here.
        Failed: anything else went wrong there, out of memory among it.
    """
    with TemporaryDirectory(prefix="unsloth-pack-bench-") as folder:
        Path(folder, "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
        # -P: modules of this package and of its surroundings, not of the folder that the user is in
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
