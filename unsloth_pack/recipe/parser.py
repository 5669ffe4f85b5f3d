"""argparse whose errors are `InputError`."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from unsloth_pack.errors import InputError, at_once
from unsloth_pack.recipe.kinds import RefusedItems, boolean, one_of, switch_or, whole
from unsloth_pack.recipe.remedies import remedy_for


def once(several: str) -> type[argparse.Action]:
    """The action of a flag that holds all its values, so that a second one would drop those of the first.

    Args:
        several: how to give them at once.
    """

    class Once(argparse.Action):
        how = several

        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Any,
            option_string: str | None = None,
        ) -> None:
            if hasattr(namespace, self.dest):
                raise argparse.ArgumentError(self, f"given twice; give it once, its values {several}")
            setattr(namespace, self.dest, values)

    return Once


class Parser(argparse.ArgumentParser):
    """Flags with underscores, spelt out in full. What was not given is not in the result.

    Args:
        remedies: by the name of a flag that does not exist, what to do instead.
        options: argparse's own.
    """

    def __init__(self, remedies: Mapping[str, str] | None = None, **options: Any):
        super().__init__(
            allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False, **options
        )
        self._remedies = remedies or {}
        self._refused: list[str] = []
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's; values that the flag does not take are told together with those of others."""
        if "type" in options:
            options["type"] = self.noting(names, options["type"])
        return super().add_argument(*names, **options)

    def noting(self, names: Sequence[str], kind: Callable[[str], Any]) -> Callable[[str], Any]:
        """The kind of a flag, by which a wrong value does not end the parsing. `parse` tells all of them.

        Args:
            names: of the flag.
        """

        def read(text: str) -> Any:
            try:
                return kind(text)
            except argparse.ArgumentTypeError as error:
                lines = error.lines if isinstance(error, RefusedItems) else [str(error)]
                self._refused += [f"argument {'/'.join(names)}: {line}" for line in lines]
                return None

        return read

    def add_choice(self, name: str, choices: Sequence[str], help: str) -> None:
        """A flag that takes one word out of a few, which its help lists."""
        self.add_argument(name, type=one_of(*choices), metavar="|".join(choices), help=help)

    def add_switch(self, name: str, help: str, words: Sequence[str] = (), default: str = "false") -> None:
        """A flag that is true when bare, and may take a few words more.

        Args:
            default: what holds without the flag, for its help.
        """
        metavar = "|".join(("true", "false", *words))
        help = f"{help} (default: {default})"
        self.add_argument(
            name,
            type=switch_or(*words) if words else boolean,
            nargs="?",
            const=True,
            metavar=metavar,
            help=help,
        )

    def add_num_proc(self) -> None:
        """The flag of the processes that prepare data, as `train` has it."""
        self.add_argument(
            "--num_proc",
            type=whole(1),
            metavar="PROCESSES",
            help="processes that read and tokenise the data (default: one for each core)",
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(message + self._see_help(message))

    def _see_help(self, message: str) -> str:
        """The remedy of a message that has none."""
        return "" if ";" in message else f"; see `{self.prog} --help`"

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The flags that were given, by name.

        Raises:
            InputError: unknown flags, and values that their flags do not take or that are no text.
        """
        for argument in arguments:
            try:
                argument.encode()
            except UnicodeEncodeError:  # Python's way to hold the bytes of such a name
                raise InputError(f"argument {argument!r} is not UTF-8; rename what it names") from None
            if argument.startswith("--") and argument.endswith("=--"):  # argparse makes a list of it
                raise InputError(f"argument {argument[:-3]}: got '--'; see `{self.prog} --help`")
        self._refused.clear()
        try:
            given, unknown = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:  # of a flag without a value; what follows is not read
            self._refused.append(str(error))
            given, unknown = argparse.Namespace(), []
        at_once([partial(self._mistakes, arguments, unknown)])
        return {name: value for name, value in vars(given).items() if name != "debug"}  # `main` has read it

    def _mistakes(self, arguments: Sequence[str], unknown: Sequence[str]) -> Iterator[InputError]:
        for message in self._refused:
            yield InputError(message + self._see_help(message))
        for word in [*unknown[:1], *(word for word in unknown[1:] if word.startswith("--"))]:
            flag = word.partition("=")[0]
            # without its value: some are secret
            remedy = self._values_remedy(arguments, word) or self.remedy(flag)
            yield InputError(f"unknown argument {flag!r}; {remedy}")

    def _values_remedy(self, arguments: Sequence[str], word: str) -> str | None:
        """How to write several values of a flag, if the word stands behind those that it takes."""
        before = [one for one in arguments[: arguments.index(word)] if one.startswith("--")]
        last = before[-1].partition("=")[0] if before and not word.startswith("-") else ""
        several = getattr(self._option_string_actions.get(last), "how", None)
        return f"give {last} its values {several}" if several else None

    def remedy(self, flag: str) -> str:
        """What to write in place of a flag that is unknown."""
        known = [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]
        if flag.endswith((".yaml", ".yml")) and "config" in known:
            return f"give --config {flag}"
        remedy = remedy_for(flag, known, self._remedies, spell=lambda name: f"--{name}")
        return remedy.says if remedy else f"see `{self.prog} --help`"
