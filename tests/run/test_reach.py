"""Options reach what they are about: the trainer's configuration, and the rows that it gets."""

import json

import pytest
from command_options import read_options
from model_folder import save_model
from prepared_runs import prepare

# Values that no option has by itself; the names are those of transformers' `TrainingArguments`
GIVEN = {
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 5,
    "gradient_accumulation_steps": 6,
    "learning_rate": 0.125,
    "optim": "adagrad",
    "max_grad_norm": 0.5,
    "weight_decay": 0.25,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 0.0625},
    "warmup_steps": 3,
    "seed": 7,
    "logging_steps": 9,
    "neftune_noise_alpha": 5.0,
    "max_steps": 11,
    "num_train_epochs": 2.5,
    "eval_steps": 2,
    "save_steps": 4,
    "load_best_model_at_end": True,
}


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepares a run on a few rows with these options."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model")
    rows = [{"prompt": "ab" * n, "completion": "b" * n} for n in range(1, 9)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    always = {"model_name": "model", "dataset": "rows.json", "eval_dataset": "rows.json", "output_dir": "out"}
    always |= {"max_seq_length": 64, "sample_packing": "true"}

    def prepare_with(**options):
        flags = {name: v if isinstance(v, str) else json.dumps(v) for name, v in options.items()}
        given = {**{name: str(value) for name, value in always.items()}, **flags}
        return prepare(read_options([f"--{name}={value}" for name, value in given.items()]))

    return prepare_with


def test_what_the_trainer_hears(prepared):
    config = prepared(**GIVEN).config
    heard = {name: getattr(config, name) for name in GIVEN}
    assert {name: getattr(value, "value", value) for name, value in heard.items()} == GIVEN


@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_to_evaluate_on_are_packed_as_asked(is_packed, prepared):
    made = prepared(eval_packing=is_packed, max_steps=1)
    assert ("seq_lengths" in made.evaluation.rows.column_names) == is_packed
    assert "seq_lengths" in made.train.rows.column_names
