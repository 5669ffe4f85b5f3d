"""Gradients that are averaged as one tensor are those that DDP averages one by one."""

from contextlib import nullcontext
from types import SimpleNamespace

import late_metrics_runs as runs
import pytest
import torch
from model_folder import byte_tokenizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warm import in_two_processes

from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW
from unsloth_pack.errors import InputError
from unsloth_pack.training.distributed import AveragedGradients
from unsloth_pack.training.trainer import make_trainer

MICRO_BATCHES = 3


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2), nn.Tanh(), nn.Linear(2, 3, bias=False))


def backward(parallel, rank, begin, update):
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * update + 10 * number + rank)
        begin()
        with nullcontext() if number == MICRO_BATCHES - 1 else parallel.no_sync():
            parallel(torch.randn(4, 5, generator=generator)).square().mean().backward()


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


def both(rank, folder, apart):
    """Three updates of accumulated gradients, by DDP and as one tensor."""
    expected = DistributedDataParallel(small_model())
    model = small_model()
    optimizer = FlatAdamW(model.parameters(), lr=0.1, fused=True)
    reference = torch.optim.AdamW(expected.parameters(), lr=0.1, fused=True)
    parallel, averaged = DistributedDataParallel(model), AveragedGradients()
    for update in range(3):
        if update == 1 and rank in apart:  # the weights no longer lie in one tensor, in this process
            model[0].weight.data = model[0].weight.data.clone()
        backward(expected, rank, lambda: None, update)
        backward(
            parallel, rank, lambda: averaged.begin(parallel, SimpleNamespace(optimizer=optimizer)), update
        )
        own = gradients_of(model)
        averaged.average()
        found, right = gradients_of(model), gradients_of(expected)
        assert not any(map(torch.equal, own, right))
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-8)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=1e-5, atol=1e-7)
    torch.save([p.detach() for p in model.parameters()], f"{folder}/{rank}.pt")


@pytest.mark.parametrize("apart", [(), (0,)])
def test_the_gradients_are_ddps(apart, tmp_path):
    in_two_processes(both, str(tmp_path), apart)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    if len(apart) == 1:  # this one has updated the weights one by one, which rounds otherwise
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-8)
    else:
        assert all(map(torch.equal, first, second))


def without_a_gradient(rank, folder):
    model = small_model()
    optimizer = FlatAdamW(model.parameters(), lr=0.1, fused=True)
    averaged = AveragedGradients()
    averaged.begin(DistributedDataParallel(model), optimizer)
    model[0](torch.ones(1, 5)).sum().backward()
    with pytest.raises(InputError, match="3 trained weights got no gradient in this process"):
        averaged.average()


def test_a_weight_without_a_gradient_is_an_error(tmp_path):
    in_two_processes(without_a_gradient, str(tmp_path))


def trained(rank, folder):
    """Runs of the trainer: with DDP's own exchange, and as one tensor."""
    weights = []
    for flat in (False, True):
        options = {"accumulation": 2, "max_grad_norm": 0.05, "optim": "adamw_torch_fused"}
        arguments = runs.config(folder, True, **options)
        with pytest.MonkeyPatch.context() as patching:
            if not flat:
                patching.setattr(runs.NOT_FLAT, lambda *_: "for comparison")
            trainer = make_trainer(
                runs.model(), byte_tokenizer(), arguments, runs.rows(True), runs.rows(True, 50), []
            )
            trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert trainer.model_wrapped.require_backward_grad_sync is not flat
        weights.append([p.detach() for p in trainer.model.parameters() if p.requires_grad])
    torch.save(weights, f"{folder}/{rank}.pt")


def test_a_run_is_that_of_ddp(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    in_two_processes(trained, str(tmp_path))
    (by_ddp, as_one), (_, on_the_other) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    torch.testing.assert_close(as_one, by_ddp, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, as_one, on_the_other))
