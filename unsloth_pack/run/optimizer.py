"""Optimizers and schedules by their names in transformers: their settings, and whether they can be made."""

import ast
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.config.options import TrainingOptions
from unsloth_pack.config.values import Count, NotNegative, Positive, Share, read_as
from unsloth_pack.errors import InputError, errors_of, first_line

if TYPE_CHECKING:
    from transformers import TrainingArguments

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


@cache
def names_in_library(module: str, name: str) -> list[str]:
    """The values of an enumeration, or the keys of a dict, in a module of transformers.

    They are read from its source: importing it takes seconds.
    """
    library: Any = find_spec("transformers")
    path = Path(*library.submodule_search_locations, f"{module}.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        values: list[Any] = []
        if isinstance(node, ast.ClassDef) and node.name == name:
            values = [each.value for each in node.body if isinstance(each, ast.Assign)]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            values = node.value.keys if [getattr(each, "id", "") for each in node.targets] == [name] else []
        if values:
            return [str(each.value) for each in values if isinstance(each, ast.Constant)]
    raise ImportError(f"{path} has no {name}")


def check_settings(training: TrainingOptions) -> Iterator[InputError]:
    """Refuse an optimizer that transformers does not know, and settings that it does not take."""
    optim, optimizers = (
        "adamw_torch" if training.optim is None else training.optim,
        names_in_library("training_args", "OptimizerNames"),
    )
    if optim not in optimizers:
        yield InputError(f"optim is {optim!r}; choose one of {', '.join(optimizers)}")
        return
    takes = SETTINGS.get(optim, {})
    for name, value in (training.optim_args or {}).items():
        if name in takes:
            yield from errors_of(read_as, takes[name], value, f"optim_args: {name}")
        else:
            known = f"give {', '.join(takes)}" if takes else "leave out optim_args"
            yield InputError(f"optim_args has {name!r}, which {optim} does not take; {known}")


def check_schedule(
    training: TrainingOptions, *, knows_rate: bool = True, tries: bool = True
) -> Iterator[InputError]:
    """Refuse what transformers refuses, and a floor at which the rate would rise, or be negative.

    Args:
        knows_rate: `learning_rate` is right, so that a floor can be compared with it.
        tries: make the schedule, for which torch is imported.
    """
    name, settings = training.lr_scheduler_type, dict(training.lr_scheduler_kwargs or {})
    schedules = names_in_library("trainer_utils", "SchedulerType")
    if name not in schedules:
        yield InputError(f"lr_scheduler_type is {name!r}; choose one of {', '.join(schedules)}")
    elif name in ("constant", "constant_with_warmup") and settings:
        yield InputError(
            f"lr_scheduler_kwargs is {json.dumps(settings)} and lr_scheduler_type is {name!r}, which takes "
            "none; leave them out, or give another lr_scheduler_type"
        )
    elif tries and (why := _why_not_made(name, settings, training.learning_rate)):
        given = f" and lr_scheduler_kwargs is {json.dumps(settings)}" if settings else ""
        yield InputError(
            f"lr_scheduler_type is {name!r}{given}, which transformers refuses ({why}); correct "
            "lr_scheduler_kwargs, or give another lr_scheduler_type"
        )
    else:
        rate = (training.learning_rate, f"learning_rate, which is {training.learning_rate:g}")
        floors: dict[str, tuple[float, str]] = {"min_lr_rate": (1, "1"), "min_lr_ratio": (1, "1")}
        floors |= {"min_lr": rate, "lr_end": rate} if knows_rate else {}
        for name, (most, says) in floors.items():
            value = settings.get(name)
            if isinstance(value, int | float) and not 0 <= value <= most:
                yield InputError(
                    f"lr_scheduler_kwargs has {name} {json.dumps(value)}; give a number from 0 to {says}"
                )


def _why_not_made(schedule: str, settings: dict[str, Any], learning_rate: float) -> str | None:
    """Why transformers refuses to make a schedule with these settings, or None."""
    import torch
    from transformers import get_scheduler

    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
        get_scheduler(schedule, optimizer, 0, 1, scheduler_specific_kwargs=settings)
    except (ValueError, TypeError) as error:
        return first_line(error)
    return None


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
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError) as error:
        why, remedy = f"cannot be made ({first_line(error)})", "use adamw_torch"
        if name in _OF_TORCHAO:
            why, remedy = (
                "needs torchao, and that cannot be imported",
                "pip install torchao, or use adamw_torch",
            )
        raise InputError(f"optim is {name!r}, which {why}; {remedy}") from None
    if kind.__module__.startswith("bitsandbytes") and not torch.cuda.is_available():
        raise InputError(f"optim is {name!r}, which needs CUDA, and there is none here; use adamw_torch")
    if kind.__module__.startswith("torch.optim."):
        try:
            kind([torch.nn.Parameter(torch.zeros(1))], **settings)
        except ValueError as error:
            raise InputError(f"optim is {name!r}, which refuses optim_args: {error}; correct them") from None
