"""Options as dataclasses: the same functions make a toy's flags and those of `train`."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
import yaml
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.flags import (
    add_flags,
    build,
    changed,
    choice,
    flat,
    option,
    options_of,
    read_values,
    sections_of,
    switch,
)
from unsloth_pack.recipe.kinds import json_object, real, switch_or, text, whole
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.parser import Parser


@dataclass(frozen=True)
class Icing:
    """What is on top."""

    thickness: float = option(0.5, real(0, below=3), "how much of it, 100% sugar", "CM")
    colour: str | None = choice(None, ("red", "blue"), "its colour", unset="that of the cake")


@dataclass(frozen=True)
class Oven:
    """How it is baked.

    More about it.
    """

    degrees: int = option(180, whole(50, 300), "heat", "CELSIUS", alias="heat")
    fan: bool = switch(False, "with the fan on")
    grill: str | None = option(None, text, "from above: full, or a level", "LEVEL", bare="full")
    icing: Icing = Icing()


@dataclass(frozen=True)
class Name:
    """Whose it is."""

    name: str = option("Ada", text, "a name")


@dataclass(frozen=True)
class Cake:
    whose: Name = Name()
    oven: Oven = Oven()


@pytest.fixture
def parser():
    made = Parser(prog="bake")
    add_flags(made, Cake)
    return made


def test_options_are_found_in_all_sections():
    assert {name: each.path for name, each in options_of(Cake).items()} == {
        "name": ("whose", "name"),
        "degrees": ("oven", "degrees"),
        "heat": ("oven", "degrees"),
        "fan": ("oven", "fan"),
        "grill": ("oven", "grill"),
        "thickness": ("oven", "icing", "thickness"),
        "colour": ("oven", "icing", "colour"),
    }
    assert options_of(Cake)["colour"].type == str | None
    about = [("whose", "Whose it is."), ("oven", "How it is baked."), ("oven.icing", "What is on top.")]
    assert [(".".join(section.path), section.about) for section in sections_of(Cake)] == about


def test_flags_set_them_and_what_is_not_given_is_not_there(parser):
    assert parser.parse([]) == {}
    given = parser.parse(["--heat=200", "--fan", "--thickness", "1", "--grill", "--debug"])
    assert given == {"degrees": 200, "fan": True, "thickness": 1.0, "grill": "full"}
    cake = build(Cake, given)
    assert (cake.oven.degrees, cake.oven.icing.thickness, cake.whose.name) == (200, 1.0, "Ada")
    with pytest.raises(FrozenInstanceError):
        cake.oven.degrees = 100


def test_the_help_is_made_of_them(parser):
    said = " ".join(parser.format_help().split())
    assert "oven: How it is baked. --degrees CELSIUS, --heat CELSIUS heat (default: 180)" in said
    assert "--fan [true|false] with the fan on (default: false)" in said
    assert "--grill [LEVEL] from above: full, or a level (default: none)" in said
    assert "oven.icing: What is on top. --thickness CM how much of it, 100% sugar (default: 0.5)" in said
    assert "--colour red|blue its colour (default: that of the cake)" in said


def from_file(file, kind=Cake):
    return read_values(kind, yaml.safe_load(file), "cake.yaml", lambda name: f"not {name}")


def test_a_file_sets_them_in_its_own_types():
    file = "{heat: 200, fan: true, thickness: 1e-1, colour: null, name: 7, grill: full}"
    read = {"degrees": 200, "fan": True, "thickness": 0.1, "name": "7", "grill": "full"}
    assert from_file(file) == read


@table(
    ("file", "says"),
    [
        ("sugar: 1", "cake.yaml: sugar is unknown; not sugar"),
        ("heat: 20", "cake.yaml: heat is 20; give a whole number of at least 50"),
        ("degrees: 301", "cake.yaml: degrees is 301; give a whole number of at most 300"),
        ("degrees: 99.5", "cake.yaml: degrees is 99.5; give a whole number of at least 50"),
        ("degrees: true", "cake.yaml: degrees is true; give a whole number of at least 50"),
        ("thickness: 3", "cake.yaml: thickness is 3; give a number of at least 0 and below 3"),
        ("thickness: .nan", "cake.yaml: thickness is nan; give a number of at least 0 and below 3"),
        ("fan: 1", "cake.yaml: fan is 1; give true or false"),
        ("colour: [red]", "cake.yaml: colour is a list; give one of red, blue"),
        ("colour: green", "cake.yaml: colour is 'green'; give one of red, blue"),
        ("name: {a: b}", "cake.yaml: name is a mapping; give text in quotes"),
        ("name: no", "cake.yaml: name is false; give text in quotes"),
        (r'name: "\ud800"', r"cake.yaml: name is '\ud800'; give text in UTF-8"),
        ("name: 0x" + "F" * 5000, "cake.yaml: name is a number of 20000 bits; give text in UTF-8"),
    ],
)
def test_what_is_wrong_in_a_file(file, says):
    with pytest.raises(InputError) as refused:
        from_file(file)
    assert str(refused.value) == says


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--degres=200", "unknown argument '--degres'; did you mean --degrees?"),
        ("--heat=20", "argument --degrees/--heat: got '20'; give a whole number of at least 50"),
        ("--fan=maybe", "argument --fan: got 'maybe'; give true or false"),
        ("--colour=green", "argument --colour: got 'green'; give one of red, blue"),
    ],
)
def test_what_is_wrong_on_the_command_line(flag, says, parser):
    with pytest.raises(InputError) as refused:
        parser.parse([flag])
    assert str(refused.value) == says


def test_the_last_source_wins_and_null_is_none():
    file = from_file("{degrees: null, thickness: 2, name: Bo}")
    cake = build(Cake, {"degrees": 90, "thickness": 1.0}, file, {"name": "Cy"})
    values = {"degrees": 90, "thickness": 2.0, "name": "Cy", "fan": False, "colour": None, "grill": None}
    assert flat(cake) == values
    assert build(Cake, flat(cake)) == cake
    assert changed(cake, {"degrees": 180, "thickness": 0.5, "name": "Ada"}) == Cake()


def test_no_value_is_lost_under_a_name_that_nothing_has():
    with pytest.raises(TypeError, match="Cake has no options sugar"):
        build(Cake, {"sugar": 1})


def test_names_are_shared_by_no_two_options():
    @dataclass(frozen=True)
    class Table:
        whose: Name = Name()
        heat: Oven = Oven()
        degrees: int = option(0, whole(0), "of an angle")

    with pytest.raises(TypeError, match=r"degrees and heat\.degrees share a name"):
        add_flags(Parser(), Table)


def test_train_is_another_such_dataclass():
    sections = {section.path for section in sections_of(TrainOptions)}
    assert sections == {("model",), ("adapter",), ("data",), ("images",), ("training",), ("output",)}
    assert all(
        section.about and all(each.help for each in section.options) for section in sections_of(TrainOptions)
    )
    read = from_file("{packing: true, loftq_config: {loftq_bits: 4}, learning_rate: 2e-5}", TrainOptions)
    options = build(TrainOptions, read)
    assert options.data.sample_packing
    assert (options.adapter.loftq_config, options.training.learning_rate) == ({"loftq_bits": 4}, 2e-5)


@table("name", sorted(flat(TrainOptions())))
def test_every_default_is_of_its_kind(name):
    each = options_of(TrainOptions)[name]
    if each.default is not None:
        assert each.kind(each.default) == each.default
        assert each.kind(str(each.default)) == each.default
    if each.bare is not None:
        assert each.kind(each.bare) == each.bare


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (switch_or("often"), "often", "often"),
        (switch_or("often"), True, True),
        (switch_or("often"), "False", False),
        (json_object("{}"), '{"a": 1}', {"a": 1}),
        (json_object("{}"), {1: None}, {"1": None}),
        (real(), "-1e3", -1000.0),
        (whole(1), "1e3", 1000),
        (whole(1), 8.0, 8),
        (real(), 3, 3.0),
        (whole(-5), " -5 ", -5),
    ],
)
def test_kinds_read_text_and_typed_values(kind, given, value):
    assert (kind(given), type(kind(given))) == (value, type(value))


@pytest.mark.parametrize("given", ['{"a": [1]}', {"a": {}}, "[1]", "{", "[" * 100_000, 4])
def test_an_object_of_anything_else_is_refused(given):
    with pytest.raises(Exception, match="give a JSON object of single values"):
        json_object("{}")(given)


def test_all_flags_that_are_wrong_are_told_at_once(parser):
    with pytest.raises(InputError) as told:
        parser.parse(["--heat=9", "--frob", "3", "--thickness", "no", "--fan", "--hee=7"])
    parts = ["argument --degrees/--heat: got '9'; give", "argument --thickness: got 'no'; give"]
    parts += ["unknown argument '--frob'; see", "unknown argument '--hee'; "]
    for line, part in zip(str(told.value).splitlines(), parts, strict=True):
        assert line.startswith(part)
    assert parser.parse(["--heat=90"]) == {"degrees": 90}
