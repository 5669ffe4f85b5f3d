"""Routed experts with LoRA: the time and memory of one layer, and what all of Qwen3-30B-A3B takes.

    python benchmarks/experts.py [--json PATH] [--tokens 4096] [--layers 4 8 12] [--small]

layer   Forward and backward pass of one layer's experts with LoRA of rank 16 on both stacks, in bfloat16:
        fused with gate and up kept or computed again, over weights in NF4 and in fp8, and PEFT's own forward
        over transformers' grouped GEMM. The median of the runs, and the peak of memory above what is held.
model   A training step of Qwen3-30B-A3B cut to a few layers, with AdamW, in 16 bits, and with its experts
        (96 % of the weights) in NF4: its time and peak. Both grow by the same amount with each layer, so 48
        layers are extrapolated from the first two numbers of layers. The others are measured too, to show
        how far such a line is off.

`--small` runs tiny sizes on any device, to see that the script works.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from unsloth_pack import FastLanguageModel, patch_model
from unsloth_pack.layers.layer import GateAndUpPlan
from unsloth_pack.layers.moe import FastExperts, FastExpertsLora, read_gate
from unsloth_pack.lora.expert_stacks import is_expert_adapter, is_experts, quantise_experts, quantise_stacks

RANK, RUNS, WARM_UPS = 16, 20, 5
LAYER = ["experts.gate_up_proj", "experts.down_proj"]
QWEN3_30B = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], head_dim=128,
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=40960, tie_word_embeddings=False,
)  # fmt: skip
ALL_LAYERS = 48
SMALL = QWEN3_30B | dict(vocab_size=512, hidden_size=64, moe_intermediate_size=64, num_experts=8)
SMALL |= dict(num_experts_per_tok=2, num_attention_heads=4, head_dim=16)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write every number here")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 12], help="of the model, two or more")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    args = parser.parse_args()
    if not (args.small or torch.cuda.is_available()):
        print("benchmarks/experts.py needs a GPU; --small runs tiny sizes on a CPU", file=sys.stderr)
        return 2
    if len(args.layers) < 2:
        print(f"--layers is {args.layers}; give two numbers or more", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, peft)},
        "tokens": args.tokens,
        "layer": layer_table(args.tokens, args.small),
        "model": model_table(args.tokens, args.layers, args.small),
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


# One layer


def layouts(is_small: bool) -> dict[str, tuple[Callable[[], nn.Module], int, int]]:
    """The experts of a layer, the width of a token, and how many experts each goes to."""
    if is_small:
        qwen = Qwen3MoeConfig(num_experts=8, hidden_size=64, moe_intermediate_size=64)
        oss = GptOssConfig(num_local_experts=4, hidden_size=64, intermediate_size=64)
        return {
            "qwen3": (lambda: Qwen3MoeExperts(qwen), 64, 2),
            "gpt_oss": (lambda: GptOssExperts(oss), 64, 2),
        }
    qwen = Qwen3MoeConfig(num_experts=128, hidden_size=2048, moe_intermediate_size=768)
    oss = GptOssConfig(num_local_experts=32, hidden_size=2880, intermediate_size=2880)
    return {
        "qwen3-30b-a3b, 8 of 128": (lambda: Qwen3MoeExperts(qwen), 2048, 8),
        "gpt_oss-20b, 4 of 32": (lambda: GptOssExperts(oss), 2880, 4),
    }


class Layer(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, index, weights)


def adapted(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    experts = make().to(device(), torch.bfloat16)
    experts.config._experts_implementation = "grouped_mm"
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=LAYER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(Layer(experts), config)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, std=0.02 if "lora_" not in name else 0.01)
    return model


def fused(model: Any, keep: bool, kind: str | None) -> Any:
    """The model with the classes that a patch gives its modules."""
    model = copy.deepcopy(model)
    layer = SimpleNamespace(gradient_checkpointing=not keep, _gradient_checkpointing_func=None)
    for one in list(model.modules()):
        if is_experts(one):
            if kind:
                quantise_stacks(one, kind)
            own = dict(gate=read_gate(one), gate_module=getattr(one, "act_fn", None), number=0)
            vars(one).update(own, decoder_layer=layer, gate_and_up_plan=GateAndUpPlan([]))
            one.__class__ = type("Experts", (FastExperts, type(one)), {})
        elif is_expert_adapter(one):
            one.__class__ = type("Adapter", (FastExpertsLora, type(one)), {})
    return model


def layer_table(tokens: int, is_small: bool) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, (make, width, k) in layouts(is_small).items():
        model = adapted(make)
        n_experts = len(model.get_base_model().experts.get_base_layer().down_proj)
        print(f"\n{name}, {tokens} tokens{'':<20}{'ms':>10}{'peak GiB':>10}")
        kinds = {
            "PEFT's own": lambda model=model: model,
            "fused, kept": lambda model=model: fused(model, True, None),
            "fused, computed again": lambda model=model: fused(model, False, None),
            "fused, NF4": lambda model=model: fused(model, True, "nf4"),
            "fused, fp8": lambda model=model: fused(model, True, "fp8"),
        }
        for kind, prepared in kinds.items():
            row = time_layer(prepared(), tokens, width, n_experts, k)
            table[f"{name}: {kind}"] = row
            print(f"  {kind:<38}{row['ms']:>10.2f}{row['peak_GiB']:>10.2f}")
    return table


def time_layer(model: Any, tokens: int, width: int, n_experts: int, k: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(tokens, n_experts, generator=generator)
    weights, index = (part.to(device()) for part in scores.softmax(-1).topk(k))
    x = torch.randn(tokens, width, generator=generator).to(device(), torch.bfloat16).requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        y = model(x, index, weights.to(torch.bfloat16))
        torch.autograd.grad(y, [x, *trained], torch.ones_like(y))

    return timed(step)


# The model


def model_table(tokens: int, layers: list[int], is_small: bool) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for bits in (16, 4):
        rows: dict[Any, dict[str, float]] = {}
        for n in layers:
            rows[n] = time_model(tokens, n, bits, is_small)
            gc.collect()  # the graph of modules is a cycle
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        print(f"\nQwen3-30B-A3B in {bits} bits, {tokens} tokens a step{'':<12}{'ms':>10}{'peak GiB':>10}")
        for n, row in rows.items():
            print(f"  {n} layers, measured{'':<31}{row['ms']:>10.1f}{row['peak_GiB']:>10.2f}")
        lines = {name: line_through(layers[:2], rows, name) for name in ("ms", "peak_GiB")}
        source = f"extrapolated from {layers[0]} and {layers[1]}"
        for n in (*layers[2:], ALL_LAYERS):
            row = {name: line(n) for name, line in lines.items()}
            rows[f"{n} extrapolated"] = row
            print(f"  {n} layers, {source}{'':<12}{row['ms']:>10.1f}{row['peak_GiB']:>10.2f}")
        table[f"{bits} bits"] = rows
    return table


def line_through(two: list[int], rows: dict[Any, Any], name: str) -> Callable[[int], float]:
    first, second = (rows[n][name] for n in two)
    slope = (second - first) / (two[1] - two[0])
    return lambda n: first + slope * (n - two[0])


def time_model(tokens: int, n_layers: int, bits: int, is_small: bool) -> dict[str, float]:
    sizes = SMALL if is_small else QWEN3_30B
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=n_layers, **sizes)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    if bits == 4:
        quantise_experts(model.get_decoder().layers, "nf4")
    patch_model(model)
    model = FastLanguageModel.get_peft_model(model, r=RANK)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=torch.cuda.is_available())
    lengths = [tokens // 4] * 4
    ids = torch.randint(0, sizes["vocab_size"], (1, sum(lengths)), device=device())

    def step() -> None:
        with torch.autocast(device(), torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, packed_seq_lengths=lengths).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, with_what_is_held=True)


def timed(step: Callable[[], None], with_what_is_held: bool = False) -> dict[str, float]:
    """Median milliseconds, and the peak of memory, above what is held already unless that is asked for."""
    for _ in range(WARM_UPS):
        step()
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        step()
        return {"ms": 1e3 * (time.perf_counter() - begun), "peak_GiB": 0.0}
    held = 0 if with_what_is_held else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(RUNS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        step()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return {"ms": statistics.median(times), "peak_GiB": (torch.cuda.max_memory_allocated() - held) / 2**30}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
