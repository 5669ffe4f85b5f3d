"""`unsloth-pack bench`: a few steps on your own model and data, packed and padded, patched and plain."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, FilePath
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError
from unsloth_pack.run.data_flags import add_data_flags, check_sources, data_options
from unsloth_pack.run.machine import device_name, device_type, versions
from unsloth_pack.run.resolve import paths_of

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console

    from unsloth_pack.bench import Case, Figures

_MOST_DOCUMENTS = 20_000  # tokenised; a short run sees fewer
_MOST_PADDED = 16  # documents of a padded batch
_PROFILED = 3  # steps
_SPREAD = 1.25  # between the rounds of a run, by which its steps differ where nothing else runs
_CORE_SHARE = 0.8  # of the time of a step, in which its thread then has a core
_SEED = 3407


@dataclass(frozen=True)
class Run:
    """One column of the table: a run and its figures, or why there are none.

    Args:
        weights: the form of the frozen weights: fp8, NF4 or their dtype.
        figures: of the fastest round, because other work on the machine only ever slows a step down.
        step_ms_by_round: milliseconds of a step, in each round.
    """

    model: str
    rows: str
    rows_per_step: int
    weights: str
    figures: "Figures | None" = None
    why_not: str | None = None
    step_ms_by_round: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}, {self.rows}"


def run(arguments: Sequence[str]) -> int:
    """Print a table of the runs and the breakdown of a patched packed step; with `--json` both as JSON.

    Returns:
        0, or 1 where the patched model did not come through on packed rows.

    Raises:
        InputError: a bad argument, an unsupported architecture, or a model or data that cannot be loaded.
    """
    given = _parser().parse(arguments)
    check_sources(given)

    from rich.console import Console

    from unsloth_pack.cli.quiet import quieten
    from unsloth_pack.report.terminal import LastingConsole

    quieten(show_bars=False)
    progress = Console(stderr=True, quiet=given.get("json", False))
    with TemporaryDirectory(prefix="unsloth-pack-bench-") as folder:
        cases = _prepare(given, Path(folder))
        runs = _measure_in_turn(cases, given.get("rounds", 2), progress)
        breakdown = None
        if figures := runs[0].figures:
            breakdown = _breakdown(cases[0], figures, progress)
    too_busy = why_too_busy(runs)
    if given.get("json", False):
        found = {"device": device_name(), "versions": versions(), "runs": [asdict(run) for run in runs]}
        LastingConsole().show_json(found | {"too_busy": too_busy, "breakdown_ms": breakdown})
    else:
        _print(LastingConsole(), runs, too_busy, breakdown)
    return 0 if breakdown is not None else 1


def _parser() -> Parser:
    parser = Parser(
        prog="unsloth-pack bench",
        description="Train for a few steps, patched and as plain transformers with PEFT, on packed rows and "
        "on padded batches, and break a step down.",
    )
    add = parser.add_argument
    add(
        "--model_name",
        type=FilePath,
        help="demo, a folder of a model or an adapter, or a hub name (default: demo)",
    )
    add_data_flags(parser)
    add(
        "--max_seq_length",
        type=Count,
        metavar="TOKENS",
        help="of a packed row (default: 2048, or what the model has)",
    )
    add(
        "--per_device_train_batch_size",
        type=Count,
        metavar="ROWS",
        help=f"packed rows a step (default: 1); a padded batch holds as many documents, up to {_MOST_PADDED}",
    )
    add("--steps", type=Count, help="that are measured, after a warm-up (default: 10)")
    add(
        "--rounds",
        type=Count,
        help="in which all runs take turns; the table has the fastest of each (default: 2)",
    )
    parser.add_option("load_in_4bit")
    parser.add_option(
        "load_in_fp8",
        "hold the patched model's frozen weights in fp8; the plain one's stay 16-bit (default: false)",
    )
    add("--attn_backend", help="of packed attention in the patched model (default: auto)")
    parser.add_option(
        "use_gradient_checkpointing",
        "as for training; the plain model recomputes every layer unless it is false (default: false)",
    )
    parser.add_switch("--json", "print JSON")
    return parser


def _prepare(given: Mapping[str, Any], folder: Path) -> list["Case"]:
    """Documents and packed rows on disk, and the four runs over them, the patched packed one first."""
    from unsloth_pack.bench import Case
    from unsloth_pack.checkpoints.loading import load_config, resolve, weight_dtype
    from unsloth_pack.checkpoints.weight_checks import check_loading, check_positions
    from unsloth_pack.packing import pack_dataset
    from unsloth_pack.run.validate import check_backend

    name = given.get("model_name", "demo")
    base = resolve(name)[0]
    config = load_config(base).get_text_config()
    attn_backend = given.get("attn_backend", "auto")
    check_backend(attn_backend, config, weight_dtype(None), device_type())
    length = given.get("max_seq_length", min(2048, config.max_position_embeddings))
    in_4bit, in_fp8 = given.get("load_in_4bit", False), given.get("load_in_fp8", False)
    check_loading(length, in_4bit, False, in_fp8)
    check_positions(length, name, config)
    documents = _documents(given, base, length, config.vocab_size)
    packed = pack_dataset(documents, length)
    documents.save_to_disk(folder / "documents")
    packed.save_to_disk(folder / "packed")

    rows = given.get("per_device_train_batch_size", 1)
    first = Case(
        model_name=name if name in BUNDLED_MODELS else base,
        rows=str(folder / "packed"),
        is_packed=True,
        is_patched=True,
        max_seq_length=length,
        rows_per_step=rows,
        steps=given.get("steps", 10),
        load_in_4bit=in_4bit,
        load_in_fp8=in_fp8,
        attn_backend=attn_backend,
        use_gradient_checkpointing=given.get("use_gradient_checkpointing", False),
    )
    batch = min(_MOST_PADDED, max(1, round(rows * len(documents) / len(packed))))
    padded = replace(first, rows=str(folder / "documents"), is_packed=False, rows_per_step=batch)
    return [first, padded, replace(first, is_patched=False), replace(padded, is_patched=False)]


def _documents(given: Mapping[str, Any], base: str, length: int, vocab_size: int) -> "Dataset":
    from unsloth_pack.data import check_token_ids
    from unsloth_pack.packing import find_packs
    from unsloth_pack.run.documents import load_tokenizer, load_training_data, mixed_documents
    from unsloth_pack.run.images import refuse_images

    data = data_options(given)
    for path_of_data in paths_of(data.dataset):
        if find_packs(path_of_data):
            raise InputError(
                f"dataset is {path_of_data!r}, which is packed; give the data that it was packed from"
            )
    chosen = [
        replace(each, rows=each.rows.shuffle(seed=_SEED).select(range(_MOST_DOCUMENTS)))
        if len(each.rows) > _MOST_DOCUMENTS
        else each
        for each in load_training_data(data)
    ]
    why = "and bench measures rows of text; give data without"
    refuse_images(base, [each.rows for each in chosen], why)
    how: dict[str, Any] = {"how": data.mixture, "seed": _SEED, "most": data.sample_limit}
    documents = mixed_documents(chosen, load_tokenizer(base), length, **how).train.rows
    check_token_ids(documents, vocab_size)
    return documents


def _measure_in_turn(cases: Sequence["Case"], rounds: int, progress: "Console") -> list[Run]:
    """The runs take turns, so that each meets the same of what else the machine does."""
    from unsloth_pack.bench import Failed, measure_apart, plain_packing_leaks

    runs = [
        Run(
            "patched" if case.is_patched else "plain",
            "packed" if case.is_packed else "padded",
            case.rows_per_step,
            _weights(case),
        )
        for case in cases
    ]
    if plain_packing_leaks():
        why_not = "left out: documents would leak without flash-attn"
        runs = [
            replace(run, why_not=why_not) if (run.model, run.rows) == ("plain", "packed") else run
            for run in runs
        ]
    for number in range(1, rounds + 1):
        for i, (case, run) in enumerate(zip(cases, runs, strict=True)):
            if run.why_not is not None:
                continue
            try:
                with progress.status(f"{run.name}, round {number} of {rounds}"):
                    runs[i] = _with_round(run, measure_apart(case))
            except Failed as error:
                runs[i] = replace(run, figures=None, why_not=str(error))
    return runs


def _with_round(run: Run, figures: "Figures") -> Run:
    is_fastest = run.figures is None or figures.step_ms < run.figures.step_ms
    step_ms_by_round = (*run.step_ms_by_round, figures.step_ms)
    return replace(run, figures=figures if is_fastest else run.figures, step_ms_by_round=step_ms_by_round)


def why_too_busy(runs: Iterable[Run]) -> str | None:
    """Why the figures do not compare: other work held the machine meanwhile. None where nothing shows it."""
    for run in runs:
        if run.figures is None:
            continue
        fastest, slowest = min(run.step_ms_by_round), max(run.step_ms_by_round)
        if slowest > _SPREAD * fastest:
            return f"a step of {run.name} took {fastest:,.1f} ms in one round, {slowest:,.1f} ms in another"
        share = run.figures.core_share
        if share is not None and share < _CORE_SHARE:
            return f"{run.name} had a core for {share:.0%} of the time of its steps"
    return None


def _weights(case: "Case") -> str:
    from unsloth_pack.checkpoints.loading import weight_dtype

    if case.load_in_fp8 and case.is_patched:
        return "fp8"
    return "NF4" if case.load_in_4bit else str(weight_dtype(None)).removeprefix("torch.")


def _breakdown(case: "Case", figures: "Figures", progress: "Console") -> dict[str, float] | None:
    """Milliseconds of a step by category, host gaps among them; None where the profiled run failed."""
    from unsloth_pack.bench import HOST_GAPS, Failed, measure_apart

    try:
        with progress.status("breakdown of a step"):
            profiled = measure_apart(replace(case, steps=_PROFILED, is_profiled=True))
    except Failed as error:
        progress.print(f"no breakdown: {error}", markup=False)
        return None
    assert profiled.kernel_ms is not None
    assert profiled.busy_ms is not None
    # The profiler slows the host and not the GPU's kernels; on a CPU, it slows everything.
    step_ms = profiled.step_ms if device_type() == "cpu" else figures.step_ms
    return profiled.kernel_ms | {HOST_GAPS: max(0.0, step_ms - profiled.busy_ms)}


def _print(
    console: "Console", runs: Sequence[Run], too_busy: str | None, breakdown: Mapping[str, float] | None
) -> None:
    from rich.table import Table

    from unsloth_pack.report.terminal import gib

    table = Table("", *(run.name for run in runs), title=device_name(), title_justify="left")
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("attention", lambda f: f.attention),
        ("real tokens/s", lambda f: f"{f.tokens_per_second:,.0f}"),
        ("samples/s", lambda f: f"{f.documents_per_second:,.1f}"),
        ("step", lambda f: f"{f.step_ms:,.1f} ms"),
        ("padding", lambda f: f"{f.tokens_padded:.1%}"),
        ("peak memory", lambda f: gib(f.peak_memory_bytes)),
        ("start-up", lambda f: f"{f.startup_seconds:.1f} s"),
        ("first step", lambda f: f"{f.first_step_seconds:.1f} s"),
    ]
    table.add_row("rows a step", *(str(run.rows_per_step) for run in runs))
    table.add_row("weights", *(run.weights for run in runs))
    for title, show in lines:
        table.add_row(title, *(show(run.figures) if run.figures else "" for run in runs))
    console.print(table)
    for run in runs:
        if run.why_not:
            console.print(f"{run.name}: {run.why_not}", markup=False, soft_wrap=True)
    if too_busy:
        console.print(
            f"the machine is too busy to compare speeds: {too_busy}; run bench again when nothing else runs",
            markup=False,
            soft_wrap=True,
        )
    if measured := runs[0].figures:
        console.print(
            f"peak memory is {measured.peak_memory_of}; the patched step is {measured.step_graphs}",
            soft_wrap=True,
        )
    if breakdown is None:
        return
    total = sum(breakdown.values())
    parts = Table("a patched packed step", "ms", "share", title_justify="left")
    for name, ms in breakdown.items():
        if ms:
            parts.add_row(name, f"{ms:,.2f}", f"{ms / total:.1%}")
    console.print(parts)
