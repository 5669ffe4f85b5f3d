"""From outside: runs of the command line in two stages, killed in processes of their own, and resumed."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch
import warm
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from unsloth_pack.cli import main

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp_path")
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "unsloth_pack" / "demo" / "model"
ROWS = ROOT / "unsloth_pack" / "demo" / "data" / "heldout.jsonl"  # the demo, without its scores
COMMON = [f"--dataset={ROWS}", "--max_seq_length=512", "--sample_packing", "--dtype=float32", "--max_steps=6"]
COMMON += ["--save_steps=2", "--logging_steps=1", "--gradient_accumulation_steps=1"]


def run(*arguments):
    assert main([*arguments]) == 0


def kill_after_a_checkpoint(out, *arguments):
    said = Path(f"{out}.log")
    command = [*arguments, f"--output_dir={out}"]
    process = warm.start(warm.run_program, ROOT / "cli.py", command, stdout=said, stderr=said)
    while process.is_alive() and not Path(out, "checkpoint-2").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0), said.read_text()  # 0: it ended before it was seen


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
    run(*COMMON, "--output_dir=first", tokens, "--lora_plus_ratio=4", "--modules_to_save=norm")
    second = [*COMMON, "--init_adapter=first", tokens, "--modules_to_save=norm"]
    kill_after_a_checkpoint("second", *second)
    run("--resume", "--output_dir=second")
    run(*second, "--output_dir=whole")
    assert losses(tmp_path / "second") == losses(tmp_path / "whole")
    run("merge", "--model_name=second", "--save_path=merged")

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
