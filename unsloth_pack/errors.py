"""Errors that a user may see, each of one line: what is wrong, the value, the remedy. How they are shown.
Checks of numbers."""

import json
import numbers
import re
import reprlib
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LAST_SEED = 2**32 - 1  # the largest that numpy takes
_IN_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.\n.*\n[\w.]+: (.*)\n?", re.DOTALL)
_OF_REQUESTS = re.compile(r"\((Request|Amzn Trace|Amz CF) ID: [^)]*\)|^\d{3} Client Error\.", re.MULTILINE)


class InputError(ValueError):
    """Bad input or arguments. The command line prints it as one line and exits with 2."""

    def __init__(self, message: str = ""):
        raised = _IN_WORKER.fullmatch(message)  # torch raises it again, with the worker's traceback
        super().__init__(f"{raised[2].strip()} (in {raised[1]})" if raised else message)

    @property
    def errors(self) -> tuple["InputError", ...]:
        """The mistakes that this error reports."""
        return getattr(self, "_errors", (self,))


class Mistakes(InputError):
    """Several mistakes at once. The command line prints each as a line of its own.

    Args:
        errors: each says `what; remedy`, behind `file:line: ` where a file made the mistake.
    """

    def __init__(self, errors: Iterable[InputError]):
        self._errors = tuple(errors)
        super().__init__("\n".join(map(str, self._errors)))


def errors_of(check: Callable[..., object], *arguments: object, **options: object) -> tuple[InputError, ...]:
    """Call a check that raises, and return the mistakes that it reports."""
    try:
        check(*arguments, **options)
    except InputError as error:
        return error.errors
    return ()


def raise_together(*checks: Iterable[InputError]) -> None:
    """Raise all mistakes that checks yield, or end with.

    Raises:
        InputError: one mistake as it is, several as `Mistakes`, none of them twice.
    """
    mistakes = {str(each): each for check in checks for error in _yielded(check) for each in error.errors}
    if mistakes:
        raise Mistakes(mistakes.values()) if len(mistakes) > 1 else next(iter(mistakes.values()))


def _yielded(check: Iterable[InputError]) -> Iterator[InputError]:
    try:
        yield from check
    except InputError as error:
        yield error


class UnsupportedArchitecture(InputError):
    """No patch is declared for this model type."""


class BackendUnavailable(InputError):
    """The attention backend that was asked for cannot run on this device, dtype, head size or model."""


class LeakFound(RuntimeError):
    """Documents of a packed row reach each other. Training must not begin."""


class RunStopped(RuntimeError):
    """A run ended after it had begun. The command line prints why and how to go on, and exits with 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came, and ends the process as Ctrl-C would."""

    signal = signal.SIGTERM


class HungUp(Terminated):
    """SIGHUP came: the terminal was closed, or its connection was lost."""

    signal = signal.SIGHUP


def printable(text: str) -> str:
    """`text` with unprintable characters escaped: names and documents may hold terminal codes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; empty where it has none.

    A line that ends with a colon says nothing without the next, nor does the number of a request to the hub.
    """
    lines = [line.strip() for line in _OF_REQUESTS.sub("", str(error)).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def written(value: object) -> str:
    """A value as config files and flags have it: true and null, where Python has True and None."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def require_whole(name: str, value: Any, least: int, most: int = 2**63 - 1) -> None:
    """Raise InputError unless a value is a whole number from `least` to `most`."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        end = f"from {least} to {most}" if is_whole and value > most else f"of at least {least}"
        raise InputError(f"{name} is {reprlib.repr(value)}; give a whole number {end}")


def require_real(name: str, value: Any, least: float, below: float) -> None:
    """Raise InputError unless a value is a number of at least `least` and below `below`."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_real and least <= value < below):
        wanted = f"a number of at least {least:g} and below {below:g}"
        raise InputError(f"{name} is {reprlib.repr(value)}; give {wanted}")
