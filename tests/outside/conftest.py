"""The package as a stranger meets it: its public names, its command line, and the libraries around it.

Nothing in this folder imports a module of the package that `docs/api.md` or the README does not name, or
reaches into one; `test_public_door.py` holds that.
"""

import itertools
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model_folder import byte_tokenizer, save_model
from outside_models import TELLING_TEMPLATE

from unsloth_pack.cli import main


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny random llama with a tokenizer of bytes."""
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def refused(capsys):
    """Runs the command line, and returns the one line with which it refused."""

    def run(arguments):
        capsys.readouterr()
        code, error = main(arguments), capsys.readouterr().err
        assert code == 2, error
        assert error.count("\n") == 1, error
        return error

    return run


@pytest.fixture(scope="session")
def telling(tmp_path_factory):
    return save_model(
        tmp_path_factory.mktemp("telling"), chat_template=TELLING_TEMPLATE, max_position_embeddings=4096
    )


@pytest.fixture
def packing(telling, tmp_path, monkeypatch):
    """The command line that packs `data`, which is a list of rows, an Arrow table, or a file or folder."""
    monkeypatch.chdir(tmp_path)

    def build(data, *more):
        path = tmp_path / "rows.jsonl"
        if isinstance(data, list):
            path.write_text("".join(json.dumps(row) + "\n" for row in data))
        elif isinstance(data, pa.Table):
            path = tmp_path / "rows.parquet"
            pq.write_table(data, path)
        else:
            path = data
        given = {"model_name": telling, "dataset": path, "max_seq_length": 4096}
        return ["pack", *(f"--{name}={value}" for name, value in given.items()), *more]

    yield build
    datasets.enable_progress_bars()


@pytest.fixture
def trained(packing, tmp_path, capsys):
    """What every row is trained on: its text, and the part of it that carries loss."""

    numbers = itertools.count()

    def run(data, *more):
        out = tmp_path / f"packs-{next(numbers)}"
        assert main(packing(data, "--strategy=next_fit", f"--out={out}", *more)) == 0, capsys.readouterr().err
        with pa.ipc.open_stream(out / "shard-00000.arrow") as stream:
            (row,) = stream.read_all().to_pylist()
        decode = byte_tokenizer().decode
        bounds = zip(row["cu_lengths"], row["cu_lengths"][1:], strict=False)
        return [
            (decode(row["input_ids"][a:b]), decode([t for t in row["labels"][a:b] if t != -100]))
            for a, b in bounds
        ]

    return run


@pytest.fixture
def refusal(packing, tmp_path, capsys):
    """The one line that the data are refused with."""

    def run(data, *more):
        capsys.readouterr()
        assert main(packing(data, "--out=packs", *more)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "; " in line
        assert not (tmp_path / "packs").exists()
        return line

    return run
