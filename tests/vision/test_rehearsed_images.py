"""A first step over images is rehearsed like one over text: all but the tower."""

import logging

import pytest
import torch
from test_captured_images import called, documents, labels_of, patched
from tiny import DEVICE

from unsloth_pack.layers import kernel_warmup


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava_onevision"])
def test_a_rehearsed_step_over_images_has_the_same_bits(name, monkeypatch, caplog):
    one = (2, 2) if name == "qwen3_vl" else (1, 1)

    def step():
        model = patched(name, torch.float32, "tower")
        docs = documents(name, [[3, one, 2], [5], [one, 4]], 0)
        loss, _ = called(name, model, docs, labels=labels_of(docs)[None].to(DEVICE))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    passes, forward = [], kernel_warmup.packed_forward
    monkeypatch.setattr(kernel_warmup, "_compiles_for", lambda device: True)
    monkeypatch.setattr(
        kernel_warmup,
        "packed_forward",
        lambda *given, **asked: passes.append(asked) or forward(*given, **asked),
    )
    with caplog.at_level(logging.DEBUG, "unsloth_pack"):
        rehearsed = step()
    assert len(passes) == 1
    assert "not compiled side by side" not in caplog.text
    monkeypatch.setattr(kernel_warmup, "_compiles_for", lambda device: False)
    assert all(map(torch.equal, rehearsed, step()))
