"""Ragged documents, streams of them, and a process that reads such a stream beside another one."""

import json
from pathlib import Path

import datasets
import numpy as np
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from unsloth_pack.packing import pack_dataset

CAPACITY = 32


def documents(n, seed=0):
    """Ragged documents; document i holds nothing but the token i."""
    lengths = np.random.default_rng(seed).integers(0, CAPACITY + 1, n)
    return [{"input_ids": [i] * k, "labels": [-100, *[i] * k][:k]} for i, k in enumerate(lengths.tolist())]


def stream(rows, n_shards=1):
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=n_shards)


def as_they_are(rows):
    """A collator that hands on packed rows as they are."""
    return rows


def read_on_rank(rank, folder, shards):
    """What one of two ranks reads in an epoch through accelerate, with two workers; it goes to files.

    Args:
        shards: the numbers of shards to try.
    """
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    for n_shards in shards:
        packed = pack_dataset(stream(documents(60), n_shards), CAPACITY)
        loader = DataLoader(packed, batch_size=1, num_workers=2, collate_fn=as_they_are)
        rows = [row for rows in accelerator.prepare(loader) for row in rows]
        Path(folder, f"{n_shards}-{rank}.json").write_text(json.dumps(rows))
    accelerator.end_training()
