"""The model card that a run leaves: `README.md`, whose front matter the hub reads."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import CARD
from unsloth_pack.config import TrainOptions
from unsloth_pack.data.sources import HUB_NAME
from unsloth_pack.errors import printable
from unsloth_pack.report.html import in_words
from unsloth_pack.run.folder import settings_of
from unsloth_pack.run.machine import device_name
from unsloth_pack.run.resolve import paths_of

_MARK = "<!-- Written by a run of unsloth-pack -->"  # in a card that a later run may replace
_UNFINISHED = "[More Information Needed]"  # in the card that PEFT saves with an adapter
Lines = Sequence[Mapping[str, Any]]  # of a metrics file, the summary among them


def write_cards(options: TrainOptions, lines: Lines, takes_images: bool) -> None:
    """Write the card into the folder of a run, and beside its merged model. A card of the user's stays."""
    folder, output = options.output.folder, options.output
    if _may_replace(folder / CARD):
        card = f"---\n{_metadata(options, takes_images).to_yaml()}\n---\n{_text(options, lines)}"
        with write_file(folder / CARD) as file:
            file.write(card.encode("utf-8", "replace"))
    if output.save_model and output.save_path is not None:
        copy_card(folder, Path(output.save_path), output.save_method)


def copy_card(run: Path, target: Path, save_method: str) -> None:
    """Copy the card of a run to what was saved of its adapter, if the run wrote it."""
    if not _holds(run / CARD, _MARK) or not _may_replace(target / CARD):
        return
    card = ModelCard.load(run / CARD)
    if save_method == "merged_16bit":
        card.data.library_name = "transformers"
        card.data.tags = [tag for tag in card.data.tags if tag != "lora"]
    card.save(target / CARD)


def _may_replace(path: Path) -> bool:
    return not os.path.lexists(path) or _holds(path, _MARK, _UNFINISHED)


def _holds(path: Path, *marks: str) -> bool:
    return path.is_file() and any(mark in path.read_text("utf-8", "replace") for mark in marks)


def _metadata(options: TrainOptions, takes_images: bool) -> ModelCardData:
    """Return what the hub reads. It refuses names of bundled and local models and data sets."""
    name, is_adapter = options.model.model_name, options.adapter.tuning == "lora"
    task = "image-text-to-text" if takes_images else "text-generation"
    named = {*paths_of(options.data.dataset), *paths_of(options.data.eval_dataset)}
    return ModelCardData(
        base_model=name if _is_of_hub(name) else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if options.data.task == "classify" else task,
        tags=["unsloth-pack", options.training.objective, *(["lora"] if is_adapter else [])],
        datasets=sorted(filter(_is_of_hub, named)) or None,
    )


def _is_of_hub(name: str) -> bool:
    return "/" in name and HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def _text(options: TrainOptions, lines: Lines) -> str:
    processes = lines[0]["processes"]
    what = "a LoRA adapter" if options.adapter.tuning == "lora" else "all of its weights"
    start = "unsloth-pack" if processes == 1 else f"torchrun --nproc_per_node {processes} cli.py --"
    sections = {
        "Data": _table(_data(lines)),
        "Results": _table(_results(lines).items()),
        "Settings": f"Those that are no defaults, as `config.yaml`:\n\n```yaml\n{settings_of(options)}```\n\n"
        f"Repeat the run with:\n\n```bash\n{start} --config config.yaml --output_dir FOLDER\n```\n",
        "Versions": _table([*lines[0]["versions"].items(), ("device", device_name())]),
    }
    body = "\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    title, base = printable(options.output.folder.resolve().name), printable(options.model.model_name)
    return f"{_MARK}\n# {title}\n\nunsloth-pack trained {what}, from `{base}`.\n\n{body}"


def _data(lines: Lines) -> Iterator[tuple[str, str]]:
    for line in (line for line in lines if line["kind"] == "data"):
        is_train = line["use"] == "train"  # of a stream, the summary alone knows what was read
        use, ledger = ("training", lines[-1]["ledger"]) if is_train else ("evaluation", line["ledger"])
        for part in line.get("data_sets", ()):
            count = "a stream" if part["documents"] is None else f"{part['documents']:,} documents"
            yield f"{use}: {part['name']}", f"{count}, weight {part['weight']:g}"
        yield use, f"{ledger['rows_read']:,} rows, {ledger['tokens_read']:,} tokens"
        yield f"{use}, SHA-256 of ids and labels", line["fingerprint"]
        if fill := line.get("fill"):
            yield f"{use}, fill of rows", f"{fill['tokens'] / fill['slots']:.1%}"


def _results(lines: Lines) -> dict[str, object]:
    """Return the figures of the summary, of the best and the last evaluation, and of a demo."""
    figures = {name: x for name, x in lines[-1].items() if name not in ("kind", "ledger", "output_dir")}
    evaluations = [line for line in lines if line.get("eval_loss") is not None]
    if evaluations:
        best = min(evaluations, key=lambda line: line["eval_loss"])
        figures["best_eval_loss"] = f"{best['eval_loss']:.6g} after update {best['step']:,}"
    for line in lines:
        figures |= {name: x for name, x in line.items() if name.startswith(("eval_", "exact_match_"))}
    return in_words(figures)


def _table(rows: Iterable[tuple[str, object]]) -> str:
    return "".join(["| | |\n|---|---|\n", *(f"| {printable(a)} | {printable(str(b))} |\n" for a, b in rows)])
