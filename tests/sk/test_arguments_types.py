"""Arguments by the types of their parameters, and what cannot be converted."""

import inspect
import json
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.exceptions import FunctionExecutionException
from semantic_kernel.functions import (
    KernelArguments,
    KernelFunctionFromPrompt,
)
from semantic_kernel.prompt_template import InputVariable, PromptTemplateConfig

from planner_ext.sk.functions.conversion import InvalidArguments, quoted
from planner_ext.sk.functions.toolset import conversion_problem, tool_of
from support.arguments import (
    ADD,
    Colour,
    Item,
    accepts,
    declaring,
    function_of,
    message_of,
    parse,
    taking,
)
from support.values import each_of


@each_of(
    ("annotation", "good", "bad"),
    [
        (str, ["", "x", 1, 1.5, True], [None, [], {}]),
        (
            int,
            [0, -3, 10**400, 3.0, "42", " 7 "],
            [None, True, 1.5, "x", "1.5", "", "9" * 5000, [], {}],
        ),
        (
            float,
            [1, 1.5, "1.5", "-2"],
            [None, False, "x", "nan", "inf", 10**400, [], {}],
        ),
        (bool, [True, False], [None, 0, 1, "true", "false", "", [], {}]),
        (list, [[], [1, "a", None]], [None, {}, "a", 1]),
        (list[int], [[], [1]], [None, {}, "1"]),
        (list[int], [["7", 7.0]], [[True], [7.5], [None], ["x"], [[7]]]),
        (list[bool], [[True]], [["false"], [0]]),
        (list[str], [["a", 7]], [[None], [[]]]),
        (list[Colour], [["red"]], [["green"], [None]]),
        (list[Item], [[{"name": "a"}]], [[{}], ["a"]]),
        (list[list[int]], [[[1], []]], [[1], [["x"]]]),
        (set[int], [[1], ["1"]], [None, {}, ["x"]]),
        (frozenset[str], [["a"]], ["abc"]),
        (tuple[int, str], [[1, "a"]], [None, {}, [1], ["x", "a"]]),
        (tuple[int, ...], [[], [1, 2]], [None, ["x"]]),
        (dict, [{}, {"a": 1}], [None, [], "a", 1]),
        (dict[str, int], [{"a": 1}, {"a": "1"}], [None, [], {"a": "x"}, {"a": True}]),
        (Item, [{"name": "a"}], [None, [], "a", {}]),
        (Colour, ["red", "blue"], [None, "green", "RED", 1]),
        (int | str, [1, "a", [], {}, None], []),
        (Any, [1, "a", [], {}, None], []),
        (object, [1, "a", [], {}, None], []),
        (inspect.Parameter.empty, [1, "a", [], {}, None], []),
        (Literal["a", "b"], ["a", 1], []),
        (Decimal, ["1.5", 1], []),
    ],
)
def test_each_type_accepts_what_semantic_kernel_converts_as_meant(
    annotation: Any, good: list[Any], bad: list[Any]
) -> None:
    """A string of digits is an integer, "false" is not a boolean, and types without a schema of their own are open."""
    function = taking(annotation)
    assert [value for value in good if not accepts(function, value)] == []
    assert [value for value in bad if accepts(function, value)] == []


@each_of(
    ("annotation", "value"),
    [
        (str | None, "x"),
        (Optional[int], 1),  # noqa: UP045  (as older code writes it)
        (Annotated[str | None, "described"], "x"),
        (Annotated[Optional[int], "described"], 1),  # noqa: UP045  (as older code writes it)
        (Annotated[list[str] | None, "described"], ["x"]),
        (Colour | None, "red"),
        (Item | None, {"name": "a"}),
        (bool | None, False),
    ],
)
def test_optional_parameters_accept_null(annotation: Any, value: Any) -> None:
    """Semantic Kernel's schema of an optional does not mention null; it is still accepted."""
    function = taking(annotation, None)
    assert parse(function, "{}") == {}
    assert accepts(function, None)
    assert accepts(function, value)
    assert not accepts(function, ["a", {}] if value != ["x"] else {"a": 1})


def test_a_parameter_with_a_default_is_not_nullable() -> None:
    """A default is what holds when an argument is left out, not when it is null."""
    assert not accepts(taking(int, 3), None)


