"""`--optim` and `--optim_args`: every setting reaches the optimizer as a number, or is refused."""

import json

import pytest
import torch
from command_options import read_options
from trl import SFTConfig

from unsloth_pack.run.optimizer import SETTINGS, arguments_of
from unsloth_pack.training.trainer import RunTrainer

OTHER = {  # values that are nobody's default
    "block_size": 64,
    "bf16_stochastic_round": "true",
    "nesterov": True,
    "centered": "True",
    "t_alpha": 7,
    "t_beta3": 9,
}
OF_EXTRAS = ("adamw_torch_4bit", "adamw_torch_8bit", "stable_adamw")  # and schedule_free_*


def options_made(optim, **given):
    """What the optimizer is made with."""
    flags = ["--dataset=d", f"--optim={optim}", f"--optim_args={json.dumps(given)}"]
    training = read_options(flags if given else flags[:2]).training
    config = SFTConfig("out", optim=optim, use_cpu=True, bf16=False, **arguments_of(training))
    return RunTrainer.get_optimizer_cls_and_kwargs(config)[1]


@pytest.mark.parametrize(
    "optim",
    [
        pytest.param(optim, marks=pytest.mark.extras)
        if optim in OF_EXTRAS or optim.startswith("schedule_free")
        else optim
        for optim in SETTINGS
    ],
)
def test_every_setting_reaches_the_optimizer(optim):
    plain = options_made(optim)
    for name in SETTINGS[optim]:
        value = OTHER.get(name, 0.125)
        made = options_made(optim, **{name: value})
        changed = {key: made[key] for key in made if made[key] != plain.get(key)}
        assert len(changed) == 1, name
        (found,) = changed.values()
        number = next(each for each in found if each == value) if isinstance(found, tuple) else found
        assert not isinstance(number, str), name
        assert number == (True if isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"optim": "adamw_torch", "optim_args": "momentum=0.9"},
            "optim_args has 'momentum', which adamw_torch does not take; give beta1, beta2, eps",
        ),
        ({"optim": "sgd", "optim_args": "momentum=fast"}, "optim_args: momentum is 'fast'; it should be a"),
        (
            {"optim": "sgd", "optim_args": "nesterov=true"},
            "optim is 'sgd', which refuses optim_args: Nesterov momentum",
        ),
        (
            {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=true"},
            "is set, and what trains is in float32; give --tuning full --dtype bfloat16",
        ),
    ],
)
def test_settings_that_cannot_be(flags, says, refused):
    assert says in refused(**flags)


def groups_of(folder):
    return torch.load(folder / "optimizer.pt", weights_only=True)["param_groups"]


def test_a_run_trains_with_them_and_goes_on_with_them(train, tmp_path):
    (tmp_path / "run.yaml").write_text("optim: adamw_torch\noptim_args: {beta2: 0.95, eps: 1e-6}\n")
    flags = ["--config=run.yaml", "--optim_args.beta1=0.8", "--save_steps=2"]
    assert train(*flags) == 0
    for group in groups_of(tmp_path / "out" / "checkpoint-2"):
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)
    written = (tmp_path / "out" / "config.yaml").read_text()
    assert "  optim_args: {beta1: 0.8, beta2: 0.95, eps: 1.0e-06}\n" in written
    assert train(output_dir="again", config="out/config.yaml") == 0
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
