"""The files and tests that the documents name exist, and the code in the README runs."""

import re
from pathlib import Path

import pytest
import trl
from packaging.version import Version
from tiny import DEVICE

from unsloth_pack.data import load_rows, to_trl
from unsloth_pack.demo import TRAIN_FILE

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
TESTS = {
    name
    for path in ROOT.glob("tests/**/test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}
CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = (".", "tests", "docs", "unsloth_pack", "benchmarks/results")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_and_file_that_is_named_is_there(document):
    text = document.read_text()
    code = " ".join(CODE.findall(text))
    assert set(re.findall(r"\btest_\w+\b(?!\.py)", code)) <= TESTS
    for file, test in re.findall(r"([\w/]+\.py)::(test_\w+)", code):
        assert (ROOT / "tests" / file).is_file()
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), link
    for file in re.findall(r"[\w./-]+\.py\b|[\w./-]+-20\d\d-\d\d-\d\d\.\w+", code):
        assert any((ROOT / folder / file).exists() for folder in FOLDERS), file


@pytest.mark.skipif(
    DEVICE == "cpu" and Version(trl.__version__) < Version("1.16"), reason="TRL trains on CUDA only"
)
def test_the_notebook_of_the_readme_trains(tmp_path, monkeypatch):
    (notebook,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    small = {"output_dir": str(tmp_path), "report_to": "none", "max_steps": 1, "save_strategy": "no"}
    small |= {"use_cpu": DEVICE == "cpu", "bf16": DEVICE != "cpu", "per_device_train_batch_size": 1}
    config = trl.SFTConfig
    monkeypatch.setattr(trl, "SFTConfig", lambda **given: config(**given, **small))
    names = {"rows": to_trl(load_rows(str(TRAIN_FILE)), chat_template=True).select(range(40))}
    exec(notebook, names)
    assert names["trainer"].state.global_step == 1
