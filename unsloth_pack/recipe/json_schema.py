"""A JSON schema of config files, made from the options: an editor completes and checks files with it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from unsloth_pack.recipe.config_file import BASE
from unsloth_pack.recipe.flags import Option, sections_of
from unsloth_pack.recipe.kinds import or_null

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that editors know in full
_ONLY_FLAGS = ("config",)


def json_schema(kind: "type[DataclassInstance]") -> dict[str, Any]:
    """The schema of a file that sets options of `kind`, each at the top or in its section."""
    sections = sections_of(kind)
    name = {"type": "string", "minLength": 1}
    about = "a file to build on, relative to this one; or a list of files"
    base = {**name, "type": ["string", "array", "null"], "items": name, "description": about}
    properties: dict[str, Any] = {BASE: base}
    for section in sections:
        properties |= _properties(section.options)
    for section in sections:
        if section.path:
            _section_at(properties, section.path, section.about)["properties"] |= _properties(section.options)
    title = "A config file of unsloth-pack train"
    return {"$schema": _DRAFT, "title": title, **_object(properties)}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _section_at(properties: dict[str, Any], path: tuple[str, ...], about: str) -> dict[str, Any]:
    """The schema of a section, put where its path leads."""
    for name in path:
        section = properties.setdefault(name, {**_object({}), "type": ["object", "null"]})
        properties = section["properties"]
    section["description"] = about
    return section


def _properties(options: Iterable[Option]) -> dict[str, Any]:
    return {name: _schema_of(each) for each in options for name in each.names if name not in _ONLY_FLAGS}


def _schema_of(option: Option) -> dict[str, Any]:
    described = f"{option.help} (default: {option.shown_default})"
    default = {} if option.default is None else {"default": option.default}
    return {**or_null(option.kind.schema), "description": described, **default}
