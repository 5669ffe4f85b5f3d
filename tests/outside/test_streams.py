"""Packed streams: every document exactly once an epoch, over all workers and ranks of a loader."""

import contextlib
import itertools
import json
import pickle
from types import SimpleNamespace

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from streams_of_rows import CAPACITY, as_they_are, documents, read_on_rank, stream
from torch.utils.data import DataLoader
from trainer_runs import arguments
from trl import SFTConfig, SFTTrainer
from warm import two_ranks

from unsloth_pack import FastLanguageModel, InputError
from unsloth_pack.packing import pack_dataset


def unpacked(rows):
    """The documents of packed rows, in order: the number of each, and its labels."""
    found = []
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= CAPACITY
        for end, n in zip(itertools.accumulate(row["seq_lengths"]), row["seq_lengths"], strict=True):
            ids, labels = row["input_ids"][end - n : end], row["labels"][end - n : end]
            assert len(set(ids)) == 1
            found.append({"input_ids": list(ids), "labels": list(labels)})
    return found


def by_number(rows):
    return sorted((row for row in rows if row["input_ids"]), key=lambda row: row["input_ids"][0])


def assert_each_once(packed_rows, rows):
    assert by_number(unpacked(packed_rows)) == by_number(rows)


@contextlib.contextmanager
def worker(number, of):
    """This process, as if it were a worker of a torch loader."""
    module = torch.utils.data._utils.worker
    module._worker_info = SimpleNamespace(id=number, num_workers=of, seed=0, dataset=None)
    try:
        yield
    finally:
        module._worker_info = None


def rows_of_workers(packed, n_workers):
    """What each worker of a loader gives in one epoch; without workers, what the process itself gives."""
    if not n_workers:
        return [list(packed)]
    given_by = []
    for number in range(n_workers):
        with worker(number, n_workers):
            given_by.append(list(pickle.loads(pickle.dumps(packed))))
    return given_by


@st.composite
def setups(draw):
    rows = documents(draw(st.integers(1, 120)), seed=draw(st.integers(0, 9)))
    n_shards = draw(st.integers(1, min(8, len(rows))))
    source = stream(rows, n_shards)
    if draw(st.booleans()):
        source = source.shuffle(seed=draw(st.integers(0, 9)), buffer_size=draw(st.integers(1, 50)))
    packed = pack_dataset(
        source,
        CAPACITY,
        draw(st.sampled_from(["bfd", "next_fit"])),
        buffer_size=draw(st.integers(1, 60)),
        seed=draw(st.none() | st.integers(0, 9)),
    )
    return rows, packed


@pytest.mark.parametrize("examples", [40, pytest.param(120, marks=pytest.mark.nightly)])
def test_every_document_once_an_epoch(examples):
    drawn = (setups(), st.sampled_from([0, 1, 2, 4, 9]), st.integers(1, 3), st.integers(0, 3))
    settings(max_examples=examples, deadline=None)(given(*drawn)(every_document_comes_once))()


def every_document_comes_once(setup, n_workers, world_size, epoch):
    """Over all workers of all ranks; and the same epoch gives the same rows again."""
    rows, packed = setup
    seen = []
    for rank in range(world_size):
        of_rank = split_dataset_by_node(packed, rank, world_size) if world_size > 1 else packed
        of_rank.set_epoch(epoch)
        parts = rows_of_workers(of_rank, n_workers)
        assert parts == rows_of_workers(of_rank, n_workers)
        seen += itertools.chain.from_iterable(parts)
    assert_each_once(seen, rows)


@st.composite
def readers(draw):
    """Makers of one stream, as a rank with a number of workers reads it, and the number of those workers."""
    rows = documents(draw(st.integers(1, 90)))
    n_shards = draw(st.integers(1, min(6, len(rows))))
    buffer_size = draw(st.integers(1, 40))
    world_size = draw(st.integers(1, 3))
    rank = draw(st.integers(0, world_size - 1))
    epoch = draw(st.integers(0, 2))

    def make():
        packed = pack_dataset(stream(rows, n_shards), CAPACITY, buffer_size=buffer_size)
        packed = split_dataset_by_node(packed, rank, world_size) if world_size > 1 else packed
        packed.set_epoch(epoch)
        return packed

    return make, draw(st.integers(0, 3))


