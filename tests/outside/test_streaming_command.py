"""`--streaming` from outside: the command line on files."""

import gzip
import json

import pytest

from unsloth_pack.cli import main

ROWS = [{"instruction": f"say {'a' * (n % 40)}", "output": "b" * (1 + n % 50)} for n in range(80)]


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(2):
        with gzip.open(folder / f"{number}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS[number::2])
    return folder


def test_compressed_shards_train(shards, model_folder, tmp_path, capfd):
    flags = ["--streaming", f"--model_name={model_folder}", f"--dataset={shards}/*.jsonl.gz", "--max_steps=3"]
    flags += ["--max_seq_length=128", "--dtype=float32", f"--output_dir={tmp_path / 'out'}"]
    assert main(flags) == 0
    shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert "a stream, counted as it is read" in shown
    assert "documents were read and not trained on" in shown
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_packs_do_not_stream(model_folder, tmp_path, refused):
    data, packs = tmp_path / "rows.json", tmp_path / "packs"
    data.write_text(json.dumps(ROWS))
    packing = ["pack", f"--dataset={data}", f"--model_name={model_folder}", "--max_seq_length=128"]
    assert main([*packing, f"--out={packs}"]) == 0
    said = refused(["--streaming", f"--model_name={model_folder}", f"--dataset={packs}", "--max_steps=3"])
    assert "holds packed rows, which stay on the disk; leave it out" in said
