"""A hook of mkdocs: pages that are made from the README, the notebooks and the commands' own help.

So nothing stands twice. Links to files that are no part of the site become their paths.
"""

import contextlib
import io
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_WIDTH = "100"  # columns of a help text


@event_priority(100)  # before the plugin that renders notebooks
def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in `docs/`."""
    for source, page in _COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        path = f"notebooks/{notebook.name}"
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    for name in _subcommands():
        files.append(File.generated(config, f"commands/{name}.md", content=_command_page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that lead out of the site into the names of what they lead to."""
    here = posixpath.dirname(page.file.src_uri)

    def kept(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = link.partition("#")[0]
        if not target or "://" in target:
            return match[0]
        for place in (posixpath.join(here, target), target):
            path = posixpath.normpath(place)
            path = _COPIED.get(path.removeprefix("../"), path)
            if files.get_file_from_path(path) is not None:
                return f"[{text}]({posixpath.relpath(path, here or '.')}{link[len(target) :]})"
        return f"{text} (`{posixpath.normpath(target).removeprefix('../')}`)"

    return _LINK.sub(kept, markdown)


def _subcommands() -> tuple[str, ...]:
    from unsloth_pack.cli import SUBCOMMANDS

    return SUBCOMMANDS


def _command_page(name: str) -> str:
    """The help of a command, as it prints it."""
    from unsloth_pack.cli import main

    before, shown = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = _WIDTH
    try:
        with contextlib.redirect_stdout(shown):
            code = main([name, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    assert code == 0, name
    return f"# unsloth-pack {name}\n\n```text\n{shown.getvalue().rstrip()}\n```\n"
