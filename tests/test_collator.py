"""Under the trainer of a run a row is described in the loader, and never read from the device."""

import pickle

import late_metrics_runs as runs
import pytest
import torch
from tiny import DEVICE, random_documents
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack.packed_row.padded_batch import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.patching.trainer_hooks import RowCollator
from unsloth_pack.training.trl_setup import row_collator

LENGTHS = [5, 1, 9, 3]


def example(lengths=LENGTHS, seed=0):
    ids = torch.cat(random_documents(lengths, seed=seed)).tolist()
    return {"input_ids": ids, "labels": ids, "seq_lengths": list(lengths)}


@pytest.mark.parametrize("lengths", [LENGTHS, [7]], ids=["four documents", "one document"])
def test_the_row_is_that_which_the_tensors_describe(lengths):
    batch = RowCollator(row_collator())([example(lengths), example([4, 2])])
    row = batch["packed_row"]
    assert row.lengths == (*lengths, 4, 2)
    assert row.shape == tuple(batch["input_ids"].shape)
    assert set(batch) == {"input_ids", "labels", "position_ids", "packed_row"}


def test_padding_behind_a_row_is_no_document():
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=16)
    row = RowCollator(collate)([example(), example([4, 2])])["packed_row"]
    assert (row.lengths, row.is_padding) == ((*LENGTHS, 4, 2, 8), (False,) * 6 + (True,))


def test_a_row_comes_from_another_process():
    """What was built of it stays behind: tensors of a device do not belong in a pipe."""
    row = RowCollator(row_collator())([example()])["packed_row"]
    assert row.cu_seqlens.tolist() == [0, 5, 6, 15, 18]
    row.once("something", lambda: torch.zeros(1000))
    there = pickle.loads(pickle.dumps(row))
    assert there.lengths == row.lengths
    assert there.cu_seqlens.tolist() == row.cu_seqlens.tolist()
    assert len(pickle.dumps(row)) < 2000
    moved = row.on(torch.device("meta"))
    assert moved.device.type == "meta"
    assert row.on(torch.device("cpu")) is row


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_of_a_run_reads_nothing_back(workers, tmp_path, described, no_chunked_head, monkeypatch):
    """Rows are described in the loader alone; none of the descriptions is looked for in a call."""
    entered, row_itself = [], PackedRow.on
    monkeypatch.setattr(PackedRow, "on", lambda row, *a: entered.append(row) or row_itself(row, *a))
    runs.run_trainer(tmp_path, True, max_steps=4, eval_strategy="no", dataloader_num_workers=workers).train()
    assert len(entered) == 4
    assert all(isinstance(row, PackedRow) for row in entered)
    assert described == []  # by a call: the collator has described them
    assert DEVICE == "cpu" or entered[0].device.type == "cpu"


def documents_alone():
    ids = [document.tolist() for document in random_documents([9, 4, 17, 6])]
    return [{"input_ids": document, "labels": document} for document in ids]


def test_a_padded_batch_is_described_too():
    collate = RowCollator(DataCollatorForLanguageModeling(pad_token_id=0))
    batch = collate(documents_alone())
    known = batch.pop("packed_row")
    assert isinstance(known, PaddedBatch)
    assert known.row.lengths == (9, 4, 17, 6)
    assert known.shape == (4, 17)
    labelled = documents_alone()
    for place in (1, 2):  # on padding, and beyond the ids
        labelled[place] = {**labelled[place], "labels": [*labelled[place]["labels"], 7]}
        assert "packed_row" not in collate(labelled)
