"""The form that edits a call's arguments: drawn from the parameters, read back as arguments.

An unchanged field keeps its exact value. A value that a plain field cannot hold, such
as an object or a text with invisible characters, is edited as JSON.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

from planner_ext.core.values import frozen
from planner_ext.engine.schemas import argument_problem, read_json
from planner_ext.readable.text import exact, is_shown_whole, visible

FieldKind: TypeAlias = Literal[
    "text", "number", "integer", "boolean", "choice", "texts", "numbers", "json"
]
"""``texts`` and ``numbers`` have one item a line, ``json`` is any value."""


@frozen
class Field:
    """One argument in a form.

    Attributes:
        key: The name of the form's field.
        name: The parameter; "" if all arguments are edited as one JSON object.
        help: The parameter's description.
        required: An optional argument may be blank.
        value: The call's argument, or the person's input.
        choices: The values of a choice, as JSON texts.
        problem: Why the input is not valid, or "".
    """

    key: str
    name: str
    kind: FieldKind
    help: str = ""
    required: bool = True
    value: str = ""
    choices: tuple[str, ...] = ()
    problem: str = ""

    @property
    def label(self) -> str:
        """The name, fully visible."""
        return exact(self.name)


def drawn_form(
    parameters: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> tuple[Field, ...]:
    """Draw a call's form: a field for each parameter, and for each other argument.

    Args:
        parameters: JSON schema of the function's parameters, if known.
        arguments: The call's arguments.
    """
    known = None if parameters is None else parameters.get("properties")
    if not isinstance(known, Mapping):
        return (
            Field(
                key="argument", name="", kind="json", value=_as_json(dict(arguments))
            ),
        )
    schemas = cast("Mapping[str, Any]", known)
    names = [*schemas, *(name for name in arguments if name not in schemas)]
    required = cast("Mapping[str, Any]", parameters).get("required") or ()
    return tuple(
        _field(
            f"argument-{place}",
            name,
            schemas.get(name),
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
    given: dict[str, Any] = {}
    fields: list[Field] = []
    for field in drawn_form(parameters, arguments):
        text = typed.get(field.key, field.value)
        problem = ""
        try:
            given.update(_read(field, text, arguments))
        except ValueError as error:
            problem = str(error)
        fields.append(replace(field, value=text, problem=problem))
    wrong = [
        f"{field.name or 'The arguments'}: {field.problem}"
        for field in fields
        if field.problem
    ]
    if (
        not wrong
        and parameters is not None
        and (problem := argument_problem(parameters, given))
    ):
        wrong = [problem]
    return given, tuple(fields), "; ".join(wrong)


def _field(
    key: str, name: str, schema: Any, arguments: Mapping[str, Any], *, required: bool
) -> Field:
    described = cast("Mapping[str, Any]", schema if isinstance(schema, Mapping) else {})
    value = arguments.get(name)
    has = name in arguments
    kind, choices = _kind_of(described, value, has=has)
    shown = "" if not has or value is None else _WRITERS.get(kind, _as_json)(value)
    about = described.get("description")
    text = visible(about) if isinstance(about, str) else ""
    return Field(
        key=key,
        name=name,
        kind=kind,
        help=text,
        required=required,
        value=shown,
        choices=choices,
    )


def _kind_of(
    schema: Mapping[str, Any], value: Any, *, has: bool
) -> tuple[FieldKind, tuple[str, ...]]:
    """Choose the kind of field that can hold the value faithfully, and its choices."""
    choices = schema.get("enum")
    if isinstance(choices, list) and all(map(_is_scalar, cast("list[Any]", choices))):
        texts = tuple(_as_json(one) for one in cast("list[Any]", choices))
        if not has or value is None or _as_json(value) in texts:
            return "choice", texts
        return "json", ()
    type_ = _type_of(schema)
    if type_ == "array":
        type_ = f"array of {_type_of(schema.get('items'))}"
    kind: FieldKind = _KINDS.get(type_, "json")
    return (kind if not has or value is None or _HOLDS[kind](value) else "json"), ()


def _type_of(schema: object) -> str:
    """Return the one type of a schema besides null; "" without exactly one."""
    said = cast("Mapping[str, object]", schema if isinstance(schema, Mapping) else {})
    types = said.get("type")
    if isinstance(options := said.get("anyOf"), list):
        types = [
            _type_of(one) for one in cast("list[object]", options) if not _is_null(one)
        ]
    listed = cast("list[object]", types if isinstance(types, list) else [types])
    names = {one for one in listed if isinstance(one, str)} - {"null"}
    return names.pop() if len(names) == 1 else ""


def _is_null(schema: object) -> bool:
    return (
        isinstance(schema, Mapping)
        and cast("Mapping[str, object]", schema).get("type") == "null"
    )


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
    return written if is_shown_whole(written) else json.dumps(value, indent=indent)


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


def _read_number(text: str) -> int | float:
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
    "integer": _read_integer,
    "number": _read_number,
    "texts": _lines,
    "numbers": lambda text: [_read_number(line) for line in _lines(text)],
}
"""How a text is read; the other kinds read JSON."""
