"""JSON schemas of answers, checked with ``jsonschema``. Nothing is ever fetched for a schema."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

__all__ = ["answer_problems", "schema_problem"]

_PROBLEMS = 5
"""The number of problems of one answer that are described."""

_ITSELF_ALONE: Registry[Any] = Registry()
"""Resolves the references of a schema within itself, and no other."""


def answer_problems(schema: dict[str, Any], value: Any) -> str:
    """Describe how JSON values violate a schema; "" if they do not."""
    validator: Any = validator_for(schema)(schema, registry=_ITSELF_ALONE)
    errors = islice(validator.iter_errors(value), _PROBLEMS)
    return "; ".join(f"{error.json_path}: {error.message}" for error in errors)


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
