"""A JSON schema of config files, with which an editor completes and checks them."""

from typing import Any

from unsloth_pack.config.files import BASE
from unsloth_pack.config.options import OPTIONS, SECTIONS, TrainOptions

_NUMBER = r"^\s*[-+]?[\d_.]+([eE][-+]?\d+)?\s*$"
_IN_QUOTES = {
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": "^([Tt]rue|TRUE|[Ff]alse|FALSE|yes|no|on|off)$",
}


def json_schema() -> dict[str, Any]:
    """The schema of a file that sets options, each at the top or in its section."""
    whole = TrainOptions.model_json_schema()
    names = {"type": "string", "minLength": 1}
    about = "a file to build on, relative to this one; or a list of files"
    base = {**names, "type": ["string", "array", "null"], "items": names, "description": about}
    top: dict[str, Any] = {BASE: base}
    sections: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        found = whole["$defs"].pop(kind.__name__)["properties"]
        options = {alias: _option(name, found[name]) for name in found for alias in OPTIONS[name].names}
        options.pop("config", None)
        top |= options
        sections[section] = {**_object(options), "type": ["object", "null"], "description": kind.__doc__}
    draft = "http://json-schema.org/draft-07/schema#"  # the newest that editors know in full
    head = {"$schema": draft, "title": "A config file of unsloth-pack train", "$defs": whole["$defs"]}
    return {**head, **_object({**top, **sections})}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _option(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an option in a file: null restores the default, and several values may be one text."""
    option, kinds = OPTIONS[name], [*_kinds(schema), {"type": "null"}]
    if option.takes_several:
        holds_numbers = any(each.get("items", {}).get("type") == "integer" for each in kinds)
        pattern = "[={]" if dict in option.types else r"^[\s\d\[]" if holds_numbers else r"\S"
        kinds.append({"type": "string", "pattern": pattern})
    for each in [*kinds]:
        if each.get("type") in _IN_QUOTES and not option.takes_several:
            kinds.append({"type": "string", "pattern": _IN_QUOTES[each["type"]]})
        if each.get("type") == "string" and not option.takes_several and not {"enum", "const"} & each.keys():
            each["type"] = ["string", "number"]  # which is read as it is spelt
        if "$ref" in each.get("items", {}):  # data sets, of which a path or one object may stand alone
            kinds = [*kinds, each["items"]]
            each["items"] = {"anyOf": [each["items"], {"type": ["string", "number"]}]}
    default = {} if option.default is None else {"default": option.default}
    return {"anyOf": kinds, "description": f"{option.help} (default: {option.shown_default})", **default}


def _kinds(schema: dict[str, Any]) -> list[dict[str, Any]]:
    inner = schema.get("anyOf") or schema.get("oneOf")
    if inner:
        return [kind for each in inner for kind in _kinds(each)]
    return [{key: value for key, value in schema.items() if key not in ("title", "description", "default")}]
