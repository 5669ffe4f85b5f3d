"""Whatever the configuration says, a packed row gives what each of its documents gives alone."""

import random

import pytest
import torch
from random_configs import draw_lora, draw_overrides
from tiny import error, random_documents, run_alone, run_packed, tiny_model

from unsloth_pack import patch_model, supported_architectures

SPECS = supported_architectures()


def assert_packed_is_alone(arch, seed):
    rng = random.Random(f"{arch} {seed}")
    overrides, lora = draw_overrides(SPECS[arch], rng), draw_lora(rng)
    said = f"{arch}, {overrides}, {lora}"
    lengths = [rng.choice([1, 2, 9, 16, 17, 33]) for _ in range(rng.randint(1, 6))] + [8]
    documents = random_documents(lengths, seed, overrides["vocab_size"])
    model = tiny_model(arch, torch.float64, "cpu", lora=lora, **overrides)
    alone = run_alone(model, documents)
    with patch_model(model):
        packed = run_packed(model, documents, tail=rng.choice([0, 5]))
    assert error(packed.logits, alone.logits) < 1e-4, said  # norms and angles are float32's in any dtype
    assert abs(packed.loss / alone.loss - 1) < 1e-4, said
    greatest = max(grad.norm() for grad in alone.grads.values())
    for name, grad in alone.grads.items():
        assert (packed.grads[name] - grad).norm() < 1e-3 * max(grad.norm(), 1e-2 * greatest), (name, said)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arch", SPECS)
def test_a_random_configuration(arch, seed):
    assert_packed_is_alone(arch, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SPECS)
def test_many_random_configurations(arch):
    for seed in range(3, 60):
        assert_packed_is_alone(arch, seed)
