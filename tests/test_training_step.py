"""`docs/one-training-step.md` lists the files that one update passes, in their order."""

import re
from pathlib import Path

import warm

from tools.training_step import files_of_a_step

PAGE = Path(__file__).parents[1] / "docs" / "one-training-step.md"


def write_files(path: str) -> None:
    Path(path).write_text("\n".join(files_of_a_step(f"{path}-run")))


def test_the_page_lists_the_files_of_a_step(tmp_path):
    run = warm.call(write_files, str(tmp_path / "files"), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert (tmp_path / "files").read_text().split() == listed
