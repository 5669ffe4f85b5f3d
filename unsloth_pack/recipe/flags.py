"""Options as nested frozen dataclasses: made into flags, read from flags and files, and flattened again.

A section is a field that holds another such dataclass; an option is a field made by `option`, `choice` or
`switch`. An option is known by its own name, whatever section it is in, so no two may share a name.

    @dataclass(frozen=True)
    class Oven:
        "How it is baked."
        degrees: int = option(180, whole(50), "heat of the oven", "CELSIUS")

    @dataclass(frozen=True)
    class Cake:
        oven: Oven = Oven()

    parser = Parser(prog="bake")
    add_flags(parser, Cake)
    cake = build(Cake, parser.parse(["--degrees", "200"]))  # cake.oven.degrees is 200
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from inspect import getdoc
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.kinds import Kind, Refused, boolean, one_of, shown
from unsloth_pack.recipe.parser import Parser, once

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Default = TypeVar("Default")
Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True)
class Option:
    """One option of a dataclass.

    Args:
        path: the fields that lead to it, its own name last.
        type: as the dataclass declares it.
        kind: reads and checks a value.
        unit: what its help shows in place of a value.
        alias: another name; empty where there is none.
        unset: what a default of None stands for.
        bare: what the flag means without a value; None where it needs one.
    """

    path: tuple[str, ...]
    type: Any
    default: Any
    kind: Kind
    help: str
    unit: str
    alias: str
    unset: str
    bare: Any

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.alias) if self.alias else (self.name,)

    @property
    def takes_mapping(self) -> bool:
        """Whether a mapping is among its types."""
        return any(get_origin(each) is Mapping for each in (self.type, *get_args(self.type)))

    @property
    def shown_default(self) -> str:
        """The default, or what it stands for, in words."""
        if self.default is None:
            return self.unset
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@dataclass(frozen=True)
class Section:
    """The options that stand together in one dataclass, and what it says of them."""

    path: tuple[str, ...]
    about: str
    options: tuple[Option, ...]


def option(
    default: Default,
    kind: Kind,
    help: str,
    unit: str = "VALUE",
    *,
    alias: str = "",
    unset: str = "none",
    bare: Any = None,
) -> Default:
    """A field that is an option; the arguments are those of `Option`."""
    about = {"kind": kind, "help": help, "unit": unit, "alias": alias, "unset": unset, "bare": bare}
    return field(default=default, metadata=about)


def choice(default: Default, choices: Sequence[str], help: str, *, unset: str = "none") -> Default:
    """An option that is one word out of a few."""
    return option(default, one_of(*choices), help, "|".join(choices), unset=unset)


def switch(default: Default, help: str, *, alias: str = "", unset: str = "none") -> Default:
    """An option that is true or false, and true where the flag stands alone."""
    return option(default, boolean, help, "true|false", alias=alias, unset=unset, bare=True)


@cache
def sections_of(kind: "type[DataclassInstance]") -> tuple[Section, ...]:
    """The sections of a dataclass that have options, itself first, in the order of its fields."""
    return tuple(_sections(kind(), ()))


@cache
def section_names(kind: "type[DataclassInstance]") -> frozenset[tuple[str, ...]]:
    """The paths of all sections in a dataclass, without its own."""
    return frozenset(section.path for section in sections_of(kind) if section.path)


def _is_section(value: object) -> "TypeGuard[DataclassInstance]":
    return is_dataclass(value) and not isinstance(value, type)


def _sections(default: "DataclassInstance", path: tuple[str, ...]) -> Iterator[Section]:
    types = get_type_hints(type(default))
    values = [(each, getattr(default, each.name)) for each in fields(default)]
    own = [
        Option((*path, each.name), types[each.name], value, **each.metadata)
        for each, value in values
        if not _is_section(value)
    ]
    if own:
        yield Section(path, (getdoc(type(default)) or "").partition("\n")[0], tuple(own))
    for each, value in values:
        if _is_section(value):
            yield from _sections(value, (*path, each.name))


@cache
def options_of(kind: "type[DataclassInstance]") -> Mapping[str, Option]:
    """All options of a dataclass, by name and by alias.

    Raises:
        TypeError: two options share a name.
    """
    found: dict[str, Option] = {}
    for each in (option for section in sections_of(kind) for option in section.options):
        for name in each.names:
            if name in found:
                raise TypeError(f"{'.'.join(found[name].path)} and {'.'.join(each.path)} share a name")
            found[name] = each
    return found


def add_flags(parser: Parser, kind: "type[DataclassInstance]") -> None:
    """Give the parser a flag for every option, in a group for every section."""
    options_of(kind)  # refuses options that share a name
    for section in sections_of(kind):
        group = parser.add_argument_group(".".join(section.path) or "flags", section.about)
        for each in section.options:
            takes: dict[str, Any] = {"nargs": "?", "const": each.bare} if each.bare is not None else {}
            takes |= {"action": once(each.kind.several)} if each.kind.several else {}
            names = [f"--{name}" for name in each.names]
            group.add_argument(
                *names,
                dest=each.name,
                type=parser.noting(names, _or_null(each.kind)),
                metavar=each.unit,
                help=f"{each.help} (default: {each.shown_default})".replace("%", "%%"),
                **takes,
            )


def _or_null(kind: Kind) -> Callable[[str], Any]:
    """The kind for a flag: `null` restores the default, which a config file may have changed."""
    return lambda text: None if text == "null" else kind(text)


def read_values(
    kind: "type[DataclassInstance]",
    values: Mapping[str, object],
    source: str,
    remedy: Callable[[str], str] = lambda name: "leave it out",
) -> dict[str, Any]:
    """The values of options, checked, by name. None is as good as not given.

    Args:
        values: by name or alias, as YAML or JSON has them.
        source: where they come from, to begin an error message.
        remedy: what to do about a name that is unknown.

    Raises:
        InputError: a name is unknown, or a value is not of its option's kind.
    """
    known, found = options_of(kind), {}
    for name, value in values.items():
        if name not in known:
            raise InputError(f"{source}: {name} is unknown; {remedy(name)}")
        try:
            if value is not None:
                found[known[name].name] = known[name].kind(value)
        except Refused as error:
            raise InputError(f"{source}: {name} is {shown(value)}; give {error.wanted}") from None
    return found


def build(kind: type[Options], *sources: Mapping[str, Any]) -> Options:
    """The dataclass with values by name: of each option the last that a source has, else its default."""
    options = kind()
    for values in sources:
        options = changed(options, values)
    return options


def changed(options: Options, values: Mapping[str, Any]) -> Options:
    """The same options but for these values, by name.

    Raises:
        TypeError: there is no option of such a name.
    """
    if unknown := values.keys() - flat(options).keys():
        raise TypeError(f"{type(options).__name__} has no options {', '.join(sorted(unknown))}")
    return _changed(options, values)


def _changed(options: Options, values: Mapping[str, Any]) -> Options:
    new: dict[str, Any] = {}
    for each in fields(options):
        value = getattr(options, each.name)
        if _is_section(value):
            new[each.name] = _changed(value, values)
        elif each.name in values:
            new[each.name] = values[each.name]
    return replace(options, **new)


def flat(options: "DataclassInstance") -> dict[str, Any]:
    """The value of every option, by name."""
    found: dict[str, Any] = {}
    for each in fields(options):
        value = getattr(options, each.name)
        found |= flat(value) if _is_section(value) else {each.name: value}
    return found
