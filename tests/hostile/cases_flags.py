"""Flags, their combinations, config files and folders that cannot be written to."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from refusals import Case, train

NUMBERS = {  # a flag of each type, and the remedy where its value is no such number
    "r": "a whole number of at least 1",
    "warmup_steps": "a whole number of at least 0",
    "seed": "a whole number from 0 to",
    "learning_rate": "a number above 0",
    "weight_decay": "a number of at least 0",
    "lora_dropout": "a number of at least 0 and below 1",
}
NO_NUMBERS = ("-1", "nan", "inf", "", "x", "0x10", "1,5", "[1]", "1" + "0" * 12)
WORDS = {
    "dtype": "one of bfloat16",
    "sample_packing": "true or false",
    "use_gradient_checkpointing": "one of true",
    "loftq_config": "or a JSON object",
}


def flag(name: str, value: str, says: str) -> Case:
    return Case(f"--{name}={value}", f"{name} is .*{says}", train(**{name: value}))


VALUES = [flag(name, value, f"give {says}") for name, says in NUMBERS.items() for value in NO_NUMBERS]
VALUES += [flag("learning_rate", "-0", "above 0"), flag("r", "1.5", "a whole number")]
VALUES += [flag("lora_dropout", "1", "below 1"), flag("r", "100000", "give a whole number from 1 to 64")]
VALUES += [flag(name, value, says) for name, says in WORDS.items() for value in ("", "frob", "7", "[4]")]
VALUES += [
    flag(name, value, f"choose one of {says}")
    for name, says in {"optim": "adamw", "lr_scheduler_type": "linear", "report_to": "none"}.items()
    for value in ("", "frob", "../x")
]

TOGETHER = [
    Case("4 and 8 bits", "are set together; choose one", train(load_in_4bit=True, load_in_8bit=True)),
    Case("as many examples, unpacked", "give --sample_packing too", train(keep_examples_per_update=True)),
    Case("evaluation not packed, and none", "give --eval_dataset", train(eval_packing=False)),
    Case(
        "evaluation packed alone", "--sample_packing too", train(eval_packing=True, eval_dataset="few.jsonl")
    ),
    Case("a place for no model", "give --save_model too", train(save_path="merged")),
    Case("one place for two", "is output_dir", train(save_model=True, save_path="out")),
    Case(
        "one place for two, spelt otherwise", "is output_dir", train(save_model=True, save_path="./x/../out")
    ),
    *(
        Case(
            f"one place for two, {name}",
            "where the run itself writes",
            train(save_model=True, save_path=name),
        )
        for name in (
            "out/metrics.jsonl",
            "out/metrics.jsonl/x",
            "out/loss.png",
            "out/checkpoint-1",
            "out/.saving",
        )
    ),
    Case("no evaluation to follow", "give --eval_dataset", train(lr_scheduler_type="reduce_lr_on_plateau")),
    Case("an optimizer of a GPU", "optim is 'lion_32bit', which needs CUDA", train(optim="lion_32bit")),
    Case("resume nothing", "no configuration of a run to resume", train(resume=True)),
    Case("resume nowhere", "--resume needs --output_dir", ["--resume"]),
    Case("resume and overwrite", "contradict each other", train(resume=True, overwrite_output_dir=True)),
    Case("longer than the model", "max_seq_length is 512.*lower it", train(max_seq_length=512)),
    Case("packing through other words", "unknown argument '--pack'", [*train(), "--pack"]),
    Case("a misspelt flag", "did you mean --learning_rate", ["--lerning_rate", "1"]),
    Case("a shortened flag", "unknown argument '--lora_drop'; did you mean", ["--lora_drop=1"]),
    Case("a single dash", "unknown argument '-r'", ["-r", "4"]),
    Case(
        "bytes that are no text",
        r"caf\\udce9.*; give text in quotes",
        train(output_dir=os.fsdecode(b"caf\xe9")),
    ),
    Case(
        "data of a name that is no text",
        r"caf\\udce9.*; give text in quotes",
        train(dataset=os.fsdecode(b"caf\xe9.jsonl")),
        lambda folder: (folder / "few.jsonl").rename(folder / os.fsdecode(b"caf\xe9.jsonl")),
    ),
    Case("words without a flag", "unknown argument 'rows.json'", ["train", "rows.json"]),
    Case("an unknown subcommand", "unknown subcommand 'trian'", ["trian"]),
    Case("a subcommand of letters", "unknown subcommand '../train'", ["../train"]),
    Case("a flag without a value", "expected one argument", ["--r"]),
    Case("a flag before the subcommand", "unknown argument 'stats'", [*train(), "stats"]),
    Case("merge nothing", "--model_name is missing", ["merge", "--save_path=new"]),
    Case("merge nowhere", "--save_path is missing", ["merge", "--model_name=model"]),
    Case(
        "merge what is no adapter",
        "holds no adapter_config.json",
        ["merge", "--model_name=model", "--save_path=new"],
    ),
    Case("pack nowhere", "--out is missing", ["pack", "--dataset=few.jsonl"]),
    Case("pack by another strategy", "one of next_fit", ["pack", "--out=new", "--strategy=best"]),
    Case("pack no rows a shard", "at least 1", ["pack", "--out=new", "--rows_per_shard=0"]),
    Case(
        "pack longer than the model",
        "lower it",
        ["pack", "--out=new", "--model_name=model", "--max_seq_length=9999"],
    ),
    Case("pack a seed beyond", "a whole number", ["pack", "--out=new", f"--seed={10**30}"]),
    Case("generate of nothing", "give some text", ["generate", "--prompt= "]),
    Case("generate colder than cold", "of at least 0", ["generate", "--prompt=a", "--temperature=-1"]),
    Case("generate forever", "a whole number", ["generate", "--prompt=a", f"--max_new_tokens={10**30}"]),
    Case(
        "generate from too much",
        "lower --max_new",
        ["generate", "--model_name=model", f"--prompt={'a' * 999}"],
    ),
    Case("verify beyond the model", "lower it", ["verify", "--model_name=model", "--max_seq_length=9999"]),
    Case(
        "verify a row of one token", "max_seq_length", ["verify", "--model_name=model", "--max_seq_length=1"]
    ),
    Case("stats of no lengths", "pack_lengths", ["stats", "--pack_lengths="]),
    Case("stats of words", "pack_lengths", ["stats", "--pack_lengths=1,b"]),
    Case("stats of zero", "pack_lengths", ["stats", "--pack_lengths=0"]),
    Case("stats of odd pictures", "image_sizes is", ["stats", "--image_sizes=12"]),
    Case(
        "stats into a file as a folder",
        "is a file",
        ["stats", "--dataset=few.jsonl", "--png=few.jsonl/a.png"],
    ),
    Case("doctor, verbose", "unknown argument", ["doctor", "--verbose"]),
]


def settings(flag: str, name: str, content: str, says: str, **others: object) -> Case:
    """A file of settings for a flag that shards."""
    return Case(
        f"--{flag}: {name} with {content[:30]}",
        f"{flag} is '{name}'.*{says}",
        train(**{flag: name}, **others),
        lambda folder: (folder / name).write_text(content),
    )


SHARDING = [
    Case("sharded twice", "give one of them", train(fsdp="full", deepspeed="zero2")),
    Case("FSDP in one process", "torchrun --nproc_per_node N cli.py --fsdp full", [*train(), "--fsdp"]),
    Case("FSDP of 4 bits", "load_in_4bit is set; drop one", train(fsdp="full", load_in_4bit=True)),
    Case("ZeRO of 8 bits", "load_in_8bit is set; drop one", train(deepspeed="zero3", load_in_8bit=True)),
    *(
        Case(
            f"{name} decided apart",
            "give true or offload",
            train(use_gradient_checkpointing="auto", **{name: value}),
        )
        for name, value in {"fsdp": "full", "deepspeed": "zero3"}.items()
    ),
    Case("--fsdp=frob", "choose one of full, keep", train(fsdp="frob")),
    Case("--deepspeed=frob", "choose one of zero2, zero3", train(deepspeed="frob")),
    Case("a file of settings that is not there", "check the path", train(fsdp="gone.json")),
    settings("fsdp", "a.json", "[1", "not json"),
    settings("fsdp", "a.yaml", "a: [1", "not yaml"),
    settings("fsdp", "a.json", "[]", "no settings"),
    settings("fsdp", "a.yaml", "fsdp_config: {fsdp_version: 1}", "version to 1; give 2"),
    settings("fsdp", "a.yaml", "frobnicate: true", "leave it out"),
    settings("deepspeed", "a.json", "{}", "no settings"),
    settings("deepspeed", "a.json", '{"zero_optimization": {"stage": 4}}', "stage to 4"),
]
SHARDING = [replace(case, beside="this is one|is not installed") for case in SHARDING]


def config(name: str, content: str | bytes, says: str) -> Case:
    data = content.encode() if isinstance(content, str) else content
    return Case(
        f"config: {name}",
        says,
        train(config="run.yaml"),
        lambda folder: (folder / "run.yaml").write_bytes(data),
    )


CONFIGS = [
    Case("config: missing", "config is 'gone.yaml'.*check the path", train(config="gone.yaml")),
    Case("config: a folder", "config is '.'", train(config=".")),
    Case("config: no name", "config is ''|config is '.'", train(config="")),
    config(
        "an open quote before a secret",
        'hub_token: "hf_secret\n',
        r"run.yaml:2: not yaml \(found unexpected end of stream\); correct it$",
    ),
    config("UTF-16", "r: 4\n".encode("utf-16"), "not yaml"),
    config("zero bytes", b"r: \x00", "not yaml"),
    config("python's own types", "seed: !!python/object/apply:os.system ['touch written']", "seed is a list"),
    config("python's names", "dtype: !!python/name:os.system", "not yaml .*tag"),
    config("a value out of range", "r: 0\n", "run.yaml:1: r is 0; give a whole number"),
]


def a_file(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("mine")


def some_rows(folder: Path) -> None:
    (folder / "rows").mkdir()
    (folder / "few.jsonl").rename(folder / "rows/few.jsonl")


def a_run(name: str = "metrics.jsonl", content: str = "{}") -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / "out" / name).parent.mkdir(parents=True)
        (folder / "out" / name).write_text(content)

    return prepare


def resumed(name: str, content: str, says: str) -> Case:
    return Case(f"resume: {name}", says, ["--resume", "--output_dir=out"], a_run("metrics.jsonl", content))


def options(**values: object) -> str:
    return json.dumps({"kind": "config", "options": {"model_name": "model", **values}}) + "\n"


FOLDERS = [
    Case("output_dir is a file", "is a file; give another folder", train(output_dir="mine"), a_file("mine")),
    Case("output_dir is in a file", "is a file; give", train(output_dir="mine/out"), a_file("mine")),
    Case("output_dir is the data", "is a file; give another folder", train(output_dir="few.jsonl")),
    Case("output_dir is the model", "holds a model", train(output_dir="model")),
    Case("output_dir is in the kernel's", "cannot be written to", train(output_dir="/proc/self/out")),
    Case("output_dir is nobody's", "output_dir is ''", train(output_dir="")),
    Case(
        "output_dir is in the data", "is in dataset", train(dataset="rows", output_dir="rows/out"), some_rows
    ),
    Case(
        "output_dir is the folder of the data",
        "is in dataset",
        train(dataset="rows", output_dir="rows"),
        some_rows,
    ),
    Case("output_dir is about the data", "is in dataset", train(eval_dataset=".", output_dir="out")),
    Case("output_dir steers a terminal", "cannot name a folder", train(output_dir="\x1b[31mout")),
    Case("png steers a terminal", "cannot name a folder", ["stats", "--png=a\nb/c.png"]),
    Case("output_dir has a zero byte", "output_dir", train(output_dir="a\0b")),
    Case("output_dir is too long", "output_dir", train(output_dir="x" * 5000)),
    Case(
        "output_dir is a dangling link",
        "output_dir",
        train(output_dir="out"),
        lambda f: (f / "out").symlink_to("gone/x"),
    ),
    Case("output_dir holds a run", "holds a run already", train(), a_run()),
    Case("output_dir holds an adapter", "holds a run already", train(), a_run("adapter_config.json")),
    Case(
        "output_dir holds a checkpoint",
        "holds a run already",
        train(),
        a_run("checkpoint-3/trainer_state.json"),
    ),
    Case("save_path is a file", "is a file; give", train(save_model=True, save_path="mine"), a_file("mine")),
    Case("save_path holds something", "is not empty", train(save_model=True, save_path="model")),
    Case("out holds something", "is not empty", ["pack", "--dataset=few.jsonl", "--out=model"]),
    Case("out is a file", "is a file", ["pack", "--dataset=few.jsonl", "--out=few.jsonl"]),
    Case(
        "out is in the kernel's", "cannot be written", ["pack", "--dataset=few.jsonl", "--out=/proc/self/out"]
    ),
    resumed("an empty file", "", "no configuration of a run to resume"),
    resumed("half a line", '{"kind": "config", "opt', "no configuration of a run"),
    resumed("other JSON", "[]\n", "no configuration of a run"),
    resumed("options that are none", '{"kind": "config", "options": [1]}\n', "no configuration of a run"),
    resumed("zeros", "\0\n", "no configuration"),
    resumed(
        "a rank that is text",
        options(r="x", dataset="few.jsonl"),
        "run to resume: r is 'x'; give a whole",
    ),
    resumed("a rank of 0", options(r=0, dataset="few.jsonl"), "run to resume: r is 0; give a whole"),
    Case(
        "resume: a broken checkpoint",
        "is not whole",
        ["--resume", "--output_dir=out"],
        lambda folder: (
            a_run("metrics.jsonl", options(dataset="few.jsonl", max_seq_length=128))(folder),
            (folder / "out/checkpoint-3").mkdir(),
        ),
    ),
]
CASES = [*VALUES, *TOGETHER, *SHARDING, *CONFIGS, *FOLDERS]
