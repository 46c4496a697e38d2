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
        try:
            validator: Any = validator_for(known[name], default=Draft202012Validator)
            for error in validator(known[name], registry=_ITSELF_ALONE).iter_errors(value):
                if _is_certain(error):
                    return f"{json.dumps(name)}{error.json_path[1:]}: {error.message[:_CHARACTERS]}"
        except Exception:  # noqa: S112  (of a schema that cannot be used: the function's own check decides)
            continue
    return ""


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
