"""Where the value of an option comes from, and what is read to decide it."""

import json

import pytest
from command_options import read_options
from tables import table

from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.demo import DEFAULTS, DEMO_DEFAULTS
from unsloth_pack.errors import InputError
from unsloth_pack.run.resolve import FREE_ON_RESUME, with_optimizer


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(folder, **values):
    """The folder of a run that was started with these values."""
    record = {"kind": "config", "options": values}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return ["--resume", f"--output_dir={folder}"]


def test_the_command_line_wins_over_the_file_over_the_demo_over_defaults(folder):
    (folder / "run.yaml").write_text("lora_alpha: 8\nr: 4\nweight_decay: null\nmax_steps: 7\n")
    options = read_options(["--config=run.yaml", "--r=2"])
    adapter, training = options.adapter, options.training
    assert (adapter.r, adapter.lora_alpha, training.max_steps) == (2, 8.0, 7)
    assert training.weight_decay == DEMO_DEFAULTS["weight_decay"]  # null is as good as not given
    assert training.learning_rate == DEMO_DEFAULTS["learning_rate"]
    assert training.seed == TrainOptions().training.seed
    assert read_options(["--dataset=rows.json"]).training.learning_rate == 2e-4


def test_what_a_run_writes_down_resumes_it(folder):
    """The record is flat, by the names of the options, as JSON."""
    first = read_options(["--dataset=d", "--loftq_config={}", "--use_gradient_checkpointing=offload"])
    flags = started(folder, **json.loads(json.dumps(flat(first))))
    resumed = flat(read_options(flags))
    assert resumed == flat(first) | {"resume": True, "output_dir": str(folder)}


@table("name", sorted(flat(TrainOptions()).keys() - {"output_dir", "resume", "config", "objective"}))
def test_a_resumed_run_changes_nothing_but_what_is_free(name, folder):
    """Every option is one or the other, for a new option too; the objective has one value."""
    others = {int: "7", float: "0.25", bool: "true", type(None): "7", str: "other"}
    words = {"bias": "all", "on_nonfinite": "skip", "save_method": "lora", "dtype": "float16"}
    words |= {"loftq_config": "{}", "eval_packing": "true", "lr_scheduler_kwargs": "{}", "tuning": "full"}
    words |= {"learning_rates": '{"norm": 1}', "warmup_ratio": "0.25", "optim_args": "eps=1"}
    words |= {"freeze_vit": "false", "attn_backend": "sdpa", "push_to_hub": "a/b"}
    was = flat(TrainOptions())
    value = words.get(name, others[type(was[name])])
    flags = [*started(folder, **was), f"--{name}={value}"]
    if name in FREE_ON_RESUME:
        assert str(flat(read_options(flags))[name]).lower() == value
    else:
        with pytest.raises(InputError, match=name):
            read_options(flags)


def test_what_is_free_on_resume():
    """Written down a second time: whoever frees an option says here that it changes no update."""
    of_reports = {
        "config",
        "dry_run",
        "resume",
        "output_dir",
        "logging_steps",
        "report_to",
        "push_to_hub",
    } | {"verbose"}
    of_saving = {"save_model", "save_method", "save_path", "save_steps", "save_delay_steps"}
    of_machines = {"attn_backend", "use_gradient_checkpointing", "num_proc", "dataloader_num_workers"}
    assert of_reports | of_saving | of_machines | {"no_probe", "on_nonfinite"} == FREE_ON_RESUME


def test_a_record_of_an_earlier_version_may_lack_options(folder):
    options = read_options([*started(folder, model_name="m", dataset="d"), "--seed=1"])
    assert options.training.seed == 1


@pytest.mark.parametrize(("base", "data"), [("vision-demo", "vision-demo"), ("demo", "demo"), (".", "demo")])
def test_an_adapter_of_a_demo_trains_on_the_data_of_that_demo(base, data, folder):
    (folder / "config.json").write_text("{}")
    (folder / "first").mkdir()
    config = {"base_model_name_or_path": base, "peft_type": "LORA", "r": 4}
    (folder / "first" / "adapter_config.json").write_text(json.dumps(config))
    options = read_options(["--init_adapter=first"])
    assert (options.model.model_name, options.data.dataset) == (base, data)
    defaults = DEFAULTS.get(base, {"learning_rate": TrainOptions().training.learning_rate})
    assert options.training.learning_rate == defaults["learning_rate"]
    assert read_options(["--init_adapter=first", "--dataset=rows.json"]).data.dataset == "rows.json"


def test_defaults_that_depend_on_other_options():
    packed, padded = read_options(["--dataset=d", "--packing"]), read_options(["--dataset=d"])
    assert packed.training.per_device_train_batch_size == packed.training.per_device_eval_batch_size == 1
    assert padded.training.per_device_train_batch_size == 2
    assert read_options([]).training.per_device_train_batch_size == 16
    assert read_options(["--packing"]).training.per_device_train_batch_size == 2
    assert padded.training.max_steps == 400
    assert read_options(["--dataset=d", "--num_train_epochs=1"]).training.max_steps is None
    assert read_options(["--save_model", "--output_dir=out"]).output.save_path == "out/merged"
    assert with_optimizer(packed, "cpu").training.optim == "adamw_torch"
    assert with_optimizer(packed, "cuda").training.optim == "adamw_torch_fused"
    assert with_optimizer(read_options(["--optim=lion_32bit"]), "cuda").training.optim == "lion_32bit"
