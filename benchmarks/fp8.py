"""The exactness of load_in_fp8, beside bfloat16 and NF4: against float64, and over 200 training steps.

    python benchmarks/fp8.py --dataset alpaca_en_demo.json [--json PATH] [--steps 200] [--seeds 3]

error   The relative error (norm over norm) of the logits and of all LoRA gradients against float64, for a
        Llama of four layers of the 8B shape, with random weights that bfloat16 holds exactly.
curve   The bundled model is trained on the data in packed rows of 2,048: in bfloat16 with several seeds (of
        the data order and the adapter), and in fp8 and NF4 with the first seed. Shown is the largest distance
        of each smoothed loss from the mean of the bfloat16 seeds.
"""

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from unsloth_pack import FastLanguageModel
from unsloth_pack.lora.quantised import quantize_to_fp8

SHAPE = dict(vocab_size=4096, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4)
SHAPE |= dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2048)
LENGTHS = [700, 30, 294]
SMOOTHED_OVER = 20  # steps
KINDS = ("bfloat16", "fp8", "nf4")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, help="alpaca rows, as json")
    parser.add_argument("--json", type=Path, help="also write every number here")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/fp8.py needs a GPU with fp8", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers)},
        "error": error_table(),
        "curve": curve_table(args.dataset, args.steps, args.seeds),
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def error_table() -> dict[str, dict[str, float]]:
    ids = torch.randint(0, SHAPE["vocab_size"], (1, sum(LENGTHS)), device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).save_pretrained(folder)
        exact = outcome(folder, "float64", ids)
        table = {}
        print(f"\n{'error against float64':<24}{'logits':>12}{'gradients':>12}")
        for kind in KINDS:
            got = outcome(folder, kind, ids)
            table[kind] = {name: distance(got[name], exact[name]) for name in exact}
            print(f"{kind:<24}{table[kind]['logits']:>12.2e}{table[kind]['gradients']:>12.2e}")
    return table


def outcome(folder: str, kind: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of one adapter, in float64."""
    dtype = torch.float64 if kind == "float64" else torch.bfloat16
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    options = {"dtype": dtype, "device_map": {"": 0}, "quantization_config": nf4 if kind == "nf4" else None}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).requires_grad_(False)
    if kind == "fp8":
        quantize_to_fp8(model.get_decoder().layers)
    model = FastLanguageModel.get_peft_model(model, r=16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "lora_" in name:
                noise = 0.02 * torch.randn(weight.shape, generator=generator)
                weight.data = noise.to(weight.device, dtype if dtype == torch.float64 else torch.float32)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype != torch.float64):
        out = model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS)
    out.loss.backward()
    grads = [p.grad.double().flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
    result = {"logits": out.logits.detach().double(), "gradients": torch.cat(grads)}
    del model, out
    torch.cuda.empty_cache()
    return result


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def curve_table(dataset: str, steps: int, seeds: int) -> dict[str, Any]:
    curves = {f"bfloat16, seed {seed}": losses(dataset, steps, seed, {}) for seed in range(seeds)}
    mean = np.mean([smooth(curve) for curve in curves.values()], axis=0)
    curves["fp8, seed 0"] = losses(dataset, steps, 0, {"load_in_fp8": True})
    curves["nf4, seed 0"] = losses(dataset, steps, 0, {"load_in_4bit": True})
    print(f"\n{f'loss over {steps} steps':<24}{'last':>9}{'farthest from the mean of the seeds':>38}")
    table = {}
    for name, curve in curves.items():
        smoothed = smooth(curve)
        farthest = float(np.abs(smoothed - mean).max())
        table[name] = {"losses": curve, "farthest": farthest}
        print(f"{name:<24}{smoothed[-1]:>9.4f}{farthest:>38.4f}")
    return table


def losses(dataset: str, steps: int, seed: int, loaded: dict[str, Any]) -> list[float]:
    from unsloth_pack.cli import main as run

    flags = {"max_steps": steps, "random_state": seed, "seed": seed, "max_seq_length": 2048, **loaded}
    flags |= {"gradient_accumulation_steps": 1, "learning_rate": 2e-3, "per_device_train_batch_size": 1}
    with tempfile.TemporaryDirectory() as folder:
        flags |= {"dataset": dataset, "output_dir": f"{folder}/run", "dtype": "bfloat16"}
        if run(["--sample_packing", *(f"--{name}={value}" for name, value in flags.items())]):
            raise SystemExit("a run failed")
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "log" and "loss" in line]


def smooth(curve: list[float]) -> np.ndarray:
    return np.convolve(curve, np.full(SMOOTHED_OVER, 1 / SMOOTHED_OVER), mode="valid")


if __name__ == "__main__":
    sys.exit(main())
