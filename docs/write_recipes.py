"""Write the tables of `docs/options.md` and `docs/recipes.md` from the options and the recipes."""

import re
from collections.abc import Iterator
from pathlib import Path

from unsloth_pack.cli.recipe import recipe_names, summary_of
from unsloth_pack.config import OPTIONS, SECTIONS
from unsloth_pack.config.options import Option

GUIDES = [Path(__file__).with_name(name) for name in ("options.md", "recipes.md")]


def with_tables(guide: str) -> str:
    """Replace every table between `<!-- name -->` and `<!-- end -->`."""
    for name, lines in {"recipes": _recipes(), "options": _options()}.items():
        table = f"<!-- {name} -->\n" + "\n".join(lines) + "\n<!-- end -->"
        guide = re.sub(
            rf"<!-- {name} -->.*?<!-- end -->", lambda _, table=table: table, guide, flags=re.DOTALL
        )
    return guide


def _recipes() -> Iterator[str]:
    yield "| recipe | what it is |"
    yield "|---|---|"
    yield from (f"| `{name}` | {summary_of(name)} |" for name in recipe_names())


def _options() -> Iterator[str]:
    for section, kind in SECTIONS.items():
        yield f"\n**`{section}`**: {kind.__doc__}\n"
        yield "| option | value | what it is | default |"
        yield "|---|---|---|---|"
        for name in kind.model_fields:
            yield f"| {' | '.join(_cells(OPTIONS[name]))} |"


def _cells(option: Option) -> Iterator[str]:
    yield " or ".join(f"`{name}`" for name in option.names)
    for text in (option.unit, option.help, option.shown_default):
        yield text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for guide in GUIDES:
        guide.write_text(with_tables(guide.read_text(encoding="utf-8")), encoding="utf-8")
