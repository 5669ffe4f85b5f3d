"""Packs on disk for tests: damaged ones, and ones with rows that another program has written."""

import hashlib
import json

import datasets
import numpy as np
import pyarrow as pa

from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.packing import write_packs

CAPACITY = 64


def edit_manifest(folder, **values):
    path = folder / "packs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder, change, schema=None):
    """Change the rows of the first shard, and write a manifest with the checksum of the changed shard."""
    path = folder / "shard-00000.arrow"
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    rows = table.to_pylist()
    change(rows)
    table = pa.Table.from_pylist(rows, schema or table.schema)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    data = path.read_bytes()
    manifest = json.loads((folder / "packs.json").read_text())
    manifest["shards"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(folder, shards=manifest["shards"])


def flip_a_byte(path, place=0.5):
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


def cut(path, keep=0.5):
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])


def documents(n, longest=40, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, n)
    ids = [rng.integers(0, 1000, length).tolist() for length in lengths]
    return [{"input_ids": x, "labels": [-100, *x[1:]]} for x in ids]


def write(folder, rows, **options):
    lengths = [len(row["input_ids"]) for row in rows]
    counted = sum(label != -100 for row in rows for label in row["labels"])
    masked = sum(lengths) - counted
    ledger = TokenLedger(
        len(rows), sum(lengths), 0, 0, 0, 0, masked, 0, counted, 0, max(lengths), max(lengths)
    )
    options = {"capacity": CAPACITY, "tokenizer_hash": "a" * 64, "ledger": ledger, **options}
    return write_packs(datasets.Dataset.from_list(rows), folder, **options)
