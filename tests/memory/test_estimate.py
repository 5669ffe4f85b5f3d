"""The estimate of a run's memory, against peaks that were measured on GPUs."""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tables import table

from unsloth_pack.config import TrainOptions, changed
from unsloth_pack.run.estimate import estimate_run
from unsloth_pack.training.chips import Gpu

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from shapes import IN_MXFP4, LARGE, PUBLISHED

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H100, GIB = Gpu.named("h100"), 2**30
A3B = LARGE["qwen3-30b-a3b"]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GC = {"use_gradient_checkpointing": "offload"}
NF4, FULL = {"load_in_4bit": True}, {"tuning": "full", "dtype": "bfloat16"}
SWEEP = (  # of benchmarks/results/sweep-h100-2026-11-26.json
    *("qwen2.5-0.5b-1x1024-r8", "gemma3-1b-4x2048-r64-drop0.05"),
    *("llama3.2-1b-1x8192-r128", "llama3.2-1b-1x32768-r16-gc", "qwen3-1.7b-8x1024-r16-4bit"),
    *("phi3-mini-1x4096-r16", "phi3-mini-4x2048-r64-gc", "qwen3-4b-1x16384-r16-4bit-gc"),
    *("mistral-7b-1x4096-r64-drop0.1", "llama3.1-8b-1x8192-r16", "llama3.1-8b-4x2048-r128-gc"),
    *("llama3.1-8b-1x32768-r16-gc", "mistral-7b-2x4096-r16-4bit-gc"),
)
GC_HERE = {"use_gradient_checkpointing": True}
OSS = [*SEVEN[:4], "gate_up_proj", "down_proj"]


@cache
def sweep():
    text = (RESULTS / "sweep-h100-2026-11-26.json").read_text(encoding="utf-8")
    return {point["point"]: point for point in json.loads(text)["points"]}


def estimate(folder, shape, tokens, gpu=H100, rows=1, **options):
    packed = {"quantization_config": {"quant_method": "mxfp4"}} if options.pop("packed", False) else {}
    shape.config(**packed).save_pretrained(folder)
    values = {"model_name": str(folder), "max_seq_length": tokens, "per_device_train_batch_size": rows}
    values |= {"gradient_accumulation_steps": 1, "target_modules": list(shape.projections)}
    if options.get("tuning") == "full":
        values["target_modules"] = None
    return estimate_run(changed(TrainOptions(), values | options), gpu)


@pytest.mark.parametrize("name", SWEEP)
def test_estimates_measured_peaks_of_adapters(name, tmp_path):
    point = sweep()[name]
    options = {"r": point["rank"], "lora_dropout": point["dropout"]}
    options |= (NF4 if point["base"] == "4-bit" else {}) | (GC if point["checkpointing"] else {})
    shape = PUBLISHED[point["shape"]]
    run = estimate(tmp_path, shape, point["row_tokens"], rows=point["rows"], **options)
    near = 0.1 if point["checkpointing"] else 0.04  # less is known of recomputed layers
    assert run.memory.peak / GIB == pytest.approx(point["results"]["ours"]["peak_GiB"], rel=near)


@table(
    ("shape", "tokens", "options", "measured"),
    [  # compare.py on H100s, but for full fine-tuning: full-h200-2026-11-25, full-8b- and full-one-gpu-h100
        (PUBLISHED["llama3.1-8b"], 8192, {"load_in_fp8": True}, 32.98),
        (replace(A3B, layers=8), 4096, NF4 | GC | {"r": 8}, 5.57),
        (replace(A3B, layers=8), 4096, {}, 14.95),
        (IN_MXFP4["gpt-oss-20b"], 4096, GC | {"r": 8, "target_modules": SEVEN[:4]}, 39.9),
        (PUBLISHED["qwen2.5-0.5b"], 2048, FULL, 5.30),
        (PUBLISHED["llama3.2-3b"], 8192, FULL | {"masters_on_host": True}, 24.50),
        (PUBLISHED["llama3.1-8b"], 8192, FULL | {"optim": "adamw_8bit"}, 61.91),
    ],
)
def test_estimates_measured_peaks_of_large_models(shape, tokens, options, measured, tmp_path):
    assert estimate(tmp_path, shape, tokens, **options).memory.peak / GIB == pytest.approx(measured, rel=0.1)


@table(
    ("shape", "options", "processes", "measured"),
    [  # large-h200-2026-11-28, and ranks-peers- of that day
        (A3B, {"r": 16}, 1, 75.68),
        (A3B, NF4 | GC | {"r": 8}, 1, 21.19),
        (LARGE["qwen3-32b"], NF4 | GC, 1, 20.60),
        (LARGE["llama70b"], NF4, 1, 45.08),
        (LARGE["llama70b"], {"fsdp": "full"}, 2, 79.98),
        (LARGE["llama70b"], NF4 | {"fsdp": "full"}, 2, 30.42),
        (IN_MXFP4["gpt-oss-20b"], {"r": 8, "target_modules": OSS, "packed": True}, 1, 16.70),
        (IN_MXFP4["gpt-oss-20b"], NF4 | {"r": 8, "target_modules": OSS, "packed": True}, 1, 15.30),
    ],
)
def test_estimates_measured_peaks_of_whole_models(shape, options, processes, measured, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    peak = estimate(tmp_path, shape, 4096, **GC_HERE | options).memory.peak
    assert peak / GIB == pytest.approx(measured, rel=0.05)


def test_an_adapter_is_whole_in_every_process(tmp_path, monkeypatch):
    memory = []
    for processes in ("1", "4"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        memory.append(estimate(tmp_path, PUBLISHED["llama3.1-8b"], 2048, fsdp="full").memory)
    alone, of_four = memory
    assert (of_four.trained, of_four.moments) == (alone.trained, alone.moments)
    assert of_four.weights < 0.5 * alone.weights
