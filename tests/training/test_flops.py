"""FLOPs of training, against torch's counter; the rate beside the peak of a chip."""

import math
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from late_metrics_runs import run_trainer
from peft import LoraConfig, get_peft_model
from tables import table
from tiny import tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, TrainerCallback

from unsloth_pack import patch_model
from unsloth_pack.cuda_graphs.capture_decision import DeviceTimer
from unsloth_pack.memory.checkpointing import enable_checkpointing
from unsloth_pack.packed_row.padded_batch import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.patching import deferred_logging
from unsloth_pack.training.chips import Chips, peak_flops
from unsloth_pack.training.flops import ModelFlops, count_keys
from unsloth_pack.training.updates import TokenCounts

CPU, TOKENS = torch.device("cpu"), 64
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_ATTENTION = LINEAR[:4]
LORA = {"r": 4, "target_modules": LINEAR}


def product(_, a, b, **__):
    return 2 * math.prod(a) * b[-1]


def counted(run):
    """FLOPs by torch's counter: all, and those of batched products; it passes over products in place."""
    mode = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product})
    with mode:
        run()
    by_operator = Counter({str(op): n for op, n in mode.get_flop_counts()["Global"].items()})
    return by_operator.total(), by_operator["aten.bmm"]


def ids(n_tokens=TOKENS):
    return torch.randint(1, 200, (1, n_tokens), generator=torch.Generator().manual_seed(0))


@table(
    ("arch", "lora", "n_frozen", "overrides"),
    [
        ("llama", None, 0, {"num_key_value_heads": 4}),
        ("llama", LORA, 0, {"num_key_value_heads": 1}),
        ("llama", LORA | {"layers_to_transform": [1]}, 0, {}),
        ("llama", {"r": 4, "target_modules": ["down_proj"]}, 0, {}),
        ("llama", {"r": 4, "target_modules": [*LINEAR, "lm_head"]}, 0, {}),
        ("qwen3", None, 0, {"tie_word_embeddings": True}),
        ("qwen3", None, 1, {"tie_word_embeddings": False}),
        ("gemma2", LORA, 0, {"sliding_window": TOKENS}),
        ("gemma4_text", LORA, 0, {"sliding_window": TOKENS}),
        ("deepseek_v3", None, 0, {}),
        ("qwen3_moe", None, 0, {}),
        ("qwen3_moe", {"r": 4, "target_modules": OF_ATTENTION}, 0, {"sliding_window": TOKENS}),
        ("gpt_oss", {"r": 4, "target_modules": OF_ATTENTION}, 0, {"sliding_window": TOKENS}),
    ],
)
def test_model_flops_are_those_that_torch_counts(arch, lora, n_frozen, overrides):
    """The counter takes every pair of positions, which causal attention sees half of."""
    config = tiny_config(arch, attn_implementation="eager", **overrides)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    if lora is not None:
        model = get_peft_model(model, LoraConfig(**lora))
    if n_frozen:
        model.get_input_embeddings().requires_grad_(False)
        model.get_decoder().layers[:n_frozen].requires_grad_(False)

    def step():
        model(input_ids=ids(), use_cache=False).logits.square().mean().backward()

    expected, of_attention = counted(step)
    assert of_attention
    flops, _ = ModelFlops(model).count(torch.full((TOKENS,), TOKENS), None)
    assert flops == pytest.approx(expected, rel=0.01)
    if not n_frozen and lora in (None, LORA):
        _, passed = counted(lambda: model(input_ids=ids(), use_cache=False))
        forward, _ = ModelFlops(model).count(torch.full((TOKENS,), TOKENS), None, trains=False)
        assert passed
        assert forward < 0.51 * flops


