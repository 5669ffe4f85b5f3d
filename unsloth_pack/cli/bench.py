"""`unsloth-pack bench`: a few steps on your own model and data, packed and padded, patched and plain."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.report.terminal import LastingConsole
from unsloth_pack.run.data_flags import add_data_flags, check_sources, read_documents
from unsloth_pack.run.machine import device_name, device_type, versions

if TYPE_CHECKING:
    from unsloth_pack.bench.measure import Case, Figures

_MOST_DOCUMENTS = 20_000  # of a data set; a short run sees fewer
_MOST_PADDED = 16  # documents of a padded batch
_PROFILED = 3  # steps
_SPREAD = 1.25  # between the rounds of a run, by which its steps differ where nothing else runs


@dataclass
class Run:
    """One column of the table: a run and its figures, or why there are none."""

    model: str
    rows: str
    rows_per_step: int
    weights: str  # the form of the frozen weights: fp8, NF4 or their dtype
    figures: "Figures | None" = None  # of the fastest round, because other work only ever slows a step down
    why_not: str | None = None
    step_ms_by_round: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.rows}"


def run(arguments: Sequence[str]) -> int:
    """Print a table of the runs and the breakdown of a patched packed step; with `--json` both as JSON.

    Returns:
        0, or 1 where the patched model did not come through on packed rows.
    """
    flags = build_parser().parse(arguments)
    check_sources(flags)

    from unsloth_pack.cli import quieten

    quieten(show_bars=False)
    progress = Console(stderr=True, quiet=flags.get("json", False))
    with TemporaryDirectory(prefix="unsloth-pack-bench-") as folder:
        cases = _prepare(flags, Path(folder))
        runs = _measure_in_turn(cases, flags.get("rounds", 2), progress)
        breakdown = _breakdown(cases[0], runs[0].figures, progress)
    too_busy = _why_too_busy(runs)
    if flags.get("json"):
        measured = {"device": device_name(), "versions": versions(), "runs": [asdict(run) for run in runs]}
        LastingConsole().show_json(measured | {"too_busy": too_busy, "breakdown_ms": breakdown})
    else:
        _print(LastingConsole(), runs, too_busy, breakdown)
    return 0 if breakdown is not None else 1


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = Parser(
        prog="unsloth-pack bench",
        description="Train for a few steps, patched and as plain transformers with PEFT, on packed rows and "
        "on padded batches, and break a step down.",
    )
    parser.add_option("model_name", "demo, a folder of a model or an adapter, or a hub name (default: demo)")
    add_data_flags(parser)
    parser.add_option("max_seq_length", "of a packed row (default: 2048, or what the model has)")
    padded = f"a padded batch holds as many documents, up to {_MOST_PADDED}"
    parser.add_option("per_device_train_batch_size", f"packed rows a step (default: 1); {padded}")
    parser.add_argument("--steps", type=Count, help="that are measured, after a warm-up (default: 10)")
    rounds = "in which all runs take turns; the table has the fastest of each (default: 2)"
    parser.add_argument("--rounds", type=Count, help=rounds)
    parser.add_option("load_in_4bit")
    plain = "the plain one's stay 16-bit (default: false)"
    parser.add_option("load_in_fp8", f"hold the patched model's frozen weights in fp8; {plain}")
    parser.add_option("attn_backend", "of packed attention in the patched model (default: auto)")
    recomputes = "the plain model recomputes every layer unless it is false (default: false)"
    parser.add_option("use_gradient_checkpointing", f"as for training; {recomputes}")
    parser.add_switch("--json", "print JSON")
    return parser


def _prepare(flags: Mapping[str, Any], folder: Path) -> list["Case"]:
    """Write documents and packed rows; return the four runs over them, the patched packed one first."""
    from unsloth_pack.bench.measure import Case
    from unsloth_pack.checkpoints import loading
    from unsloth_pack.data import check_token_ids
    from unsloth_pack.models import arch_spec_for
    from unsloth_pack.packing import pack_dataset
    from unsloth_pack.run.validate import check_backend

    name = flags.get("model_name", "demo")
    base = loading.find_model(name)[0]
    config = loading.load_config(base).get_text_config()
    arch_spec_for(config.model_type)
    attn_backend = flags.get("attn_backend") or "auto"
    check_backend(attn_backend, config, loading.weight_dtype(None), device_type())
    length = flags.get("max_seq_length") or min(2048, config.max_position_embeddings)
    in_4bit, in_fp8 = flags.get("load_in_4bit", False), flags.get("load_in_fp8", False)
    loading.check_loading(length, in_4bit, False, in_fp8)
    loading.check_positions(length, name, config)
    why = "and bench measures rows of text; give data without"
    mixture, _, _ = read_documents(flags, base, length, most=_MOST_DOCUMENTS, why_no_images=why)
    documents = mixture.train.rows
    check_token_ids(documents, config.vocab_size)
    packed = pack_dataset(documents, length)
    documents.save_to_disk(folder / "documents")
    packed.save_to_disk(folder / "packed")

    rows = flags.get("per_device_train_batch_size") or 1
    if rows == "auto":
        raise InputError("per_device_train_batch_size is 'auto', and bench times one size; give a number")
    first = Case(
        model_name=name if name in BUNDLED_MODELS else base,
        rows=str(folder / "packed"),
        is_packed=True,
        is_patched=True,
        max_seq_length=length,
        rows_per_step=rows,
        steps=flags.get("steps", 10),
        load_in_4bit=in_4bit,
        load_in_fp8=in_fp8,
        attn_backend=attn_backend,
        use_gradient_checkpointing=flags.get("use_gradient_checkpointing", False),
    )
    batch = min(_MOST_PADDED, max(1, round(rows * len(documents) / len(packed))))
    padded = replace(first, rows=str(folder / "documents"), is_packed=False, rows_per_step=batch)
    return [first, padded, replace(first, is_patched=False), replace(padded, is_patched=False)]


def _measure_in_turn(cases: Sequence["Case"], rounds: int, progress: Console) -> list[Run]:
    """Measure the runs in turn, so that each meets the same of what else the machine does."""
    from unsloth_pack.bench import measure
    from unsloth_pack.checkpoints.loading import weight_dtype

    leaks = measure.plain_packing_leaks()
    runs = []
    for case in cases:
        weights = "NF4" if case.load_in_4bit else str(weight_dtype(None)).removeprefix("torch.")
        weights = "fp8" if case.load_in_fp8 and case.is_patched else weights
        model, rows = "patched" if case.is_patched else "plain", "packed" if case.is_packed else "padded"
        runs.append(Run(model, rows, case.rows_per_step, weights))
        if case.is_packed and not case.is_patched and leaks:
            runs[-1].why_not = "left out: documents would leak without flash-attn"
    for number in range(1, rounds + 1):
        for case, run in zip(cases, runs, strict=True):
            if run.why_not is not None:
                continue
            try:
                with progress.status(f"{run.name}, round {number} of {rounds}"):
                    figures = measure.measure_apart(case)
            except Exception as error:  # a peer fails as it likes; the others are measured all the same
                run.figures, run.why_not = None, f"{type(error).__name__}: {first_line(error)}"
                continue
            run.step_ms_by_round.append(figures.step_ms)
            if run.figures is None or figures.step_ms < run.figures.step_ms:
                run.figures = figures
    return runs


def _why_too_busy(runs: Iterable[Run]) -> str | None:
    """Say why the figures do not compare, as other work held the machine meanwhile; None if none did."""
    for run in runs:
        fastest, slowest = (pick(run.step_ms_by_round, default=0.0) for pick in (min, max))
        if slowest > _SPREAD * fastest:
            return f"a step of {run.name} took {fastest:,.1f} ms in one round, {slowest:,.1f} ms in another"
    return None


def _breakdown(case: "Case", figures: "Figures | None", progress: Console) -> dict[str, float] | None:
    """Return the milliseconds of a step by category, host gaps among them; None if a run failed."""
    from unsloth_pack.bench import measure
    from unsloth_pack.bench.breakdown import HOST_GAPS

    if figures is None:
        return None
    try:
        with progress.status("breakdown of a step"):
            profiled = measure.measure_apart(replace(case, steps=_PROFILED, is_profiled=True))
    except Exception as error:  # the figures are there already
        progress.print(f"no breakdown: {type(error).__name__}: {first_line(error)}", markup=False)
        return None
    assert profiled.kernel_ms is not None
    assert profiled.busy_ms is not None
    # The profiler slows the host and not the GPU's kernels; on a CPU, it slows everything.
    step_ms = profiled.step_ms if device_type() == "cpu" else figures.step_ms
    return profiled.kernel_ms | {HOST_GAPS: max(0.0, step_ms - profiled.busy_ms)}


def _print(
    console: Console, runs: Sequence[Run], too_busy: str | None, breakdown: Mapping[str, float] | None
) -> None:
    table = Table("", *(run.name for run in runs), title=device_name(), title_justify="left")
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("attention", lambda f: f.attention),
        ("real tokens/s", lambda f: f"{f.tokens_per_second:,.0f}"),
        ("samples/s", lambda f: f"{f.documents_per_second:,.1f}"),
        ("step", lambda f: f"{f.step_ms:,.1f} ms"),
        ("TFLOP/s", lambda f: f"{f.tflops:,.3g}"),
        ("MFU", lambda f: "" if f.mfu is None else f"{f.mfu:.1%}"),
        ("HFU", lambda f: "" if f.hfu is None else f"{f.hfu:.1%}"),
        ("padding", lambda f: f"{f.tokens_padded:.1%}"),
        ("peak memory", lambda f: f"{f.peak_memory_bytes / 2**30:.2f} GiB"),
        ("start-up", lambda f: f"{f.startup_seconds:.1f} s"),
        ("first step", lambda f: f"{f.first_step_seconds:.1f} s"),
    ]
    table.add_row("rows a step", *(str(run.rows_per_step) for run in runs))
    table.add_row("weights", *(run.weights for run in runs))
    for title, show in lines:
        table.add_row(title, *(show(run.figures) if run.figures else "" for run in runs))
    console.print(table)
    notes = [f"{run.name}: {run.why_not}" for run in runs if run.why_not]
    if too_busy:
        busy = f"the machine is too busy to compare speeds: {too_busy}"
        notes.append(f"{busy}; run bench again when nothing else runs")
    if first := runs[0].figures:
        notes.append(f"peak memory is {first.peak_memory_of}; the patched step is {first.step_graphs}")
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    if breakdown is None:
        return
    total = sum(breakdown.values())
    parts = Table("a patched packed step", "ms", "share", title_justify="left")
    for name, ms in breakdown.items():
        if ms:
            parts.add_row(name, f"{ms:,.2f}", f"{ms / total:.1%}")
    console.print(parts)
