"""From outside: runs of the command line in processes of their own, killed and resumed, in two stages."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "unsloth_pack" / "demo" / "model"
ROWS = ROOT / "unsloth_pack" / "demo" / "data" / "heldout.jsonl"  # the demo, without its scores
COMMON = [f"--dataset={ROWS}", "--max_seq_length=512", "--sample_packing", "--dtype=float32", "--max_steps=6"]
COMMON += ["--save_steps=2", "--logging_steps=1", "--gradient_accumulation_steps=1"]


def start(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "cli.py"), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder, *arguments):
    process = start(folder, *arguments)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def kill_after_a_checkpoint(folder, out, *arguments):
    process = start(folder, *arguments)
    while process.poll() is None and not (folder / out / "checkpoint-2").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "log" and "loss" in line}


@torch.no_grad()
def logits(model, ids):
    return model.eval()(input_ids=ids).logits


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_new_tokens_then_a_second_stage_killed_and_resumed_then_merged(tmp_path):
    (tmp_path / "tokens.txt").write_text("<zap>\n<zip>\n")
    tokens = "--add_tokens=tokens.txt"
    run(tmp_path, *COMMON, "--output_dir=first", tokens, "--lora_plus_ratio=4", "--modules_to_save=norm")
    second = [*COMMON, "--output_dir=second", "--init_adapter=first", tokens, "--modules_to_save=norm"]
    kill_after_a_checkpoint(tmp_path, "second", *second)
    run(tmp_path, "--resume", "--output_dir=second")
    run(tmp_path, *[flag.replace("second", "whole") for flag in second])
    assert losses(tmp_path / "second") == losses(tmp_path / "whole")
    run(tmp_path, "merge", "--model_name=second", "--save_path=merged")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "second")
    ids = tokenizer("Sort <zap> 3 1 2 <zip>", return_tensors="pt").input_ids
    assert {*tokenizer.convert_tokens_to_ids(["<zap>", "<zip>"])} <= {*ids[0].tolist()}
    base = plain(DEMO)
    if len(tokenizer) > base.get_input_embeddings().num_embeddings:
        base.resize_token_embeddings(len(tokenizer))
    trained = logits(PeftModel.from_pretrained(base, tmp_path / "second"), ids)
    merged = logits(plain(tmp_path / "merged"), ids)
    assert (merged - trained).norm() < 0.02 * trained.norm()
    assert (logits(plain(DEMO), ids) - trained).norm() > 0.05 * trained.norm()


def test_a_full_run_with_frozen_parts_killed_and_resumed(tmp_path):
    full = [*COMMON, "--tuning=full", "--learning_rate=1e-3", "--freeze_modules=embed_tokens"]
    kill_after_a_checkpoint(tmp_path, "killed", *full, "--output_dir=killed")
    run(tmp_path, "--resume", "--output_dir=killed")
    run(tmp_path, *full, "--output_dir=whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    ids = torch.arange(5, 60)[None]
    one, other = (plain(tmp_path / name) for name in ("killed", "whole"))
    assert torch.equal(logits(one, ids), logits(other, ids))
    base = plain(DEMO)
    assert torch.equal(one.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert not torch.equal(logits(one, ids), logits(base, ids))
    run(tmp_path, "verify", "--model_name=killed", "--dtype=float32")
