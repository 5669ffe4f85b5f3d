"""Run the notebooks from top to bottom: `python tools/run_notebooks.py [--write] [NAME ...]`.

`--write` puts the outputs into the files: text without what libraries print to stderr, and pictures.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
SECONDS = 240  # of one cell, on two busy cores
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in an empty folder of its own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before.get("PYTHONPATH")])])
    try:
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(
                notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
            )
            client.execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return cleaned(notebook)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without stderr, the times of cells, and what names this machine's Python."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of notebooks; all if none is given")
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    given = parser.parse_args(arguments)
    paths = [FOLDER / name for name in given.names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        began = time.monotonic()
        notebook = run(path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)
        if given.write:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
