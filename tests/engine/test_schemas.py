"""Values against schemas: an edited call's arguments, and answers; in a time in proportion to their size."""

import inspect
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator

from planner_ext.engine.schemas import (
    answer_problems,
    argument_problem,
    read_json,
    schema_problem,
)
from support.examples import tried
from support.values import each_of

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": {"type": "string"},
        "amount": {"type": "number", "minimum": 0},
        "count": {"type": "integer"},
        "when": {"type": "object"},
        "kind": {"type": "string", "enum": ["full", "part"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "who": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "pair": {"type": "array", "items": [{"type": "string"}, {"type": "string"}]},
        "far": {"$ref": "#/$defs/nowhere"},
        "flag": {"type": "boolean"},
    },
    "required": ["order"],
}


@each_of(
    ("arguments", "problem"),
    [
        ({}, '"order" is missing'),
        (
            {"order": "7", "ordre": "8"},
            '"ordre" is not a parameter; there are: order, amount, count, when, kind',
        ),
        ({"order": ["7"]}, "\"order\": ['7'] is not of type 'string'"),
        ({"order": "7", "amount": -1}, '"amount": -1 is less than the minimum of 0'),
        (
            {"order": "7", "amount": "much"},
            "\"amount\": 'much' is not of type 'number'",
        ),
        ({"order": "7", "count": 1.5}, "\"count\": 1.5 is not of type 'integer'"),
        (
            {"order": "7", "kind": "none"},
            "\"kind\": 'none' is not one of ['full', 'part']",
        ),
        (
            {"order": "7", "tags": ["a", ["b"]]},
            "\"tags\"[1]: ['b'] is not of type 'string'",
        ),
        ({"order": "7", "who": "ann"}, "\"who\": 'ann' is not of type 'object'"),
        (
            {"order": "7", "who": {"name": []}},
            "\"who\".name: [] is not of type 'string'",
        ),
        (
            {"order": "7", "either": []},
            '"either": [] is not valid under any of the given schemas',
        ),
        ({"order": "7", "flag": "no"}, "\"flag\": 'no' is not of type 'boolean'"),
    ],
)
def test_the_argument_that_does_not_fit_is_named(
    arguments: dict[str, Any], problem: str
) -> None:
    """With its place in the argument, and what the schema wants."""
    assert argument_problem(PARAMETERS, arguments).startswith(problem)


@each_of(
    "arguments",
    [
        {
            "amount": 1.5,
            "count": 2.0,
            "kind": "full",
            "tags": [],
            "who": {"name": "ann"},
            "either": "x",
        },
        {"amount": "1.5", "count": "2"},  # a number as text
        {"order": 7, "tags": [1, True]},  # a number for a text
        {"amount": None, "kind": None, "who": None},  # `X | None` has the schema of X
        {
            "when": "2026-11-22"
        },  # a type that Semantic Kernel does not know is an object to it
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


@each_of(
    ("schema", "problem"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, ""),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ""),
        ({"properties": {"$ref": {"type": "string"}}}, ""),
        ({"type": "nothing"}, "its schema is not valid: "),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}]},
            "its schema refers to '#/$defs/a', which is not in it.",
        ),
        (
            {"$ref": "https://example.com/a.json"},
            "its schema refers to 'https://example.com/a.json'",
        ),
    ],
)
def test_a_schema_refers_to_itself_alone(schema: dict[str, Any], problem: str) -> None:
    found = schema_problem(schema)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def doubling(levels: int) -> dict[str, Any]:
    """Make a schema whose references double at each level."""
    each = {
        f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(levels)
    }
    return {"$ref": "#/$defs/l0", "$defs": {**each, f"l{levels}": {"type": "null"}}}


HANGING: dict[str, tuple[Any, Any]] = {
    "pattern": ({"type": "string", "pattern": "^(a|a)*$"}, "a" * 60 + "b"),
    "pattern-inside": (
        {"items": {"anyOf": [{"pattern": "^(a+)+$"}]}},
        ["a" * 60 + "b"],
    ),
    "names": (
        {"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False},
        {"a" * 60 + "b": 1},
    ),
    "references": (doubling(40), "a"),
    "product": ({"allOf": [{"items": {"type": "string"}}] * 20_000}, ["a"] * 20_000),
    "other-draft": (
        {
            "items": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "pattern": "^(a|a)*$",
            }
        },
        ["a" * 60 + "b"],
    ),
}


