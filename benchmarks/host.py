"""Python's share of a captured training step: the milliseconds that each part of it takes on the host.

    python benchmarks/host.py [--against FOLDER] [--layers 24] [--steps 60] [--rounds 3] [--json PATH]

Needs no GPU. A model of many narrow layers with an adapter on every projection trains: under TRL's
SFTTrainer, under the trainer of `unsloth-pack train`, and in a bare loop. What would be replayed from CUDA
graphs is replaced by static tensors: the row is described, copied and checked, and gradients are handed out,
but the layers compute nothing.
Times are of the processor, so that other processes on the machine hardly count. With --against, another
checkout of unsloth_pack is measured in turns with this one. Each part is the median over steps, of the best
round. Parts lie within one another: `step` holds all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

ROOT = Path(__file__).resolve().parents[1]
TOKENS, DOCUMENTS, VOCAB = 2048, 12, 32
COLD = 10  # steps that do not count
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--against", type=Path, help="the folder of another checkout")
    add("--layers", type=int, default=24, help="of the model (default: 24)")
    add("--steps", type=int, default=60, help="that count, of a run (default: 60)")
    add("--rounds", type=int, default=3, help="runs of each checkout (default: 3)")
    add("--json", type=Path, help="also write every number here")
    add("--run", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(args.layers, args.steps)))
        return 0
    folders = {"here": ROOT} | ({"against": args.against.resolve()} if args.against else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(args.rounds):
        for name, folder in folders.items():
            rounds[name].append(run_in(folder, args))
    best = {
        name: {part: min(one[part] for one in found) for part in found[0]} for name, found in rounds.items()
    }
    print(f"{'ms a step':<40}" + "".join(f"{name:>10}" for name in best))
    for part in best["here"]:
        print(f"{part:<40}" + "".join(f"{best[name].get(part, float('nan')):>10.3f}" for name in best))
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1) + "\n")
    return 0


def run_in(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """The parts of one run over the checkout in this folder."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, "--run", f"--layers={args.layers}", f"--steps={args.steps}"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# One run