def test_an_expert_adapter_counts_for_the_chosen_experts():
    """6 r (in + out) for each of them; PEFT doubles the rank of gate and up."""
    model = tiny_model("qwen3_moe", device="cpu")
    without, _ = ModelFlops(model).count(torch.ones(1), None)
    config = model.config
    adapters = [n for name, n in model.named_parameters() if "experts" in name and "lora_" in name]
    assert adapters
    for adapter in adapters:
        adapter.requires_grad_(False)
    frozen, _ = ModelFlops(model).count(torch.ones(1), None)
    share = config.num_experts_per_tok / config.num_experts
    assert without - frozen == pytest.approx(2 * share * sum(n.numel() for n in adapters))


@table("mode", [False, True])
def test_hardware_flops_are_those_of_a_patched_model(mode):
    """Attention, which the counter does not know on a CPU, is left out on both sides."""
    lengths = [30, 50, 48]
    model = tiny_model("llama", device="cpu", vocab_size=512)
    patch_model(model, "sdpa")
    model.get_base_model().get_decoder().leak_probe = None  # it runs the model too
    enable_checkpointing(model, mode)
    model.train()
    labels = ids(sum(lengths))
    labels[:, ::2] = -100  # and so every first token

    def step():
        model(input_ids=ids(sum(lengths)), packed_seq_lengths=lengths, labels=labels).loss.backward()

    flops = ModelFlops(model)
    n_labels = int((labels != -100).sum())
    plain, packed = flops.count(torch.ones(sum(lengths)), n_labels)
    _, one_pair = flops.count(torch.ones(1), 0)
    _, two_pairs = flops.count(torch.full((1,), 2.0), 0)
    packed -= sum(lengths) * (two_pairs - one_pair)
    expected, _ = counted(step)
    assert packed == pytest.approx(expected, rel=0.01)
    assert (packed > plain) == mode  # half of the tokens have no label


def visible(lengths, window, parent=None):
    """Pairs of a query and a key that it sees, one by one."""
    above = [0] * len(lengths)
    for i, p in enumerate(parent or ()):
        above[i] = above[p] + lengths[p] if p >= 0 else 0
    each = [a + i + 1 for n, a in zip(lengths, above, strict=True) for i in range(n)]
    return sum(min(n, window) for n in each)


