"""The command line: `unsloth-pack [train] ...` and its other subcommands."""

import io
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

import unsloth_pack
from unsloth_pack.errors import (
    HungUp,
    InputError,
    LeakFound,
    Mistakes,
    RunStopped,
    Terminated,
    first_line,
    printable,
)

# Each a module here with `run(argv) -> exit code`
SUBCOMMANDS = (
    *("train", "stats", "pack", "teach", "verify", "bench"),
    *("generate", "chat", "merge", "export", "doctor", "config", "recipe", "estimate"),
)
_LONGEST_LINE = 1200  # characters; the lists of what may be chosen are shorter
_ENDS = {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}  # signals that end a command
_PREFIX = "unsloth-pack: "
_PLACE = re.compile(r".+?:\d+: ")  # a line of a config file
# Turns of OpenMP's loop before a waiting thread sleeps, some 0.1 ms in place of milliseconds: on busy cores
# a tiny model trains four times slower otherwise. torch reads it when it is imported.
_SPINS = "10000"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun gives each process the name of one


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand, `train` when none is named.

    Args:
        argv: the arguments after the program's name; None for those of this process.

    Returns:
        The exit code: 0 done; 2 bad input or arguments; 130, 143 or 129 stopped by Ctrl-C, SIGTERM or SIGHUP;
        1 anything else. All but 0 come with one line on stderr, and with the traceback under `--debug`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # a character that it cannot show is replaced
            stream.reconfigure(errors="replace")
    with _terminated_as_interrupted():
        try:
            code = _run(arguments)
            _flush()
            line = f"ended with exit code {code}"
        except SystemExit as help_was_shown:
            return int(help_was_shown.code or 0)
        except (KeyboardInterrupt, Exception) as error:
            for number in _ENDS:  # torchrun sends SIGTERM to all that remain, and each prints its line first
                signal.signal(number, signal.SIG_IGN)
            code, line = _exit_of(error)
            if "--debug" in arguments:
                traceback.print_exc()
            with suppress(OSError):  # the terminal may be gone
                said = line if isinstance(error, Mistakes) else f"{_PREFIX}{line}"
                sys.stderr.write(f"{said}\n")  # in one piece: processes may share the terminal
        if code and (path := os.environ.get(_ERROR_FILE)):
            _leave_error(path, code, line)
        return code


def _leave_error(path: str, code: int, line: str) -> None:
    """Write why this process ended for torchrun, which exits with 1 in any case, in the form of its own."""
    error = {"message": line, "errorCode": code, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": error}, file)


def _flush() -> None:
    """Flush stdout now: if its reader has gone (`| head`), Python's own flush would change the exit code."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Raise an error at the first SIGTERM or SIGHUP, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _ENDS[signal.Signals(number)]

    # nohup ignores SIGHUP
    before = {number: signal.getsignal(number) for number in _ENDS}
    heard = [number for number in _ENDS if number != signal.SIGHUP or before[number] != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def _exit_of(error: BaseException) -> tuple[int, str]:
    if isinstance(error, Mistakes):
        lines = map(_one_line, error.errors)  # editors look for `file:line:`
        return 2, "\n".join(line if _PLACE.match(line) else f"{_PREFIX}{line}" for line in lines)
    if isinstance(error, InputError):
        return 2, _one_line(error)
    if isinstance(error, LeakFound):
        return 1, str(error)
    if isinstance(error, KeyboardInterrupt):
        number = error.signal if isinstance(error, Terminated) else signal.SIGINT
        return 128 + number, str(error) or "interrupted before it saved anything"
    if isinstance(error, RunStopped):
        return 1, "\n".join(map(_one_line, str(error).splitlines()))
    return 1, f"{type(error).__name__}: {first_line(error) or 'no message'}; add --debug for the traceback"


def _one_line(error: BaseException | str) -> str:
    """Return the message as a line, without characters that steer a terminal; a long one loses its middle."""
    line, half = printable(" ".join(str(error).split())), _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


def _print_completion(arguments: list[str]) -> None:
    """Print the script that completes subcommands and flags in a shell, and exit."""
    try:
        import shtab
    except ImportError:
        raise InputError("--print-completion needs shtab; pip install shtab") from None
    modules = [import_module(f"unsloth_pack.cli.{name}") for name in ("train", *SUBCOMMANDS)]
    whole, *others = [module.build_parser() for module in modules]
    for action in (action for parser in (whole, *others) for action in parser.actions):
        words = action.metavar.split("|") if isinstance(action.metavar, str) else []
        if len(words) > 1:
            action.choices = words
        elif words:
            action.complete = shtab.FILE
    commands = whole.add_subparsers()
    for name, own in zip(SUBCOMMANDS, others, strict=True):
        about = own.description.partition(".")[0]
        commands.add_parser(name, help=about, parents=[own], add_help=False, conflict_handler="resolve")
    shtab.add_argument_to(whole)
    whole.parse_args(arguments)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"unsloth-pack {unsloth_pack.__version__}")
        return 0
    if arguments[:1] == ["--print-completion"]:
        _print_completion(arguments)
    name = "train"
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    if name not in SUBCOMMANDS:
        config = f", or --config {name}" if name.endswith((".yaml", ".yml")) else ""
        raise InputError(f"unknown subcommand {name!r}; use one of {', '.join(SUBCOMMANDS)}{config}")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of missing kernels, in every layer
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    status: int = import_module(f"unsloth_pack.cli.{name}").run(arguments)
    return status


def quieten(show_bars: bool = True) -> None:
    """Hide what libraries say to each other, and progress bars where nobody watches."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry before the error
    if not (show_bars and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
