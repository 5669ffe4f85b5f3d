"""`unsloth-pack estimate`: will a run fit, and how long does it take? Loads no weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unsloth_pack.config import Parser, TrainOptions, load, telling_places, train_parser
from unsloth_pack.errors import InputError
from unsloth_pack.report.terminal import LastingConsole, Line, print_lines
from unsloth_pack.run.resolve import resolve, with_optimizer
from unsloth_pack.run.validate import validate_file

if TYPE_CHECKING:
    from unsloth_pack.run.estimate import RunEstimate
    from unsloth_pack.training.chips import Gpu

_SHARES = {  # of the memory
    "weights": "frozen weights",
    "trained": "trained weights",
    "moments": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "loss": "loss",
}


def run(arguments: Sequence[str]) -> int:
    """Print the estimate of a run with the flags of `train`, on this GPU or on the one that `--gpu` names."""
    own, flags = _with_own_flags(Parser(add_help=False)).parse_known_args(arguments)
    loaded = load(flags, build_parser())
    with telling_places(loaded):
        options = with_optimizer(resolve(loaded), "cuda")
        validate_file(options)

        from unsloth_pack.cli import quieten
        from unsloth_pack.training.chips import GPUS, Gpu

        gpu = getattr(own, "gpu", None)
        if gpu is not None and gpu not in GPUS:
            raise InputError(f"gpu is {gpu!r}; give one of {', '.join(GPUS)}")
        as_json = getattr(own, "json", False)
        quieten(show_bars=not as_json)
        from unsloth_pack.run.estimate import with_rows_that_fit

        on = Gpu.here() if gpu is None else Gpu.named(gpu)
        show(with_rows_that_fit(options, on), on, as_json)
    return 0


def show(o: TrainOptions, gpu: "Gpu | None", as_json: bool = False) -> None:
    """Print what a run is expected to take, and on a GPU whether it fits."""
    from unsloth_pack.run.estimate import estimate_run, plan_updates, remedy

    estimate = estimate_run(o, gpu)
    plan = plan_updates(o, estimate)
    advice = None if gpu is None or estimate.fits else remedy(o, gpu)
    if as_json:
        memory = {name: getattr(estimate.memory, name) for name in (*_SHARES, "peak")}
        of_gpu = {"gpu": gpu and gpu.name, "memory": gpu and gpu.memory, "fits": estimate.fits}
        values = {"bytes": memory, "tokens": estimate.tokens, **of_gpu, "remedy": advice}
        LastingConsole().show_json(values | plan)
    else:
        print_lines(LastingConsole(), f"estimate of {o.model.model_name}", _lines(estimate, plan, advice))


def _lines(estimate: "RunEstimate", plan: dict[str, Any], advice: str | None) -> list[Line]:
    memory, gpu, gib = estimate.memory, estimate.gpu, 2**30
    lines = [(label, f"{getattr(memory, name) / gib:.2f} GiB") for name, label in _SHARES.items()]
    at = f"about {memory.peak / gib:.1f} GiB at {estimate.tokens:,} tokens a micro-batch"
    lines.append(("peak", at if gpu is None else f"{at}, of {gpu.memory / gib:.1f} on {gpu.name}"))
    if gpu is not None:
        lines.append(("fits", "yes" if estimate.fits else f"no; {advice}"))
    updates, tokens, hours = plan["updates"], plan["tokens_an_update"], plan["hours"]
    lines.append(("plan", f"{'?' if updates is None else f'{updates:,}'} updates of {tokens:,.0f} tokens"))
    if hours is not None:
        time = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
        lines.append(("time", f"about {time}, {updates * tokens / hours / 3600:,.0f} tokens/s"))
    return lines


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = train_parser(
        prog="unsloth-pack estimate",
        usage="unsloth-pack estimate [--gpu NAME] [--json] [flags of train]",
        description="Estimate memory and time of a run, from the configuration of its model and from the "
        "data that --dataset names.",
    )
    return _with_own_flags(parser)


def _with_own_flags(parser: Parser) -> Parser:
    parser.add_argument("--gpu", metavar="NAME", help="a GPU, such as 4090 or h100 (default: this machine's)")
    parser.add_switch("--json", "print JSON")
    return parser
