"""Modules and parameters that regular expressions over their names choose."""

import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from unsloth_pack.errors import InputError, written


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module's path is chosen, or that of a module that holds it.

    A pattern stands for whole parts of a path: `model.layers.[01]` chooses these two layers and all that is
    in them, `norm` every module of that name, and `.*norm` every module whose name ends so.
    """
    compiled = [re.compile(rf"(?:.*\.)?(?:{pattern})(?:\..*)?") for pattern in patterns]
    return lambda path: any(pattern.fullmatch(path) for pattern in compiled)


def check_matches(
    option: str,
    patterns: Sequence[str],
    paths: Iterable[str],
    which: str = "has weights",
    remedy: str = "give a regular expression, or a JSON list of several",
) -> None:
    """Refuse a pattern that chooses nothing.

    Args:
        option: that holds the patterns.
        paths: of all parameters that may be chosen.
        which: what their modules have in common.
        remedy: what to do about a pattern that chooses none of them.

    Raises:
        InputError: names the pattern, and a few names that the model has.
    """
    known = [*paths]
    for pattern in patterns:
        if not any(map(matcher([pattern]), known)):
            some = ", ".join(dict.fromkeys(path.rpartition(".")[0] for path in known[:3]))
            raise InputError(
                f"{option} holds {pattern!r}, which matches no module that {which}; {remedy} (the model has "
                f"{some}, ...)",
                about=option,
            )


def parameter_paths(model: nn.Module) -> list[str]:
    """The paths of all parameters; of one that two modules share, both."""
    return [path for path, _ in model.named_parameters(remove_duplicate=False)]


def chosen_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The paths of the chosen modules that hold parameters of their own."""
    is_chosen = matcher(patterns)
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if is_chosen(path) and any(True for _ in module.parameters(recurse=False))
    ]


def train_only(model: nn.Module, train: Sequence[str] | None, freeze: Sequence[str] | None) -> None:
    """Let the parameters that `train` chooses train, or all without it, but for those that `freeze` chooses.

    Raises:
        InputError: nothing is left to train.
    """
    is_trained = matcher(train) if train else lambda path: True
    is_frozen = matcher(freeze or ())
    parameters = [*model.named_parameters(remove_duplicate=False)]
    model.requires_grad_(False)
    for path, parameter in parameters:
        parameter.requires_grad_(parameter.requires_grad or is_trained(path))
    for path, parameter in parameters:
        if is_frozen(path):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise InputError(
            f"train_modules is {written(train)} and freeze_modules is {written(freeze)}, which leaves "
            "nothing to train; freeze less",
            about=("train_modules", "freeze_modules"),
        )
