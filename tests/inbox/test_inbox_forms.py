"""The form of a call's arguments: drawn from the parameters, read back as typed arguments, nothing changed unasked."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planner_ext.inbox.forms import Field, drawn_form, read_form
from support.values import each_of

TYPES: dict[str, Mapping[str, Any]] = {
    "text": {"type": "string", "description": "What to say."},
    "integer": {"type": "integer"},
    "number": {"type": ["number", "null"]},
    "boolean": {"anyOf": [{"type": "boolean"}, {"type": "null", "title": "No answer"}]},
    "choice": {"enum": ["a", "b", 3, None]},
    "texts": {"type": "array", "items": {"type": "string"}},
    "numbers": {"type": "array", "items": {"type": "integer"}},
    "json": {"type": "object", "additionalProperties": {"type": "integer"}},
}
PARAMETERS = {"type": "object", "properties": TYPES, "required": ["text", "integer"]}
GIVEN = {"text": "hello", "integer": 7}


def by_name(fields: tuple[Field, ...]) -> dict[str, Field]:
    return {field.name: field for field in fields}


def typed(**texts: str) -> dict[str, str]:
    """Name what was typed as the form of all types does."""
    return {f"argument-{[*TYPES].index(name)}": text for name, text in texts.items()}


def test_each_type_has_a_field_of_its_kind() -> None:
    """A field for each parameter, with its kind, description and choices, and whether the function needs it."""
    fields = drawn_form(PARAMETERS, GIVEN)
    assert [(field.name, field.kind) for field in fields] == [
        (name, name) for name in TYPES
    ]
    assert by_name(fields)["choice"].choices == ('"a"', '"b"', "3", "null")
    assert by_name(fields)["text"].help == "What to say."
    assert [field.name for field in fields if field.required] == ["text", "integer"]
    assert [field.value for field in fields] == ["hello", "7", "", "", "", "", "", ""]


@each_of(
    ("name", "text", "value"),
    [
        ("text", "7", "7"),
        ("text", "", ""),
        ("text", " a\nb ", " a\nb "),
        ("integer", " 12 ", 12),
        ("integer", "-3", -3),
        ("number", "2.50", 2.5),
        ("number", "7", 7),
        ("boolean", "true", True),
        ("boolean", "false", False),
        ("choice", '"b"', "b"),
        ("choice", "3", 3),
        ("texts", "a\n\n b\n", ["a", " b"]),
        ("numbers", "1\n2", [1, 2]),
        ("json", '{"a": 1}', {"a": 1}),
    ],
)
def test_what_is_typed_becomes_a_value_of_its_type(
    name: str, text: str, value: Any
) -> None:
    """A text becomes what the parameter takes: a number, a truth value, a list, an object."""
    arguments, _, problem = read_form(PARAMETERS, GIVEN, typed(**{name: text}))
    assert (problem, arguments) == ("", GIVEN | {name: value})
    assert type(arguments[name]) is type(value)


@each_of(
    ("name", "text", "expected"),
    [
        ("integer", "", "integer: expected a whole number"),
        ("integer", "7.5", "integer: expected a whole number"),
        ("integer", "seven", "integer: expected a whole number"),
        ("number", "nan", "number: expected a number"),
        ("number", "inf", "number: expected a number"),
        ("number", "9" * 400, "number: expected a number"),
        ("boolean", "perhaps", "boolean: expected a JSON value"),
        ("choice", '"c"', '"choice": '),
        ("numbers", "1\ntwo", "numbers: expected a number"),
        ("numbers", "1.5", '"numbers"[0]: 1.5 is not of type'),
        ("json", "{", "json: expected a JSON value"),
        ("json", "NaN", "json: expected a JSON value"),
        ("json", "[" * 100_000, "json: expected a JSON value"),
        ("json", '{"a": "x"}', '"json".a: '),
    ],
)
def test_what_does_not_fit_is_refused_and_kept(
    name: str, text: str, expected: str
) -> None:
    """The problem names the argument, the field keeps what was typed, and the other fields theirs."""
    _, fields, problem = read_form(
        PARAMETERS, GIVEN, typed(**{name: text, "text": "new"})
    )
    assert problem.startswith(expected)
    assert (
        by_name(fields)[name].value == text and by_name(fields)["text"].value == "new"
    )


def test_a_blank_optional_field_is_not_given() -> None:
    """What is cleared and not required is left to the function's default; what is required stays."""
    before = {**GIVEN, "number": 2.5, "texts": ["a"], "json": {"a": 1}}
    arguments, _, problem = read_form(
        PARAMETERS, before, typed(number="", texts="  ", json="", text="")
    )
    assert (problem, arguments) == ("", {"text": "", "integer": 7})


@each_of(
    ("name", "value"),
    [
        ("text", "a\u202eb"),
        ("text", "a\u200bb"),
        ("text", "a\r\nb"),
        ("text", "a" + " " * 41 + "b"),
        ("text", "\x00"),
        ("text", "\ud800"),
        ("text", 7),
        ("integer", "7"),
        ("number", True),
        ("choice", "unknown"),
        ("texts", ["a\nb"]),
        ("texts", ["", "a"]),
        ("texts", [1]),
        ("numbers", ["1"]),
    ],
)
def test_what_a_field_cannot_hold_is_edited_as_json(name: str, value: Any) -> None:
    """A text with invisible characters, a value of another type: the field shows it as JSON, in plain characters."""
    field = by_name(drawn_form(PARAMETERS, {**GIVEN, name: value}))[name]
    assert field.kind == "json"
    assert field.value.isascii() and all(
        char == "\n" or char.isprintable() for char in field.value
    )


