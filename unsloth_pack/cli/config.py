"""`unsloth-pack config`: what a config file comes to, whether it is right, and a schema for editors."""

from collections.abc import Sequence

from unsloth_pack.config import Parser, json_schema, load, telling_places, train_parser
from unsloth_pack.errors import InputError, printable, raise_together
from unsloth_pack.report.terminal import LastingConsole
from unsloth_pack.run.contradictions import contradictions
from unsloth_pack.run.folder import lines_with_origins
from unsloth_pack.run.resolve import resolve
from unsloth_pack.run.validate import validate_file

ACTIONS = {
    "show": "print every value of the run, with the file and line that it comes from",
    "check": "say all that is wrong with the file and its base files, and load nothing",
    "schema": "print the JSON schema of config files, for an editor",
}


def run(arguments: Sequence[str]) -> int:
    """Show, check, or describe config files; nothing is loaded or written."""
    action, *rest = arguments or ["--help"]
    if action.startswith("-"):
        build_parser().parse(arguments or ["--help"])
    if action not in ACTIONS:
        raise InputError(f"config has no action {action!r}; use one of {', '.join(ACTIONS)}")
    if action == "schema":
        Parser(prog="unsloth-pack config schema", description=f"{ACTIONS[action]}.").parse(rest)
        LastingConsole().show_json(json_schema())
        return 0
    file, flags = (rest[:1], rest[1:]) if rest and not rest[0].startswith("-") else ([], rest)
    if file and flags and not flags[0].startswith("-"):
        raise InputError(f"config {action} takes one file, and is given {flags[0]!r} too; call it for each")
    loaded = load([*(f"--config={name}" for name in file), *flags], build_parser())
    if action == "check" and "config" not in loaded.given:
        raise InputError("config check is given no file; name one")
    with telling_places(loaded):
        options = resolve(loaded)
        if action == "check":
            validate_file(options)
            print(printable(f"{loaded.output.config}: no mistakes"))
            return 0
        raise_together(contradictions(options))
        lines = [*map(printable, lines_with_origins(options))]
    LastingConsole().out(*lines, sep="\n", highlight=False)
    return 0


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    actions = "; ".join(f"{name}: {what}" for name, what in ACTIONS.items())
    return train_parser(
        prog="unsloth-pack config",
        usage="unsloth-pack config show|check|schema [FILE] [flags of train]",
        description=f"Look at config files. {actions}. FILE is short for --config FILE.",
    )