@each_of(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["x"], [None, 1, True]),
        ({"type": "integer"}, [1, 2.0], [None, "1", True, 1.5]),
        ({"type": "number"}, [1, 1.5], [None, "1", True]),
        ({"type": ["string", "null"]}, ["x", None], [1]),
        ({"type": ["integer", "string"]}, ["x", 1], [None, [], 1.5]),
        ({"type": "string", "nullable": True}, ["x", None], [1]),
        ({"type": "string", "enum": ["a", "b"]}, ["a"], ["c", None]),
        ({"enum": [1, None]}, [1, 1.0, None], [True, 2, "1"]),
        ({"type": "object"}, [{}], [[], "x"]),
        ({"type": "object", "properties": {"a": {}}}, [{}], [[], "x"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["x", None, 1], []),
        ({"type": "file"}, ["x", None], []),
        ({}, ["x", None], []),
    ],
)
def test_a_schema_given_by_hand_is_taken_at_its_word(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    """Semantic Kernel converts nothing there, so a near miss would reach the function as it is."""
    function = declaring(schema_data=schema, is_required=True)
    assert [value for value in good if not accepts(function, value)] == []
    assert [value for value in bad if accepts(function, value)] == []


@each_of(
    ("annotation", "expected"),
    [
        (Colour, 'one of "red", "blue"'),
        (Annotated[Optional[int], "d"], "integer or null"),  # noqa: UP045  (as older code writes it)
        (Colour | None, 'one of "red", "blue" or null'),
    ],
)
def test_the_message_says_what_is_expected(annotation: Any, expected: str) -> None:
    """Types, null and the values of an enumeration are named."""
    assert f'"p" must be {expected}, not ["x"]' in message_of(
        taking(annotation), '{"p": ["x"]}'
    )


def test_many_values_are_not_all_listed() -> None:
    """An enumeration of hundreds does not fill the model's context."""
    message = message_of(
        declaring(schema_data={"enum": [f"value {i}" for i in range(1000)]}),
        '{"p": "x"}',
    )
    assert '"value 49", ...' in message
    assert "value 50" not in message


def test_the_variables_of_a_prompt_take_what_can_be_written() -> None:
    """A prompt has no types of its own, and nothing is injected into it: a variable may be named service."""
    config = PromptTemplateConfig(
        template="{{$service}} {{$n}}",
        input_variables=[
            InputVariable(name="service"),
            InputVariable(name="n", json_schema="str", is_required=False),
        ],
    )
    function = KernelFunctionFromPrompt(
        function_name="f", plugin_name="p", prompt_template_config=config
    )
    assert parse(function, '{"service": "x", "n": 5}') == {"service": "x", "n": "5"}
    assert isinstance(parse(function, '{"service": "x", "n": []}'), InvalidArguments)
    assert isinstance(parse(function, '{"n": "x"}'), InvalidArguments)


async def failure_of(annotation: Any, value: Any) -> FunctionExecutionException:
    with pytest.raises(FunctionExecutionException) as raised:
        await taking(annotation).invoke(Kernel(), KernelArguments(p=value))
    return raised.value


async def test_an_argument_that_cannot_be_converted_is_explained() -> None:
    """The model reads which of its arguments, to what, and what pydantic found; nothing of the application's own."""
    value = {"name": "forbidden", "count": "many"}
    error = await failure_of(Item, value)
    assert conversion_problem(error, tool_of(taking(Item)), {"p": value}) == (
        'The argument "p" of p-f cannot be converted to Item (name: not valid; count: Input should be a valid integer, '
        "unable to parse string as an integer). The function was not run. Call it again with a corrected argument."
    )


async def test_an_argument_without_a_model_is_explained_in_short() -> None:
    """Where the type says nothing, its name is what the model reads."""
    error = await failure_of(list[int], ["x"])
    assert conversion_problem(error, tool_of(taking(list[int])), {"p": ["x"]}) == (
        'The argument "p" of p-f cannot be converted to list[int]. The function was not run. '
        "Call it again with a corrected argument."
    )


async def test_an_argument_of_the_application_is_not_the_models_concern() -> None:
    """What the model did not give is not explained to it."""
    assert (
        conversion_problem(
            await failure_of(list[int], ["x"]), tool_of(taking(list[int])), {}
        )
        is None
    )


def test_other_errors_are_not_conversions() -> None:
    """The error's class alone says nothing: Semantic Kernel raises it for much else."""
    tool = tool_of(ADD)
    assert (
        conversion_problem(
            FunctionExecutionException("Parameter a is expected"), tool, {"a": 1}
        )
        is None
    )
    assert conversion_problem(ValueError("no"), tool, {"a": 1}) is None
    try:
        raise FunctionExecutionException("from elsewhere")
    except FunctionExecutionException as error:
        assert conversion_problem(error, tool, {"a": 1}) is None


def test_quoted_values_are_short_and_sendable() -> None:
    """An echo is JSON, cut, and never breaks the request that carries it."""
    assert quoted('a"b') == '"a\\"b"'
    assert quoted("\ud800") == '"?"'
    assert len(quoted("x" * 1000)) == 82
    assert quoted(list(range(1000))).endswith("...")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None)),
    lambda children: (
        st.lists(children)
        | st.dictionaries(st.text() | st.sampled_from(["a", "b", "c"]), children)
    ),
)


def wide(
    a: int,
    b: str | None = None,
    c: Annotated[Item | None, "described"] = None,
    d: Any = 0,
    hidden: Annotated[str, {"include_in_function_choices": False}] = "",
    kernel: Any = None,
) -> None: ...


WIDE = function_of(wide)


@given(
    st.text(st.characters(codec=None))
    | JSON.map(json.dumps)
    | JSON.map(lambda v: json.dumps(v, ensure_ascii=False))
)
def test_any_text_is_accepted_or_answered(text: str) -> None:
    """Parsing never raises, and a message can always be sent."""
    parsed = parse(WIDE, text)
    if isinstance(parsed, InvalidArguments):
        parsed.message.encode()
        assert parse(WIDE, text) == parsed


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: JSON for name in ("a", "b", "c", "d", "hidden", "kernel", "other")
        },
    )
)
def test_what_is_accepted_is_visible_and_can_be_sent_back(
    arguments: dict[str, Any],
) -> None:
    """Accepted arguments are declared, visible parameters, complete, and JSON again."""
    parsed = parse(WIDE, json.dumps(arguments))
    if not isinstance(parsed, InvalidArguments):
        assert {"a"} <= parsed.keys() <= {"a", "b", "c", "d"}
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()


NAMES = st.text().filter(lambda name: name != "forbidden")


@given(
    st.integers(),
    st.none() | st.text(),
    st.none() | st.builds(lambda **c: c, name=NAMES, count=st.integers()),
)
def test_what_fits_is_accepted(a: int, b: str | None, c: dict[str, Any] | None) -> None:
    """Arguments of the right types are never refused."""
    arguments = {"a": a, "b": b, "c": c}
    assert parse(WIDE, json.dumps(arguments)) == arguments
