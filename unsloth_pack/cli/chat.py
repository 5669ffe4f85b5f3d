"""`unsloth-pack chat`: talk to a model, and see beside each answer what its base would say."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from unsloth_pack.checkpoints.names import is_adapter
from unsloth_pack.cli.generate import Conversation, add_answers, read_with_answers
from unsloth_pack.config import Parser
from unsloth_pack.data.rows import Message, with_system
from unsloth_pack.errors import InputError, Terminated, printable
from unsloth_pack.images.rows import MARK

if TYPE_CHECKING:
    from unsloth_pack.cli.answers import Answerer

_COMMANDS = "/reset, /save FILE, /image FILE"


def run(arguments: Sequence[str]) -> int:
    """Answer every line of the terminal, or of standard input, until it ends."""
    flags = read_with_answers(build_parser(), arguments)
    name, compares = flags.get("model_name", "demo"), flags.get("compare", False)
    if compares and not is_adapter(name):
        raise InputError(f"compare is true, and {name} is no adapter; name a run's folder, or leave it out")

    from unsloth_pack.cli import quieten

    quieten()
    from unsloth_pack.cli.answers import Answerer
    from unsloth_pack.lora.base_model import name_trained_in_place

    answerer = Answerer(name, flags, "/reset begins anew, or lower --max_new_tokens")
    if compares and (weight := name_trained_in_place(answerer.model)):
        raise InputError(f"compare is true, and the adapter replaces {weight} of its base; leave it out")
    if not answerer.has_template:
        print(printable(f"{name} has no chat template: it continues your text"), file=sys.stderr)
    _Chat(answerer, flags.get("system", ""), compares).talk()
    return 0


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    about = f"Talk to a model. Commands: {_COMMANDS}. A line that ends with \\ goes on in the next."
    parser = Parser(prog="unsloth-pack chat", description=about)
    what = "demo, a folder of a model or an adapter, or a hub name (default: demo)"
    parser.add_argument("model_name", nargs="?", metavar="RUN_OR_MODEL", help=what)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt (default: none)")
    parser.add_switch("--compare", "show each answer beside that of the model without its adapter")
    return add_answers(parser, 512)


class _Chat:
    """A conversation at a terminal, or on standard input without prompts."""

    def __init__(self, answerer: "Answerer", system: str, compares: bool):
        self._answerer, self._compares = answerer, compares
        self._begin = with_system(system, [])
        self._is_terminal = sys.stdin.isatty()
        self._reset()

    def _reset(self) -> None:
        self._turns: list[Message] = self._begin
        self._images: list[str] = []
        self._waiting: list[str] = []  # images of the next message

    def talk(self) -> None:
        """Answer until the input ends. A mistake ends it only if nobody is there to correct it."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  lines can be edited and recalled
            print(f"{_COMMANDS}; Ctrl-C stops an answer, Ctrl-D ends the chat")
        while True:
            try:
                self._take(self._read())
            except EOFError:
                return
            except (InputError, KeyboardInterrupt) as error:
                if not self._is_terminal or isinstance(error, Terminated):
                    raise
                print(printable(str(error)), file=sys.stderr)

    def _read(self) -> str:
        line = input("> " if self._is_terminal else "")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input('. ' if self._is_terminal else '')}"
        return line

    def _take(self, line: str) -> None:
        command, _, file = line.strip().partition(" ")
        path = Path(file.strip()).expanduser().absolute()
        if command == "/reset":
            self._reset()
        elif command == "/save" and file:
            self._save_turns(path)
        elif command == "/image" and file:
            self._answerer.read_image(str(path))
            self._waiting.append(str(path))
        elif command[:1] == "/" and command[1:].isalpha():
            raise InputError(f"{line.strip()!r} is no command; use {_COMMANDS}")
        elif command:
            self._ask(line)

    def _ask(self, text: str) -> None:
        from unsloth_pack.lora.base_model import base_model

        text = text if MARK in text else MARK * len(self._waiting) + text
        turns = [*self._turns, {"role": "user", "content": text}]
        asked = Conversation(turns, [*self._images, *self._waiting])
        if self._compares:
            with Live(auto_refresh=False, transient=True) as live:
                with base_model(self._answerer.model):
                    base = self._answer(asked, lambda text: live.update(_table(text), refresh=True))
                answer = self._answer(asked, lambda text: live.update(_table(base, text), refresh=True))
            Console().print(_table(base, answer))
        else:
            answer = self._answer(asked)
        if answer:
            self._turns = [*turns, {"role": "assistant", "content": answer}]
            self._images, self._waiting = asked.images, []

    def _answer(self, asked: Conversation, show: Callable[[str], None] | None = None) -> str:
        """Print an answer, or `show` it, until it ends or Ctrl-C stops it."""
        from unsloth_pack.cli.answers import Streamer

        streamer = Streamer(self._answerer.tokenizer, show)
        try:
            self._answerer.answer([asked], streamer)
        except KeyboardInterrupt as error:
            if isinstance(error, Terminated):
                raise
            streamer.end()  # type: ignore[no-untyped-call]
        return streamer.text

    def _save_turns(self, path: Path) -> None:
        if self._turns == self._begin:
            raise InputError("there is no answer to save yet; ask something")
        if path.suffix not in (".json", ".jsonl"):
            raise InputError(f"/save is given {path.name!r}; give a name that ends in .jsonl or .json")
        row = {"messages": self._turns} | ({"images": self._images} if self._images else {})
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be written ({error.strerror}); give another") from None


def _table(*answers: str) -> Table:
    table = Table(*(Column(head, ratio=1) for head in ("without the adapter", "with it")), expand=True)
    table.add_row(*map(Text, answers))
    return table
