"""Flags, their combinations, config files and folders that cannot be written to."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from refusals import Case, train


def flag(name: str, value: str, says: str) -> Case:
    return Case(f"--{name}={value}", f"{name} is .*{says}", train(**{name: value}))


VALUES = [
    *(flag("r", value, "it should be") for value in ("-1", "1.5", "x", "", "0x10", "1" + "0" * 12)),
    *(flag("learning_rate", value, "it should be") for value in ("-0", "nan", "inf", "1,5")),
    flag("lora_dropout", "1", "it should be less than 1"),
    flag("r", "100000", "give a whole number from 1 to 64"),
    flag("dtype", "frob", "it should be 'bfloat16'"),
    flag("sample_packing", "frob", "it should be a valid boolean"),
    flag("loftq_config", "[4]", "it should be a valid dictionary"),
    Case("--optim=frob", "transformers refuses these arguments: frob", train(optim="frob")),
    flag("lr_scheduler_type", "../x", "transformers refuses"),
    flag("report_to", "frob", "give one of none"),
]

TOGETHER = [
    Case("4 and 8 bits", "give one of them", train(load_in_4bit=True, load_in_8bit=True)),
    Case("as many examples, unpacked", "give --sample_packing too", train(keep_examples_per_update=True)),
    Case("a place for no model", "give --save_model too", train(save_path="merged")),
    *(
        Case(
            f"one place for two, {name}",
            "where the run itself writes",
            train(save_model=True, save_path=name),
        )
        for name in ("out", "./x/../out", "out/metrics.jsonl/x", "out/checkpoint-1", "out/.saving")
    ),
    Case("no evaluation to follow", "give --eval_dataset", train(lr_scheduler_type="reduce_lr_on_plateau")),
    Case("an optimizer of a GPU", "optim is 'lion_32bit', which needs CUDA", train(optim="lion_32bit")),
    Case("resume nothing", "no configuration of a run to resume", train(resume=True)),
    Case("resume and overwrite", "contradict each other", train(resume=True, overwrite_output_dir=True)),
    Case("longer than the model", "max_seq_length is 512.*lower it", train(max_seq_length=512)),
    Case("a single dash", "unknown argument '-r'", ["-r", "4"]),
    Case(
        "bytes that are no text",
        r"output_dir is .*caf\\udce9.*; it should be a valid string",
        train(output_dir=os.fsdecode(b"caf\xe9")),
    ),
    Case("merge nothing", "--model_name is missing", ["merge", "--save_path=new"]),
    Case(
        "merge what is no adapter",
        "holds no adapter_config.json",
        ["merge", "--model_name=model", "--save_path=new"],
    ),
    Case("pack nowhere", "--out is missing", ["pack", "--dataset=few.jsonl"]),
    Case("pack by another strategy", "it should be 'next_fit'", ["pack", "--out=new", "--strategy=best"]),
    Case(
        "pack longer than the model",
        "lower it",
        ["pack", "--out=new", "--model_name=model", "--max_seq_length=9999"],
    ),
    Case("generate of nothing", "give some text", ["generate", "--prompt= "]),
    Case(
        "generate from too much",
        "lower --max_new",
        ["generate", "--model_name=model", f"--prompt={'a' * 999}"],
    ),
    Case("verify beyond the model", "lower it", ["verify", "--model_name=model", "--max_seq_length=9999"]),
    Case("stats of words", "pack_lengths", ["stats", "--pack_lengths=1,b"]),
    Case("stats of odd pictures", "image_sizes is", ["stats", "--image_sizes=12"]),
    Case(
        "stats into a file as a folder",
        "cannot be written to",
        ["stats", "--dataset=few.jsonl", "--png=few.jsonl/a.png"],
    ),
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
    Case("FSDP in one process", "torchrun --nproc_per_node N cli.py --fsdp full", [*train(), "--fsdp"]),
    Case("FSDP of 8 bits", "load_in_8bit is true; give one", train(fsdp="full", load_in_8bit=True)),
    Case("decided apart", "give true or offload", train(use_gradient_checkpointing="auto", fsdp="full")),
    Case("--deepspeed=frob", "choose one of zero2, zero3", train(deepspeed="frob")),
    settings("fsdp", "a.json", "[1", "not json"),
    settings("fsdp", "a.yaml", "fsdp_config: {fsdp_version: 1}", "version is 1; it should be 2"),
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
    config("an open quote before a secret", 'hub_token: "hf_secret\n', r"run.yaml:2: not yaml; correct it$"),
    config("UTF-16", "r: 4\n".encode("utf-16"), "not yaml"),
    config("python's own types", "seed: !!python/object/apply:os.system ['touch written']", "a tag stands"),
]
CONFIGS[-1] = replace(CONFIGS[-1], beside="seed is")


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
    Case("output_dir is in a file", "cannot be written to", train(output_dir="mine/out"), a_file("mine")),
    Case("output_dir is the model", "holds a model", train(output_dir="model")),
    Case("output_dir is nobody's", "output_dir is ''", train(output_dir="")),
    Case(
        "output_dir is in the data", "is in dataset", train(dataset="rows", output_dir="rows/out"), some_rows
    ),
    Case("output_dir steers a terminal", "cannot name a folder", train(output_dir="\x1b[31mout")),
    Case("output_dir is too long", "output_dir", train(output_dir="x" * 5000)),
    Case(
        "output_dir is a dangling link",
        "output_dir",
        train(output_dir="out"),
        lambda f: (f / "out").symlink_to("gone/x"),
    ),
    Case("output_dir holds an adapter", "holds a run already", train(), a_run("adapter_config.json")),
    Case(
        "output_dir holds a checkpoint",
        "holds a run already",
        train(),
        a_run("checkpoint-3/trainer_state.json"),
    ),
    Case("save_path holds something", "is not empty", train(save_model=True, save_path="model")),
    Case("out holds something", "is not empty", ["pack", "--dataset=few.jsonl", "--out=model"]),
    resumed("half a line", '{"kind": "config", "opt', "no configuration of a run"),
    resumed("options that are none", '{"kind": "config", "options": [1]}\n', "no configuration of a run"),
    resumed("a rank of 0", options(r=0, dataset="few.jsonl"), "run to resume: r is 0; it should"),
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
