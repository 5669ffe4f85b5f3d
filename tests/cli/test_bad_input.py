"""Bad input ends with exit code 2, one line that says what, the value and the remedy, and nothing written."""

import json

import pytest
from tables import table

from unsloth_pack.cli import main


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"load_in_4bit": True, "loftq_config": "{}"},
            ["loftq_config is {} and load_in_4bit is true; give one"],
        ),
        (
            {"eval_packing": True},
            ["eval_packing is true, which needs another option; give --sample_packing too"],
        ),
        (
            {"tuning": "full", "lora_plus_ratio": 16, "save_method": "lora", "r": 8},
            ["'full' and r is 8", "'full' and lora_plus_ratio is 16", "'full' and save_method is 'lora'"],
        ),
        (
            {"streaming": True, "max_steps": None, "sample_packing": False, "eval_fraction": 0.5},
            ["streaming is true, which needs", "sample_packing is false", "true and eval_fraction is 0.5"],
        ),
        (
            {"optim": "sgd", "optim_args": "momentum=2,beta1=0.9"},
            ["optim_args: momentum is 2", "optim_args has 'beta1'"],
        ),
    ],
)
def test_all_contradictions_come_at_once(flags, told, train, capsys):
    assert train(**flags) == 2
    said = capsys.readouterr().err
    assert [line for line in told if line not in said] == []


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("optim", "adamw_8bit", "use adamw_torch"),
        ("attn_backend", "flash", "use 'auto' or one of sdpa"),
        ("loftq_config", '{"loftq_bits": 4}', "leave it out"),
    ],
)
def test_what_needs_a_gpu(flag, value, remedy, refused):
    error = refused(**{flag: value})
    assert value in error
    assert remedy in error


# Of TRL, transformers, PEFT, Axolotl, LLaMA-Factory, ms-swift and torchtune: what there is no flag for


@table(
    ("arguments", "complaint", "remedy"),
    [
        (["--hub_token=abc"], "'--hub_token'", "set HF_TOKEN in the environment"),
        (
            ["--grpo_beta=1"],
            "'--grpo_beta'",
            "no objective has such a setting; leave it out",
        ),
        (["--frobnicate"], "unknown argument '--frobnicate'", "see `unsloth-pack --help`"),
        (
            ["trian"],
            "unknown subcommand 'trian'",
            "one of train, stats, pack, teach, verify, bench, generate, chat, merge, export",
        ),
        (["run.yaml"], "unknown subcommand 'run.yaml'", "or --config run.yaml"),
        (["--cutoff-len=512"], "unknown argument '--cutoff-len'", "did you mean --max_seq_length?"),
        (["pack", "--base_model", "x"], "unknown argument '--base_model'", "did you mean --model_name?"),
        (["--r"], "argument --r: expected one argument", "--help"),
        (["--target_modules=a", "--target_modules=b"], "--target_modules is given twice", "give it once"),
        (["--target_modules", "a", "b"], "unknown argument 'b'", "put commas between its values"),
        (["--resume"], "--resume needs --output_dir", "name the folder"),
        (["generate", "--temperature", "-1"], "temperature is '-1'", "greater than or equal to 0"),
    ],
)
def test_command_lines(arguments, complaint, remedy, refused):
    error = refused(command=arguments)
    assert complaint in error
    assert remedy in error


def test_debug_shows_the_traceback(capsys):
    assert main(["--r", "0", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("unsloth-pack: r is '0'")


def test_anything_else_is_one_line_and_exit_code_1(train, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("unsloth_pack.run.trainer.make_trainer", fail)
    assert train() == 1
    assert (
        capsys.readouterr().err == "unsloth-pack: RuntimeError: first line; add --debug for the traceback\n"
    )


def test_a_launcher_is_told_of_the_exit_code(monkeypatch, tmp_path, capsys):
    for file in (tmp_path / "error.json", tmp_path / "no-such-folder" / "error.json"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert main(["--r", "0"]) == 2
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["errorCode"] == 2
    assert capsys.readouterr().err == f"{told['message']}\n" * 2
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none.json"))
    assert main(["--help"]) == 0
    assert not (tmp_path / "none.json").exists()
