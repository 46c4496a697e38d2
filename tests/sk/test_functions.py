"""What a requested call is: resolved by its exact name, with arguments that it declares."""

from dataclasses import replace
from typing import Any

from planner_ext.core.values import ResolvedCall
from planner_ext.engine.ports import Functions
from support.functions import Bench
from support.values import each_of


def test_it_is_the_engines_functions() -> None:
    """The class satisfies the port."""
    functions: Functions = Bench().functions
    assert functions.encode({"a": None}) == '{"a":null}'


def test_a_call_of_an_offered_function_is_resolved_and_validated() -> None:
    """A good call is a function with its names and arguments."""
    checked = Bench().check("lights-switch", '{"room": "hall"}')
    assert replace(
        checked, signature="", parameters="", threaded=False
    ) == ResolvedCall(
        kind="function",
        function="lights-switch",
        plugin_name="lights",
        function_name="switch",
        arguments={"room": "hall"},
    )


@each_of(
    "name",
    [
        "switch",
        "Lights-switch",
        "lights.switch",
        "lights_switch",
        "",
        "lights-",
        "lights",
    ],
)
def test_only_the_exact_name_resolves(name: str) -> None:
    """A bare name, another case or another separator is unknown, and the answer names what exists."""
    checked = Bench().check(name, '{"room": "hall"}')
    assert checked.kind == "unknown"
    assert checked.function == name
    assert dict(checked.arguments) == {}
    assert checked.answer.startswith(
        f'There is no function "{name}". Call one of these by its exact name: lights-'
    )
    assert "lights-switch" in checked.answer
    assert checked.answer.endswith("planner-SendFinalAnswer, remote-call.")


def test_a_function_that_exists_and_is_not_offered_is_unknown() -> None:
    """What was not offered with the request does not run."""
    bench = Bench()
    del bench.offered["lights-fail"]
    assert bench.check("lights-fail").kind == "unknown"


def test_the_list_of_functions_is_bounded() -> None:
    """A kernel with hundreds of functions does not fill the model's context."""
    bench = Bench()
    bench.tools.functions = {f"p-f{number}": bench.final for number in range(300)}
    answer = bench.check("no" * 500).answer
    assert "p-f49, and 251 more." in answer
    assert len(answer) < 1000


def test_without_functions_the_answer_says_so() -> None:
    """With no function to offer, the result asks the model to answer."""
    bench = Bench()
    bench.tools.functions, bench.tools.schema_only = {}, frozenset()
    assert bench.check("p-f").answer == (
        'There is no function "p-f", and no other may be called now. Answer without functions.'
    )


def test_a_function_known_by_schema_only_is_external() -> None:
    """The caller must run it; its arguments are not checked here."""
    assert Bench().check("remote-call", "not even JSON") == ResolvedCall(
        kind="external", function="remote-call", arguments={}
    )


def test_bad_arguments_are_answered() -> None:
    """Invalid arguments carry a message the model can act on."""
    checked = Bench().check("lights-switch", '{"room": "hall", "colour": "red"}')
    assert checked.kind == "invalid"
    assert checked.function == "lights-switch"
    assert dict(checked.arguments) == {}
    assert '"colour" is not a parameter' in checked.answer


def test_edited_arguments_replace_the_models() -> None:
    """An edit is validated like the model's own."""
    bench = Bench()
    assert bench.check("lights-switch", "nonsense", '{"room": "attic"}').arguments == {
        "room": "attic"
    }
    assert (
        bench.check("lights-switch", '{"room": "hall"}', '{"attic": 1}').kind
        == "invalid"
    )


@each_of(("sent", "answer"), [("done", "done"), (42, "42"), (True, "true")])
def test_the_final_answer_is_taken_as_text(sent: Any, answer: str) -> None:
    """The planner's own function is recognised, and its answer is text."""
    checked = Bench().check("planner-SendFinalAnswer", {"answer": sent})
    assert (checked.kind, checked.answer) == ("final_answer", answer)


@each_of(
    "arguments",
    [
        "",
        '{"answer": " "}',
        '{"answer": null}',
        '{"answer": {"a": 1}}',
        '{"text": "done"}',
        "done",
    ],
)
def test_a_malformed_final_answer_is_invalid(arguments: str) -> None:
    """The model reads how to send it."""
    checked = Bench().check("planner-SendFinalAnswer", arguments)
    assert checked.kind == "invalid"
    assert "planner-SendFinalAnswer" in checked.answer


def test_the_final_answer_function_is_recognised_by_identity() -> None:
    """A function of the application with the same name is a function like another."""
    assert (
        Bench(final_answer=None).check("planner-SendFinalAnswer", {"answer": "x"}).kind
        == "function"
    )
    assert (
        Bench(final_answer=Bench().final)
        .check("planner-SendFinalAnswer", {"answer": "x"})
        .kind
        == "function"
    )
