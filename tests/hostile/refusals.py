"""Hostile cases, and how they are judged: one line a mistake, exit code 2, nothing written."""

import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unsloth_pack.cli import main
from unsloth_pack.errors import InputError

FEW = "".join(f'{{"instruction": "Say {i}.", "output": "{i}"}}\n' for i in range(8))


def nothing(folder: Path) -> None:
    """Prepares nothing."""


@dataclass(frozen=True)
class Case:
    """Something to be refused, in a folder of its own that also holds `model`, a tiny one, and `few.jsonl`.

    Args:
        says: a regular expression that the line of the refusal holds.
        run: arguments of the command line, or a call of the API.
        prepare: puts into the folder what the case needs.
        beside: a regular expression that the lines of other mistakes hold; empty where there are none.
    """

    name: str
    says: str
    run: Sequence[str] | Callable[[], object]
    prepare: Callable[[Path], object] = nothing
    beside: str = ""


def train(**flags: object) -> list[str]:
    """The command line of a run on the tiny model that would succeed without these flags."""
    given = {"model_name": "model", "dataset": "few.jsonl", "output_dir": "out", "max_seq_length": 144}
    given |= {"max_steps": 1, **flags}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def line_of(case: Case, folder: Path) -> str:
    """The line that the case is refused with.

    Raises:
        AssertionError: it is not refused, not in one line with a remedy, with a traceback, beside other lines
            than those that are expected, or something was written, changed or lost.
    """
    case.prepare(folder)
    before = tree(folder)
    lines = [_refusal_of_call(case.run)] if callable(case.run) else _refusals_of_command(case.run)
    assert tree(folder) == before, "something was written"
    for line in lines:
        assert "\n" not in line
        assert "Traceback" not in line
        assert line.isprintable()
        assert "; " in line, f"no remedy: {line}"
        assert len(line) < 1300, f"{len(line)} characters: {line[:1000]}"
    own = [line for line in lines if re.search(case.says, line)]
    assert own, lines
    others = [line for line in lines if line not in own[:1]]
    assert all(case.beside and re.search(case.beside, line) for line in others), others
    return own[0]


def _refusals_of_command(arguments: Sequence[str]) -> list[str]:
    with _captured() as written:
        code = main(arguments)
    out, said = written
    assert code == 2, f"exit code {code}: {said}"
    assert out == ""
    assert said.endswith("\n"), said
    lines = said.removesuffix("\n").split("\n")
    assert all(line.startswith(("unsloth-pack: ", "run.yaml:")) for line in lines), said
    return lines


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What this process writes to the descriptors of stdout and stderr, past Python's own streams too."""
    streams, written = (sys.stdout, sys.stderr), []
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        try:
            for number, file in ((1, out), (2, error)):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
            yield written
        finally:
            sys.stdout.close()
            sys.stderr.close()
            sys.stdout, sys.stderr = streams
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            written.extend(file.seek(0) or file.read().decode() for file in (out, error))


def _refusal_of_call(call: Callable[[], object]) -> str:
    try:
        result = call()
    except InputError as error:
        return str(error)
    raise AssertionError(f"not refused: {result!r}")


def tree(folder: Path) -> dict[str, object]:
    """Every file, folder and link under a folder, with what it holds."""
    found: dict[str, object] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink():
                found[str(path)] = os.readlink(path)
            elif path.is_file():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[str(path)] = path.stat().st_mode
    return found
