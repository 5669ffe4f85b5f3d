"""Whole models on the kernels, where there is no GPU under the interpreter: as exact as their references."""

import sys

import pytest
import torch
from tiny import error, random_documents, run_packed, tiny_model

from unsloth_pack import patch_model, verify

LENGTHS = [3, 1, 12]


# Under the interpreter a case takes up to half a minute
CASES = [("gemma3_text", torch.float32), ("phi3", torch.bfloat16), ("apertus", torch.bfloat16)]


@pytest.mark.parametrize(("arch", "dtype"), CASES, ids=str)
def test_kernels_and_references_make_the_same_model(arch, dtype, monkeypatch):
    documents = random_documents(LENGTHS)
    truth = _packed(arch, torch.float64, documents)
    fused = _packed(arch, dtype, documents, truth.routes)
    for name in ("norm", "elementwise", "gated_lora", "rope"):
        module = sys.modules[f"unsloth_pack.kernels.{name}"]
        monkeypatch.setattr(module, "takes_fused_path", lambda *_: False)
    plain = _packed(arch, dtype, documents, truth.routes)
    assert error(fused.logits, truth.logits) <= 1.5 * error(plain.logits, truth.logits)
    assert fused.grads.keys() == truth.grads.keys()
    ours, theirs = (
        sum(error(run.grads[name], grad) ** 2 for name, grad in truth.grads.items()) for run in (fused, plain)
    )
    assert ours**0.5 <= 1.5 * theirs**0.5


def test_verify_passes_on_the_kernels():
    """The loss and its gradients too, which a kernel makes of the row, transformers of documents alone."""
    model = tiny_model("llama", torch.bfloat16, num_hidden_layers=1)
    patch_model(model, "sdpa")
    report = verify(model, documents=random_documents((5, 1, 9)))
    assert report.passed, str(report)


def _packed(arch, dtype, documents, routes=None):
    model = tiny_model(arch, dtype)
    patch_model(model, "sdpa")
    return run_packed(model, documents, routes)
