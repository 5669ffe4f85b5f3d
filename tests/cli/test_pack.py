"""`pack`, and `train` on what it wrote: the same run as `--sample_packing`, or a refusal in one line."""

import functools
import json
import re
import shutil

import datasets
import pytest
from cli_runs import losses, read_metrics, tree
from model_folder import byte_tokenizer, save_model
from packs_on_disk import cut, rewrite
from safetensors.torch import load_file

from unsloth_pack.cli import main
from unsloth_pack.demo import TRAIN_FILE
from unsloth_pack.packing import read_manifest

CAPACITY = 128


@pytest.fixture(scope="session")
def whole_packs(model, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "packs"
    command = ["pack", "--model_name", model, "--dataset", data, "--out", str(folder)]
    assert main([*command, "--max_seq_length", str(CAPACITY), "--rows_per_shard", "12"]) == 0
    return folder


@pytest.fixture
def packs(whole_packs, tmp_path):
    return shutil.copytree(whole_packs, tmp_path / "packs")


@pytest.fixture
def refused(refused):
    """The rows' length is that of the packs."""
    return functools.partial(refused, max_seq_length=None)


def test_the_summary_and_the_manifest(model, data, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    command = ["pack", "--model_name", model, "--dataset", data, "--max_seq_length", "256"]
    assert main([*command, "--out", "my new/packs"]) == 0
    shown = capsys.readouterr().out
    manifest = read_manifest(tmp_path / "my new" / "packs")
    assert f"{len(rows)} rows, {manifest.tokens:,} tokens" in shown
    for said in (manifest.data_fingerprint, "MiB", f"{manifest.rows} rows", "--dataset 'my new/packs'"):
        assert said in shown

    more = ["--strategy", "next_fit", "--seed", "7", "--train_on_responses_only", "--rows_per_shard", "5"]
    assert main([*command, *more, "--out", "other", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (part,) = printed.pop("data_sets")
    assert (part["name"], part["documents"], part["unused_columns"]) == (data, len(rows), [])
    assert (printed["strategy"], printed["seed"], printed["train_on_responses_only"]) == ("next_fit", 7, True)
    assert {shard["rows"] for shard in printed["shards"][:-1]} == {5}
    newer = [printed.pop(name) for name in ("teacher", "objective", "reference")]
    assert newer == [None, "sft", None]  # 0.2.0 knows no such keys on disk
    on_disk = json.loads((tmp_path / "other" / "packs.json").read_text())
    assert on_disk == {"format": "unsloth_pack packs", "version": 1, **printed}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "full"], "out 'full' is not empty; give a new folder"),
        (["--out", "full/file"], "cannot be written to (Not a directory)"),
        (["--out", "new", "--dataset", "packs"], "packs: packed rows, but documents are needed here"),
        (["--out", "new", "--strategy", "best"], "it should be 'next_fit', 'first_fit'"),
    ],
)
def test_bad_input_to_pack(flags, message, model, data, packs, refused, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    given = flags if "--dataset" in flags else ["--dataset", data, *flags]
    length = [] if "--max_seq_length" in flags else ["--max_seq_length", "128"]
    assert message in refused(command=["pack", "--model_name", model, *length, *given])


@pytest.mark.draws
def test_the_same_losses_as_packing_at_the_start_of_the_run(tmp_path):
    """On the bundled model and data, step for step."""
    assert main(["pack", "--max_seq_length", "512", "--out", "packs"]) == 0
    flags = ["--max_steps=3", "--gradient_accumulation_steps=2", "--seed=5", "--learning_rate=0.01"]
    from_rows = ["--dataset", str(TRAIN_FILE), "--sample_packing", "--max_seq_length", "512"]
    assert main([*from_rows, *flags, "--output_dir", "rows"]) == 0
    assert main(["--dataset", "packs", *flags, "--output_dir", "packed"]) == 0
    assert losses(tmp_path / "packed") == losses(tmp_path / "rows")
    assert len(losses(tmp_path / "rows")) == 3
    data, expected = (read_metrics(tmp_path / name)["data"][0] for name in ("packed", "rows"))
    assert data["fingerprint"] == read_manifest(tmp_path / "packs").data_fingerprint
    assert expected.pop("mixture") == "concatenate"
    assert [part["name"] for part in expected.pop("data_sets")] == [str(TRAIN_FILE)]
    assert data == expected | {"fingerprint": data["fingerprint"]}
    assert (tmp_path / "packed" / "lengths.png").read_bytes() == (tmp_path / "rows/lengths.png").read_bytes()


def test_resume_refuses_other_packs(model, rows, packs, train, tmp_path, capsys):
    """Of the same documents in another order: no token count differs."""
    out, flags = tmp_path / "out", {"dataset": packs, "max_seq_length": None}
    assert train(**flags, save_steps=2, max_steps=3) == 0
    shutil.rmtree(out / "checkpoint-3")
    first = shutil.move(packs, tmp_path / "first")
    (tmp_path / "rows.json").write_text(json.dumps(rows[::-1]))
    command = ["pack", "--model_name", model, "--dataset", "rows.json", "--out", str(packs)]
    assert main([*command, "--max_seq_length", str(CAPACITY)]) == 0
    before = tree(tmp_path)
    capsys.readouterr()
    assert main(["--resume", f"--output_dir={out}"]) == 2
    error = capsys.readouterr().err
    prints = [read_manifest(folder).data_fingerprint for folder in (first, packs)]
    assert f"packs is not what the run began with (fingerprint was {prints[0]}, is {prints[1]})" in error
    assert error.count("\n") == 1
    assert tree(tmp_path) == before
    shutil.rmtree(packs)
    shutil.move(first, packs)
    assert main(["--resume", f"--output_dir={out}"]) == 0


WHOLE = {"per_device_train_batch_size": 40, "gradient_accumulation_steps": 1}  # an update sees all rows


@pytest.fixture(scope="module")
def truth(model, data, tmp_path_factory):
    """The loss of one update over all documents, each in a padded row of its own."""
    out = tmp_path_factory.mktemp("truth") / "out"
    flags = {"model_name": model, "dataset": data, "output_dir": out, "max_steps": 1, "max_seq_length": 128}
    assert main([f"--{name}={value}" for name, value in (flags | WHOLE).items()]) == 0
    return losses(out)[1]


@pytest.fixture
def first_loss(train, packs, tmp_path):
    def run(**flags):
        assert train(**{"dataset": packs, "max_seq_length": None, "max_steps": 1, **WHOLE, **flags}) == 0
        return losses(tmp_path / "out")[1]

    return run


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"sample_packing": True, "max_seq_length": 256, "use_dora": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1000},
    ],
)
def test_no_flag_lets_documents_see_each_other(flags, first_loss, truth, monkeypatch):
    monkeypatch.setenv("UNSLOTH_PACK_ATTN", "auto" if flags else "sdpa")
    assert first_loss(**flags) == pytest.approx(truth, rel=1e-5)


