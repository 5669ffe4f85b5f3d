"""The site builds without a warning, and has a page for every command, notebook and document."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.extras
def test_it_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in ("index", "api", "troubleshooting", "commands/train", "notebooks/1-first-fine-tune"):
        assert (tmp_path / "site" / f"{name}.html").stat().st_size > 10_000
    api = (tmp_path / "site" / "api.html").read_text()
    assert "instruction_part" in api
    assert "--max_seq_length" in (tmp_path / "site" / "commands" / "train.html").read_text()
