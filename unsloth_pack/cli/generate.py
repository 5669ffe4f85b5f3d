"""`unsloth-pack generate`: what a model answers to a prompt, perhaps about images, or to many."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, FilePath, NotNegative, Seed
from unsloth_pack.data import rows as fields
from unsloth_pack.data.sources import load_rows
from unsloth_pack.errors import InputError
from unsloth_pack.run.data_flags import check_sources
from unsloth_pack.run.machine import check_writable

if TYPE_CHECKING:
    from unsloth_pack.cli.answers import Answerer

_TopP = Annotated[float, Field(gt=0, le=1)]
_BATCH = 16
_NEEDED = {"out": "prompts", "batch_size": "prompts", "top_p": "temperature", "top_k": "temperature"}


@dataclass(frozen=True)
class Conversation:
    """Turns that end before an answer."""

    turns: list[fields.Message]  # without a chat template they are joined as text
    images: list[str] = field(default_factory=list)  # paths, one for each `<image>` in the turns
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template


def run(arguments: Sequence[str]) -> int:
    """Print the answer to `--prompt` or to lines of standard input, or write those to `--prompts`."""
    flags = read_with_answers(build_parser(), arguments)
    if not flags.get("prompt", "-").strip():
        raise InputError("prompt is empty; give some text")
    if "prompt" in flags and "prompts" in flags:
        raise InputError("prompt and prompts are both given; leave out one")
    if "out" in flags:
        out = Path(flags["out"]).absolute()
        if out.exists() or not out.parent.is_dir():
            raise InputError(f"out is {flags['out']!r}; give a new file in a folder that is there")
        check_writable("out", out.parent)

    from unsloth_pack.cli import quieten

    quieten()
    rows = [*map(dict, load_rows(flags["prompts"]))] if "prompts" in flags else []
    asked = [parse_prompt(index, row, flags.get("image", ())) for index, row in enumerate(rows)]
    from unsloth_pack.cli.answers import Answerer, Streamer

    answerer = Answerer(flags.get("model_name", "demo"), flags, "shorten it, or lower --max_new_tokens")
    if rows:
        _write(answerer, rows, asked, flags)
        return 0
    prompts = [flags["prompt"]] if "prompt" in flags else (line.rstrip("\n") for line in sys.stdin)
    for prompt in filter(str.strip, prompts):
        turn = {"role": "user", "content": prompt}
        answerer.answer([Conversation([turn], flags.get("image", []))], Streamer(answerer.tokenizer))
    return 0


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = Parser(prog="unsloth-pack generate", description="Generate text from a model or an adapter.")
    add = parser.add_argument
    parser.add_option("model_name", "demo, a folder of a model or an adapter, or a hub name (default: demo)")
    add("--prompt", metavar="TEXT", help="what to answer (default: every line of standard input)")
    what = "a file as for --dataset, with the column prompt, messages or text (default: none)"
    add("--prompts", type=FilePath, metavar="FILE", help=f"prompts that are answered as JSON lines: {what}")
    add("--out", type=FilePath, metavar="FILE", help="for these lines (default: standard output)")
    together = f"prompts that are answered together; fewer take less memory (default: {_BATCH})"
    add("--batch_size", type=Count, metavar="PROMPTS", help=together)
    about = "an image to ask about; several are given one by one. <image> in the prompt says where each"
    add("--image", action="append", metavar="FILE", help=f"{about} belongs (default: before the prompt)")
    return add_answers(parser, 128)


def add_answers(parser: Parser, new_tokens: int) -> Parser:
    """Add the flags of a model and its answers."""
    add = parser.add_argument
    longest = f"length of the longest answer (default: {new_tokens})"
    add("--max_new_tokens", type=Count, default=new_tokens, metavar="TOKENS", help=longest)
    add("--temperature", type=NotNegative, help="of sampling; 0 takes the most likely token (default: 0)")
    default = "(default: the model's own)"
    add("--top_p", type=_TopP, help=f"share of the probability to sample from {default}")
    add("--top_k", type=Count, metavar="TOKENS", help=f"most likely tokens to sample from {default}")
    add("--seed", type=Seed, help="of sampling (default: 3407)")
    parser.add_option("dtype")
    parser.add_option("load_in_4bit")
    return parser


def read_with_answers(parser: Parser, arguments: Sequence[str]) -> dict[str, Any]:
    """Read the flags of `add_answers`, among others; refuse those without effect."""
    flags = parser.parse(arguments)
    for name, needed in _NEEDED.items():
        if name in flags and not flags.get(needed):
            raise InputError(f"{name} is {flags[name]!r} without {needed}; give --{needed}, or leave it out")
    check_sources(flags)
    return flags


def parse_prompt(index: int, row: fields.Row, images: Sequence[str] = ()) -> Conversation:
    """Return what to ask of a row, about its own images or these."""
    column = next((name for name in ("messages", "prompt") if row.get(name) is not None), "text")
    if isinstance(row.get(column), str):
        turns = [{"role": "user", "content": fields.string(index, row, column)}]
    else:
        turns = fields.messages(index, {column: None, **row}, column, {})
    if turns[-1]["role"] == "assistant":
        fields.fail(index, column, "the last turn is an answer", turns[-1], "end with a turn of the user")
    variables = fields.template_kwargs(index, row).get("chat_template_kwargs", {})
    if tools := fields.tools(index, row).get("tools"):
        variables = {"tools": json.loads(tools)} | variables
    return Conversation(turns, row.get("images") or [*images], variables)


def _write(
    answerer: "Answerer", rows: Sequence[fields.Row], asked: list[Conversation], flags: Mapping[str, Any]
) -> None:
    """Write each row with its answer, a batch at a time; prompts about images are answered one by one."""
    for index, each in enumerate(asked):
        try:
            answerer.encode([each])
        except InputError as error:
            raise InputError(f"row {index}: {error}") from None
    size = 1 if any(each.images for each in asked) else flags.get("batch_size", _BATCH)
    with open(flags["out"], "x", encoding="utf-8") if "out" in flags else nullcontext() as out:
        for start in range(0, len(rows), size):
            answers = answerer.answer(asked[start : start + size])
            for row, answer in zip(rows[start : start + size], answers, strict=True):
                line = {name: value for name, value in row.items() if value is not None}  # of other rows
                print(json.dumps(line | {"generated_text": answer}, ensure_ascii=False), file=out, flush=True)