@pytest.mark.timeout(60)
@each_of("what", HANGING)
def test_a_strangers_schema_does_not_hang_the_check(what: str) -> None:
    """Patterns, references and sizes that would take years are not evaluated: the function's own check decides."""
    schema, value = HANGING[what]
    assert argument_problem({"properties": {"a": schema}}, {"a": value}) == ""


def test_what_else_a_schema_with_a_pattern_says_is_checked() -> None:
    """A property may be named ``pattern``; the type of a value with a pattern is still compared."""
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "integer", "pattern": "^(a|a)*$"}},
    }
    assert argument_problem(
        {"properties": {"a": schema}}, {"a": {"pattern": "x"}}
    ).startswith('"a".pattern: ')


SCHEMA_OF_TREE: dict[str, Any] = {
    "$ref": "#/$defs/t",
    "$defs": {"t": {"anyOf": [{"items": {"$ref": "#/$defs/t"}}]}},
}


def nested(levels: int, value: Any = 0) -> Any:
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.timeout(60)
@each_of(
    ("schema", "value", "said"),
    [
        ({"pattern": r"^(\w+\s?)*$"}, "a" * 60 + "!", "does not match"),
        (
            {"items": {"patternProperties": {"^(a|a)*$": False}}},
            [{"a" * 60 + "b": 1}],
            "",
        ),
        (
            {"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False},
            {"a" * 60 + "b": 1},
            "not allowed",
        ),
        (
            {"patternProperties": {"^(a|a)*$": {}}, "unevaluatedProperties": False},
            {"a" * 60 + "b": 1},
            "not allowed",
        ),
        ({"uniqueItems": True}, [{"a": number} for number in range(20_000)], ""),
        (
            {"uniqueItems": True},
            [number * (2**61 - 1) for number in range(50_000)],
            "",
        ),  # Python hashes them alike
        (
            {"uniqueItems": True},
            [{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}],
            "items that are equal",
        ),
        ({"uniqueItems": True}, [1, True, "1", None, 0, False], ""),
        (
            {"items": {"enum": [{"a": number} for number in range(3_000)]}},
            [{"a": 2999}] * 3_000,
            "",
        ),
        ({"multipleOf": 1e-300}, 1e308, ""),
        ({"multipleOf": 0.1}, 10**4000 + 1, ""),
        ({"multipleOf": 0.1}, 0.3, ""),
        ({"type": "string"}, ["a" * 10_000] * 1_000, "is not of type 'string'"),
        (doubling(40), "a", "takes more than 20,100 steps to check"),
        (
            {"allOf": [{"items": {"type": "string"}}] * 3_000},
            ["a"] * 3_000,
            "steps to check",
        ),
        ({"$ref": "#"}, 1, "refers to itself without end"),
        (SCHEMA_OF_TREE, nested(80), ""),
        (SCHEMA_OF_TREE, nested(101), "nested too deeply"),
        (SCHEMA_OF_TREE, nested(5_000), "nested too deeply"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_an_answer_is_checked_within_bounds(schema: Any, value: Any, said: str) -> None:
    """What would take years, or the stack, is checked in another way, or ends with the limit by name."""
    problem = answer_problems(schema, value)
    assert (said in problem) if said else problem == ""
    assert len(problem) < 2_000


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, 2.5, -1.0])
    | st.text("ab", max_size=3)
)
NAMES = st.sampled_from(["a", "b", "ab"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3)
    ),
)
FEW = st.integers(0, 3)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Make schemas of one to four keywords over other schemas."""
    several = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    kinds = st.sampled_from(
        ["null", "boolean", "integer", "number", "string", "array", "object"]
    )
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": kinds | st.lists(kinds, min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "pattern": st.sampled_from(["^a", "b$", "^(a|b)*$", "aa"]),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "uniqueItems": st.booleans(),
        "dependentRequired": st.dictionaries(
            NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2
        ),
        **dict.fromkeys(
            ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"],
            st.integers(-2, 2),
        ),
        **dict.fromkeys(
            [
                "minLength",
                "maxLength",
                "minItems",
                "maxItems",
                "minProperties",
                "maxProperties",
            ],
            FEW,
        ),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        **dict.fromkeys(["properties", "dependentSchemas"], named),
        "patternProperties": st.dictionaries(
            st.sampled_from(["^a", "b"]), inner, max_size=2
        ),
        **dict.fromkeys(
            [
                "additionalProperties",
                "unevaluatedProperties",
                "items",
                "unevaluatedItems",
            ],
            inner,
        ),
        **dict.fromkeys(
            ["contains", "propertyNames", "not", "if", "then", "else"], inner
        ),
        **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], several),
        "minContains": FEW,
        "maxContains": FEW,
    }
    pairs = st.sampled_from(sorted(keywords)).flatmap(
        lambda name: st.tuples(st.just(name), keywords[name])
    )
    return st.lists(pairs, min_size=1, max_size=4).map(dict)


SCHEMAS = st.recursive(
    st.booleans() | combined(st.booleans()), combined, max_leaves=6
).filter(lambda schema: isinstance(schema, dict))


@tried(200)
@given(schema=SCHEMAS, value=VALUES)
def test_the_check_thinks_as_jsonschema_does(
    schema: dict[str, Any], value: Any
) -> None:
    """A value within the bounds is valid here where it is to the reference implementation of Python."""
    assert schema_problem(schema) == ""
    assert (answer_problems(schema, value) == "") == Draft202012Validator(
        schema
    ).is_valid(value)


@each_of(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, null, true, "x"]}', {"a": [1, 2.5, None, True, "x"]}),
        ("1e300", 1e300),
        ("[" * 100 + "]" * 100, nested(99, [])),
    ],
)
def test_json_of_others_is_read(text: str, value: Any) -> None:
    assert read_json(text) == value


@each_of(
    ("text", "said"),
    [
        ("NaN", "NaN is not a number of JSON"),
        ("[-Infinity]", "-Infinity is not a number of JSON"),
        ("1e400", "1e400 is too large for a float"),
        ("-1" + "0" * 400 + ".5", "is too large for a float"),
        ("9" * 5_000, "number that cannot be used"),
        ("[" * 101 + "]" * 101, "nested too deeply: it may have 100 levels"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 300 + "1" + "}" * 300, "nested too deeply"),
        ("{'a': 1}", "is not JSON: "),
    ],
    ids=lambda text: text[:12],
)
def test_json_beyond_the_bounds_is_refused_by_name(text: str, said: str) -> None:
    """A number that no float holds, or levels that no check could go down, are an error that says so."""
    with pytest.raises(ValueError, match=r"^(?:is|holds) ") as refused:
        read_json(text)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300


@each_of(
    ("schema", "said"),
    [
        (
            {"pattern": "(?=a)b"},
            "has the pattern '(?=a)b', which cannot run in time in proportion to the text",
        ),
        (
            {"properties": {"a": {"items": {"pattern": r"(a)\1"}}}},
            "lookbehind, backreferences",
        ),
        (
            {"anyOf": [{"patternProperties": {"(?<!a)b": True}}]},
            "take a pydantic model",
        ),
        ({"$defs": {"a": {"pattern": "((a{100}){100}){100}"}}}, "repeats over 1000"),
        ({"pattern": "a\ud800"}, "not valid Unicode"),
        (
            {"$dynamicRef": "#a"},
            "$dynamicRef, which is not followed. Write it with $ref.",
        ),
        (
            {"$schema": "http://json-schema.org/draft-03/schema#"},
            "Write it in the draft 2020-12",
        ),
        ({"pattern": r"^[\u4e00-\u9fa5]+\Z"}, ""),
        ({"const": {"pattern": "(?=a)b"}}, ""),
        ({"properties": {"pattern": {"enum": ["(?=a)b"]}}}, ""),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_schema_that_cannot_be_checked_in_bounds_is_refused_at_the_start(
    schema: dict[str, Any], said: str
) -> None:
    """By name, with the way out: its pattern needs backtracking, or it is of a draft that is not read."""
    problem = schema_problem(schema)
    assert (said in problem) if said else problem == ""


def test_a_pattern_may_name_characters_by_number() -> None:
    r"""``\uXXXX`` and ``\Z`` are unknown to RE2, and are written as it has them."""
    schema = {"pattern": r"^[\u4e00-\u9fa5]+\Z"}
    assert answer_problems(schema, "\u6f22\u5b57") == ""
    assert "does not match" in answer_problems(schema, "kanji")
    assert "does not match" in answer_problems({"pattern": "^a$"}, "a\n")


DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
ANY_Y = {"properties": {"y": True}}


@each_of(
    ("schema", "value", "problem"),
    [
        ({"exclusiveMinimum": 3}, 3, "3 is less than or equal to the minimum of 3"),
        ({"exclusiveMaximum": 3}, 3, "3 is greater than or equal to the maximum of 3"),
        (
            {**DRAFT_4, "minimum": 3, "exclusiveMinimum": True},
            3,
            "3 is less than or equal to the minimum of 3",
        ),
        ({**DRAFT_4, "maximum": 3, "exclusiveMaximum": False}, 3, ""),
        ({"contains": {"type": "string"}, "minContains": 2}, ["a"], "has 1 items"),
    ],
)
def test_bounds_are_read_in_the_words_of_each_draft(
    schema: dict[str, Any], value: Any, problem: str
) -> None:
    """An exclusive bound is a number, or in draft 4 a flag beside its bound; items that fit are counted."""
    found = answer_problems(schema, value)
    assert problem in found
    assert bool(problem) == bool(found)


@each_of(
    ("schema", "value", "problem"),
    [
        (
            {"items": [{"type": "string"}], "additionalItems": False},
            ["a", 1],
            "Additional item 1",
        ),
        ({"items": [{"type": "string"}]}, [1], "$[0]: 1 is not of type 'string'"),
        ({"items": {}, "additionalItems": False}, [1], ""),
        ({"allOf": [{"items": {}}], "unevaluatedItems": False}, [1], ""),
        (
            {"allOf": [{"contains": {"type": "string"}}], "unevaluatedItems": False},
            ["a", 1],
            "Additional item 1",
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": ANY_Y},
                "unevaluatedProperties": False,
            },
            {"y": 1, "z": 2},
            "Additional property 'z'",
        ),
        (
            {
                "allOf": [{"if": {"required": ["z"]}, "then": ANY_Y}],
                "unevaluatedProperties": False,
            },
            {"y": 1, "z": 2},
            "Additional property 'z'",
        ),
        (
            {
                "dependentSchemas": {"x": ANY_Y},
                "properties": {"x": True},
                "unevaluatedProperties": False,
            },
            {"x": 1, "y": 1, "z": 2},
            "Additional property 'z'",
        ),
        (
            {
                "allOf": [{"additionalProperties": True}],
                "unevaluatedProperties": False,
            },
            {"z": 1},
            "",
        ),
        (
            {
                "allOf": [{"patternProperties": {"^x": True}}],
                "unevaluatedProperties": False,
            },
            {"xa": 1, "z": 2},
            "Additional property 'z'",
        ),
    ],
)
def test_what_no_keyword_is_about_is_found(
    schema: dict[str, Any], value: Any, problem: str
) -> None:
    """Items and properties beyond those of every schema that the value fits are named, or are free."""
    found = answer_problems(schema, value)
    assert problem in found
    assert bool(problem) == bool(found)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    """The way out is a schema with definitions."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"items": schema}
    assert "Put parts of it under $defs." in schema_problem(schema)


def test_a_check_without_stack_is_refused() -> None:
    """A check that starts deep in a program says so, and raises nothing."""

    def deep(frames: int) -> str:
        if frames:
            return deep(frames - 1)
        return answer_problems({"allOf": [{"allOf": [{"items": True}]}]}, [[1]])

    here = len(inspect.stack())
    found = {deep(sys.getrecursionlimit() - here - left) for left in range(10, 60)}
    assert any("than the stack of this process has left" in one for one in found)


def test_a_requirement_of_an_older_draft_is_no_problem() -> None:
    """In draft 3 ``required`` is a flag of a property, about which nothing is certain."""
    schema = {"type": "object", "required": True}
    assert argument_problem({"properties": {"who": schema}}, {"who": {}}) == ""
