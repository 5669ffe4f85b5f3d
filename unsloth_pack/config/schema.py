"""A JSON schema of config files, with which an editor completes and checks them."""

from typing import Any

from unsloth_pack.config.files import BASE
from unsloth_pack.config.options import OPTIONS, SECTIONS, TrainOptions


def json_schema() -> dict[str, Any]:
    """The schema of a file that sets options, each at the top or in its section."""
    whole = TrainOptions.model_json_schema()
    about = "a file to build on, relative to this one; or a list of files"
    base = {"type": ["string", "array", "null"], "items": {"type": "string"}, "description": about}
    top: dict[str, Any] = {BASE: base}
    sections: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        schemas = whole["$defs"].pop(kind.__name__)["properties"]
        options = {alias: _option(name, schemas[name]) for name in schemas for alias in OPTIONS[name].names}
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
    items = [each["items"] for each in kinds if "$ref" in each.get("items", {})]
    for each in kinds:
        if each.get("items") in items:  # data sets, of which a path or one object may stand alone
            each["items"] = {"anyOf": [each["items"], {"type": "string"}]}
    if option.takes_several:
        kinds += [*items, {"type": "string"}]
    default = {} if option.default is None else {"default": option.default}
    return {"anyOf": kinds, "description": f"{option.help} (default: {option.shown_default})", **default}


def _kinds(schema: dict[str, Any]) -> list[dict[str, Any]]:
    if inner := schema.get("anyOf") or schema.get("oneOf"):
        return [kind for each in inner for kind in _kinds(each)]
    return [{key: value for key, value in schema.items() if key not in ("title", "description", "default")}]
