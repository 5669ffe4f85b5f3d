"""`torch.compile` around a patched model changes nothing: the compiler leaves the patched forwards alone."""

import pytest
import torch
from outside_models import DEVICE, assert_same_training, plain_and_patched

BACKENDS = ["eager", "inductor"] if DEVICE == "cuda" else ["eager"]  # inductor needs a C++ compiler on a CPU


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def decoder(model, backend):
    model.model.compile(backend=backend)
    return model


def layers(model, backend):
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("compile_part", [whole, in_place, decoder, layers])
def test_a_compiled_model_trains_the_same(compile_part, architecture, backend):
    plain, patched = plain_and_patched(architecture)
    assert_same_training(compile_part(patched.train(), backend), plain.train())


def test_it_generates_the_same():
    plain, patched = plain_and_patched()
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    compiled = torch.compile(patched, backend="eager")
    assert torch.equal(compiled.generate(ids, **options), plain.generate(ids, **options))
