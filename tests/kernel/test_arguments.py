import enum
import inspect
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.exceptions import FunctionExecutionException
from semantic_kernel.functions import (
    KernelArguments,
    KernelFunction,
    KernelFunctionFromPrompt,
    KernelParameterMetadata,
    kernel_function,
)
from semantic_kernel.functions.kernel_function_from_method import KernelFunctionFromMethod
from semantic_kernel.prompt_template import InputVariable, PromptTemplateConfig

from planner_ext.kernel.arguments import (
    MAX_DEPTH,
    InvalidArguments,
    conversion_problem,
    parameters_of,
    parse_arguments,
    quoted,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Item(pydantic.BaseModel):
    name: str
    count: int = 1

    @pydantic.field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        if name == "forbidden":
            raise ValueError("looked up in the secret table")
        return name


def function_of(method: Callable[..., Any], **more: Any) -> KernelFunctionFromMethod:
    return KernelFunctionFromMethod(kernel_function(name="f")(method), plugin_name="p", **more)


def taking(annotation: Any, default: Any = inspect.Parameter.empty) -> KernelFunction:
    """A function ``p-f`` with one parameter ``p``."""

    def f(**arguments: Any) -> Any:
        return arguments["p"]

    parameter = inspect.Parameter("p", inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
    f.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return function_of(f)


def declaring(**parameter: Any) -> KernelFunction:
    """A function ``p-f`` with one parameter ``p`` that was declared by hand, as plugins of remote tools do."""

    def f(**arguments: Any) -> Any:
        return arguments["p"]

    return function_of(f, parameters=[KernelParameterMetadata(name="p", **parameter)])


def parse(function: KernelFunction, text: str) -> dict[str, Any] | InvalidArguments:
    return parse_arguments(text, parameters_of(function))


def message_of(function: KernelFunction, text: str) -> str:
    parsed = parse(function, text)
    assert isinstance(parsed, InvalidArguments)
    return parsed.message


def accepts(function: KernelFunction, value: Any) -> bool:
    parsed = parse(function, json.dumps({"p": value}))
    assert isinstance(parsed, InvalidArguments) or parsed == {"p": value}
    return not isinstance(parsed, InvalidArguments)


def add(a: int, b: int = 0) -> int:
    return a + b


ADD = function_of(add)


def test_a_json_object_of_declared_parameters_is_accepted() -> None:
    """What the function declares is returned as it was sent."""
    assert parse(ADD, ' {"a": 1, "b": 2}\n') == {"a": 1, "b": 2}


def test_optional_parameters_may_be_left_out() -> None:
    """Only what is required must be given."""
    assert parse(ADD, '{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("text", ["", " \n", "{}"])
def test_no_arguments_are_an_empty_object(text: str) -> None:
    """Models send nothing at all for a function without parameters."""
    assert parse(function_of(lambda: None), text) == {}


@pytest.mark.parametrize("text", ["null", "[]", "1", '"a"', "true", '[{"a": 1}]'])
def test_what_is_no_object_is_refused(text: str) -> None:
    """Arguments are one JSON object and nothing else."""
    assert message_of(ADD, text) == f"The arguments of p-add must be one JSON object; got {text}.".replace("add", "f")


@pytest.mark.parametrize("text", ["{'a': 1}", '{"a": 1', '{"a": 1}}', '{"a": 1,}', "a=1", '{"a": "\n"}', "\ufeff{}"])
def test_text_that_is_not_json_is_refused_and_not_repaired(text: str) -> None:
    """Single quotes, cut texts, trailing commas: the model is told where, and nothing is guessed."""
    assert message_of(ADD, text).startswith("The arguments of p-f are not valid JSON, see character ")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_json_cannot_carry_are_refused(number: str) -> None:
    """Not-a-number, the infinities, and integers too long to be written again."""
    assert "hold a number" in message_of(ADD, f'{{"a": {number}}}')


@pytest.mark.parametrize(
    "text", [r'{"p": "\ud800"}', '{"p": "\udfff"}', r'{"p": ["\ude00\ud83d"]}', r'{"\udc00": 1}', r'{"p": "é\uD800"}']
)
def test_lone_surrogates_are_refused(text: str) -> None:
    """Text that could not be sent back to the model is not accepted from it."""
    assert "lone surrogate" in message_of(taking(Any), text)


def test_surrogate_pairs_are_text() -> None:
    """An escaped character outside the basic plane is what it stands for."""
    assert parse(taking(str), r'{"p": "\ud83d\ude00 \\ud800"}') == {"p": "😀 \\ud800"}


@pytest.mark.parametrize("levels", [MAX_DEPTH, 990, 200_000])
def test_nesting_without_end_is_refused(levels: int) -> None:
    """One message for every depth beyond the bound, wherever Python's own limit lies."""
    text = f'{{"p": {"[" * levels}{"]" * levels}}}'
    assert message_of(taking(Any), text) == (
        f"The arguments of p-f are nested deeper than {MAX_DEPTH} levels. Send a flatter JSON object."
    )


def test_nesting_within_reason_is_accepted() -> None:
    """The bound itself is fine, and brackets in a text are no nesting."""
    levels = MAX_DEPTH - 1
    assert isinstance(parse(taking(Any), f'{{"p": {"[" * levels}{"]" * levels}}}'), dict)
    assert isinstance(parse(taking(Any), json.dumps({"p": "[{" * 1000})), dict)


def test_size_is_no_reason_to_refuse() -> None:
    """A document of megabytes is an argument like another."""
    assert accepts(taking(str), "x" * 3_000_000)
    assert accepts(taking(list), list(range(100_000)))


def test_missing_and_unknown_arguments_are_named_in_one_message() -> None:
    """The model reads everything that is wrong, and what the function takes."""
    assert message_of(ADD, '{"c": 1, "b": "x"}') == (
        'The arguments of p-f cannot be used: "a" is missing; "c" is not a parameter; "b" must be integer, not "x". '
        "Its parameters: a (integer, required), b (integer). Call it again with corrected arguments."
    )


def test_what_the_model_sent_is_echoed_in_short() -> None:
    """Long names and values are cut, and many names are counted."""
    message = message_of(ADD, json.dumps({"a": "v" * 10_000} | {f"n{i}" + "n" * 1000: 1 for i in range(100)}))
    assert len(message) < 1600
    assert "90 more are not parameters" in message


def test_a_function_without_parameters_says_so() -> None:
    """The model learns that there is nothing to give."""
    assert "It takes no parameters." in message_of(function_of(lambda: None), '{"a": 1}')


def secretive(
    shown: str,
    hidden: Annotated[str, {"include_in_function_choices": False}],
    kernel: Any,
    service: Any,
    execution_settings: Any,
    arguments: Any,
) -> None: ...


@pytest.mark.parametrize("name", ["hidden", "kernel", "service", "execution_settings", "arguments", "nothing"])
def test_what_the_model_cannot_see_it_cannot_set(name: str) -> None:
    """Hidden and injected parameters are refused like unknown ones, and never demanded."""
    function = function_of(secretive)
    assert parse(function, '{"shown": "x"}') == {"shown": "x"}
    assert message_of(function, json.dumps({"shown": "x", name: "y"})) == (
        f'The arguments of p-f cannot be used: "{name}" is not a parameter. '
        "Its parameters: shown (string, required). Call it again with corrected arguments."
    )


def test_a_parameter_named_settings_is_a_parameter() -> None:
    """The name means something to KernelArguments, and nothing here."""

    def f(settings: str) -> None: ...

    assert parse(function_of(f), '{"settings": "dark"}') == {"settings": "dark"}


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (str, ["", "x", 1, 1.5, True], [None, [], {}]),
        (int, [0, -3, 10**400, 3.0, "42", " 7 "], [None, True, 1.5, "x", "1.5", "", "9" * 5000, [], {}]),
        (float, [1, 1.5, "1.5", "-2"], [None, False, "x", "nan", "inf", 10**400, [], {}]),
        (bool, [True, False], [None, 0, 1, "true", "false", "", [], {}]),
        (list, [[], [1, "a", None]], [None, {}, "a", 1]),
        (list[int], [[], [1]], [None, {}, "1"]),
        (set[int], [[1]], [None, {}]),
        (tuple[int, str], [[1, "a"]], [None, {}]),
        (dict, [{}, {"a": 1}], [None, [], "a", 1]),
        (dict[str, int], [{"a": 1}], [None, []]),
        (Item, [{"name": "a"}, {}], [None, [], "a"]),
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
    """A string of digits is an integer, "false" is no boolean, and types that have no schema of their own are open."""
    function = taking(annotation)
    assert [value for value in good if not accepts(function, value)] == []
    assert [value for value in bad if accepts(function, value)] == []


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (str | None, "x"),
        (Optional[int], 1),  # noqa: UP045
        (Annotated[str | None, "described"], "x"),
        (Annotated[Optional[int], "described"], 1),  # noqa: UP045
        (Annotated[list[str] | None, "described"], ["x"]),
        (Colour | None, "red"),
        (Item | None, {"name": "a"}),
        (bool | None, False),
    ],
)
def test_optional_parameters_accept_null(annotation: Any, value: Any) -> None:
    """Semantic Kernel's schema of an optional says nothing of null; it is accepted all the same."""
    function = taking(annotation, None)
    assert parse(function, "{}") == {}
    assert accepts(function, None)
    assert accepts(function, value)
    assert not accepts(function, ["a", {}] if value != ["x"] else {"a": 1})


def test_a_parameter_with_a_default_is_not_nullable() -> None:
    """A default is what holds when an argument is left out, not when it is null."""
    assert not accepts(taking(int, 3), None)


@pytest.mark.parametrize(
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
def test_a_schema_given_by_hand_is_taken_at_its_word(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    """Semantic Kernel converts nothing there, so a near miss would reach the function as it is."""
    function = declaring(schema_data=schema, is_required=True)
    assert [value for value in good if not accepts(function, value)] == []
    assert [value for value in bad if accepts(function, value)] == []


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Colour, 'one of "red", "blue"'),
        (Annotated[Optional[int], "d"], "integer or null"),  # noqa: UP045
        (Colour | None, 'one of "red", "blue" or null'),
    ],
)
def test_the_message_says_what_is_expected(annotation: Any, expected: str) -> None:
    """Types, null and the values of an enumeration are named."""
    assert f'"p" must be {expected}, not ["x"]' in message_of(taking(annotation), '{"p": ["x"]}')


