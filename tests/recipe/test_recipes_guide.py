"""`docs/recipes.md` says what the options, the recipes and the tables of names say."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from unsloth_pack.recipe.command_line import given_options, train_parser
from unsloth_pack.recipe.flags import options_of
from unsloth_pack.recipe.options import TrainOptions

GUIDE = Path(__file__).parents[2] / "docs" / "recipes.md"
TEXT = GUIDE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def write_recipes():
    spec = importlib.util.spec_from_file_location("write_recipes", GUIDE.with_name("write_recipes.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_options(write_recipes):
    """Else run `python docs/write_recipes.py`."""
    assert write_recipes.with_tables(TEXT) == TEXT


def test_a_table_that_is_old_is_seen(write_recipes):
    assert write_recipes.with_tables(TEXT.replace("| `sft-packed` |", "| `gone` |")) == TEXT


def test_every_option_is_in_the_guide():
    for name in options_of(TrainOptions):
        assert f"`{name}`" in TEXT, name


def test_the_file_that_is_shown_is_a_good_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = re.search(r"```yaml\n(# run\.yaml\n.*?)```", TEXT, re.DOTALL)[1]
    Path("run.yaml").write_text(shown)
    Path("team.yaml").write_text("r: 4\n")
    given = given_options(train_parser(), ["--config=run.yaml"])
    assert given["r"] == 4
    assert given.keys() - {"config", "r"} == yaml.safe_load(shown).keys() - {"base_config", "training"} | {
        *yaml.safe_load(shown)["training"]
    }