@each_of(
    "text",
    [
        "def f():\n\tif x:\n        return 1\n",
        "سلام، می‌شود",
        "⚠️ 👨‍👩‍👧",
        "a\u00e9\n\nb",
    ],
)
def test_a_text_is_edited_as_text(text: str) -> None:
    """Code with its indents, every script, and emoji: the field holds them as they are."""
    field = by_name(drawn_form(PARAMETERS, {**GIVEN, "text": text}))["text"]
    assert (field.kind, field.value) == ("text", text)


def test_letters_stay_letters_in_json() -> None:
    """An object is edited in the letters of its language."""
    field = by_name(drawn_form(PARAMETERS, {**GIVEN, "json": {"שם": 1}}))["json"]
    assert "שם" in field.value


def test_without_parameters_all_arguments_are_one_json_object() -> None:
    """A function with unknown parameters, and arguments beside its parameters, can still be edited."""
    (field,) = drawn_form(None, {"a": 1})
    assert (field.name, field.kind) == ("", "json")
    assert read_form(None, {"a": 1}, {"argument": '{"b": 2}'})[::2] == ({"b": 2}, "")
    assert "one JSON object" in read_form(None, {"a": 1}, {"argument": "[]"})[2]
    assert by_name(drawn_form({"properties": {}}, {"odd": [1]}))["odd"].kind == "json"


def test_the_name_of_an_argument_is_fully_visible() -> None:
    """A name that a stranger chose cannot look like another one, nor reorder the line."""
    (field,) = drawn_form({"properties": {}}, {"amo\u200bunt\u202e\ud800": 1})
    assert field.label == "amo\\u200bunt\\u202e\\ud800"


@each_of(
    "schema",
    [
        None,
        5,
        True,
        {"anyOf": [True, {"type": "string"}]},
        {"type": [["a"]]},
        {"type": 5},
        {"items": 1},
    ],
)
def test_an_invalid_schema_does_not_stop_a_decision(schema: Any) -> None:
    """Schemas come from other servers, too: what they do not describe is edited as JSON."""
    parameters = {"type": "object", "properties": {"a": schema}}
    assert read_form(parameters, {"a": 1}, {"argument-0": "[2]"})[0] == {"a": [2]}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(arguments=st.dictionaries(st.sampled_from([*TYPES, "odd", "\u202e"]), JSON))
def test_an_untouched_form_changes_nothing(arguments: dict[str, Any]) -> None:
    """For all arguments, a form that is sent back as a browser does gives exactly these."""
    for parameters in (PARAMETERS, None):
        sent = {
            field.key: field.value.replace("\r\n", "\n")
            for field in drawn_form(parameters, arguments)
        }
        read = read_form(parameters, arguments, sent)[0]
        assert read == arguments and repr(read) == repr(
            {name: arguments[name] for name in read}
        )


ORDER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "to": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "street": {"type": "string"},
                        "zip": {"type": "integer", "minimum": 1},
                        "inner": {
                            "type": "object",
                            "properties": {"floor": {"type": "integer"}},
                        },
                    },
                    "required": ["street"],
                },
                {"type": "null"},
            ],
            "description": "Where to.",
        },
        "on": {"type": "string", "format": "date"},
        "speed": {"anyOf": [{"enum": ["slow", "fast"]}, {"type": "null"}]},
    },
}


def test_an_object_is_a_form_of_its_own() -> None:
    """At any depth: an unchanged part keeps its exact value, a changed one has its type, a wrong one is named."""
    arguments = {"to": {"street": "x", "zip": 2.0}, "on": "2026-11-22"}
    fields = by_name(drawn_form(ORDER, arguments))
    assert [field.kind for field in fields.values()] == ["object", "date", "choice"]
    parts = by_name(fields["to"].fields)
    assert (parts["zip"].value, parts["inner"].kind) == ("2.0", "object")
    assert parts["zip"].help == "At least 1."
    typed_ = {parts["street"].key: "y", fields["on"].key: "2026-12-01"}
    given, _, problem = read_form(ORDER, arguments, typed_)
    assert (problem, given) == (
        "",
        {"to": {"street": "y", "zip": 2.0}, "on": "2026-12-01"},
    )
    floor = parts["inner"].fields[0].key
    given, _, problem = read_form(ORDER, arguments, {floor: "3"})
    assert given["to"]["inner"] == {"floor": 3}
    _, _, problem = read_form(ORDER, arguments, {floor: "high"})
    assert problem == "floor: expected a whole number, such as 7"
    _, _, problem = read_form(ORDER, arguments, {parts["zip"].key: "0"})
    assert problem.startswith('"to": ')


def test_an_object_that_is_not_given_may_stay_so() -> None:
    """Its fields are blank; unless one is filled in, the argument is left to the function's default."""
    assert read_form(ORDER, {}, {}) == ({}, drawn_form(ORDER, {}), "")
    street = by_name(by_name(drawn_form(ORDER, {}))["to"].fields)["street"]
    given, _, problem = read_form(ORDER, {}, {street.key: "z"})
    assert (problem, given) == ("", {"to": {"street": "z"}})


def test_a_value_that_is_no_date_is_edited_as_json() -> None:
    """A browser's field for dates would drop it."""
    fields = by_name(drawn_form(ORDER, {"on": "tomorrow"}))
    assert (fields["on"].kind, fields["on"].value) == ("json", '"tomorrow"')