CONTRADICTIONS = [
    (["--sample_packing=false"], "sample_packing is false, but true for the packed rows"),
    (["--padding_free=false"], "padding_free is false, but true for the packed rows"),
    (["--train_on_responses_only"], "train_on_responses_only is true, but false for the packed rows"),
    (["--max_seq_length=127"], "max_seq_length is 127 and packs holds rows of up to 128 tokens"),
    (["--eval_dataset=packs", "--eval_packing=false"], "eval_packing is false, but true for the packed"),
]
OF_EVALUATION = [
    ([], "sample_packing is false, but true for the packed rows in packs; give --sample_packing true"),
    (["--sample_packing", "--max_seq_length=100"], "packs holds rows of up to 128 tokens"),
]


@pytest.mark.parametrize(
    ("use", "flags", "message"),
    [("dataset", *case) for case in CONTRADICTIONS] + [("eval_dataset", *case) for case in OF_EVALUATION],
)
def test_flags_that_contradict_packed_rows(use, flags, message, packs, refused):
    assert message in refused(*flags, **{use: "packs"})


def test_packs_that_have_lost_more_than_allowed(model, rows, train, refused, tmp_path):
    (tmp_path / "long.json").write_text(json.dumps([*rows, {**rows[0], "output": "b" * 200}]))
    command = ["pack", f"--model_name={model}", "--dataset=long.json", f"--max_seq_length={CAPACITY}"]
    assert main([*command, "--out=long"]) == 0
    says = refused(dataset="long", max_seq_length=None)
    longest, share = re.fullmatch(
        r".*: long has lost .* pack it anew with --max_seq_length (\d+) .*--max_token_loss (\S+)\n", says
    ).groups()
    assert train(f"--max_token_loss={share}", dataset="long", max_seq_length=None, max_steps=1) == 0
    assert main([*command[:3], f"--max_seq_length={longest}", "--out=whole"]) == 0
    assert read_manifest(tmp_path / "whole").ledger.discarded == 0
    flags = {"eval_dataset": "long", "output_dir": "other", "max_seq_length": CAPACITY}
    assert "long has lost" in refused("--sample_packing", **flags)


