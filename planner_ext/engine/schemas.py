"""JSON schemas of answers and of arguments, checked with ``jsonschema``. Nothing is ever fetched for a schema."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, cast

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

__all__ = ["answer_problems", "argument_problem", "schema_problem"]

_PROBLEMS = 5
"""The number of problems of one answer that are described."""

_CHARACTERS = 300
"""The most characters of what is wrong with an argument."""

_ITSELF_ALONE: Registry[Any] = Registry()
"""Resolves the references of a schema within itself, and no other."""


def answer_problems(schema: dict[str, Any], value: Any) -> str:
    """Describe how JSON values violate a schema; "" if they do not."""
    validator: Any = validator_for(schema)(schema, registry=_ITSELF_ALONE)
    errors = islice(validator.iter_errors(value), _PROBLEMS)
    return "; ".join(f"{error.json_path}: {error.message}" for error in errors)


def argument_problem(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Describe which argument violates the schema of a function's parameters, and how; "" if none surely does.

    The schema may be a stranger's, such as that of a tool server. So of its keywords only those are evaluated that take
    a time in proportion to schema and value: no pattern, no reference. A schema and a value whose sizes together
    exceed a limit are not compared. The function's own conversion decides what is not checked here.

    A value that a function's own conversion may accept passes: a number as text, a number for a text, null. So does
    what Semantic Kernel's schemas say wrongly: a bare ``object`` for a type that they do not know, and each field of a
    model without ``None`` as required.
    """
    known: Mapping[str, Any] = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"{json.dumps(name)} is missing"
    for name, value in arguments.items():
        if name not in known:
            return f"{json.dumps(name)} is not a parameter; there are: {', '.join(known) or 'none'}"
        with suppress(Exception):  # of a schema that cannot be used: the function's own check decides
            if problem := _problem_of(known[name], value):
                return f"{json.dumps(name)}{problem}"
    return ""


def _problem_of(schema: Any, value: Any) -> str:
    """Describe where a value violates a schema, and how; "" if it does not surely, or too much is to compare."""
    schema = _quick(schema)
    if _size(schema) * _size(value) > _MOST_STEPS:
        return ""
    validator: Any = Draft202012Validator(schema)
    for error in validator.iter_errors(value):
        if _is_certain(error):
            return f"{error.json_path[1:]}: {error.message[:_CHARACTERS]}"
    return ""


_MOST_STEPS = 100_000
"""The most that the number of values in a schema times the number of values in an argument may be."""

_QUICK = {
    *("type", "enum", "const", "required", "minLength", "maxLength", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_OF_ONE, _OF_EACH = ("items", "additionalProperties"), ("anyOf", "allOf", "oneOf")


def _quick(schema: Any) -> Any:
    """Copy the keywords of a schema that are evaluated; what they combine is copied so, too."""
    if not isinstance(schema, dict):
        return schema
    given = cast("dict[str, Any]", schema)
    quick = {name: part for name, part in given.items() if name in _QUICK}
    quick |= {name: _quick(given[name]) for name in _OF_ONE if name in given}
    quick |= {name: [_quick(part) for part in given[name]] for name in _OF_EACH if name in given}
    if "properties" in given:
        quick["properties"] = {name: _quick(part) for name, part in given["properties"].items()}
    if "patternProperties" in given:
        quick.pop("additionalProperties", None)  # it is about the names that no pattern matches
    if "$ref" in given:
        return {}
    return quick


def _size(value: object) -> int:
    """Count the values in JSON values."""
    if isinstance(value, dict):
        return 1 + sum(map(_size, cast("dict[str, object]", value).values()))
    return 1 + sum(map(_size, cast("list[object]", value))) if isinstance(value, list) else 1


def _is_certain(error: Any) -> bool:
    """Return whether the function's own conversion refuses a value, too."""
    value, wanted = error.instance, error.validator_value
    match error.validator:
        case "required":
            return False
        case "anyOf" | "oneOf":
            return all(map(_is_certain, error.context))
        case "type":
            types = {wanted} if isinstance(wanted, str) else set(wanted)
            described = error.schema.get("properties") or "additionalProperties" in error.schema
            if value is None or ("object" in types and not described):
                return False
            if isinstance(value, str):
                return not (types & {"integer", "number"} and _is_number(value))
            return not ("string" in types and isinstance(value, bool | int | float))
        case _:
            return value is not None


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def schema_problem(schema: dict[str, Any]) -> str:
    """Say why a schema is not valid, or what it refers to outside of itself; "" if it can be used."""
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return f"its schema is not valid: {error.message}."
    resolver = _ITSELF_ALONE.resolver_with_root(DRAFT202012.create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            return f"its schema refers to {reference!r}, which is not in it. Put that under $defs."
    return ""


def _references(part: Any) -> Iterator[str]:
    """Walk the references of a schema."""
    if isinstance(part, dict):
        known = cast("dict[str, Any]", part)
        if isinstance(known.get("$ref"), str):
            yield known["$ref"]
        part = [*known.values()]
    for each in cast("list[Any]", part if isinstance(part, list) else []):
        yield from _references(each)
