"""The model card of a run says what the run did, repeats it, and never replaces a card of the user's."""

import shutil

import pytest
import yaml
from cli_runs import losses, read_metrics
from huggingface_hub import ModelCard

from unsloth_pack.cli import main


def test_a_card_says_what_the_run_did_and_its_settings_repeat_it(train, tmp_path, data):
    flags = {"eval_fraction": 0.2, "sample_packing": True, "max_steps": 2}
    assert train("--save_model", "--weight_decay=0.01", **flags) == 0
    out, lines = tmp_path / "out", read_metrics(tmp_path / "out")
    text = (out / "README.md").read_text()
    assert "More Information Needed" not in text
    (summary,) = lines["summary"]
    said = [data, *(line["fingerprint"] for line in lines["data"]), "| torch | ", "40 documents"]
    best = min(line["eval_loss"] for line in lines["log"] if "eval_loss" in line)
    said += [f"| loss at last (nats a token) | {summary['last_loss']:.6g} |"]
    said += [f"| best eval loss | {best:.6g} after update", "| device | "]
    said += [f"| tokens trained | {summary['tokens_trained']:,} |"]
    assert [each for each in said if each not in text] == []
    card, merged = ModelCard.load(out / "README.md"), ModelCard.load(out / "merged" / "README.md")
    assert (card.data.library_name, merged.data.library_name) == ("peft", "transformers")
    assert card.data.base_model is card.data.datasets is None
    assert ("lora" in card.data.tags, "lora" in merged.data.tags) == (True, False)
    assert merged.text == card.text
    settings = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(settings).keys() >= {"dataset", "weight_decay", "max_steps"}
    assert "lora_alpha" not in settings
    (tmp_path / "again.yaml").write_text(settings)
    assert main(["train", "--config=again.yaml", "--output_dir=again"]) == 0
    assert losses(tmp_path / "again") == losses(out)


def test_the_card_of_a_whole_model(train, tmp_path):
    assert train(tuning="full", max_steps=1) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.library_name, "lora" in card.data.tags) == ("transformers", False)


@pytest.mark.parametrize("text", ["mine", "---\nlicense: mit\n---\nmine"])
def test_a_card_of_the_user_stays(text, train, tmp_path):
    out = tmp_path / "out"
    assert train(max_steps=2, save_steps=1) == 0
    shutil.rmtree(out / "checkpoint-2")
    (out / "adapter_config.json").unlink()
    (out / "adapter_model.safetensors").unlink()
    (out / "README.md").write_text(text)
    assert main(["train", "--resume", f"--output_dir={out}"]) == 0
    assert (out / "README.md").read_text() == text


def test_merging_takes_the_card_along(finished, tmp_path):
    assert main(["merge", f"--model_name={finished}", f"--save_path={tmp_path / 'whole'}"]) == 0
    assert ModelCard.load(tmp_path / "whole" / "README.md").data.library_name == "transformers"
