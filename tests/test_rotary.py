"""Rotary types whose angles depend on the length of the text: a document is rotated as it would be alone."""

import pytest
import torch
from tiny import error, random_documents, run_alone, run_packed, tiny_model

from unsloth_pack import patch_model
from unsloth_pack.layers.rotary import _GRAIN


def rope(kind, **parameters):
    return {"rope_type": kind, "rope_theta": 1e4} | parameters


OF_32 = {"original_max_position_embeddings": 32}
LONG = {
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
BY_TYPE = {"full_attention": rope("dynamic", factor=2.0)}
BY_TYPE["sliding_attention"] = rope("default", rope_theta=1e3)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {  # the architecture, and what of its config differs
    "longrope": ("phi3", rope("longrope", **LONG, **OF_32), 256, OF_32),
    "dynamic": ("llama", rope("dynamic", factor=2.0), 32, {}),
    "dynamic in one type of layer": ("gemma3_text", BY_TYPE, 32, {}),
    "yarn": ("llama", rope("yarn", factor=4.0, **OF_32), 128, {}),
    "llama3": ("llama", rope("llama3", **LLAMA3, **OF_32), 256, {}),
}
ROPES = {
    name: (arch, {"rope_parameters": parameters, "max_position_embeddings": most, **more})
    for name, (arch, parameters, most, more) in ROPES.items()
}


@pytest.mark.parametrize(("arch", "overrides"), ROPES.values(), ids=ROPES)
def test_a_short_document_beside_a_long_one_turns_as_it_would_alone(arch, overrides):
    documents = random_documents([20, 90, 32, 33, 5, 70])
    outcomes = {}
    for dtype in (torch.float64, torch.float32):
        alone = []
        for document in documents:  # a fresh model for each: transformers' dynamic types remember the longest
            alone.append(run_alone(tiny_model(arch, dtype, device="cpu", **overrides), [document]).logits)
        outcomes[dtype] = torch.cat(alone)
    truth, plain = outcomes[torch.float64], outcomes[torch.float32]
    model = tiny_model(arch, torch.float32, device="cpu", **overrides)
    patch_model(model)
    for _ in range(2):  # tables are kept between steps
        got = run_packed(model, documents).logits
        assert error(got, truth) <= 1.5 * error(plain, truth)
    assert error(run_packed(model, documents[:1]).logits, truth[:20]) <= 1.5 * error(plain[:20], truth[:20])


def test_a_table_reaches_as_far_as_the_longest_document():
    document = random_documents([_GRAIN + 1])
    model = tiny_model("llama", torch.float64, device="cpu", max_position_embeddings=2 * _GRAIN)
    truth = run_alone(model, document).logits
    patch_model(model)
    assert error(run_packed(model, document).logits, truth) < 1e-6  # angles are float32