class Parts:
    """The milliseconds of each part, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time a method or function wherever `owner` is asked for it."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                if self.steps:
                    self.steps[-1][part] += 1e3 * (time.thread_time() - start)

        setattr(owner, name, timed)

    @contextmanager
    def step(self) -> Any:
        """Goes around a step."""
        self.steps.append(defaultdict(float))
        start = time.thread_time()
        yield
        self.steps[-1]["step"] = 1e3 * (time.thread_time() - start)

    def medians(self, prefix: str) -> dict[str, float]:
        """Of every part, over the steps that count."""
        steps = self.steps[COLD:-1]
        parts = dict.fromkeys(["step", *(part for step in steps for part in step)])
        return {f"{prefix}: {part}": statistics.median(step[part] for step in steps) for part in parts}


def run(layers: int, steps: int) -> dict[str, float]:
    """The parts of a step under each trainer."""
    found = {}
    for prefix, train in (("TRL", train_with_trl), ("run", train_as_a_run), ("bare loop", train_in_a_loop)):
        model = make_model(layers)
        parts = Parts()
        watch(parts, model)
        train(model, parts, COLD + steps + 1)
        found |= parts.medians(prefix)
    return found


def make_model(layers: int) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen2Config

    import unsloth_pack

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    base = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    unsloth_pack.patch_model(model)
    decoder: Any = model.get_base_model().get_decoder()
    decoder.leak_probe = None
    replay_nothing(decoder.step_graphs)
    return model


def replay_nothing(graphs: Any) -> None:
    """Capture shapes as on a GPU, in graphs whose replay computes nothing."""
    import torch

    from unsloth_pack.cuda_graphs import step as step_graphs
    from unsloth_pack.layers.mixers import attention

    captured_shape = step_graphs.CapturedShape
    instead = {
        **dict.fromkeys(("CUDAGraph", "Stream", "current_stream"), lambda: MagicMock(replay=lambda: None)),
        **dict.fromkeys(("graph", "use_mem_pool", "stream"), lambda *_, **__: nullcontext()),
        **dict.fromkeys(("set_stream", "empty_cache"), lambda *_: None),
        "current_device": lambda: 0,
    }

    def capture(*args: Any) -> Any:
        zeros = torch.zeros
        with ExitStack() as stack:
            for name, value in instead.items():
                stack.enter_context(patch.object(torch.cuda, name, value))

            def on_host(*shape: Any, **at: Any) -> torch.Tensor:
                return zeros(*shape, **{**at, "device": "cpu"})

            stack.enter_context(patch.object(torch, "zeros", on_host))
            # The CPU's own reads the row on the host, which a static one does not describe
            stack.enter_context(patch.object(attention, "attend", lambda q, k, v, *_: q + k.sum() + v.sum()))
            return captured_shape(*args)

    step_graphs.CapturedShape = capture
    graphs.why_never = graphs.why_not = None


def watch(parts: Parts, model: Any) -> None:
    """Name the parts of a step that are timed."""
    from unsloth_pack.cuda_graphs.capture import CapturedShape, DecoderState
    from unsloth_pack.cuda_graphs.shapes import ShapeBucket
    from unsloth_pack.layers import causal_lm
    from unsloth_pack.packed_row.row import PackedRow

    for owner, name, part in (
        (causal_lm, "take_row", "describe the row"),
        (causal_lm, "StepLabels", "labels checked and masked"),
        (causal_lm, "LabelledHead", "labels counted"),
        (DecoderState, "matches", "is the decoder as captured"),
        (ShapeBucket, "of", "shape of the row"),
        (PackedRow, "fill", "fill the static row"),
        (CapturedShape, "launch", "launch the forward graph"),
        (CapturedShape, "output", "gradients of what was launched"),
        (type(model), "forward", "model forward"),
        (type(model), "train", "model.train"),
        (type(model), "zero_grad", "model.zero_grad"),
    ):
        parts.wrap(owner, name, part)


def train_in_a_loop(model: Any, parts: Parts, steps: int) -> None:
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    for number in range(steps):
        row = make_row(number)
        ids = torch.tensor([row["input_ids"]])
        positions = torch.cat([torch.arange(length) for length in row["seq_lengths"]])[None]
        with parts.step():
            model.train()
            loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
            start = time.thread_time()
            loss.backward()
            parts.steps[-1]["backward"] += 1e3 * (time.thread_time() - start)
            start = time.thread_time()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            parts.steps[-1]["clip"] += 1e3 * (time.thread_time() - start)
            start = time.thread_time()
            optimizer.step()
            parts.steps[-1]["optimizer"] += 1e3 * (time.thread_time() - start)
            model.zero_grad()


def train_with_trl(model: Any, parts: Parts, steps: int) -> None:
    from trl import SFTConfig, SFTTrainer

    def make(folder: str, rows: Any, callbacks: list[Any]) -> Any:
        own = {"padding_free": True, "max_length": None, "use_cpu": True, "bf16": False, "disable_tqdm": True}
        config = SFTConfig(folder, **own, gradient_checkpointing=False, **arguments(steps))
        given = {"processing_class": tokenizer(), "callbacks": callbacks}
        return SFTTrainer(model=model, args=config, train_dataset=rows, **given)

    train(make, parts, steps)


def train_as_a_run(model: Any, parts: Parts, steps: int) -> None:
    import torch

    from unsloth_pack.training.trainer import make_trainer
    from unsloth_pack.training.trl_setup import sft_config

    def make(folder: str, rows: Any, callbacks: list[Any]) -> Any:
        config = sft_config(folder, padding_free=True, dtype=torch.float32, **arguments(steps))
        return make_trainer(model, tokenizer(), config, rows, None, callbacks)

    train(make, parts, steps)


def arguments(steps: int) -> dict[str, Any]:
    """Of transformers' `TrainingArguments`."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "optim": "adamw_torch_fused",
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
    }


def train(make: Callable[[str, Any, list[Any]], Any], parts: Parts, steps: int) -> None:
    """Train with the trainer that `make` makes of a folder, rows and callbacks."""
    from datasets import Dataset
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        inside: Any = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.inside = parts.step()
            self.inside.__enter__()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.start = time.thread_time()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            parts.steps[-1]["optimizer"] += 1e3 * (time.thread_time() - self.start)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.inside.__exit__(None, None, None)

    rows = Dataset.from_list([make_row(number) for number in range(steps)])
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(folder, rows, [Clock()])
        parts.wrap(trainer.accelerator, "backward", "backward")
        parts.wrap(trainer, "_clip_grad_norm", "clip")
        parts.wrap(trainer, "compute_loss", "compute_loss")
        parts.wrap(trainer, "floating_point_ops", "count of parameters")
        sys.stdout, out = sys.stderr, sys.stdout
        try:
            trainer.train()
        finally:
            sys.stdout = out


def make_row(number: int) -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(number)
    cuts = np.sort(random.choice(np.arange(1, TOKENS), DOCUMENTS - 1, replace=False))
    lengths = np.diff([0, *cuts, TOKENS]).tolist()
    ids = random.integers(3, VOCAB, TOKENS).tolist()
    return {"input_ids": ids, "labels": ids, "seq_lengths": lengths}


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"[PAD]": 0, "[EOS]": 1, "[UNK]": 2}, unk_token="[UNK]")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )


if __name__ == "__main__":
    raise SystemExit(main())
