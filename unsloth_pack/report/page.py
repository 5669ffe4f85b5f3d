"""`report.html`: a run on one page that loads nothing and needs no network."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_pack.errors import first_line, printable
from unsloth_pack.files.whole_folders import write_file
from unsloth_pack.patching.report import PatchReport
from unsloth_pack.report.figures import curves, lengths_histogram, packed_row
from unsloth_pack.report.row_figure import PackedRowSeen

NAME = "report.html"
_MARK = '<meta name="generator" content="unsloth_pack">'
_HEAD = 1024  # bytes, in which the mark stands
# The browser asks nobody for anything, whatever stands in the page
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd;
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; width: 18rem; } td.number { font-variant-numeric: tabular-nums; }
table.answers { table-layout: fixed; } table.answers th { width: auto; }
p.note { color: #666; }
"""


@dataclass(frozen=True)
class RunSeen:
    """What the page shows of a run beside its metrics file.

    Args:
        patch: what was fused.
        lengths: `[documents]` tokens of the training documents; None where the data streams.
        row: a packed row; None where rows are not packed, or stream.
        max_length: at which documents are cut.
    """

    patch: PatchReport
    lengths: np.ndarray | None
    row: PackedRowSeen | None
    max_length: int


def write_page(folder: Path, lines: Sequence[Mapping[str, Any]], seen: RunSeen) -> str | None:
    """Write the page of a run, whole or not at all.

    Args:
        folder: of the run.
        lines: of its metrics file.

    Returns:
        Why there is no page: a file of its name is somebody else's. None if it was written.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / NAME
    if not path.is_symlink() and path.exists() and not _is_ours(path):
        return f"{path} is a file of somebody else"
    text = page_of(lines, seen)
    with write_file(path) as file:
        file.write(text.encode("utf-8", "replace"))
    return None


def page_of(lines: Sequence[Mapping[str, Any]], seen: RunSeen) -> str:
    """The page as HTML."""
    by_kind: dict[str, list[Any]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    (config,), summary = by_kind["config"], by_kind["summary"][-1]
    model = config["options"].get("model_name", "")
    body = [
        f"<h1>{_text(model)}: {summary['steps']:,} updates in {summary['seconds']:,.1f} s</h1>",
        _section("Over the run", _drawn(lambda: curves(by_kind.get("log", [])))),
        *_held_out(by_kind.get("demo", [])),
        _section("Lengths of documents", _lengths(seen)),
        _section("A packed row", _row(seen)),
        _section("Where the tokens went", _table(summary["ledger"])),
        _section("Summary", _table({k: v for k, v in summary.items() if k not in ("kind", "ledger")})),
        _section("Patch", _table(_of_patch(seen.patch))),
        _section("Versions", _table(config["versions"])),
        _section("Configuration", _table(config["options"] | {"processes": config.get("processes")})),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'{_MARK}\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(model)}: training report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _is_ours(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return _MARK.encode() in file.read(_HEAD)
    return False


def _lengths(seen: RunSeen) -> str:
    lengths = seen.lengths
    if lengths is None:
        return _note("The data streams, so the lengths of all documents are not known.")
    return _drawn(lambda: lengths_histogram(lengths, seen.max_length))


def _held_out(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The answers of a demo's model; nothing for other runs."""
    if not lines:
        return []
    scores = {name: lines[-1][f"exact_match_{name}"] for name in ("before", "after")}
    told = f"Answered to the letter: {scores['before']:.1%} before training, {scores['after']:.1%} after it."
    columns = ("prompt", "before", "after", "expected")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = ["".join(_cell(example[column]) for column in columns) for example in lines[-1]["examples"]]
    body = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
    return [_section("Held-out rows", f'{_note(told)}<table class="answers">{body}</table>')]


def _row(seen: RunSeen) -> str:
    row = seen.row
    if row is None:
        return _note("Rows stream, or are not packed.")
    counted = int(row.is_counted.sum())
    told = (
        f"{len(row.lengths)} documents of {', '.join(map(str, row.lengths))} tokens. Lines are their "
        "boundaries, which no token sees across. Dark tokens count in the loss: "
        f"{counted:,} of {len(row.is_counted):,}."
    )
    if row.images:
        told += f" Images have {sum(image.tokens for image in row.images):,} of the tokens."
    return _drawn(lambda: packed_row(row)) + _note(told)


def _drawn(draw: Callable[[], str]) -> str:
    try:
        return f"<figure>{draw()}</figure>"
    except Exception as error:  # a page without a figure tells more than none
        return _note(f"This figure could not be drawn: {type(error).__name__}: {first_line(error)}")


def _of_patch(patch: PatchReport) -> dict[str, str]:
    return {
        "architecture": f"{patch.model_type}, {patch.n_layers} layers",
        "attention": f"{patch.attn_backend}: {patch.attn_reason}",
        **{f"fused: {kind}": what for kind, what in patch.fused.items()},
        **{f"not fused: {kind}": why for kind, why in patch.not_fused.items()},
    }


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}"


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"<tr><th>{_text(name)}</th>{_cell(value)}</tr>" for name, value in values.items()]
    return f"<table>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
        return f'<td class="number">{shown}</td>'
    return f"<td>{_text(value if isinstance(value, str) else json.dumps(value))}</td>"


def _text(value: Any) -> str:
    return escape(printable(str(value)))
