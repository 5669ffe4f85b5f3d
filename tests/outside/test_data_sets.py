"""Several data sets, parts of them, and documents held out: `train` twice, and stopped in a process."""

import json
import subprocess
import time
from pathlib import Path

import datasets
import pytest
import warm

from unsloth_pack.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
ALPACA = [{"instruction": f"say {'a' * (n % 9)}", "output": "b" * (1 + n % 30), "id": n} for n in range(40)]
ASKED = [{"question": f"what is {n}", "answer": f"it is {n}", "lang": "en"} for n in range(60)]
CHATS = [
    {"conversations": [{"from": "human", "value": f"hi {n}"}, {"from": "gpt", "value": "x" * (n % 7 + 1)}]}
    for n in range(30)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Data sets of four formats."""
    (tmp_path / "alpaca.json").write_text(json.dumps(ALPACA))
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ASKED))
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of the text" for n in range(20)))
    datasets.Dataset.from_list(CHATS).to_parquet(tmp_path / "chats.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MAPPED = {"path": "asked.jsonl", "weight": 0.5, "columns": {"question": "prompt", "answer": "completion"}}
MIXED = [{"path": "alpaca.json", "weight": 2}, MAPPED, "chats.parquet", {"path": "text.txt", "limit": 10}]
FLAGS = ["--max_seq_length=128", "--dtype=float32", "--gradient_accumulation_steps=1", "--seed=5"]


@pytest.fixture
def train(folder, model_folder, capsys):
    """Runs `train`, or a process of it that is stopped after some updates, and returns what it said."""

    def run(*arguments, out="out", stopped_after=None):
        given = [] if "--resume" in arguments else [f"--model_name={model_folder}", *FLAGS]
        command = ["train", *given, *arguments, f"--output_dir={out}"]
        capsys.readouterr()
        if stopped_after is None:
            assert main(command) == 0
            said = capsys.readouterr().out
        else:
            said = stopped(command, folder, out, stopped_after)
        return " ".join(said.replace("│", " ").split())

    return run


def stopped(command, folder, out, updates):
    """What a process says that is terminated after its first updates."""
    output = folder / f"{out}.log"
    process = warm.start(warm.run_program, ROOT / "cli.py", command, cwd=folder, stdout=output, stderr=output)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.is_alive():
        if (folder / out / "metrics.jsonl").exists() and len(losses(folder / out)) >= updates:
            process.terminate()
            break
        time.sleep(0.02)
    process.join(timeout=200)
    said = output.read_text()
    assert process.exitcode == 143, said
    return said


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def data_of(folder, use="train"):
    (line,) = [line for line in metrics(folder) if line["kind"] == "data" and line["use"] == use]
    return line


def losses(folder):
    """Of training and of evaluation, by update."""
    logs = [line for line in metrics(folder) if line["kind"] == "log"]
    return {
        (line["step"], name): line[name] for line in logs for name in ("loss", "eval_loss") if name in line
    }


def adapter(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


HELD_OUT = ["--eval_fraction=0.1", f"--dataset={json.dumps(MIXED)}", "--max_steps=30", "--sample_packing"]


@pytest.mark.nightly
def test_a_mixture_that_is_held_out_of_trains_twice_alike_and_resumes(train, folder):
    banner = train(*HELD_OUT, "--num_proc=1", "--verbose", out="one")
    assert "mixture alpaca.json: weight 2, " in banner
    assert "mixture asked.jsonl: weight 0.5, " in banner
    assert "not used alpaca.json: id" in banner
    assert "not used asked.jsonl: lang" in banner
    assert "held out of the data" in banner
    train(*HELD_OUT, "--num_proc=2", out="cut", stopped_after=2)
    train("--resume", out="cut")
    assert data_of(folder / "cut") == data_of(folder / "one")
    assert data_of(folder / "cut", "eval") == data_of(folder / "one", "eval")
    assert losses(folder / "cut") == losses(folder / "one")
    assert adapter(folder / "cut") == adapter(folder / "one")
    data = data_of(folder / "one")
    assert data["mixture"] == "concatenate"
    assert [part["name"] for part in data["data_sets"]] == [
        *("alpaca.json", "asked.jsonl", "chats.parquet", "text.txt")
    ]
    assert [part["documents"] for part in data["data_sets"]] == [40, 60, 30, 10]
    assert sum(part["held_out"] for part in data["data_sets"]) == data["ledger"]["rows_held_out"] == 14
    assert data_of(folder / "one", "eval")["ledger"]["rows_read"] == 14
    tokens = sum(part["trained_tokens"] for part in data["data_sets"])
    ledger = data["ledger"]
    assert tokens == sum(
        ledger[name]
        for name in ("tokens_counted", "tokens_masked_by_template", "tokens_masked_at_boundaries")
    )


def test_a_mixture_that_streams_resumes(train, folder):
    items = [item | {"weight": 3} if item is MAPPED else item for item in MIXED]
    flags = ["--streaming", "--mixture=interleave_under", f"--dataset={json.dumps(items)}", "--max_steps=25"]
    shown = train(*flags, "--num_proc=2", out="one")
    assert "mixture asked.jsonl: " in shown
    assert "read asked.jsonl: " in shown
    train(*flags, out="cut", stopped_after=2)
    train("--resume", out="cut")
    assert losses(folder / "cut") == losses(folder / "one")
    assert adapter(folder / "cut") == adapter(folder / "one")
    summaries = [metrics(folder / name)[-1] for name in ("one", "cut")]
    for summary in summaries:  # a resumed run finds its files by their whole paths
        read = summary["stream"]["read"]
        summary["stream"]["read"] = [[Path(name).name, *counts] for name, *counts in read]
    assert summaries[0]["stream"] == summaries[1]["stream"]
    assert len(summaries[0]["stream"]["read"]) == 4


# ---- without training: what is chosen, by `pack`


@pytest.fixture
def packed(folder, model_folder, capsys):
    """What `pack` says of the data."""

    def pack(*arguments):
        capsys.readouterr()
        command = ["pack", f"--model_name={model_folder}", "--max_seq_length=200", "--json", "--out=packs"]
        assert main([*command, *arguments]) == 0
        subprocess.run(["rm", "-r", "packs"], check=True)
        return json.loads(capsys.readouterr().out)

    return pack


@pytest.fixture
def no_pack(refused, folder, model_folder):
    def pack(*arguments):
        given = [f"--model_name={model_folder}", "--max_seq_length=200", "--out=no_packs"]
        return refused(["pack", *given, *arguments])

    return pack


def test_any_number_of_processes_packs_the_same_mixture(packed):
    flags = [f"--dataset={json.dumps(MIXED)}", "--mixture=interleave_over", "--sample_limit=50"]
    manifest = packed(*flags)
    assert manifest["documents"] == 50
    assert packed(*flags, "--num_proc=2") == packed(*flags, "--num_proc=1") == manifest
    assert packed(*flags, "--seed=1") != manifest


def test_a_split_of_a_folder(packed, no_pack, folder):
    (folder / "data").mkdir()
    for name, rows in (("train", ALPACA[:9]), ("validation", ALPACA[:5]), ("test-00000", ALPACA[:3])):
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows))
    assert packed("--dataset=data")["documents"] == 9
    assert packed("--dataset=data", "--split=validation")["documents"] == 5
    both = [{"path": "data", "split": "test"}, "data"]
    assert packed(f"--dataset={json.dumps(both)}", "--split=validation")["documents"] == 3 + 5
    beside_a_file = packed("--dataset=data,alpaca.json", "--split=validation")
    assert beside_a_file["documents"] == 5 + len(ALPACA)
    assert "no split 'dev'; choose one of test, train, validation" in no_pack("--dataset=data", "--split=dev")


LAYOUTS = {
    "hub": ["default/train/0000.jsonl", "default/validation/0000.jsonl", "default/test/0000.jsonl"],
    "shards": ["data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"],
    "words": ["my train.jsonl", "dev-0.jsonl", "sub/x_testing.1.jsonl", "config.json"],
    "declared": ["a/0.jsonl", "b/train.jsonl", "test.jsonl"],
    "below": ["v1/dev.jsonl", "v2/train/a.jsonl", "v2/eval/a.jsonl"],
}
CARDS = {
    "declared": "- config_name: other\n  data_files: test.jsonl\n- config_name: mine\n  default: true\n"
    "  data_files:\n  - split: train\n    path: [./a/*.jsonl, test.jsonl]\n  - split: held\n    path: b/*\n",
    "below": "- config_name: one\n  data_dir: v2\n",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_has_the_splits_that_datasets_finds(packed, folder, no_pack, name):
    for number, path in enumerate(LAYOUTS[name], 1):
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text('{"text": "a"}\n' * number)
    if name in CARDS:
        (folder / name / "README.md").write_text(f"---\nconfigs:\n{CARDS[name]}---\n# Rows\n")
    splits = datasets.load_dataset(name, cache_dir=str(folder / "cache"))
    for split, rows in splits.items():
        assert packed(f"--dataset={name}", f"--split={split}")["documents"] == len(rows)
    assert f"choose one of {', '.join(sorted(splits))}" in no_pack(f"--dataset={name}", "--split=none")


@pytest.mark.parametrize(
    ("paths", "card", "says"),
    [
        (["train.jsonl", "more.jsonl"], "", "more.jsonl: in no split, beside files of train; "),
        (["a.jsonl"], "configs: [{config_name: a}, {config_name: b}]", "available configs: ['a', 'b']"),
        (["a.jsonl"], "configs: [{config_name: a, data_files: b.jsonl}]", "Unable to find"),
        (["a.jsonl"], "a: [", "while parsing a flow node"),
    ],
)
def test_files_of_a_folder_that_have_no_one_split(folder, no_pack, paths, card, says):
    for path in paths:
        (folder / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / path).write_text('{"text": "a"}\n')
    (folder / "data" / "README.md").write_text(f"---\n{card}\n---\n")
    assert says in no_pack("--dataset=data")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--streaming"], "streaming is true and eval_fraction is 0.5; give one of them"),
        (["--dataset=same.txt"], "all 3 documents hold the same tokens, so that none can be held out"),
    ],
)
def test_what_cannot_be_held_out(folder, model_folder, refused, flags, says):
    (folder / "same.txt").write_text("a\na\na")
    train = [f"--model_name={model_folder}", "--max_steps=1", "--output_dir=out", "--max_seq_length=99"]
    data = [] if any(flag.startswith("--dataset") for flag in flags) else ["--dataset=text.txt"]
    assert says in refused([*train, *data, "--eval_fraction=0.5", *flags])


def test_evaluation_data_of_several_kinds(folder, model_folder, capsys):
    """Its documents count once each, and a smoke run evaluates on few of them."""
    train = [f"--model_name={model_folder}", "--max_steps=2", "--output_dir=out", *FLAGS]
    evaluation = json.dumps(["alpaca.json", {"path": "text.txt", "limit": 3}])
    assert main([*train, "--dataset=text.txt", f"--eval_dataset={evaluation}", "--sample_limit=7"]) == 0
    assert data_of(folder / "out", "eval")["ledger"]["rows_read"] == 7 + 3
    assert data_of(folder / "out")["ledger"]["rows_read"] == 7
    assert "eval_loss" in {name for _, name in losses(folder / "out")}


@pytest.mark.parametrize("rows", [[{"text": "ab"}, {"text": None}], [{"text": ""}]])
def test_a_mistake_in_evaluation_rows_names_their_file(rows, folder, model_folder, refused):
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model_name": model_folder, "dataset": "alpaca.json", "eval_dataset": "held.jsonl"}
    line = refused([*(f"--{name}={value}" for name, value in given.items()), "--max_seq_length=200"])
    assert line.startswith("unsloth-pack: held.jsonl: ")
