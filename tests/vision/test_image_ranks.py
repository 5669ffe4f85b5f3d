"""Two processes, one of them with a row without images: both end, with the mean of their gradients."""

import torch
from image_models import GRIDS, MODELS, documents, labels_of, lengths_of, patched, row_of
from torch.nn.parallel import DistributedDataParallel
from warm import in_two_processes

CASES = [(name, "aligner") for name in MODELS]
CASES += [("qwen3_vl", "tower"), ("idefics3", "tower")]


def rows_of(name, model):
    """A row with images and one without."""
    wide, tall = ((2, 4), (4, 2)) if name in GRIDS else ((1, 2), (2, 1))
    docs = documents(name, [[wide, 5], [3, tall], [7]])
    with_images = row_of(name, model, docs)
    rows = []
    for row, chosen in ((with_images, docs), ({"input_ids": docs[2].ids[None]}, docs[2:])):
        rows.append(row | {"labels": labels_of(chosen)[None], "packed_seq_lengths": lengths_of(chosen)})
    return rows


def gradients(model):
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def train(rank, folder):
    """Two steps of every model, so that one whose gradients did not all come is found."""
    for name, trained in CASES:
        model = patched(name, torch.float32, trained)
        row = rows_of(name, model)[rank]
        parallel = DistributedDataParallel(model, find_unused_parameters=False)
        for _ in range(2):
            model.zero_grad()
            parallel(**row).loss.backward()
        torch.save(gradients(model), f"{folder}/{name}-{trained}-{rank}.pt")


def test_a_row_without_images_holds_nobody_up(tmp_path):
    in_two_processes(train, str(tmp_path))
    for name, trained in CASES:
        model = patched(name, torch.float32, trained)
        for row in rows_of(name, model):
            model(**row).loss.backward()
        ours = [torch.load(tmp_path / f"{name}-{trained}-{rank}.pt") for rank in (0, 1)]
        for key, expected in gradients(model).items():
            assert torch.equal(ours[0][key], ours[1][key]), (name, trained, key)
            torch.testing.assert_close(ours[0][key], expected / 2, msg=f"{name} {trained} {key}")
