"""A run that begins with the adapter of another, from the command line."""

import json
import shutil
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from cli_runs import adapter_names, check_merged, command_line, cut_after, logits, losses, plain, read_metrics
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from unsloth_pack import FastLanguageModel
from unsloth_pack.cli import main
from unsloth_pack.training.trainer import RunTrainer


@contextmanager
def first_rows_noted():
    """The inputs and the loss of the first step of each run."""
    seen, step = [], RunTrainer.training_step

    def noted(self, model, inputs, *args, **kwargs):
        given = {name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)}
        loss = step(self, model, inputs, *args, **kwargs)
        if self.state.global_step == 0:
            seen.append((given, loss))
        return loss

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunTrainer, "training_step", noted)
        yield seen


class FirstStages:
    """Runs each first stage once; tests read its folder."""

    def __init__(self, folder, *model_and_data):
        self._folder, self._model_and_data, self._made = folder, model_and_data, {}

    def __call__(self, **flags):
        out = self._folder / str(len(self._made))
        if (key := str(flags)) not in self._made:
            with first_rows_noted() as seen:
                assert main(command_line(*self._model_and_data, out, "--packing", **STAGE, **flags)) == 0
            self._made[key] = out, seen[0][1]
        return self._made[key][0]

    def first_loss(self, stage):
        """Of the run that ended in this folder."""
        return dict(self._made.values())[stage]