def test_attention_counts_visible_pairs_of_documents():
    """Windows of the layers, branches of a prompt, padding, and batches that nobody has described."""
    model = tiny_model("gemma2", device="cpu", sliding_window=8)
    flops = ModelFlops(model)
    token, _ = flops.count(torch.ones(1), None)
    both, _ = flops.count(torch.full((1,), 2.0), None)
    pairs = both - token  # of a pair in all layers
    full = (
        flops.count(torch.full((1,), 10.0), None)[0] - flops.count(torch.full((1,), 9.0), None)[0]
    ) / pairs
    assert 0 < full < 1  # of the layers without a window
    rng = np.random.default_rng(0)
    lengths = tuple(rng.integers(1, 40, 6).tolist())
    parent = (-1, 0, 0, -1, 3, -1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batches = {
        "packed": ({"packed_row": PackedRow.of_lengths(lengths, CPU)}, None),
        "branches": ({"packed_row": PackedRow.of_lengths(lengths, CPU, parent)}, parent),
        "padded": ({"packed_row": PaddedBatch.of_mask(mask.numpy(), CPU)}, None),
        "mask": ({"attention_mask": mask.long()}, None),
        "left": ({"attention_mask": mask.long().flip(1)}, None),
        "positions": ({"position_ids": positions}, None),
    }
    for name, (batch, of) in batches.items():
        n_pairs = full * visible(lengths, 10**9, of) + (1 - full) * visible(lengths, 8, of)
        expected = (token - pairs) * sum(lengths) + pairs * n_pairs
        assert flops.count(count_keys(batch), None)[0] == pytest.approx(expected), name


def test_passes_of_a_teacher_are_added():
    """Two micro-batches on each of two processes, of 60 labels in all."""
    model, teacher = (tiny_model("llama", device="cpu", seed=seed) for seed in (0, 1))
    patch_model(model, "sdpa")
    row = {"packed_row": PackedRow.of_lengths((20, 12), CPU), "input_ids": ids(32)}
    both = SimpleNamespace(num_processes=2, device=CPU, reduce=lambda sums: 2 * sums)
    args = SimpleNamespace(device=CPU, world_size=2)

    def flops(frozen):
        counts = TokenCounts(model, args)
        counts.add([row, row], 60, frozen, both)
        assert (counts.trained.tokens, counts.trained.counted) == (2 * 2 * 32, 60)
        return counts.trained.model_flops, counts.trained.hardware_flops

    keys = torch.tensor([*range(1, 21), *range(1, 13)])
    alone, beside = flops([]), flops([(teacher, row), (model, row)])
    expected = ModelFlops(model).count(keys, 15)
    assert alone == tuple(4 * n for n in expected)
    of_teacher, of_reference = (ModelFlops(each).count(keys, 15, trains=False) for each in (teacher, model))
    assert beside[0] - alone[0] == 2 * (of_teacher[0] + of_reference[0])
    assert beside[1] - alone[1] == 2 * of_reference[1]  # the teacher is not patched
    assert 0 < of_reference[1] < of_reference[0] == of_teacher[0]


@table(
    ("name", "in_fp8", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", False, 989.5),
        ("NVIDIA H100 80GB HBM3", True, 1979.0),
        ("NVIDIA H100 PCIe", False, 756.5),
        ("NVIDIA GH200 480GB", False, 989.5),
        ("NVIDIA A100-SXM4-80GB", False, 312.0),
        ("NVIDIA A100-SXM4-80GB", True, None),
        ("NVIDIA L4", False, 121.0),
        ("NVIDIA L40S", False, 362.05),
        ("Tesla T4", False, 65.0),
        ("NVIDIA GeForce RTX 4090", True, 330.3),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", False, None),
        ("NVIDIA GeForce RTX 4090 D", False, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", False, None),
        ("NVIDIA A10G", False, None),
        ("some chip", False, None),
    ],
)
def test_the_peak_of_a_chip(name, in_fp8, tflops):
    assert peak_flops(name, in_fp8) == (None if tflops is None else tflops * 1e12)


def test_shares_of_the_peak():
    """Two devices at 3 model and 5 hardware TFLOP/s each, of 10."""
    rates = Chips(2, 10e12).utilisation(12e12, 20e12, 2.0)
    assert rates == {"tflops": 3.0, "mfu": pytest.approx(0.3), "hfu": pytest.approx(0.5)}
    assert Chips(2, None).utilisation(12e12, 20e12, 2.0) == {"tflops": 3.0}
    assert Chips(1, 10e12).utilisation(12e12, 0, 2.0) == {"tflops": 6.0, "mfu": pytest.approx(0.6)}


class Marks(TrainerCallback):
    """A device that takes a second an update, and the FLOPs of all updates so far."""

    def __init__(self):
        self.trainer, self.flops = None, [0.0]

    def on_step_end(self, *_, **__):
        self.flops.append(float(self.trainer.counts.sums["model_flops"]))


def test_a_log_line_takes_the_time_of_its_updates_on_the_device(tmp_path, monkeypatch):
    """Those of updates that are saved are not written late."""
    marks = Marks()
    monkeypatch.setattr(DeviceTimer, "mark", lambda _: len(marks.flops))
    monkeypatch.setattr(DeviceTimer, "between", lambda _, start, end: end - start)
    monkeypatch.setattr(deferred_logging, "is_on_gpu", lambda _: True)
    saved = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no", "logging_steps": 1}
    marks.trainer = run_trainer(tmp_path, True, marks, **saved)
    marks.trainer.train()
    told = [line["tflops"] * 1e12 for line in marks.trainer.state.log_history if "loss" in line]
    assert told == pytest.approx([after - before for before, after in pairwise(marks.flops)])
