"""The Python of the documents runs as it stands, with what its text says has to be given."""

import re
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from outside_models import DEVICE
from packaging.version import Version

from unsloth_pack import FastLanguageModel

ROOT = Path(__file__).parents[2]
CPU = "use_cpu=True, bf16=False, " if DEVICE == "cpu" else ""  # as the README says
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and Version(trl.__version__) < Version("1.16"), reason="TRL trains on CUDA only"
)
QUICK = "max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=1, report_to='none'"


@pytest.fixture
def given(monkeypatch, tmp_path):
    """What the texts around the code say is there, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = FastLanguageModel.from_pretrained("demo", max_seq_length=512)
    turns = [{"role": "user", "content": "Sort 3 1 2"}, {"role": "assistant", "content": "1 2 3"}]
    ids = [[*range(5, 5 + length)] for length in (30, 60, 9)]
    return {
        "model": FastLanguageModel.get_peft_model(model, r=4),
        "tokenizer": tokenizer,
        "rows": Dataset.from_list([{"messages": turns}] * 9),
        "tokenised": Dataset.from_dict({"input_ids": ids, "labels": ids}),
    }


@pytest.mark.parametrize("name", ["README.md", "docs/packing.md", "docs/models.md", "docs/trust.md"])
def test_python(name, given):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    exec(code.replace("SFTConfig(", f"SFTConfig({CPU}{QUICK}, "), given)
    if name == "docs/packing.md":
        given["trainer"].train()
    if "trainer" in given:
        assert given["trainer"].state.global_step == 1
        assert given["trainer"].train_dataset[0]["seq_lengths"]
    if "report" in given:
        assert given["report"].passed
