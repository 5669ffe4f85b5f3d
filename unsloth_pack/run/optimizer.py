"""Optimizers by their names in transformers: which settings each takes, and whether it can be made here."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unsloth_pack.config.options import TrainingOptions, TrainOptions
from unsloth_pack.config.values import Count, NotNegative, Positive, Refused, Share, read_as
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.run.library_names import names_in
from unsloth_pack.run.machine import count_processes

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

Settings = Mapping[str, Any]  # types of values

_BETAS: Settings = {"beta1": Share, "beta2": Share}
_ADAM: Settings = {**_BETAS, "eps": Positive}
_LOW_BITS: Settings = {**_ADAM, "block_size": Count, "bf16_stochastic_round": bool}
_ADEMAMIX: Settings = {
    **_ADAM,
    "beta3": Share,
    "alpha": NotNegative,
    "t_alpha": Count,
    "t_beta3": Count,
}
_SCHEDULE_FREE: Settings = {"weight_lr_power": NotNegative, "r": NotNegative}

# What transformers reads of `optim_args`, and our names of its arguments adam_*. Other settings than these it
# passes over in silence, or hands on as text.
SETTINGS: Mapping[str, Settings] = {
    "adamw_torch": _ADAM,
    "adamw_torch_fused": _ADAM,
    "adamw_torch_4bit": _LOW_BITS,
    "adamw_torch_8bit": _LOW_BITS,
    "adamw_bnb_8bit": _ADAM,
    "adamw_8bit": _ADAM,
    "paged_adamw_32bit": _ADAM,
    "paged_adamw_8bit": _ADAM,
    "lion_8bit": _BETAS,
    "lion_32bit": _BETAS,
    "paged_lion_32bit": _BETAS,
    "paged_lion_8bit": _BETAS,
    "ademamix": _ADEMAMIX,
    "ademamix_8bit": _ADEMAMIX,
    "paged_ademamix_32bit": _ADEMAMIX,
    "paged_ademamix_8bit": _ADEMAMIX,
    "sgd": {"momentum": Share, "dampening": Share, "nesterov": bool},
    "adagrad": {"lr_decay": NotNegative, "eps": Positive},
    "rmsprop": {"momentum": Share, "alpha": Share, "eps": Positive, "centered": bool},
    "stable_adamw": {**_ADAM, "max_lr": Positive},
    "schedule_free_adamw": {**_ADAM, **_SCHEDULE_FREE},
    "schedule_free_radam": {**_ADAM, **_SCHEDULE_FREE},
    "schedule_free_sgd": _SCHEDULE_FREE,
}
_OF_ADAM = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
_OF_TORCHAO = ("adamw_torch_4bit", "adamw_torch_8bit")
_ROUNDING = "bf16_stochastic_round"
_ON_HOST = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")  # torch's own
_BY_GROUP = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd", "stable_adamw")


def check_settings(training: TrainingOptions) -> Iterator[InputError]:
    """Refuse an optimizer that transformers does not know, and settings that it does not take."""
    optim, optimizers = str(training.optim), names_in("training_args", "OptimizerNames")
    if optim not in optimizers:
        yield InputError(f"optim is {optim!r}; choose one of {', '.join(optimizers)}", about="optim")
        return
    takes = SETTINGS.get(optim, {})
    for name, value in (training.optim_args or {}).items():
        if name not in takes:
            known = f"give {', '.join(takes)}" if takes else "leave out optim_args"
            yield InputError(
                f"optim_args has {name!r}, which {optim} does not take; {known}", about=f"optim_args.{name}"
            )
            continue
        try:
            read_as(takes[name], value)
        except Refused as error:
            why = str(error).removeprefix("got ")
            yield InputError(f"optim_args has {name} {why}", about=f"optim_args.{name}")


def check_rounding(options: TrainOptions, dtype: "torch.dtype") -> None:
    """Refuse stochastic rounding where no weight that trains is in bfloat16, so that it would do nothing.

    Args:
        dtype: to load the weights in.
    """
    import torch

    is_full, settings = options.adapter.tuning == "full", options.training.optim_args or {}
    if (
        _ROUNDING in settings
        and read_as(bool, settings[_ROUNDING])
        and not (is_full and dtype == torch.bfloat16)
    ):
        trains = (
            f"dtype is {str(dtype).removeprefix('torch.')}" if is_full else "an adapter trains in float32"
        )
        raise InputError(
            f"optim_args has {_ROUNDING}, which rounds weights in bfloat16, and {trains}; give --tuning full "
            "--dtype bfloat16, or leave it out",
            about=(f"optim_args.{_ROUNDING}", "tuning", "dtype"),
        )


def check_updates(options: TrainOptions) -> Iterator[InputError]:
    """Refuse gradients that are applied as they come, and masters on the host, where that cannot be right."""
    training = options.training
    for name in ("optimizer_in_backward", "masters_on_host"):
        if getattr(training, name) and options.adapter.tuning != "full":
            yield InputError(
                f"{name} is set and tuning is 'lora', but gradients and moments of an adapter take little "
                "memory; leave it out, or give --tuning full",
                about=(name, "tuning"),
            )
    if training.optimizer_in_backward and options.adapter.tuning == "full":
        yield from _check_in_backward(options)
    if training.masters_on_host and training.optim not in (None, *_ON_HOST):
        yield InputError(
            f"masters_on_host is set and optim is {training.optim!r}, which does not update on the host; "
            f"give one of {', '.join(_ON_HOST)}",
            about=("masters_on_host", "optim"),
        )


def _check_in_backward(options: TrainOptions) -> Iterator[InputError]:
    training, n_processes = options.training, count_processes()

    def refused(why: str, *others: str) -> InputError:
        begins = "optimizer_in_backward applies each gradient as it comes, and"
        return InputError(f"{begins} {why}", about=("optimizer_in_backward", *others))

    if options.data.keep_examples_per_update:
        yield refused(
            "keep_examples_per_update may add up those of several steps; leave out one of them",
            "keep_examples_per_update",
        )
    if training.gradient_accumulation_steps != 1:
        yield refused(
            f"gradient_accumulation_steps is {training.gradient_accumulation_steps}, which adds up those of "
            "several steps; give --gradient_accumulation_steps 1, with longer rows or more of them in a step",
            "gradient_accumulation_steps",
        )
    if training.max_grad_norm:
        yield refused(
            f"max_grad_norm is {training.max_grad_norm:g}, but the norm of all is known only when all are "
            "there; give --max_grad_norm 0, which clips nothing",
            "max_grad_norm",
        )
    if n_processes > 1:
        yield refused(f"{n_processes} processes first sum theirs; train in one process, or leave it out")
    if training.optim not in (None, "adafactor", *SETTINGS) or str(training.optim) in _BY_GROUP:
        yield refused(
            f"optim {training.optim!r} keeps counts of whole updates; give adamw_torch, or another that "
            "updates each weight by itself",
            "optim",
        )


def check_masters(options: TrainOptions, dtype: "torch.dtype") -> None:
    """Refuse float32 masters of weights that are in float32 themselves.

    Args:
        dtype: to load the weights in.
    """
    import torch

    if options.training.masters_on_host and dtype == torch.float32:
        raise InputError(
            "masters_on_host is set and dtype is float32, in which weights need no masters; give --dtype "
            "bfloat16, or leave it out",
            about=("masters_on_host", "dtype"),
        )


def arguments_of(training: TrainingOptions) -> dict[str, Any]:
    """The settings of the optimizer, as transformers' `TrainingArguments` call them."""
    takes, given = SETTINGS.get(str(training.optim), {}), training.optim_args or {}
    read = {name: read_as(takes[name], value) for name, value in given.items()}
    is_adam = _BETAS.keys() <= takes.keys()  # others read an eps of their own
    arguments: dict[str, Any] = {
        _OF_ADAM[name]: value for name, value in read.items() if is_adam and name in _OF_ADAM
    }
    rest = [f"{name}={value}" for name, value in read.items() if _OF_ADAM.get(name) not in arguments]
    return arguments | ({"optim_args": ",".join(rest)} if rest else {})


def check_optimizer(arguments: "TrainingArguments") -> None:
    """Refuse an optimizer that cannot be made here.

    Raises:
        InputError: it is not installed, or needs CUDA or arguments that no option gives.
    """
    import torch
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    name = OptimizerNames(arguments.optim).value
    try:
        kind, _ = Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError) as error:
        if name in _OF_TORCHAO:
            raise InputError(
                f"optim is {name!r}, which needs torchao, and that cannot be imported; "
                "pip install torchao, or use adamw_torch",
                about="optim",
            ) from None
        why = first_line(error)
        raise InputError(
            f"optim is {name!r}, which cannot be made ({why}); use adamw_torch", about="optim"
        ) from None
    if kind.__module__.startswith("bitsandbytes") and not torch.cuda.is_available():
        raise InputError(
            f"optim is {name!r}, which needs CUDA, and there is none here; use adamw_torch", about="optim"
        )