@pytest.mark.parametrize("examples", [40, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_resumed_stream_goes_on_exactly(examples):
    settings(max_examples=examples, deadline=None)(given(readers(), st.data())(it_goes_on_exactly))()


def it_goes_on_exactly(reader, data):
    make, n_workers = reader
    for number in range(max(1, min(n_workers, make().num_shards))):
        with worker(number, n_workers) if n_workers else contextlib.nullcontext():
            whole = list(make())
            if not whole:
                continue
            packed = make()
            taken = data.draw(st.integers(1, len(whole)))
            head = list(itertools.islice(iterator := iter(packed), taken))
            state = json.loads(json.dumps(packed.state_dict()))
            iterator.close()
            resumed = make()
            resumed.load_state_dict(state)
            assert head + list(resumed) == whole


SHUFFLED = {
    "features": lambda rows: stream(rows, 2).shuffle(seed=0, buffer_size=50),
    "no features": lambda rows: stream(rows, 2).shuffle(seed=0, buffer_size=50).map(dict),
    "a part": lambda rows: datasets.concatenate_datasets([stream(rows), stream(rows).shuffle(seed=0)]),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_a_shuffled_stream_is_not_resumed_with_documents_lost(kind):
    """datasets does not save the documents that wait in its shuffle buffer."""
    packed = pack_dataset(SHUFFLED[kind](documents(100)), CAPACITY, buffer_size=10)
    whole = list(packed)
    assert list(itertools.islice(packed, 7)) == whole[:7]
    packed.load_state_dict(packed.state_dict())
    with pytest.raises(ValueError, match=r"shuffled with a buffer.*; .*skip"):
        list(packed)
    assert list(packed.skip(7)) == whole[7:]


def test_epochs_have_orders_of_their_own():
    rows = documents(200)
    for source in (stream(rows), stream(rows, 8), stream(rows).shuffle(seed=1, buffer_size=100)):
        packed = pack_dataset(source, CAPACITY)
        orders = []
        for epoch in (0, 1, 2, 0):
            packed.set_epoch(epoch)
            orders.append(list(packed))
        assert orders[0] == orders[3]
        assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_loader_with_worker_processes():
    rows = documents(200)
    packed = pack_dataset(stream(rows, 8), CAPACITY)
    loader = DataLoader(packed, batch_size=2, num_workers=2, collate_fn=as_they_are)
    assert_each_once(itertools.chain.from_iterable(loader), rows)


def files_of(rows, folder):
    """The rows in three json files."""
    paths = []
    for part in range(3):
        paths.append(str(folder / f"part{part}.jsonl"))
        with open(paths[-1], "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows[part::3])
    return paths


def generated(rows):
    yield from rows


def sources(rows, folder):
    """One stream of these rows a kind."""
    plain = stream(rows, 4)
    streamed = datasets.load_dataset(
        "json", data_files=files_of(rows, folder), streaming=True, split="train", cache_dir=str(folder)
    )
    halves = [stream(rows[::2], 2), stream(rows[1::2], 3)]
    return {
        "files": streamed,
        "generator": datasets.IterableDataset.from_generator(generated, gen_kwargs={"rows": rows}),
        "filtered": plain.filter(bool),
        "interleaved": datasets.interleave_datasets(
            halves, stopping_strategy="all_exhausted_without_replacement"
        ),
        "numpy": plain.with_format("numpy"),
    }


@pytest.mark.parametrize("kind", ["files", "generator", "filtered", "interleaved", "numpy"])
def test_every_kind_of_stream(kind, tmp_path):
    rows = documents(150)
    source = sources(rows, tmp_path)[kind]
    packed = pack_dataset(source, CAPACITY, buffer_size=20)
    assert isinstance(packed, datasets.IterableDataset)
    assert packed.num_shards == source.num_shards
    columns = source.column_names
    assert packed.column_names == (None if columns is None else [*columns, "seq_lengths"])
    for n_workers in (0, 2):
        parts = rows_of_workers(packed, n_workers)
        assert_each_once(itertools.chain.from_iterable(parts), rows)
    whole = list(packed)
    for taken in (1, 7, len(whole) - 1):
        head = list(itertools.islice(iterator := iter(packed), taken))
        state = packed.state_dict()
        iterator.close()
        again = pack_dataset(source, CAPACITY, buffer_size=20)
        again.load_state_dict(state)
        if kind == "filtered" and Version(datasets.__version__) < Version("5.1.0"):
            with pytest.raises(InputError, match="update datasets"):
                list(again)
        else:
            assert head + list(again) == whole


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [7]}, {"input_ids": [1] * 33}], "example 1 has 33 tokens and a row holds 32"),
        ([{"input_ids": [1, 2], "labels": [1]}], "example 0: column 'labels' has 1 values for 2 tokens"),
        ([{"input_ids": [1, None]}], r"example 0, column 'input_ids', is \[1, None\]"),
        (
            [{"input_ids": [1], "labels": [1]}] * 4 + [{"input_ids": [1]}] * 4,
            "example 4 has other columns than those before it",
        ),
    ],
    ids=["overlong", "ragged", "null", "later column"],
)
def test_what_cannot_be_packed_is_told_when_it_is_read(rows, message):
    source = datasets.IterableDataset.from_generator(generated, gen_kwargs={"rows": rows})
    with pytest.raises(ValueError, match=message):
        list(pack_dataset(source, CAPACITY, buffer_size=4))


