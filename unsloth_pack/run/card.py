"""The model card that a run leaves: `README.md`, whose front matter the hub reads."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from yaml import YAMLError

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import CARD
from unsloth_pack.config import TrainOptions
from unsloth_pack.data.sources import HUB_NAME
from unsloth_pack.errors import printable
from unsloth_pack.report.metrics import read_lines
from unsloth_pack.report.terminal import RunSummary
from unsloth_pack.run.folder import settings_of
from unsloth_pack.run.machine import device_name
from unsloth_pack.run.resolve import paths_of

_MARK = "<!-- Written by a run of unsloth-pack -->"  # in a card that a later run may replace
_UNFINISHED = "[More Information Needed]"  # in the card that PEFT saves with an adapter
_OF_EVALUATION = ("_runtime", "_per_second", "_num_tokens")  # ends of names that say nothing of the model
Rows = Iterable[tuple[str, object]]


def write_cards(options: TrainOptions, summary: RunSummary, takes_images: bool) -> None:
    """Write the card into the folder of a run, and beside its merged model. A card of the user's stays."""
    folder, output = options.output.folder, options.output
    if _may_replace(folder / CARD):
        text = _text(options, summary, read_lines(folder))
        card = f"---\n{_metadata(options, takes_images).to_yaml()}\n---\n{text}"
        with write_file(folder / CARD) as file:
            file.write(card.encode("utf-8", "replace"))
    if output.save_model and output.save_path is not None:
        copy_card(folder, Path(output.save_path), output.save_method)


def copy_card(run: Path, target: Path, save_method: str) -> None:
    """Copy the card of a run to what was saved of its adapter, if the run wrote it."""
    path = run / CARD
    if not path.is_file() or _MARK not in path.read_text("utf-8") or not _may_replace(target / CARD):
        return
    card = ModelCard.load(path)
    if save_method == "merged_16bit":
        card.data.library_name = "transformers"
        card.data.tags = [tag for tag in card.data.tags if tag != "lora"]
    card.save(target / CARD)


def _may_replace(path: Path) -> bool:
    if not os.path.lexists(path):
        return True
    text = path.read_text("utf-8", "replace") if path.is_file() and not path.is_symlink() else ""
    return _MARK in text or _UNFINISHED in text


def _metadata(options: TrainOptions, takes_images: bool) -> ModelCardData:
    """Return what the hub reads. It refuses names of bundled and local models and data sets."""
    name, is_adapter = options.model.model_name, options.adapter.tuning == "lora"
    task = "image-text-to-text" if takes_images else "text-generation"
    named = {*paths_of(options.data.dataset), *paths_of(options.data.eval_dataset)}
    return ModelCardData(
        base_model=name if _is_of_hub(name) else None,
        library_name="peft" if is_adapter else "transformers",
        license=_license_of(name),
        pipeline_tag="text-classification" if options.data.task == "classify" else task,
        tags=["unsloth-pack", options.training.objective, *(["lora"] if is_adapter else [])],
        datasets=sorted(filter(_is_of_hub, named)) or None,
    )


def _is_of_hub(name: str) -> bool:
    return "/" in name and HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def _license_of(model: str) -> str | None:
    """Return the license that the card of the base model names, if the card is on this machine."""
    local = try_to_load_from_cache(model, CARD) if _is_of_hub(model) else os.path.join(model, CARD)
    with suppress(ValueError, OSError, YAMLError):  # no card, or a broken one
        found = ModelCard.load(str(local)).data.license if os.path.isfile(str(local)) else None
        return found if isinstance(found, str) else None
    return None


def _text(options: TrainOptions, summary: RunSummary, lines: list[dict[str, Any]]) -> str:
    config, logs = lines[0], [line for line in lines if line["kind"] == "log"]
    name, processes = options.model.model_name, config["processes"]
    what = "a LoRA adapter" if options.adapter.tuning == "lora" else "all of its weights"
    start = "unsloth-pack" if processes == 1 else f"torchrun --nproc_per_node {processes} cli.py --"
    sections = {
        "Data": _data(lines),
        "Results": _table(_results(summary, logs, lines)),
        "Training": _table(_training(summary, processes)),
        "Settings": f"Those that are no defaults, as `config.yaml`:\n\n```yaml\n{settings_of(options)}```\n\n"
        f"Repeat the run with:\n\n```bash\n{start} --config config.yaml --output_dir FOLDER\n```\n",
        "Versions": _table(config["versions"].items()),
    }
    body = "\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    title = printable(options.output.folder.resolve().name)
    return f"{_MARK}\n# {title}\n\nunsloth-pack trained {what}, from `{printable(name)}`.\n\n{body}"


def _data(lines: list[dict[str, Any]]) -> str:
    rows: list[tuple[str, object]] = []
    for line in (line for line in lines if line["kind"] == "data"):
        ledger, use = line["ledger"], {"train": "training", "eval": "evaluation"}[line["use"]]
        parts = line.get("data_sets", ())
        for part in parts:
            count = "a stream" if part["documents"] is None else f"{part['documents']:,} documents"
            rows.append((f"{use}: {part['name']}", f"{count}, weight {part['weight']:g}"))
        rows.append((use, f"{ledger['rows_read']:,} rows, {ledger['tokens_read']:,} tokens"))
        rows.append((f"{use}, SHA-256 of ids and labels", line["fingerprint"]))
        if fill := line.get("fill"):
            rows.append((f"{use}, fill of rows", f"{fill['tokens'] / fill['slots']:.1%}"))
    return _table(rows)


def _results(summary: RunSummary, logs: list[dict[str, Any]], lines: list[dict[str, Any]]) -> Rows:
    yield "first loss", summary.first_loss
    yield "last loss", summary.last_loss
    evaluations = [line for line in logs if line.get("eval_loss") is not None]
    if evaluations:
        best = min(evaluations, key=lambda line: line["eval_loss"])
        yield "best evaluation loss", f"{best['eval_loss']:.6g} after update {best['step']:,}"
        for name, value in evaluations[-1].items():
            if name.startswith("eval_") and not name.endswith(_OF_EVALUATION):
                yield f"last {name}", value
    for demo in (line for line in lines if line["kind"] == "demo"):
        for when in ("before", "after"):
            yield f"exact match on held-out rows {when} training", f"{demo[f'exact_match_{when}']:.1%}"


def _training(summary: RunSummary, processes: int) -> Rows:
    yield "updates", f"{summary.steps:,} in {summary.seconds:,.1f} s, {summary.epochs:.4g} epochs"
    yield "tokens trained", f"{summary.tokens_trained:,}, {summary.tokens_counted:,} of them in the loss"
    yield "tokens a second", f"{summary.tokens_per_second:,.0f}"
    yield "model TFLOP/s a device", summary.tflops
    if summary.mfu is not None:
        yield "MFU", f"{summary.mfu:.1%}"
    yield "peak memory", f"{summary.peak_memory_bytes / 2**30:.2f} GiB of {summary.peak_memory_of}"
    yield "device", f"{processes} x {device_name()}"


def _table(rows: Rows) -> str:
    def cell(value: object) -> str:
        text = f"{value:,.6g}" if isinstance(value, float) else str(value)
        return printable(text).replace("|", "\\|").replace("<", "&lt;")

    return "".join(["| | |\n|---|---|\n", *(f"| {cell(name)} | {cell(value)} |\n" for name, value in rows)])
