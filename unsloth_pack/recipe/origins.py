"""The values of a run as a config file, with where each comes from."""

from collections.abc import Iterator, Mapping
from typing import Any

from unsloth_pack.demo import DEFAULTS
from unsloth_pack.recipe.flags import Option, flat, sections_of
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.resolve import SCHEDULES_WITHOUT_WARMUP, resolve
from unsloth_pack.recipe.what_trains import OF_AN_ADAPTER
from unsloth_pack.recipe.yaml_file import Placed, line_of

# Their defaults hold the time, and a rerun needs other folders.
OF_ONE_RUN = ("output_dir", "save_path")
# What a file does not say: which file it is, and what becomes of an earlier run
FOR_THE_COMMAND_LINE = ("config", "resume", "overwrite_output_dir")
_WIDEST = 44  # columns of a value whose origin stands in line with the others


def lines_with_origins(placed: Mapping[str, Placed], given: Mapping[str, Any]) -> Iterator[str]:
    """Every value of a run, in sections, as lines of YAML that end with the origin of the value.

    Args:
        placed: what somebody asked for, by name, with its place.
        given: the same without places.
    """
    options = resolve(given, may_lack_adapter=True)
    values, decided = flat(options), decided_by(options)
    for section in sections_of(TrainOptions):
        yield f"{'.'.join(section.path)}:"
        for option in section.options:
            if option.name in FOR_THE_COMMAND_LINE:
                continue
            if option.name in given:
                yield from _given_lines(option.name, placed[option.name], values[option.name], "  ")
            elif option.name in decided:
                yield _line("  ", option.name, None, f"follows from {decided[option.name]}")
            else:
                value = None if option.name in OF_ONE_RUN else values[option.name]
                yield _line("  ", option.name, value, _why(option, value, options))


def decided_by(options: TrainOptions) -> dict[str, str]:
    """The options whose values another one decides, by name. A file that gives both is refused."""
    found = dict.fromkeys(OF_AN_ADAPTER, "tuning") if options.adapter.tuning == "full" else {}
    if options.training.lr_scheduler_type in SCHEDULES_WITHOUT_WARMUP:
        found["warmup_steps"] = "lr_scheduler_type"
    if options.training.warmup_ratio is not None:
        found["warmup_steps"] = "warmup_ratio"
    if options.training.effective_batch_size is not None:
        found["gradient_accumulation_steps"] = "effective_batch_size"
    return found


def _given_lines(name: str, placed: Placed, value: Any, indent: str) -> Iterator[str]:
    if not isinstance(placed.value, dict) or not placed.value:
        yield _line(indent, name, value, _origin(placed))
        return
    yield f"{indent}{name}:"
    for part, inner in placed.value.items():
        if inner.value is not None:
            yield from _given_lines(part, inner, inner.plain, f"{indent}  ")


def _origin(placed: Placed) -> str:
    return "command line" if placed.place is None else str(placed.place)


def _why(option: Option, value: Any, options: TrainOptions) -> str:
    """Why an option has a value that nobody asked for."""
    if options.output.resume:
        return "the run that is resumed"
    of_demo = DEFAULTS[options.model.model_name] if options.is_demo else {}
    if value != option.default and (option.name in of_demo or (of_demo and option.name == "dataset")):
        return "default of the demo"
    if value is None:
        return f"default: {option.unset}"
    return "default" if value == option.default else "follows from other options"


def _line(indent: str, name: str, value: Any, origin: str) -> str:
    return f"{indent}{line_of(name, value):{_WIDEST}}  # {origin}"
