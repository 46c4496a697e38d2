"""The arguments of an edited call against the schema of the function's parameters."""

from typing import Any

import pytest

from planner_ext.engine.schemas import answer_problems, argument_problem, schema_problem

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": {"type": "string"},
        "amount": {"type": "number", "minimum": 0},
        "count": {"type": "integer"},
        "when": {"type": "object"},
        "kind": {"type": "string", "enum": ["full", "part"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "who": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "pair": {"type": "array", "items": [{"type": "string"}, {"type": "string"}]},
        "far": {"$ref": "#/$defs/nowhere"},
        "flag": {"type": "boolean"},
    },
    "required": ["order"],
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, '"order" is missing'),
        ({"order": "7", "ordre": "8"}, '"ordre" is not a parameter; there are: order, amount, count, when, kind'),
        ({"order": ["7"]}, "\"order\": ['7'] is not of type 'string'"),
        ({"order": "7", "amount": -1}, '"amount": -1 is less than the minimum of 0'),
        ({"order": "7", "amount": "much"}, "\"amount\": 'much' is not of type 'number'"),
        ({"order": "7", "count": 1.5}, "\"count\": 1.5 is not of type 'integer'"),
        ({"order": "7", "kind": "none"}, "\"kind\": 'none' is not one of ['full', 'part']"),
        ({"order": "7", "tags": ["a", ["b"]]}, "\"tags\"[1]: ['b'] is not of type 'string'"),
        ({"order": "7", "who": "ann"}, "\"who\": 'ann' is not of type 'object'"),
        ({"order": "7", "who": {"name": []}}, "\"who\".name: [] is not of type 'string'"),
        ({"order": "7", "either": []}, '"either": [] is not valid under any of the given schemas'),
        ({"order": "7", "flag": "no"}, "\"flag\": 'no' is not of type 'boolean'"),
    ],
)
def test_the_argument_that_does_not_fit_is_named(arguments: dict[str, Any], problem: str) -> None:
    """With its place in the argument, and what the schema wants."""
    assert argument_problem(PARAMETERS, arguments).startswith(problem)


@pytest.mark.parametrize(
    "arguments",
    [
        {"amount": 1.5, "count": 2.0, "kind": "full", "tags": [], "who": {"name": "ann"}, "either": "x"},
        {"amount": "1.5", "count": "2"},  # a number as text
        {"order": 7, "tags": [1, True]},  # a number for a text
        {"amount": None, "kind": None, "who": None},  # `X | None` has the schema of X
        {"when": "2026-11-22"},  # a type that Semantic Kernel does not know is an object to it
        {"who": {}},  # a field with a default is required to it
        {"either": None},
        {"pair": ["a", "b"], "far": 7},  # schemas that cannot be used
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_the_function_may_take_passes(arguments: dict[str, Any]) -> None:
    """The function's own conversion decides what the schema does not surely exclude."""
    assert argument_problem(PARAMETERS, {"order": "7", **arguments}) == ""


def test_an_answer_names_five_of_its_problems() -> None:
    schema: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
    assert answer_problems(schema, [1, 2]) == ""
    assert answer_problems(schema, ["x"]) == "$[0]: 'x' is not of type 'integer'"
    assert answer_problems(schema, ["x"] * 9).count(";") == 4


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, ""),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ""),
        ({"properties": {"$ref": {"type": "string"}}}, ""),
        ({"type": "nothing"}, "its schema is not valid: "),
        ({"anyOf": [{"$ref": "#/$defs/a"}]}, "its schema refers to '#/$defs/a', which is not in it."),
        ({"$ref": "https://example.com/a.json"}, "its schema refers to 'https://example.com/a.json'"),
    ],
)
def test_a_schema_refers_to_itself_alone(schema: dict[str, Any], problem: str) -> None:
    found = schema_problem(schema)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def doubling(levels: int) -> dict[str, Any]:
    """Make a schema whose references double at each level."""
    each = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/l0", "$defs": {**each, f"l{levels}": {"type": "null"}}}


HANGING: dict[str, tuple[Any, Any]] = {
    "pattern": ({"type": "string", "pattern": "^(a|a)*$"}, "a" * 60 + "b"),
    "pattern-inside": ({"items": {"anyOf": [{"pattern": "^(a+)+$"}]}}, ["a" * 60 + "b"]),
    "names": ({"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False}, {"a" * 60 + "b": 1}),
    "references": (doubling(40), "a"),
    "product": ({"allOf": [{"items": {"type": "string"}}] * 20_000}, ["a"] * 20_000),
    "other-draft": (
        {"items": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a|a)*$"}},
        ["a" * 60 + "b"],
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", HANGING)
def test_a_strangers_schema_does_not_hang_the_check(what: str) -> None:
    """Patterns, references and sizes that would take years are not evaluated: the function's own check decides."""
    schema, value = HANGING[what]
    assert argument_problem({"properties": {"a": schema}}, {"a": value}) == ""


def test_what_else_a_schema_with_a_pattern_says_is_checked() -> None:
    """A property may be named ``pattern``; the type of a value with a pattern is still compared."""
    schema = {"type": "object", "properties": {"pattern": {"type": "integer", "pattern": "^(a|a)*$"}}}
    assert argument_problem({"properties": {"a": schema}}, {"a": {"pattern": "x"}}).startswith('"a".pattern: ')
