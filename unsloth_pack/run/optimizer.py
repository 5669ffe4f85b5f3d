"""Optimizers and schedules by their names in transformers: their settings, and whether they can be made."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unsloth_pack.config.options import ImageOptions, TrainingOptions
from unsloth_pack.config.values import Count, NotNegative, Positive, Share, read_as
from unsloth_pack.errors import InputError, errors_of, first_line

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from unsloth_pack.training.optimizers import LearningRates

Settings = Mapping[str, Any]  # types of values

_BETAS: Settings = {"beta1": Share, "beta2": Share}
_ADAM: Settings = {**_BETAS, "eps": Positive}
_LOW_BITS: Settings = {**_ADAM, "block_size": Count, "bf16_stochastic_round": bool}
_ADEMAMIX: Settings = {**_ADAM, "beta3": Share, "alpha": NotNegative, "t_alpha": Count, "t_beta3": Count}
_SCHEDULE_FREE: Settings = {"weight_lr_power": NotNegative, "r": NotNegative}

# What transformers reads of `optim_args`, and our names of its arguments adam_*. Other settings than these it
# passes over in silence, or hands on as text.
SETTINGS: Mapping[str, Settings] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit"), _ADAM),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw_8bit"), _ADAM),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), _LOW_BITS),
    **dict.fromkeys(("lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit"), _BETAS),
    **dict.fromkeys(("ademamix", "ademamix_8bit"), _ADEMAMIX),
    **dict.fromkeys(("paged_ademamix_32bit", "paged_ademamix_8bit"), _ADEMAMIX),
    "sgd": {"momentum": Share, "dampening": Share, "nesterov": bool},
    "adagrad": {"lr_decay": NotNegative, "eps": Positive},
    "rmsprop": {"momentum": Share, "alpha": Share, "eps": Positive, "centered": bool},
    "stable_adamw": {**_ADAM, "max_lr": Positive},
    "schedule_free_adamw": {**_ADAM, **_SCHEDULE_FREE},
    "schedule_free_radam": {**_ADAM, **_SCHEDULE_FREE},
    "schedule_free_sgd": _SCHEDULE_FREE,
}
ROUNDING = "bf16_stochastic_round"
ON_HOST = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")  # torch's own
_OF_ADAM = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
_OF_TORCHAO = ("adamw_torch_4bit", "adamw_torch_8bit")
_BY_GROUP = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd", "stable_adamw")
BY_WEIGHT = {"adafactor", *SETTINGS} - {*_BY_GROUP}  # update each weight by itself


def check_settings(training: TrainingOptions) -> Iterator[InputError]:
    """Refuse settings that the optimizer does not take: transformers would leave them out in silence."""
    takes = SETTINGS.get(training.optim or "adamw_torch", {})
    for name, value in (training.optim_args or {}).items():
        if name in takes:
            yield from errors_of(read_as, takes[name], value, f"optim_args: {name}")
        else:
            known = f"give {', '.join(takes)}" if takes else "leave out optim_args"
            yield InputError(f"optim_args has {name!r}, which {training.optim} does not take; {known}")


def check_schedule(training: TrainingOptions) -> None:
    """Refuse an unknown schedule, and settings that it does not take."""
    import torch
    from transformers import get_scheduler

    name, settings = training.lr_scheduler_type, training.lr_scheduler_kwargs or {}
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
        get_scheduler(name, optimizer, 0, 1, scheduler_specific_kwargs=dict(settings))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"lr_scheduler_type is {name!r} and lr_scheduler_kwargs is {json.dumps(settings)}, which "
            f"transformers refuses ({first_line(error)}); correct them"
        ) from None


def arguments_of(training: TrainingOptions) -> dict[str, Any]:
    """The settings of the optimizer, as transformers' `TrainingArguments` call them."""
    takes = SETTINGS.get(str(training.optim), {})
    settings = {
        name: read_as(takes[name], value, name) for name, value in (training.optim_args or {}).items()
    }
    is_adam = _BETAS.keys() <= takes.keys()  # others read an eps of their own
    own = {name: value for name, value in settings.items() if is_adam and name in _OF_ADAM}
    arguments: dict[str, Any] = {_OF_ADAM[name]: value for name, value in own.items()}
    rest = [f"{name}={value}" for name, value in settings.items() if name not in own]
    return arguments | ({"optim_args": ",".join(rest)} if rest else {})


def rates_of(training: TrainingOptions, images: ImageOptions) -> "LearningRates":
    """The learning rates of groups of weights."""
    from unsloth_pack.training.optimizers import LearningRates

    return LearningRates(
        training.lora_plus_ratio,
        training.embedding_learning_rate,
        dict(training.learning_rates or {}),
        images.vit_lr,
        images.aligner_lr,
    )


def check_optimizer(arguments: "TrainingArguments") -> None:
    """Refuse an optimizer that cannot be made here."""
    import torch
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    name = OptimizerNames(arguments.optim).value
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError) as error:
        remedy = "pip install torchao, or use adamw_torch" if name in _OF_TORCHAO else "use adamw_torch"
        raise InputError(f"optim is {name!r}, which cannot be made ({first_line(error)}); {remedy}") from None
    if kind.__module__.startswith("bitsandbytes") and not torch.cuda.is_available():
        raise InputError(f"optim is {name!r}, which needs CUDA, and there is none here; use adamw_torch")
    if kind.__module__.startswith("torch.optim."):
        try:
            kind([torch.nn.Parameter(torch.zeros(1))], **settings)
        except ValueError as error:
            raise InputError(f"optim is {name!r}, which refuses optim_args: {error}; correct them") from None
