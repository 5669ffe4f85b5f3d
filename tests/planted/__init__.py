"""The ledger of planted faults: small edits of the package, each with the tests that should see it.

`python -m tests.planted` applies each of them to a copy and runs those tests. An entry of `faults/*.yaml`:

    - name: the first boundary of a row is one too late   # plain words, unique
      file: packed_row/row.py                             # below unsloth_pack/
      old: "cu_seqlens[i]"                                # occurs exactly once in the file
      new: "cu_seqlens[i] + 1"
      tests: [tests/test_packed_model.py::test_rows_of_other_forms_are_as_right]   # of the default tier

A fault is a mistake that a developer might make, or that was reported elsewhere: the package still imports
and runs. It is caught where one of its tests fails.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LEDGER = Path(__file__).parent / "faults"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def edited(self) -> str:
        """The source of its file with the fault in it.

        Raises:
            ValueError: the old text does not occur exactly once, or the new text is no Python.
        """
        source = (ROOT / "unsloth_pack" / self.file).read_text()
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text occurs {times} times in {self.file}")
        edited = source.replace(self.old, self.new)
        if self.file.endswith(".py"):
            try:
                compile(edited, self.file, "exec")
            except SyntaxError as error:
                raise ValueError(f"{self.name}: {error}") from error
        return edited


def read_ledger() -> list[Fault]:
    entries = [entry for path in sorted(LEDGER.glob("*.yaml")) for entry in yaml.safe_load(path.read_text())]
    faults = [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two faults have the name {sorted(twice)[0]!r}")
    return faults
