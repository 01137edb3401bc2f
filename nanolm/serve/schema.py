"""JSON held to a schema: the part of JSON Schema that our OpenAPI document uses, and no more.

    >>> problems({"n": 0}, record({"n": integer(1, 16)}))
    [('n', 'must be from 1 to 16')]

What is checked is what the document says, since both are the same dictionary.
"""

from collections.abc import Iterator
from typing import Any

from nanolm.errors import did_you_mean
from nanolm.formats import readable

Schema = dict[str, Any]
Problem = tuple[str, str]  # where, and what

NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
OF_KIND = {f"must be {name}" for name in NAMES.values()}


def text(least: int = 0, most: int = 1 << 20, **rest: Any) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most, **rest}


def integer(least: int, most: int, **rest: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, **rest}


def number(least: float, most: float, **rest: Any) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most, **rest}


def listed(items: Schema, least: int, most: int, **rest: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **rest}


def record(properties: dict[str, Schema], required: tuple[str, ...] = (), **rest: Any) -> Schema:
    """An object that has no other properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **rest,
    }


def optional(schema: Schema) -> Schema:
    """The same, or null, which is as if it were not there."""
    about = {key: schema[key] for key in schema if key in ("description", "default")}
    rest = {key: schema[key] for key in schema if key not in about}
    return {"anyOf": [rest, {"type": "null"}], **about}


def problems(value: Any, schema: Schema, path: str = "") -> Iterator[Problem]:
    """What is wrong with a value, and where."""
    if "anyOf" in schema:
        yield from of_any(value, schema["anyOf"], path)
        return
    if "enum" in schema:
        if value not in schema["enum"] or isinstance(value, bool):
            known = [str(each) for each in schema["enum"]]
            hint = did_you_mean(value, known) if isinstance(value, str) else ""
            yield path, f"must be one of {', '.join(known[:20])}{hint}"
        return
    kind = schema["type"]
    if not is_a(value, kind):
        yield path, f"must be {NAMES[kind]}"
    elif kind in ("integer", "number"):
        if not schema["minimum"] <= value <= schema["maximum"]:
            least, most = readable(schema["minimum"]), readable(schema["maximum"])
            yield path, f"must be from {least} to {most}"
    elif kind == "string":
        if not schema["minLength"] <= len(value) <= schema["maxLength"]:
            yield path, f"must have {schema['minLength']:,} to {schema['maxLength']:,} characters"
        elif any("\ud800" <= char <= "\udfff" for char in value):
            yield path, "is not valid Unicode"
    elif kind == "array":
        if not schema["minItems"] <= len(value) <= schema["maxItems"]:
            yield path, f"must have {schema['minItems']:,} to {schema['maxItems']:,} entries"
            return
        for place, each in enumerate(value):
            found = list(problems(each, schema["items"], f"{path}[{place}]"))
            yield from found
            if found:
                return  # one says enough
    elif kind == "object":
        yield from of_record(value, schema, path)


def of_any(value: Any, kinds: list[Schema], path: str) -> Iterator[Problem]:
    found = [list(problems(value, kind, path)) for kind in kinds]
    if all(found):
        # The kind that was meant, if one can be told; otherwise all that it could have been.
        meant = [
            each
            for each, kind in zip(found, kinds, strict=True)
            if "type" in kind and kind["type"] != "null" and is_a(value, kind["type"])
        ]
        if meant:
            nearest = [each for each in meant if each[0][1] not in OF_KIND]
            yield (nearest or meant)[0][0]
            return
        says = [problem.removeprefix("must be ") for each in found for _, problem in each]
        yield path, f"must be {' or '.join(dict.fromkeys(says))}"


def of_record(value: dict[str, Any], schema: Schema, path: str) -> Iterator[Problem]:
    properties = schema["properties"]
    for name in schema["required"]:
        if name not in value:
            yield joined(path, name), "is missing"
    for name, each in value.items():
        if name in properties:
            yield from problems(each, properties[name], joined(path, name))
        else:
            hint = did_you_mean(name[:80], [*properties])
            yield joined(path, name[:80]), f"is not known here{hint}"
            return  # one says enough


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_a(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return kind == "number" or isinstance(value, int) or value.is_integer()
