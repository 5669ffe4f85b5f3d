"""Trainers of TRL train a patched model as the untouched one; `test_padded_trainers.py` has more of them."""

import copy
import gc
from collections import Counter

import pytest
import torch
from outside_models import DEVICE, assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_runs import adapted, logged, trainer_of

from unsloth_pack import FastLanguageModel, patch_model

PACKED = {"packing": True, "padding_free": True}
TRAINERS = {
    "SFT padding_free": {"max_length": None, "padding_free": True},
    "SFT packed": PACKED,
    "SFT packed, padded": PACKED | {"pad_to_multiple_of": 48},
    "SFT label smoothing": {"label_smoothing_factor": 0.1},
    "SFT dft": {"loss_type": "dft"},
    "DPO ipo": {"loss_type": "ipo"},
    "GRPO": {},
    "Distillation": {"max_completion_length": 6},
}


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def run(name, model, tokenizer, folder, output):
    kind, more = name.split()[0], {}
    if kind == "Distillation":
        teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        more["teacher_model"] = teacher.to(DEVICE)
    return logged(trainer_of(kind, model, tokenizer, output, TRAINERS.get(name, {}), **more))


@pytest.mark.parametrize("name", TRAINERS)
def test_trains_as_the_untouched_model(name, model_folder, tokenizer, tmp_path):
    plain = adapted(model_folder, name.split()[0])
    before = {key: weight.detach().clone() for key, weight in plain.named_parameters()}
    patched = copy.deepcopy(plain)
    patch_model(patched)
    expected = run(name, plain, tokenizer, model_folder, tmp_path / "plain")
    logs = run(name, patched, tokenizer, model_folder, tmp_path / "patched")
    assert len(logs) == len(expected) == 2
    for ours, theirs in zip(logs, expected, strict=True):
        assert ours.keys() == theirs.keys()
        timed = [key for key in theirs if "time" in key or "runtime" in key or "per_second" in key]
        for key in theirs.keys() - timed:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    trained = [key for key, weight in plain.named_parameters() if weight.requires_grad]
    moved = 0
    for (key, one), (_, two) in zip(patched.named_parameters(), plain.named_parameters(), strict=True):
        if key in trained and not torch.equal(two, before[key]):
            moved += 1
            assert_close(one.detach() - before[key], two.detach() - before[key], key, slack=2e-3)
    assert moved


def held():
    """How many tensors, modules and objects of the package there are."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return Counter(
        kind
        for kind in kinds
        if issubclass(kind, torch.Tensor | torch.nn.Module) or str(kind.__module__).startswith("unsloth_pack")
    )


def test_nothing_stays_of_a_run(model_folder, tokenizer, tmp_path):
    def train():
        patch_model(model := adapted(model_folder, "SFT"))
        return run("SFT packed", model, tokenizer, model_folder, tmp_path)

    train()  # what is made once for all runs
    before = held()
    for _ in range(2):
        train()
    assert held() == before


def test_trainers_find_what_belongs_to_a_bundled_model(tmp_path):
    """Its tokenizer, and the reference model, which they load by the name in the configuration."""
    model, _ = FastLanguageModel.from_pretrained("demo", max_seq_length=64, full_finetuning=True)
    logs = run("DPO", model, None, None, tmp_path)
    assert logs[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the reference is it
