"""The notebooks run from top to bottom, and lie here as they ran."""

import base64
import importlib.util
import io
import re
from pathlib import Path

import nbformat
import pytest
import trl
from packaging.version import Version

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 200_000  # bytes of a file
MACHINE = re.compile(r"/(?:home|root|tmp|work|Users|usr|mnt)/|[A-Z]:\\\\")
PICTURES = {
    "1": 1,
    "2": 3,
    "3": 2,
    "4": 0,
    "5": 1,
    "6": 4,
    "7": 1,
    "8": 1,
}  # at least, by the number of the notebook


def each_notebook(test):
    return pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)(test)


@pytest.fixture(scope="session")
def runner():
    """`tools/run_notebooks.py`, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "tools" / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def pictures(notebook):
    return [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]


def share_of_colour(picture):
    """The share of pixels that are neither white, black nor grey: axes without data have none."""
    import matplotlib.image

    pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(picture)), format="png")[..., :3]
    return float((pixels.max(-1) - pixels.min(-1) > 0.1).mean())


def check(notebook, number):
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    drawn = pictures(notebook)
    assert len(drawn) >= PICTURES[number]
    assert all(share_of_colour(picture) > 0.002 for picture in drawn)


@each_notebook
def test_they_lie_here_as_they_ran(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    check(notebook, path.name[0])
    assert path.stat().st_size < LARGEST
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    shown = [
        str({**output, "data": {**output.get("data", {}), "image/png": ""}}) for output in outputs(notebook)
    ]
    assert not [text for text in shown if MACHINE.search(text)]


trains_on_a_cpu = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="TRL trains on CUDA only"
)


@pytest.mark.nightly  # a notebook runs for about a minute
@trains_on_a_cpu
@each_notebook
def test_they_run(path, runner):
    check(runner.run(path), path.name[0])


@trains_on_a_cpu
@pytest.mark.parametrize("number", "15678")  # a first run, the way from Unsloth, images, TRL's trainers
def test_their_code_runs(number, tmp_path, monkeypatch):
    """Every day, in this process, for two updates and answers of a few tokens."""
    import matplotlib.pyplot as plt

    (path,) = (path for path in NOTEBOOKS if path.name.startswith(number))
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    quick = re.sub(r"\bmax_(steps|new_tokens)=\d+", r"max_\1=2", "\n".join(cells))
    assert quick.count("max_steps=2,") == 1 + (number == "8")
    assert quick.count("max_new_tokens=2,") == 1
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    exec(quick, space)
    assert space["trainer"].state.global_step == 2
    assert len(plt.get_fignums()) >= PICTURES[number] - ("display(" in quick)
    plt.close("all")
