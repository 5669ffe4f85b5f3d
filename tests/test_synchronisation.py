"""A training step does not wait for all that a device has to do, but for a row that is described there.

For one event it waits: that of numbers asked for before the decoder runs and read after it, see `HostCopy`.
"""

import os
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from tiny import random_documents, tiny_model

import unsloth_pack
from unsloth_pack import patch_model
from unsloth_pack.training.trl_setup import row_collator

pytestmark = pytest.mark.gpu

OURS = os.path.dirname(unsloth_pack.__file__) + os.sep
READ_LATE = os.path.join(OURS, "kernels", "launch.py")
BEFORE = 6  # steps in which kernels compile and the shape of the row is captured


@contextmanager
def counted_waits():
    """The places where the host waits for the device, or for an event, which torch's mode passes over."""
    places, wait = [], torch.cuda.Event.synchronize

    def counted(event):
        caller = sys._getframe(1)
        places.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        wait(event)

    torch.cuda.synchronize()
    torch.cuda.Event.synchronize = counted
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = wait
    said = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    places += [f"{warning.filename}:{warning.lineno}" for warning in said]


def at_once_and_late(waits):
    late = [place for place in waits if place.startswith(READ_LATE)]
    return [place for place in waits if place not in late], late


def batch(described_on, seed):
    """A packed row of one shape, on the device."""
    documents = random_documents([90, 60, 45], seed=seed)
    if described_on == "device":
        row = {"input_ids": torch.cat(documents).tolist(), "seq_lengths": [*map(len, documents)]}
        made = row_collator()([row])
        return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    ids = torch.cat(documents)[None].cuda()
    return {"input_ids": ids, "labels": ids.clone(), "packed_seq_lengths": [*map(len, documents)]}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("described_on", "allowed"), [("host", 0), ("device", 1)])
def test_a_bare_loop(described_on, allowed, captured, checkpointing):
    """A row that is described on the device is fetched in one transfer, on the host in none."""
    model = tiny_model("qwen3", torch.bfloat16)
    patch_model(model, "flash")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    graphs = model.get_base_model().model.step_graphs
    if not captured:
        graphs.why_never = "for comparison"
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def step(inputs):
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    batches = [batch(described_on, seed) for seed in range(BEFORE + 3)]
    for inputs in batches[:BEFORE]:
        step(inputs)
    assert str(graphs).startswith("captured") == captured, str(graphs)
    for inputs in batches[BEFORE:]:
        with counted_waits() as waits:
            step(inputs)
        at_once, late = at_once_and_late(waits)
        assert len(at_once) <= allowed, waits
        assert len(late) <= 1  # for how many tokens have a label
