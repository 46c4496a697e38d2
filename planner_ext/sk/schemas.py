"""JSON schemas of answers: whether one is whole, and what an answer has against it. Nothing is ever fetched for one."""

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
"""Problems of one answer that are told."""

_ITSELF_ALONE: Registry[Any] = Registry()
"""Where references of a schema lead: nowhere but into itself."""


def answer_problems(schema: dict[str, Any], value: Any) -> str:
    """Say what JSON values have against a schema, "" for nothing."""
    validator: Any = validator_for(schema)(schema, registry=_ITSELF_ALONE)
    errors = islice(validator.iter_errors(value), _PROBLEMS)
    return "; ".join(f"{error.json_path}: {error.message}" for error in errors)


def schema_problem(schema: dict[str, Any]) -> str:
    """Say why something is no schema, or refers to what is not in it; "" where it is one."""
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return f"its schema is none: {error.message}."
    resolver = _ITSELF_ALONE.resolver_with_root(DRAFT202012.create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            return f"its schema refers to {reference!r}, which is not in it. Put that under $defs."
    return ""


def _references(part: Any) -> Iterator[str]:
    """Walk the references of a schema."""
    inner: list[Any] = []
    if isinstance(part, dict):
        known = cast("dict[str, Any]", part)
        inner = list(known.values())
        if isinstance(known.get("$ref"), str):
            yield known["$ref"]
    elif isinstance(part, list):
        inner = cast("list[Any]", part)
    for each in inner:
        yield from _references(each)
