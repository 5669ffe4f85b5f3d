"""`--streaming` from outside: the command line on files, and `PackingStream` in TRL's own trainer."""

import gzip
import json

import datasets
import pytest
from trainer_runs import arguments
from trl import SFTConfig, SFTTrainer

from unsloth_pack import FastLanguageModel
from unsloth_pack.cli import main
from unsloth_pack.packing import PackingStream

ROWS = [{"instruction": f"say {'a' * (n % 40)}", "output": "b" * (1 + n % 50)} for n in range(80)]


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(2):
        with gzip.open(folder / f"{number}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS[number::2])
    return folder


@pytest.mark.parametrize("pattern", ["", "*.jsonl.gz"])
def test_compressed_shards_train(pattern, shards, model_folder, tmp_path, capfd):
    flags = ["--streaming", f"--model_name={model_folder}", f"--dataset={shards / pattern}", "--max_steps=3"]
    flags += ["--max_seq_length=128", "--dtype=float32", f"--output_dir={tmp_path / 'out'}"]
    assert main(flags) == 0
    shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert "a stream, counted as it is read" in shown
    assert "documents were read and not trained on" in shown
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_stream_needs_a_number_of_updates(shards, model_folder, refused):
    said = refused(
        ["--streaming", f"--model_name={model_folder}", f"--dataset={shards}", "--max_seq_length=128"]
    )
    assert "which needs another option; give --max_steps too" in said


def test_packs_do_not_stream(model_folder, tmp_path, refused):
    data, packs = tmp_path / "rows.json", tmp_path / "packs"
    data.write_text(json.dumps(ROWS))
    packing = ["pack", f"--dataset={data}", f"--model_name={model_folder}", "--max_seq_length=128"]
    assert main([*packing, f"--out={packs}"]) == 0
    said = refused(["--streaming", f"--model_name={model_folder}", f"--dataset={packs}", "--max_steps=3"])
    assert "holds packed rows, which stay on the disk; leave it out" in said


def endless():
    number = 0
    while True:
        ids = [number % 250] * (1 + number % 30)
        yield {"input_ids": ids, "labels": ids}
        number += 1


def rows_of(capacity):
    yield from PackingStream(capacity, buffer_size=16).pack(endless())


def test_trls_own_trainer_takes_rows_of_a_packing_stream(model_folder, tmp_path):
    rows = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"capacity": 64})
    model, tokenizer = FastLanguageModel.from_pretrained(model_folder, max_seq_length=64)
    config = SFTConfig(
        **arguments(tmp_path, packing=False, padding_free=True, max_length=None, max_steps=3),
    )
    seen = []

    class Noting(SFTTrainer):
        def training_step(self, model, inputs, *more):
            seen.append(inputs["input_ids"].flatten().tolist())
            return super().training_step(model, inputs, *more)

    trainer = Noting(
        FastLanguageModel.get_peft_model(model, r=2),
        config,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train()
    given = rows_of(64)
    assert seen
    for row in seen:
        batch = []
        while len(batch) < len(row):
            batch += next(given)["input_ids"]
        assert batch == row
