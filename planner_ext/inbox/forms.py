"""The form that edits a call's arguments: drawn from the parameters, read back as arguments.

An unchanged field keeps its exact value. An object whose schema names its parts is a
form of its own. A value that a plain field cannot hold, such as a list of objects or a
text with invisible characters, is edited as JSON.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from typing import Any, Literal, TypeAlias, cast

from planner_ext.core.values import frozen
from planner_ext.engine.schemas import argument_problem, read_json
from planner_ext.readable.text import exact, is_shown_whole, visible

FieldKind: TypeAlias = Literal[
    "text",
    "number",
    "integer",
    "boolean",
    "choice",
    "date",
    "object",
    "texts",
    "numbers",
    "json",
]
"""``texts`` and ``numbers`` have one item a line, ``object`` has fields, ``json`` is any value."""


@frozen
class Field:
    """One argument in a form, or one part of an argument that is an object.

    Attributes:
        key: The name of the form's field.
        name: The parameter; "" if all arguments are edited as one JSON object.
        help: The parameter's description, and what its values are bound to.
        required: An optional argument may be blank.
        value: The call's argument, or the person's input.
        choices: The values of a choice, as JSON texts.
        problem: Why the input is not valid, or "".
        fields: The parts of an ``object``.
    """

    key: str
    name: str
    kind: FieldKind
    help: str = ""
    required: bool = True
    value: str = ""
    choices: tuple[str, ...] = ()
    problem: str = ""
    fields: "tuple[Field, ...]" = ()

    @property
    def label(self) -> str:
        """The name, fully visible."""
        return exact(self.name)


def drawn_form(
    parameters: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    key: str = "argument",
) -> tuple[Field, ...]:
    """Draw a call's form: a field for each parameter, and for each other argument.

    Args:
        parameters: JSON schema of the function's parameters, if known.
        arguments: The call's arguments.
        key: With what the names of the fields begin.
    """
    known = None if parameters is None else parameters.get("properties")
    if not isinstance(known, Mapping):
        written = _as_json(dict(arguments))
        return (Field(key=key, name="", kind="json", value=written),)
    schemas = cast("Mapping[str, Any]", known)
    names = [*schemas, *(name for name in arguments if name not in schemas)]
    required = cast("Mapping[str, Any]", parameters).get("required") or ()
    return tuple(
        _field(
            f"{key}-{place}",
            name,
            _unwrapped(schemas.get(name)),
            arguments,
            required=name in required,
        )
        for place, name in enumerate(names)
    )


def read_form(
    parameters: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    typed: Mapping[str, str],
) -> tuple[dict[str, Any], tuple[Field, ...], str]:
    """Read a form back; see `drawn_form`.

    Args:
        parameters: As drawn.
        arguments: As drawn.
        typed: The person's input, by `Field.key`.

    Returns:
        The arguments, the form with the input, and the problem, or "".
    """
    given, fields = _read_fields(drawn_form(parameters, arguments), arguments, typed)
    problem = "; ".join(_problems(fields))
    if not problem and parameters is not None:
        problem = argument_problem(parameters, given)
    return given, fields, problem


def _read_fields(
    drawn: tuple[Field, ...], arguments: Mapping[str, Any], typed: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[Field, ...]]:
    given: dict[str, Any] = {}
    fields: list[Field] = []
    for field in drawn:
        if field.kind == "object":
            before: Mapping[str, Any] = arguments.get(field.name) or {}
            inner, parts = _read_fields(field.fields, before, typed)
            if inner or field.required or before:
                given[field.name] = inner
            fields.append(replace(field, fields=parts))
            continue
        text = typed.get(field.key, field.value)
        problem = ""
        try:
            given.update(_read(field, text, arguments))
        except ValueError as error:
            problem = str(error)
        fields.append(replace(field, value=text, problem=problem))
    return given, tuple(fields)


def _problems(fields: tuple[Field, ...]) -> Iterator[str]:
    for field in fields:
        yield from _problems(field.fields)
        if field.problem:
            yield f"{field.name or 'The arguments'}: {field.problem}"


def _field(
    key: str,
    name: str,
    schema: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    required: bool,
) -> Field:
    value = arguments.get(name)
    kind, choices = _kind_of(schema, value)
    about = schema.get("description")
    bounds = [
        f"{words} {schema[one]}" for one, words in _BOUNDS.items() if one in schema
    ]
    bound = f"{exact('; '.join(bounds)).capitalize()}." if bounds else ""
    described = ""
    if isinstance(about, str):
        described = visible(about)
    return Field(
        key=key,
        name=name,
        kind=kind,
        help=" ".join(filter(None, (described, bound))),
        required=required,
        value="" if value is None else _WRITERS.get(kind, _as_json)(value),
        choices=choices,
        fields=drawn_form(schema, value or {}, key) if kind == "object" else (),
    )


def _unwrapped(schema: object) -> Mapping[str, Any]:
    """Return the schema of a value that may be null without that."""
    own = cast("Mapping[str, Any]", schema if isinstance(schema, Mapping) else {})
    options = own.get("anyOf")
    if not isinstance(options, list):
        return own
    read = [_unwrapped(one) for one in cast("list[object]", options)]
    others = [one for one in read if one.get("type") != "null"]
    if len(others) == 1:
        return {**others[0], **own}
    return own


def _kind_of(
    schema: Mapping[str, Any], value: Any
) -> tuple[FieldKind, tuple[str, ...]]:
    """Choose the kind of field that can hold the value faithfully, and its choices."""
    choices = schema.get("enum")
    if isinstance(choices, list) and all(map(_is_scalar, cast("list[Any]", choices))):
        texts = tuple(_as_json(one) for one in cast("list[Any]", choices))
        if value is None or _as_json(value) in texts:
            return "choice", texts
        return "json", ()
    type_ = _type_of(schema)
    if type_ == "array":
        type_ = f"array of {_type_of(schema.get('items'))}"
    kind: FieldKind = _KINDS.get(type_, "json")
    if schema.get("format") == "date" and kind == "text":
        kind = "date"
    if type_ == "object" and isinstance(schema.get("properties"), Mapping):
        kind = "object"
    return (kind if value is None or _HOLDS[kind](value) else "json"), ()


def _type_of(schema: object) -> str:
    """Return the one type of a schema besides null; "" without exactly one."""
    types = _unwrapped(schema).get("type")
    listed = cast("list[object]", types if isinstance(types, list) else [types])
    names = {one for one in listed if isinstance(one, str)} - {"null"}
    if len(names) == 1:
        return names.pop()
    return ""


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_plain(value: Any) -> bool:
    """Whether a field shows all of a text; a browser changes carriage returns."""
    return isinstance(value, str) and is_shown_whole(value)


def _is_line(value: Any) -> bool:
    return _is_plain(value) and "\n" not in value and value == value.strip() != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_json(value: Any) -> str:
    """Write JSON that can be read; in ASCII if it has characters that are not seen."""
    indent = 2 if isinstance(value, dict | list) else None
    written = json.dumps(value, ensure_ascii=False, indent=indent)
    if is_shown_whole(written):
        return written
    return json.dumps(value, indent=indent)


def _is_date(value: Any) -> bool:
    with suppress(ValueError, TypeError):
        return date.fromisoformat(value).isoformat() == value
    return False


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
    "minLength": "characters: at least",
    "maxLength": "characters: at most",
    "minItems": "items: at least",
    "maxItems": "items: at most",
    "format": "format:",
}
"""How the bounds of a value are said."""
_KINDS: dict[str, FieldKind] = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "array of string": "texts",
    "array of integer": "numbers",
    "array of number": "numbers",
}
_HOLDS: dict[FieldKind, Callable[[Any], bool]] = {
    "text": _is_plain,
    "date": _is_date,
    "object": lambda value: isinstance(value, dict),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "texts": lambda value: (
        isinstance(value, list) and all(map(_is_line, cast("list[Any]", value)))
    ),
    "numbers": lambda value: (
        isinstance(value, list) and all(map(_is_number, cast("list[Any]", value)))
    ),
    "json": lambda _: True,
}
_WRITERS: dict[FieldKind, Callable[[Any], str]] = {
    "text": str,
    "date": str,
    "object": lambda _: "",
    "texts": "\n".join,
    "numbers": lambda value: "\n".join(map(_as_json, value)),
}
"""How a value is shown; the other kinds show JSON."""


def _read(field: Field, text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Read one field as arguments; a blank optional field gives none."""
    if text == field.value:
        return (
            dict(arguments)
            if not field.name
            else {one: arguments[one] for one in (field.name,) if one in arguments}
        )
    if not text.strip() and not field.required:
        return {}
    value = _READERS.get(field.kind, _read_json)(text)
    if field.name:
        return {field.name: value}
    if not isinstance(value, dict):
        raise ValueError("expected one JSON object with all arguments")
    return cast("dict[str, Any]", value)


def _read_json(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        raise ValueError(f"expected a JSON value; this {error}") from None


def _read_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number, such as 7") from None


def read_number(text: str) -> int | float:
    """Read a number that is finite; `ValueError` says what was expected."""
    for read in (int, float):
        with suppress(ValueError, OverflowError):
            number = read(text)
            if math.isfinite(number):
                return number
    raise ValueError("expected a number, such as 7 or 2.5")


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


_READERS: dict[FieldKind, Callable[[str], Any]] = {
    "text": str,
    "date": str,
    "integer": _read_integer,
    "number": read_number,
    "texts": _lines,
    "numbers": lambda text: [read_number(line) for line in _lines(text)],
}
"""How a text is read; the other kinds read JSON."""