def test_many_values_are_not_all_listed() -> None:
    """An enumeration of hundreds does not fill the model's context."""
    message = message_of(declaring(schema_data={"enum": [f"value {i}" for i in range(1000)]}), '{"p": "x"}')
    assert '"value 49", ...' in message
    assert "value 50" not in message


def test_the_variables_of_a_prompt_take_what_can_be_written() -> None:
    """A prompt has no types of its own, and nothing is injected into it: a variable may be named service."""
    config = PromptTemplateConfig(
        template="{{$service}} {{$n}}",
        input_variables=[InputVariable(name="service"), InputVariable(name="n", json_schema="str", is_required=False)],
    )
    function = KernelFunctionFromPrompt(function_name="f", plugin_name="p", prompt_template_config=config)
    assert parse(function, '{"service": "x", "n": 5}') == {"service": "x", "n": 5}
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
    assert conversion_problem(error, parameters_of(taking(Item)), {"p": value}) == (
        'The argument "p" of p-f cannot be converted to Item (name: not valid; count: Input should be a valid integer, '
        "unable to parse string as an integer). The function was not run. Call it again with a corrected argument."
    )


async def test_an_argument_without_a_model_is_explained_in_short() -> None:
    """Where the type says nothing, its name is what the model reads."""
    error = await failure_of(list[int], ["x"])
    assert conversion_problem(error, parameters_of(taking(list[int])), {"p": ["x"]}) == (
        'The argument "p" of p-f cannot be converted to list[int]. The function was not run. '
        "Call it again with a corrected argument."
    )


