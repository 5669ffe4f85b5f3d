"""The door under DistributedDataParallel: every process describes its own row once a micro-batch."""

import torch
from tiny import random_documents, tiny_model
from torch.nn.parallel import DistributedDataParallel
from warm import in_two_processes

from unsloth_pack import patch_model
from unsloth_pack.packed_row import describe as from_call

LENGTHS = {0: [5, 1, 9, 3], 1: [8, 2, 4]}


def train(rank, folder):
    """Three micro-batches of a process's own row; what it has described and its gradients go to a file."""
    shapes, describe = [], from_call.describe_row
    from_call.describe_row = lambda shape, *a, **k: shapes.append(shape) or describe(shape, *a, **k)
    model = tiny_model("qwen3", torch.float32, device="cpu")
    patch_model(model)
    parallel = DistributedDataParallel(model)
    ids = torch.cat(random_documents(LENGTHS[rank], seed=rank))[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS[rank]])[None]
    for _ in range(3):
        parallel(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.save((shapes, gradients), f"{folder}/{rank}.pt")


def test_every_process_describes_its_row_once(tmp_path):
    in_two_processes(train, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first[0] == [(1, 18)] * 3
    assert second[0] == [(1, 14)] * 3
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