STAGE = {"r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def first_stage(model, data, tmp_path_factory):
    return FirstStages(tmp_path_factory.mktemp("first"), model, data)


@pytest.mark.parametrize("flags", [{"modules_to_save": "norm,lm_head"}, {"use_dora": True}])
def test_a_second_stage_begins_where_the_first_ended(flags, first_stage, train, data, tmp_path):
    first = first_stage(eval_dataset=data, eval_steps=4, max_token_loss=1, **flags)
    second = tmp_path / "second"
    more = {"init_adapter": first, "eval_dataset": data, "max_token_loss": 1, "learning_rate": 1e-9}
    assert train("--packing", output_dir=second, model_name=None, eval_steps=1, max_steps=1, **more) == 0
    ends = [[x["eval_loss"] for x in read_metrics(out)["log"] if "eval_loss" in x] for out in (first, second)]
    assert ends[1][-1] == pytest.approx(ends[0][-1], rel=1e-5)
    config = json.loads((second / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert read_metrics(second)["config"][0]["options"]["r"] == 4
    assert adapter_names(second) == adapter_names(first)


@pytest.fixture
def first_row():
    with first_rows_noted() as seen:
        yield seen


def loss_of(model, row):
    """The mean loss of a row's documents, each alone."""
    starts = [*(row["position_ids"][0] == 0).nonzero().flatten().tolist(), row["input_ids"].shape[1]]
    losses = []
    for begin, end in pairwise(starts):
        ids, labels = row["input_ids"][:, begin:end], row["labels"][0, begin + 1 : end]
        losses.append(cross_entropy(logits(model, ids)[0, :-1], labels, reduction="none")[labels != -100])
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize(
    ("way", "flags"),
    [
        ("on with it", {"trainable_token_indices": "97,98"}),
        ("on top", {"modules_to_save": "norm,lm_head"}),
        ("all of the model on top", {"trainable_token_indices": "97,98"}),
    ],
)
def test_the_first_loss_is_that_of_the_first_stages_last_model(
    way, flags, first_stage, train, model, first_row, tmp_path
):
    first = first_stage(**flags)
    more = {} if way == "on with it" else {"merge_init_adapter": True}
    more |= {"tuning": "full"} if way == "all of the model on top" else {}
    assert train("--packing", output_dir=tmp_path / "second", init_adapter=first, max_steps=1, **more) == 0
    (row, loss), cold = first_row[-1], first_stage.first_loss(first)
    trained = PeftModel.from_pretrained(plain(model), first).eval()
    of_plain, truth = loss_of(trained, row), loss_of(trained.double(), row)
    rounding = torch.finfo(torch.float32).eps * truth
    assert abs(float(loss) - truth) <= 1.5 * max(abs(of_plain - truth), rounding)
    assert abs(float(cold) - truth) > 0.01 * truth  # of the same row, by a model without the first stage


def test_a_second_stage_that_trains_on_top(first_stage, train, model, tmp_path):
    first, second = first_stage(), tmp_path / "second"
    flags = {"init_adapter": first, "r": 2, "target_modules": "q_proj", "max_steps": 2}
    assert train("--packing", "--merge_init_adapter", "--save_model", output_dir=second, **flags) == 0
    config = json.loads((second / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (2, str(second / "base"))
    merged = logits(plain(second / "base"))
    trained = logits(PeftModel.from_pretrained(plain(model), first).eval())
    torch.testing.assert_close(merged, trained, rtol=1e-4, atol=1e-4)
    check_merged(second, second / "base")


def in_4_bits(folder):
    return FastLanguageModel.from_pretrained(str(folder), 128, torch.float32, load_in_4bit=True)[0].eval()


def test_on_top_of_what_was_trained_on_4_bits(first_stage, train, first_row, tmp_path):
    """The adapter makes up for what the weights lost, so it is merged into the weights that it knew."""
    first = first_stage(load_in_4bit=True)
    ours = in_4_bits(first)
    trained = logits(ours)
    full = {"init_adapter": first, "tuning": "full", "max_steps": 1}
    assert train("--packing", "--merge_init_adapter", output_dir=tmp_path / "full", **full) == 0
    torch.testing.assert_close(logits(plain(tmp_path / "full" / "base")), trained, rtol=1e-4, atol=1e-4)
    second = {"init_adapter": first, "load_in_4bit": True, "max_steps": 2, "output_dir": tmp_path / "second"}
    assert train("--packing", "--merge_init_adapter", "--save_model", **second) == 0
    torch.testing.assert_close(logits(plain(tmp_path / "second" / "base")), trained, rtol=1e-4, atol=1e-4)
    rounded = in_4_bits(tmp_path / "second" / "base").train()  # some CPUs evaluate 4 bits in bfloat16
    row, loss = first_row[-1]
    assert float(loss) == pytest.approx(loss_of(rounded, row), rel=1e-5)
    again, _ = FastLanguageModel.from_pretrained(
        str(tmp_path / "second"), 128, torch.float32, load_in_4bit=True
    )
    merged = logits(plain(tmp_path / "second" / "merged"))
    assert (merged - logits(again)).norm() < 0.02 * merged.norm()


def test_a_second_stage_holds_its_weights_as_the_first_did(first_stage, train, first_row, tmp_path):
    first = first_stage(load_in_4bit=True)
    ours = in_4_bits(first)
    for bits, is_same in ((None, True), (False, False)):
        out = tmp_path / str(bits)
        assert train("--packing", output_dir=out, init_adapter=first, max_steps=1, load_in_4bit=bits) == 0
        assert read_metrics(out)["config"][0]["options"]["load_in_4bit"] is is_same
        row, loss = first_row[-1]
        assert (float(loss) == pytest.approx(loss_of(ours, row), rel=1e-5)) is is_same


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_stage_on_top_resumes_bit_for_bit(tuning, first_stage, train, tmp_path):
    on_top = {"init_adapter": first_stage(), "tuning": tuning, "max_steps": 4, "save_steps": 2}
    whole, half, early = (tmp_path / name for name in ("whole", "half", "early"))
    assert train("--packing", "--merge_init_adapter", output_dir=whole, **on_top) == 0
    for folder in (half, early):
        shutil.copytree(whole, folder)
    cut_after(half, 2)
    cut_after(early, 0)
    bases = {folder: (folder / "base" / "model.safetensors").stat().st_mtime_ns for folder in (half, early)}
    for folder in (half, early):
        assert main(["--resume", f"--output_dir={folder}"]) == 0
        assert losses(folder) == losses(whole)
        name = "model.safetensors" if tuning == "full" else "adapter_model.safetensors"
        again, once = load_file(folder / name), load_file(whole / name)
        assert again.keys() == once.keys()
        assert all(torch.equal(again[key], once[key]) for key in once)
    assert (half / "base" / "model.safetensors").stat().st_mtime_ns == bases[half]
    assert (early / "base" / "model.safetensors").stat().st_mtime_ns > bases[early]  # it started over
    assert not [*tmp_path.glob("*/.base")]


def test_a_refusal_leaves_no_merged_model_and_keeps_that_of_an_earlier_run(
    first_stage, train, refused, tmp_path
):
    on_top, out = {"init_adapter": first_stage(), "max_steps": 1}, tmp_path / "out"
    late = {"learning_rates": '{"lora_embedding_B": 1e-3}'}  # told when the adapter is there
    assert "lora_embedding_B" in refused("--packing", "--merge_init_adapter", **on_top, **late)
    assert not out.exists()
    assert train("--packing", "--merge_init_adapter", **on_top) == 0
    says = refused("--packing", "--merge_init_adapter", "--overwrite_output_dir", **on_top, **late)
    assert "lora_embedding_B" in says
    assert train("--packing", "--merge_init_adapter", "--overwrite_output_dir", **on_top) == 0
    plain(out / "base")
    assert train("--packing", "--overwrite_output_dir", max_steps=1) == 0
    assert not (out / "base").exists()  # nothing needs it any more


def test_what_differs_between_stages(first_stage, train, refused, untied, tmp_path):
    first = first_stage(target_modules="q_proj,v_proj", modules_to_save="norm")
    say = {
        ("r", 8): "has r 4, not 8; leave out --r, or give --merge_init_adapter",
        ("use_dora", True): "has use_dora false, not true",
        ("target_modules", "q_proj"): "has target_modules ['",
        ("trainable_token_indices", "3"): "has trainable_token_indices null, not [3]",
        (
            "freeze_modules",
            "layers.0",
        ): "has freeze_modules null, not ['layers.0']; leave",
        ("tuning", "full"): "give --merge_init_adapter, or --tuning lora",
    }
    for (name, value), says in say.items():
        assert says in refused(init_adapter=first, **{name: value})
    same = {"target_modules": "v_proj,q_proj", "modules_to_save": "norm"}
    assert train(init_adapter=first, output_dir=tmp_path / "same", max_steps=1, **same) == 0
    assert f"and model_name is {untied!r}" in refused(init_adapter=first, model_name=untied)
    assert "holds no adapter_config.json" in refused(init_adapter=tmp_path)
    assert "give --init_adapter too" in refused("--merge_init_adapter")
