"""`docs/options.md` and `docs/recipes.md` list the options and the recipes."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from unsloth_pack.config import load

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE, RECIPES = ((DOCS / name).read_text(encoding="utf-8") for name in ("options.md", "recipes.md"))


@pytest.fixture(scope="module")
def write_recipes():
    spec = importlib.util.spec_from_file_location("write_recipes", DOCS / "write_recipes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_options(write_recipes):
    """Else run `python docs/write_recipes.py`."""
    for guide in (REFERENCE, RECIPES):
        assert write_recipes.with_tables(guide) == guide


def test_the_file_that_is_shown_is_a_good_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = re.search(r"```yaml\n(# run\.yaml\n.*?)```", RECIPES, re.DOTALL)[1]
    Path("run.yaml").write_text(shown)
    Path("team.yaml").write_text("r: 4\n")
    given = load(["--config=run.yaml"]).given
    assert given["r"] == 4
    assert given.keys() - {"config", "r"} == yaml.safe_load(shown).keys() - {"base_config", "training"} | {
        *yaml.safe_load(shown)["training"]
    }