# Through the trainers of others.


def test_two_ranks_of_accelerate_with_two_workers_each(tmp_path):
    two_ranks(read_on_rank, str(tmp_path), (4,))
    rows = [json.loads((tmp_path / f"4-{rank}.json").read_text()) for rank in (0, 1)]
    assert_each_once(itertools.chain.from_iterable(rows), documents(60))


class Counting(SFTTrainer):
    """Notes how often each token reaches the model, and how many documents do."""

    tokens, documents = (), 0

    def training_step(self, model, inputs, *arguments, **keywords):
        self.tokens = [*self.tokens, *inputs["input_ids"].flatten().tolist()]
        self.documents += int((inputs["position_ids"] == 0).sum())
        return super().training_step(model, inputs, *arguments, **keywords)


@pytest.mark.parametrize(("n_workers", "has_columns"), [(0, True), (2, False)])
def test_sft_trainer(n_workers, has_columns, model_folder, tmp_path):
    """As the docstring of `pack_dataset` says; TRL reads a row of a stream whose columns are unknown."""
    rows = documents(60)
    source = stream(rows, 4) if has_columns else stream(rows, 4).map(dict)
    packed = pack_dataset(source, CAPACITY)
    per_epoch = sum(map(len, rows_of_workers(packed, n_workers)))
    model, tokenizer = FastLanguageModel.from_pretrained(model_folder, max_seq_length=CAPACITY)
    options = {"packing": False, "padding_free": True, "max_length": None, "max_steps": per_epoch}
    options |= {"dataloader_num_workers": n_workers, "gradient_accumulation_steps": 1}
    trainer = Counting(
        FastLanguageModel.get_peft_model(model, r=2),
        SFTConfig(**arguments(tmp_path, **options)),
        train_dataset=packed,
        processing_class=tokenizer,
    )
    trainer.train()
    assert sorted(trainer.tokens) == [token for row in rows for token in row["input_ids"]]
    assert trainer.documents == sum(bool(row["input_ids"]) for row in rows)