async def test_an_argument_of_the_application_is_not_the_models_concern() -> None:
    """What the model did not give is not explained to it."""
    assert conversion_problem(await failure_of(list[int], ["x"]), parameters_of(taking(list[int])), {}) is None


def test_other_errors_are_not_conversions() -> None:
    """The error's class alone says nothing: Semantic Kernel raises it for much else."""
    parameters = parameters_of(ADD)
    assert conversion_problem(FunctionExecutionException("Parameter a is expected"), parameters, {"a": 1}) is None
    assert conversion_problem(ValueError("no"), parameters, {"a": 1}) is None
    try:
        raise FunctionExecutionException("from elsewhere")
    except FunctionExecutionException as error:
        assert conversion_problem(error, parameters, {"a": 1}) is None


def test_quoted_values_are_short_and_sendable() -> None:
    """An echo is JSON, cut, and never breaks the request that carries it."""
    assert quoted('a"b') == '"a\\"b"'
    assert quoted("\ud800") == '"?"'
    assert len(quoted("x" * 1000)) == 82
    assert quoted(list(range(1000))).endswith("...")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda children: st.lists(children) | st.dictionaries(st.text() | st.sampled_from(["a", "b", "c"]), children),
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
    st.text(st.characters(codec=None)) | JSON.map(json.dumps) | JSON.map(lambda v: json.dumps(v, ensure_ascii=False))
)
def test_any_text_is_accepted_or_answered(text: str) -> None:
    """Parsing never raises, and a message can always be sent."""
    parsed = parse(WIDE, text)
    if isinstance(parsed, InvalidArguments):
        parsed.message.encode()
        assert parse(WIDE, text) == parsed


@given(st.fixed_dictionaries({}, optional={name: JSON for name in ("a", "b", "c", "d", "hidden", "kernel", "other")}))
def test_what_is_accepted_is_visible_and_can_be_sent_back(arguments: dict[str, Any]) -> None:
    """Accepted arguments are declared, visible parameters, complete, and JSON again."""
    parsed = parse(WIDE, json.dumps(arguments))
    if not isinstance(parsed, InvalidArguments):
        assert {"a"} <= parsed.keys() <= {"a", "b", "c", "d"}
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()


@given(st.integers(), st.none() | st.text(), st.none() | st.dictionaries(st.text(), st.integers()))
def test_what_fits_is_accepted(a: int, b: str | None, c: dict[str, int] | None) -> None:
    """Arguments of the right types are never refused."""
    arguments = {"a": a, "b": b, "c": c}
    assert parse(WIDE, json.dumps(arguments)) == arguments
