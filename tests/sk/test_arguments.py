"""Arguments as a model writes them: what is accepted, and what the model reads about the rest."""

import json
from typing import Annotated, Any

from planner_ext.sk.functions.conversion import MAX_DEPTH, parse_object
from support.arguments import ADD, accepts, function_of, message_of, parse, taking
from support.values import each_of


def test_a_json_object_of_declared_parameters_is_accepted() -> None:
    """What the function declares is returned as it was sent."""
    assert parse(ADD, ' {"a": 1, "b": 2}\n') == {"a": 1, "b": 2}


def test_optional_parameters_may_be_left_out() -> None:
    """Only what is required must be given."""
    assert parse(ADD, '{"a": 1}') == {"a": 1}


@each_of("text", ["", " \n", "{}"])
def test_no_arguments_are_an_empty_object(text: str) -> None:
    """Models send nothing at all for a function without parameters."""
    assert parse(function_of(lambda: None), text) == {}


@each_of("text", ["null", "[]", "1", '"a"', "true", '[{"a": 1}]'])
def test_anything_but_an_object_is_refused(text: str) -> None:
    """Arguments are one JSON object and nothing else."""
    assert message_of(
        ADD, text
    ) == f"The arguments of p-add must be one JSON object; got {text}.".replace(
        "add", "f"
    )


@each_of(
    "text",
    ["{'a': 1}", '{"a": 1', '{"a": 1}}', '{"a": 1,}', "a=1", '{"a": "\n"}', "\ufeff{}"],
)
def test_text_that_is_not_json_is_refused_and_not_repaired(text: str) -> None:
    """Single quotes, cut texts, trailing commas: the model reads where the error is, and nothing is guessed."""
    assert message_of(ADD, text).startswith(
        "The arguments of p-f are not valid JSON, see character "
    )


@each_of("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_json_cannot_carry_are_refused(number: str) -> None:
    """Not-a-number, the infinities, and integers too long to be written again."""
    assert "hold a number" in message_of(ADD, f'{{"a": {number}}}')


@each_of(
    "text",
    [
        r'{"p": "\ud800"}',
        '{"p": "\udfff"}',
        r'{"p": ["\ude00\ud83d"]}',
        r'{"\udc00": 1}',
        r'{"p": "é\uD800"}',
    ],
)
def test_lone_surrogates_are_refused(text: str) -> None:
    """Text that could not be sent back to the model is not accepted from it."""
    assert "lone surrogate" in message_of(taking(Any), text)


def test_surrogate_pairs_are_text() -> None:
    """An escaped character outside the basic plane is what it stands for."""
    assert parse(taking(str), r'{"p": "\ud83d\ude00 \\ud800"}') == {"p": "😀 \\ud800"}


@each_of("levels", [MAX_DEPTH, 990, 200_000])
def test_nesting_without_end_is_refused(levels: int) -> None:
    """One message for every depth beyond the bound, wherever Python's own limit lies."""
    text = f'{{"p": {"[" * levels}{"]" * levels}}}'
    assert message_of(taking(Any), text) == (
        f"The arguments of p-f are nested deeper than {MAX_DEPTH} levels. Send a flatter JSON object."
    )


def test_nesting_up_to_the_bound_is_accepted() -> None:
    """The bound itself is allowed, and brackets in a string do not count."""
    levels = MAX_DEPTH - 1
    assert isinstance(
        parse(taking(Any), f'{{"p": {"[" * levels}{"]" * levels}}}'), dict
    )
    assert isinstance(parse(taking(Any), json.dumps({"p": "[{" * 1000})), dict)


def test_size_does_not_matter() -> None:
    """A document of megabytes is an argument like another."""
    assert accepts(taking(str), "x" * 3_000_000)
    assert accepts(taking(list), list(range(100_000)))


def test_missing_and_unknown_arguments_are_named_in_one_message() -> None:
    """The model reads everything that is wrong, and what the function takes."""
    assert message_of(ADD, '{"c": 1, "b": "x"}') == (
        'The arguments of p-f cannot be used: "a" is missing; "c" is not a parameter; "b" must be integer, not "x". '
        "Its parameters: a (integer, required), b (integer). Correct the arguments."
    )


def test_what_the_model_sent_is_echoed_in_short() -> None:
    """Long names and values are cut, and many names are counted."""
    message = message_of(
        ADD,
        json.dumps({"a": "v" * 10_000} | {f"n{i}" + "n" * 1000: 1 for i in range(100)}),
    )
    assert len(message) < 1600
    assert "90 more are not parameters" in message


def test_a_function_without_parameters_says_so() -> None:
    """The model learns that there is nothing to give."""
    assert "It takes no parameters." in message_of(
        function_of(lambda: None), '{"a": 1}'
    )


def secretive(
    shown: str,
    hidden: Annotated[str, {"include_in_function_choices": False}],
    kernel: Any,
    service: Any,
    execution_settings: Any,
    arguments: Any,
) -> None: ...


@each_of(
    "name",
    ["hidden", "kernel", "service", "execution_settings", "arguments", "nothing"],
)
def test_what_the_model_cannot_see_it_cannot_set(name: str) -> None:
    """Hidden and injected parameters are refused like unknown ones, and never demanded."""
    function = function_of(secretive)
    assert parse(function, '{"shown": "x"}') == {"shown": "x"}
    assert message_of(function, json.dumps({"shown": "x", name: "y"})) == (
        f'The arguments of p-f cannot be used: "{name}" is not a parameter. '
        "Its parameters: shown (string, required). Correct the arguments."
    )


def test_a_parameter_named_settings_is_a_parameter() -> None:
    """The name means something to KernelArguments, and nothing here."""

    def f(settings: str) -> None: ...

    assert parse(function_of(f), '{"settings": "dark"}') == {"settings": "dark"}


def test_arguments_that_are_parsed_twice_are_not_shared() -> None:
    """A flat object is remembered between two looks at a call; a change of one does not show in the other."""
    text = '{"a": 1, "b": 2}'
    first = parse_object(text)
    assert isinstance(first, dict)
    first.clear()
    assert parse_object(text) == {"a": 1, "b": 2}
