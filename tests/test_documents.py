"""What the documents point to is there: files, headings, tests, flags and the number of hostile cases."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from tables import table

from unsloth_pack.cli import SUBCOMMANDS, main
from unsloth_pack.config import load
from unsloth_pack.config.names import other_trainers

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
PLACES = tuple(
    ROOT / place for place in (".", "unsloth_pack", "tests", "tests/outside", "docs", "benchmarks/results")
)  # where a path in backticks may begin
OF_OTHERS = {  # flags of torchrun, vLLM and the grid
    *("--shutdown-timeout", "--max-lora-rank", "--enable-mixed-moe-lora-format", "--arch"),
}
each_document = table("document", DOCUMENTS, ids=lambda path: path.name)


@pytest.fixture(scope="module")
def functions():
    """The names of the functions in each file of tests."""
    return {
        path: {*re.findall(r"^ *def (\w+)\(", path.read_text(), re.MULTILINE)}
        for path in (ROOT / "tests").rglob("test_*.py")
    }


def anchors(document):
    """The headings of a document, as GitHub spells their addresses."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_document
def test_the_named_tests_exist(document, functions):
    text = document.read_text()
    for name in re.findall(r"\btest_\w+\b(?!\.py)", text):
        assert name in other_trainers()[0] or any(name in names for names in functions.values()), name
    for file, name in re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", text):
        assert name in functions.get(ROOT / "tests" / file, ()), f"{file}::{name}"


@each_document
def test_the_named_files_exist(document):
    """Paths that begin with a folder of ours, Python files, and results, which have a date in their name."""
    text = document.read_text()
    rooms = "|".join(path.name for place in PLACES for path in place.iterdir() if path.is_dir())
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = [*re.findall(rf"`((?:{rooms})/[\w./-]+)`", text)]
    named += re.findall(r"[\w./-]+\.py\b|[\w./-]+-20\d\d-\d\d-\d\d\.\w+", code)
    for name in named:
        assert any((place / name).exists() for place in PLACES), name


@pytest.fixture(scope="module")
def flags():
    """The flags of every subcommand, by its name, as its help says."""
    found = {}
    for name in SUBCOMMANDS:
        shown = io.StringIO()
        with redirect_stdout(shown):
            assert main([name, "--help"]) == 0
        found[name] = {*re.findall(r"--[a-z]\w*", shown.getvalue())}
    return found


@each_document
def test_a_command_takes_the_flags_that_it_is_shown_with(document, flags):
    ours = r"(?:unsloth-pack|(?<=cli\.py))(?: (\w+))?((?: [^\s`#|]+)*)"
    for name, arguments in re.findall(ours, document.read_text()):
        used = {*re.findall(r"(?<=\s)--[a-z]\w*+(?!\.\w)", arguments)}
        assert used <= flags.get(name, flags["train"]), (name, arguments)


@each_document
def test_the_named_flags_exist(document, flags):
    ours = set().union(*flags.values())
    for place in ("benchmarks", "tests"):
        for path in (ROOT / place).rglob("*.py"):
            ours |= {*re.findall(r'"(--[a-z][\w-]*)"', path.read_text())}
    named = {*re.findall(r"`(--[a-z][\w-]*+)(?!\.\w)", document.read_text())}
    assert named <= ours | OF_OTHERS


@each_document
def test_the_dotted_flags_are_taken(document):
    for flag in re.findall(r"--[a-z]\w*(?:\.\w+)+", document.read_text()):
        assert load([f"{flag}=1"]).given, flag


def test_the_documents_count_the_planted_faults():
    trust, faults = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("trust", "planted-faults"))
    planted = len(re.findall(r"^\| \S+\.(?:py|yaml|jinja) \|", faults, re.MULTILINE))
    assert f"plants {planted} small faults" in trust
    assert f"each of these {planted} faults" in faults


def test_the_readme_has_the_two_commands_that_ci_runs():
    blocks = re.findall(r"```bash\n(python3 -m venv .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    main_job, tests = (" ".join(block.split()) for block in blocks)
    assert main_job.endswith(".venv/bin/python cli.py --sample_packing")
    assert tests.endswith(".venv/bin/python -m pytest -n 2")
    assert all(len(line) < 80 for block in blocks for line in block.split("\n"))
