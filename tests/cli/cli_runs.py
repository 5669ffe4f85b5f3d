"""What the command line's runs leave behind, as plain transformers and PEFT read it."""

import json
import os
import shutil

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel

IDS = torch.arange(3, 60)[None]


def command_line(model, data, out, *arguments, **flags):
    """Of `train` on a tiny model."""
    given = {"model_name": model, "dataset": data, "output_dir": out, "max_seq_length": 144}
    given |= {"max_steps": 4, "gradient_accumulation_steps": 1, "learning_rate": 0.01}
    given |= {"dtype": "float32", **flags}  # and so the same backend on every machine
    return [*arguments, *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def read_metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    return {kind: [line for line in lines if line["kind"] == kind] for kind in kinds}


def losses(folder):
    return {line["step"]: line["loss"] for line in read_metrics(folder)["log"] if "loss" in line}


def cut_after(folder, step):
    """Leave of a run in `folder` what a kill after the checkpoint of this step would; 0: before the first."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    for name in ("adapter_model.safetensors", "adapter_config.json", "model.safetensors", "config.json"):
        (folder / name).unlink(missing_ok=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "summary"]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")


def tree(folder):
    """Every file under a folder, with its size and the time of its last change."""
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return {path: (os.path.getsize(path), os.path.getmtime(path)) for path in paths}


def plain(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def logits(model, ids=IDS):
    return model(input_ids=ids).logits


def adapter_names(folder):
    return {
        name.removeprefix("base_model.model.") for name in load_file(folder / "adapter_model.safetensors")
    }


def check_merged(out, base):
    """Plain PEFT, our loader and the merged model compute the same, and something was trained."""
    trained = logits(PeftModel.from_pretrained(plain(base), out).eval())
    assert (trained - logits(plain(base))).norm() > 1e-3 * trained.norm()
    ours, _ = FastLanguageModel.from_pretrained(str(out), 128, torch.float32)
    torch.testing.assert_close(logits(ours.eval()), trained, rtol=1e-4, atol=1e-4)
    error = (logits(plain(out / "merged")) - trained).norm() / trained.norm()
    assert error < 0.02
