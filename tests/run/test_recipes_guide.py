"""`docs/options.md` and `docs/recipes.md` list the options and the recipes."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from tables import table

from unsloth_pack.cli.recipe import recipe_names, recipe_text
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


KNOWN = yaml.safe_load((DOCS / "gpus.yaml").read_text(encoding="utf-8"))
SIZES = {name: sizes for models in KNOWN["families"].values() for name, sizes in models.items()}
FOR_GPUS = [name for name in recipe_names() if name.startswith("gpu-")]


@table(
    ("name", "weights", "tokens"),
    [("Qwen3-14B", "NF4", 2048), ("Llama-3.2-1B", "16 bits", 8192), ("Gemma-3-4B", "NF4", 8192)],
)
def test_peaks_in_the_table_of_gpus(name, weights, tokens, write_recipes):
    """Else run `python docs/write_recipes.py --estimate`."""
    peak = write_recipes.estimated(SIZES[name], weights, tokens)
    assert peak == pytest.approx(KNOWN["peaks"][name][weights][tokens], abs=0.02)


@pytest.mark.nightly
@table("name", SIZES)
def test_every_peak_in_the_table_of_gpus(name, write_recipes):
    for weights, peaks in KNOWN["peaks"][name].items():
        for tokens, peak in peaks.items():
            assert write_recipes.estimated(SIZES[name], weights, tokens) == pytest.approx(peak, abs=0.02)


@table("name", FOR_GPUS)
def test_a_recipe_names_the_largest_model_that_fits_its_gpu(name, write_recipes):
    gpu = KNOWN["gpus"][name.removeprefix("gpu-").replace("gb", " GB")]
    model = yaml.safe_load(recipe_text(name))
    in_nf4 = {each: peaks["NF4"][model["max_seq_length"]] for each, peaks in KNOWN["peaks"].items()}
    largest = max((peak, each) for each, peak in in_nf4.items() if write_recipes.fits(peak, gpu))[1]
    assert all(word in model["model_name"] for word in largest.split("-")), largest
    assert model["load_in_4bit"]


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
