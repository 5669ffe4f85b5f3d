"""An update is applied where its losses and its gradient are finite, and left out where one is not."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD

from unsloth_pack.training.updates import NonFiniteUpdates


@pytest.mark.parametrize(
    ("losses", "norm", "is_applied"),
    [
        ([1.0, 2.0], 1.0, True),
        ([math.nan, 1.0], 1.0, False),
        ([1.0, math.inf], 1.0, False),
        ([1.0, 1.0], math.inf, False),
        ([1.0, 1.0], math.nan, False),
    ],
)
def test_both_are_looked_at(losses, norm, is_applied):
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=1),
        accelerator=SimpleNamespace(scaler=None),
        state=SimpleNamespace(global_step=4),
        optimizer=SGD([weight], lr=1.0, weight_decay=0.5),
    )
    updates = NonFiniteUpdates()
    for loss in losses:
        assert math.isfinite(updates.note_loss(torch.tensor(loss)))
    updates.judge(trainer, torch.tensor(norm))
    trainer.optimizer.step()
    assert (weight.item() != 1) == is_applied
    steps, are_finite = updates.take_verdicts()
    assert (steps, are_finite.tolist()) == ([5], [is_applied])