DAMAGE = {
    "cut shard": (lambda packs: cut(packs / "shard-00001.arrow"), "checksum differs"),
    "no manifest": (lambda packs: (packs / "packs.json").unlink(), "not a whole manifest"),
    "short boundaries": (
        lambda packs: rewrite(packs, lambda rows: rows[0]["cu_lengths"].append(99)),
        "and the cu_lengths [0, 128, 99]",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_packs(name, packs, refused):
    damage, message = DAMAGE[name]
    damage(packs)
    assert message in refused("--sample_packing", max_seq_length=128, dataset=packs)


def test_packs_of_another_tokenizer(packs, refused, model, tmp_path):
    template = byte_tokenizer().chat_template.replace("[user]", "<user>") + " "
    other = save_model(tmp_path / "other", chat_template=template)
    error = refused(dataset=packs, model_name=other)
    assert "packed with another tokenizer" in error
    assert model in error


def test_packed_ids_beyond_the_vocabulary(packs, refused, tmp_path):
    small = save_model(tmp_path / "small", vocab_size=100, eos_token_id=2, pad_token_id=0)
    assert "outside the vocabulary, 0 to 99" in refused(dataset=packs, model_name=small)


def test_packed_rows_without_a_manifest(refused):
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}])
    rows.to_parquet("rows.parquet")
    error = refused("--sample_packing", dataset="rows.parquet", max_seq_length=CAPACITY)
    assert "holds token ids of an unknown tokenizer" in error


def test_a_run_on_packs_goes_on_as_if_nothing_had_been(train, packs, tmp_path, capsys):
    flags = {"dataset": packs, "max_seq_length": None, "save_steps": 2, "max_steps": 5, "lora_dropout": 0.2}
    assert train(**flags, output_dir=tmp_path / "whole") == 0
    assert train(**flags) == 0
    out = tmp_path / "out"
    shutil.rmtree(out / "checkpoint-5")
    assert main(["--resume", "--output_dir", str(out)]) == 0
    assert losses(out) == losses(tmp_path / "whole")
    assert len(read_metrics(out)["data"]) == 1
    finished, whole = (load_file(path / "adapter_model.safetensors") for path in (out, tmp_path / "whole"))
    assert all((finished[name] == whole[name]).all() for name in whole)
    shutil.rmtree(out / "checkpoint-5")
    cut(packs / "shard-00000.arrow")
    assert main(["--resume", "--output_dir", str(out)]) == 2
    assert "checksum differs" in capsys.readouterr().err


def test_a_large_data_set_is_prepared_as_a_small_one(model, data, tmp_path, monkeypatch):
    """By any number of processes, into packs and for a run, from files that the cache holds."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    common = ["--model_name", model, "--dataset", data, "--max_seq_length", "144"]
    flags = [
        *common,
        "--max_steps=3",
        "--sample_packing",
        "--gradient_accumulation_steps=1",
        "--dtype=float32",
    ]
    assert main(["pack", *common, "--out", "packs"]) == 0
    assert main([*flags, "--output_dir", "small"]) == 0
    monkeypatch.setattr("unsloth_pack.data.files._SMALL", 0)
    monkeypatch.setattr("unsloth_pack.data.cache._ROWS", 7)
    for num_proc in ("1", "3"):
        assert main(["pack", *common, "--out", num_proc, "--num_proc", num_proc]) == 0
        shutil.rmtree(tmp_path / "cache")
        for path in (tmp_path / "packs").iterdir():
            assert (tmp_path / num_proc / path.name).read_bytes() == path.read_bytes()
    assert main([*flags, "--output_dir", "large", "--num_proc", "2"]) == 0
    assert losses(tmp_path / "large") == losses(tmp_path / "small")
    small, large = (read_metrics(tmp_path / name)["data"] for name in ("small", "large"))
    assert small == large
    parts = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "unsloth_pack").iterdir()}
    assert parts == {"rows", "documents", "packed"}
