"""Bad input ends with exit code 2, one line that says what, the value and the remedy, and nothing written."""

import json

import pytest
from model_folder import save_model
from tables import table

from unsloth_pack.cli import main
from unsloth_pack.config import OPTIONS, train_parser
from unsloth_pack.config.names import other_trainers


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"load_in_4bit": True, "loftq_config": "{}"}, ["loftq_config starts from 16-bit weights; drop"]),
        (
            {"eval_packing": True},
            ["eval_packing is true without data", "eval_packing is set without sample_packing"],
        ),
        (
            {"tuning": "full", "lora_plus_ratio": 16, "save_method": "lora", "r": 8},
            ["r is 8 and tuning is 'full'", "and lora_plus_ratio is 16", "and save_method is 'lora'"],
        ),
        (
            {"streaming": True, "max_steps": None, "sample_packing": False, "eval_fraction": 0.5},
            ["streaming is set and max_steps", "sample_packing is false", "eval_fraction is 0.5"],
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


def test_what_there_is_of_data_and_then_of_a_model_is_told_at_once(train, capsys, tmp_path):
    """What is wrong with the model is told where nothing else is: it takes seconds to look at one."""
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    of_data = {"columns": "question=prompt,answr=completion", "optim": "adam", "eval_dataset": "gone.jsonl"}
    of_model = {"target_modules": "q_prj,v_prj", "bias": "none", "layers_to_transform": "99"}
    told = ["optim is 'adam'", "rows.jsonl: columns maps 'answr'", "gone.jsonl: file not found"]
    right = {"columns": "question=prompt,answer=completion"}
    for wrong, lines in (
        ({**of_model, **of_data}, told),
        ({**of_model, **right}, ["target_modules names 'q_prj', 'v_prj'", "layers_to_transform is 99"]),
    ):
        assert train(dataset="rows.jsonl", **wrong) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == len(lines)
        assert [line for line in lines if not any(line in each for each in said)] == []


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


def test_quantised_weights_need_bitsandbytes(refused, monkeypatch):
    monkeypatch.setattr("unsloth_pack.checkpoints.loading.is_bitsandbytes_available", lambda: False)
    error = refused("--load_in_4bit")
    assert "load_in_4bit" in error
    assert "pip install" in error


def test_weights_in_a_form_that_the_device_lacks_are_refused_before_data_is_read(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("unsloth_pack.data.sources.load_rows", None)
    error = refused("--load_in_fp8")
    assert "load_in_fp8" in error
    assert "needs a GPU" in error


def test_one_letter_left_out_doubled_or_swapped_leads_to_the_flag():
    parser, (same, instead, _) = train_parser(), other_trainers()
    missed = []
    for flag in (name for name in OPTIONS if len(name) > 3):
        for i in range(1, len(flag) - 1):
            slips = flag[:i] + flag[i + 1 :], flag[:i] + flag[i] + flag[i:]
            slips += (flag[:i] + flag[i + 1] + flag[i] + flag[i + 2 :],)
            missed += [
                slip
                for slip in {*slips} - OPTIONS.keys() - same.keys() - instead.keys()
                if parser.remedy(f"--{slip}") != f"did you mean --{flag}?"
            ]
    assert {*missed} <= {"load_in4_bit", "load_in_bit", "load_in_b4it", "learning_ratse"}  # as near to two


# Of TRL, transformers, PEFT, Axolotl, LLaMA-Factory, ms-swift and torchtune: what there is no flag for
NO_FLAGS_OF_OURS = """
    ddp_backend data_seed dataset_kwargs eval_delay eval_strategy fsdp_config group_by_length label_names
    logging_strategy lora_on_cpu model_type packing_strategy precompute_ref_batch_size prediction_loss_only
    rope_scaling save_only_model shuffle_dataset torch_compile vllm_mode wandb_project frobnicate verbose max
    load save lo b use_lora train random weight padding sample logging token mode repo optimizers_config
    data_dir dataset_dir model_init_kwargs learner dataloader resume_from_checkpoint
"""


@table("flag", NO_FLAGS_OF_OURS.split())
def test_no_guess_where_nothing_is_alike(flag):
    assert "did you mean" not in train_parser().remedy(f"--{flag}")


@table(
    ("arguments", "complaint", "remedy"),
    [
        (["--lora_target_linear=true"], "'--lora_target_linear'", "give target_modules: all-linear"),
        (["--hub_token=abc"], "'--hub_token'", "set HF_TOKEN in the environment"),
        (["--lerning_rate", "1"], "unknown argument '--lerning_rate'", "did you mean --learning_rate?"),
        (["--grpo_beta=1"], "'--grpo_beta'", "objective is sft, which has no such setting; leave it out"),
        (["--frobnicate"], "unknown argument '--frobnicate'", "see `unsloth-pack --help`"),
        (
            ["trian"],
            "unknown subcommand 'trian'",
            "one of train, stats, pack, verify, bench, generate, merge, doctor, config, recipe",
        ),
        (["run.yaml"], "unknown subcommand 'run.yaml'", "or --config run.yaml"),
        (["train", "run.yaml"], "unknown argument 'run.yaml'", "; give --config run.yaml"),
        (["--cutoff-len=512"], "unknown argument '--cutoff-len'", "did you mean --max_seq_length?"),
        (["pack", "--base_model", "x"], "unknown argument '--base_model'", "did you mean --model_name?"),
        (["--r"], "argument --r: expected one argument", "--help"),
        (["--target_modules=a", "--target_modules=b"], "--target_modules is given twice", "its values with"),
        (["--target_modules", "a", "b"], "unknown argument 'b'", "; give a flag its values with commas"),
        (["stats", "--dataset=a", "--dataset=b"], "--dataset is given twice", "with commas"),
        (["stats", "--mixture=interleave_over"], "mixture is 'interleave_over', and there is one", "several"),
        (["--resume"], "--resume needs --output_dir", "name the folder"),
        (["generate", "--temperature", "-1"], "temperature is -1", "of at least 0"),
        (["merge", "--save_path", "x"], "--model_name is missing", "--help"),
        (["merge", "--model_name=no", "--save_path=x"], "'no' holds no adapter_config.json", "that train"),
    ],
)
def test_command_lines(arguments, complaint, remedy, refused):
    error = refused(command=arguments)
    assert complaint in error
    assert remedy in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["merge", "--model_name=whole", "--save_path=merged"],
            "model_name 'whole' holds no adapter_config.json; it holds a whole model, with nothing to merge",
        ),
        (
            ["--init_adapter=whole"],
            "init_adapter 'whole' holds no adapter_config.json; it holds a whole model, so give --model_name "
            "'whole' in place of it",
        ),
    ],
)
def test_a_whole_model_in_place_of_an_adapter(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"unsloth-pack: {says}\n"


@pytest.mark.parametrize(
    ("name", "text", "flags", "complaint"),
    [
        ("empty.json", "[]", {}, "0 rows"),
        ("other.json", '[{"question": "a", "answer": "b"}]', {}, "question"),
        ("broken.jsonl", '{"text": "a"}\n{"text"', {}, "line 2"),
        ("long.json", None, {"max_seq_length": 8}, "max_seq_length 8"),
        ("text.json", '[{"text": "a b c"}]', {"train_on_responses_only": True}, "plain text"),
    ],
)
def test_data(name, text, flags, complaint, refused, rows, tmp_path):
    (tmp_path / name).write_text(text if text is not None else json.dumps(rows))
    assert complaint in refused(dataset=tmp_path / name, **flags)


def test_token_ids_beyond_the_vocabulary(refused, tmp_path):
    folder = save_model(tmp_path / "small", vocab_size=100, eos_token_id=2, pad_token_id=0)
    error = refused(model_name=folder)
    assert "outside the vocabulary, 0 to 99" in error


def test_an_architecture_without_a_patch(refused, tmp_path):
    folder = save_model(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    error = refused(model_name=folder)
    assert "'gpt2' has no patch" in error
    assert "llama" in error


def test_debug_shows_the_traceback(capsys):
    assert main(["--r", "0", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("unsloth-pack: r is 0")


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
    assert capsys.readouterr().err == f"unsloth-pack: {told['message']}\n" * 2
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none.json"))
    assert main(["--help"]) == 0
    assert not (tmp_path / "none.json").exists()
