"""`unsloth-pack verify`: does this model keep the documents of a packed row apart?"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, FilePath, Seed
from unsloth_pack.run.data_flags import add_data_flags, check_sources, data_options

if TYPE_CHECKING:
    from rich.table import Table

    from unsloth_pack.verification import VerifyReport

_ROOM = 8192  # tokens of a row by default: beyond the usual sliding windows
_MOST_DOCUMENTS = 8  # of a data set
_SILENCE = 10  # seconds without a line, where the output is no terminal


def run(arguments: Sequence[str]) -> int:
    """Print every verdict and a table of what was measured; with `--json` all of it as JSON.

    Returns:
        0 where every check passed, 1 where one failed.

    Raises:
        InputError: a bad argument, an unsupported architecture, or a model or data that cannot be loaded.
    """
    given = _parser().parse(arguments)
    check_sources(given)

    from unsloth_pack.cli.quiet import quieten
    from unsloth_pack.report.terminal import LastingConsole
    from unsloth_pack.verification import verify

    quieten(show_bars=False)
    seed = given.get("seed", 3407)
    room = given.get("max_seq_length") or _default_room(given.get("model_name", "demo"))
    model, tokenizer = _load_model(given, room, seed)
    documents = _documents(given, tokenizer, room) if "dataset" in given else None
    with _shown_steps() as progress:
        report = verify(model, documents=documents, max_seq_length=room, seed=seed, progress=progress)
    console = LastingConsole()
    if given.get("json", False):
        console.show_json(_as_json(report))
    else:
        console.out(report, highlight=False)
        console.print(_table(report))
    return 0 if report.passed else 1


def _parser() -> Parser:
    parser = Parser(
        prog="unsloth-pack verify",
        description="Check that in this model the documents of a packed row do not see each other, and that "
        "each gives what it gives alone.",
    )
    add = parser.add_argument
    add(
        "--model_name",
        type=FilePath,
        help="demo, a folder of a model or an adapter, or a hub name (default: demo)",
    )
    add_data_flags(parser, "data whose documents are packed, as for training (default: random tokens)")
    add(
        "--max_seq_length",
        type=Count,
        metavar="TOKENS",
        help=f"length of the row (default: {_ROOM}, or the model's positions if it has fewer)",
    )
    parser.add_option("dtype")
    for name in ("load_in_4bit", "load_in_8bit", "load_in_fp8"):
        parser.add_option(name)
    add("--attn_backend", help="what computes attention, as for training (default: auto)")
    parser.add_option("use_gradient_checkpointing")
    add(
        "--seed",
        type=Seed,
        help="seed of the random tokens and of the adapter (default: 3407)",
    )
    parser.add_switch("--json", "print JSON")
    return parser


@contextmanager
def _shown_steps() -> Iterator[Callable[[str], None]]:
    """Show steps on a terminal, else print one now and then; name the step that is interrupted."""
    from rich.console import Console

    console, present, shown_at = Console(stderr=True), "the first step", time.monotonic()

    def show(step: str) -> None:
        nonlocal present, shown_at
        present = step
        status.update(f"verifying: {step}")
        if not console.is_terminal and time.monotonic() > shown_at + _SILENCE:
            console.print(f"verifying: {step}", highlight=False)
            shown_at = time.monotonic()

    with console.status("verifying") as status:
        try:
            yield show
        except KeyboardInterrupt as error:
            raise type(error)(f"interrupted in {present}; there is no verdict yet") from None


def _default_room(model_name: str) -> int:
    from unsloth_pack.checkpoints.loading import load_config, resolve

    config = load_config(resolve(model_name)[0]).get_text_config()
    return min(_ROOM, getattr(config, "max_position_embeddings", _ROOM))


def _load_model(given: Mapping[str, Any], room: int, seed: int) -> tuple[Any, Any]:
    """The model as it would train: with the adapter that it names, else with a random one."""
    import torch
    from peft import PeftModel

    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.memory.checkpointing import enable_checkpointing

    names = ("model_name", "dtype", "load_in_4bit", "load_in_8bit", "load_in_fp8", "attn_backend")
    chosen = {name: given[name] for name in names if name in given}
    model, tokenizer = FastLanguageModel.from_pretrained(**chosen, max_seq_length=room, random_state=seed)
    checkpointing = given.get("use_gradient_checkpointing", False)
    if isinstance(model, PeftModel):
        enable_checkpointing(model, checkpointing)
        return model, tokenizer
    model = FastLanguageModel.get_peft_model(
        model, use_gradient_checkpointing=checkpointing, random_state=seed
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it is 0 in a new adapter, so that A would have no effect
            torch.nn.init.normal_(parameter, std=0.02)
    return model, tokenizer


def _documents(given: dict[str, Any], tokenizer: Any, room: int) -> list[list[int]]:
    """The first documents of a data set that fit into the row, each cut to half of it."""
    from unsloth_pack.run.documents import load_training_data, mixed_documents
    from unsloth_pack.run.images import refuse_images

    data = data_options(given)
    rows = load_training_data(data, _MOST_DOCUMENTS)
    why = "and those that are checked are random ones; leave out --dataset"
    refuse_images(given.get("model_name", "demo"), [each.rows for each in rows], why)
    how: dict[str, Any] = {"how": data.mixture, "most": data.sample_limit}
    encoded = mixed_documents(rows, tokenizer, max(1, room // 2), **how).train.rows
    documents: list[list[int]] = []
    for ids in encoded["input_ids"]:
        if sum(map(len, documents)) + len(ids) <= room:
            documents.append(list(ids))
    return documents


def _as_json(report: "VerifyReport") -> dict[str, Any]:
    found = {"passed": report.passed, **asdict(report)}
    for check in found["checks"]:
        if not math.isfinite(check["value"]):  # JSON has neither NaN nor infinity
            check["value"] = None
    return found


def _table(report: "VerifyReport") -> "Table":
    from rich.table import Table

    n_failed = sum(not check.passed for check in report.checks)
    verdict = f"{n_failed} of {len(report.checks)} checks failed" if n_failed else "all checks passed"
    table = Table("check", "found", "allowed", "verdict", title=verdict, title_justify="left")
    for check in report.checks:
        shown = "passed" if check.passed else "[red]FAILED[/]"
        table.add_row(check.name, f"{check.value:.2g}", f"{check.allowed:.2g}", shown)
    return table
