"""The first step is rehearsed so that its kernels are compiled side by side, and training does not notice."""

import gc
import logging
import threading
import weakref

import pytest
import torch
from tiny import patched, random_documents

from unsloth_pack.kernels import launch
from unsloth_pack.kernels.launch import compile_in_parallel
from unsloth_pack.layers import kernel_warmup

IDS = torch.cat(random_documents([9, 14, 5]))[None]
ROW = {"input_ids": IDS, "labels": IDS, "packed_seq_lengths": [9, 14, 5]}


@pytest.fixture
def passes(monkeypatch):
    """The layers that were rehearsed, one list for each pass: on a CPU nothing is rehearsed otherwise."""
    seen, forward = [], kernel_warmup.packed_forward

    def record(decoder, *args, only=None, **asked):
        seen.append(list(only))
        return forward(decoder, *args, only=only, **asked)

    monkeypatch.setattr(kernel_warmup, "_compiles_for", lambda device: True)
    monkeypatch.setattr(kernel_warmup, "packed_forward", record)
    return seen


def steps(arch="llama", rows=(ROW, ROW), **overrides):
    """Losses, gradients and the next random number, of steps in a bare loop."""
    torch.manual_seed(0)
    model = patched(arch, lora={"lora_dropout": 0.0 if arch == "qwen3_moe" else 0.2}, **overrides)
    losses = []
    for row in rows:
        loss = model(**row).loss
        loss.backward()
        losses.append(loss.item())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return losses, gradients, torch.rand(1).item()


@pytest.mark.parametrize("arch", ["gemma3_text", "qwen3_moe", "lfm2", "gemma4_text"])
def test_a_rehearsed_step_has_the_same_bits(arch, passes, monkeypatch):
    losses, gradients, number = steps(arch)
    assert len(passes) == 1  # of two steps
    monkeypatch.setattr(kernel_warmup, "_compiles_for", lambda device: False)
    expected_losses, expected_gradients, expected_number = steps(arch)
    assert losses == expected_losses
    assert number == expected_number
    assert all(map(torch.equal, gradients, expected_gradients))


def test_a_padded_batch_is_rehearsed_as_the_row_that_it_becomes(passes, caplog):
    documents = random_documents([9, 14])
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.arange(14)[None] < torch.tensor([[9], [14]])
    with caplog.at_level(logging.DEBUG, "unsloth_pack"):
        patched()(
            input_ids=ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100)
        ).loss.backward()
    assert passes == [[0]]
    assert "not compiled" not in caplog.text


def test_what_fails_in_the_rehearsal_is_left_to_the_step(passes, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(kernel_warmup, "packed_forward", broken)
    model = patched()
    with caplog.at_level(logging.DEBUG, "unsloth_pack"):
        loss = model(**ROW).loss
    assert loss.isfinite()
    assert "not compiled side by side: no memory" in caplog.text
    assert torch.is_grad_enabled()
    assert launch._local.compile is None


@pytest.mark.parametrize("where", ["evaluation", "no gradients", "anomalies are looked for"])
def test_nothing_is_rehearsed(where, passes):
    model = patched()
    if where == "evaluation":
        model.eval()(**ROW)
    elif where == "no gradients":
        with torch.no_grad():
            model(**ROW)
    else:
        with torch.autograd.detect_anomaly():
            model(**ROW).loss.backward()
    assert passes == []


class Kernel:
    """Takes as long to compile as the others wait for it."""

    def __init__(self, wait):
        self.wait, self.compiled, self.arguments = wait, [], None

    def warmup(self, *args, grid, **options):
        self.compiled.append(threading.current_thread().name)
        self.arguments = (*args, options)
        self.wait()
        return self

    run = None


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.autograd.graph.save_on_cpu())


def test_kernels_are_compiled_at_the_same_time_once_for_each_form(no_device):
    barrier = threading.Barrier(3)  # breaks unless three compile at once
    one, other = (Kernel(lambda: barrier.wait(timeout=20)) for _ in "ab")
    x = torch.zeros(8)
    with compile_in_parallel(torch.device("cpu")):
        for _ in range(3):
            launch._local.compile(one, (x, 5), {"BLOCK": 16})
            launch._local.compile(one, (x.half(), 5), {"BLOCK": 16})
            launch._local.compile(other, ((x, x), 5), {})
    assert not barrier.broken
    names = one.compiled + other.compiled
    assert len(names) == len(set(names)) == 3
    assert threading.current_thread().name not in names


def test_a_kernel_that_waits_to_be_compiled_keeps_no_memory_of_the_step(no_device):
    """The first step had a higher peak than all others, by 0.8 GiB on an 8B model."""
    goes_on = threading.Event()
    kernel = Kernel(lambda: None)
    kernel.wait = lambda: goes_on.wait(20)
    memory = torch.zeros(4096)
    whole = weakref.ref(memory.untyped_storage())
    views = [memory, memory[1:].view(63, 65), memory.view(torch.bfloat16)[3::2], memory.view(torch.uint8)[5:]]
    forms = [(x.dtype, x.data_ptr() % 16) for x in views]
    with compile_in_parallel(torch.device("cpu")):
        x, y, z, w = views
        launch._local.compile(kernel, (x, (y, 7), None), {"z": z, "w": w, "BLOCK": 16})
        del memory, views, x, y, z, w
        gc.collect()
        assert whole() is None
        goes_on.set()
    x, (y, seven), nothing, options = kernel.arguments
    assert (seven, nothing, options["BLOCK"]) == (7, None, 16)
    assert [(t.dtype, t.data_ptr() % 16) for t in (x, y, options["z"], options["w"])] == forms


def nothing_kernel(x, n):
    pass


def test_kernels_are_not_launched_meanwhile_and_in_other_threads_they_are(monkeypatch):
    triton = pytest.importorskip("triton")
    launched, compiled = [], []
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *args, **options: launched.append(args))
    kernel, x = launch.Kernel(nothing_kernel), torch.zeros(1)
    with compile_in_parallel(torch.device("cpu")):
        monkeypatch.setattr(launch._local, "compile", lambda *call: compiled.append(call))
        kernel[(1,)](x, 1, num_warps=2)
        other = threading.Thread(target=lambda: kernel[(1,)](x, 2))
        other.start()
        other.join()
    kernel[(1,)](x, 3)
    assert launched == [(x, 2), (x, 3)]
    assert compiled == [(kernel, (x, 1), {"num_warps": 2})]
