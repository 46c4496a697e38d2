"""`next_action` on replies and steps: what is an answer, and when functions are withdrawn."""

from dataclasses import replace
from typing import Any

import pytest

from planner_ext.core.facts import Resumed
from planner_ext.core.limits import Budget
from planner_ext.core.machine import AddMessage, CheckAnswer
from support.core import (
    LOOP,
    RESUMED,
    Play,
    budget_changed,
    calls,
    says,
    stop,
    violations,
)
from support.narrow import as_type
from support.values import each_of


@pytest.mark.parametrize(
    ("name", "status", "limit"),
    [
        ("maximum_use_attempts", "limit_reached", "maximum_use_attempts"),
        ("", "answered", None),
    ],
)
def test_used_attempts_withdraw_functions(
    name: str, status: str, limit: str | None
) -> None:
    """Two attempts are two tool rounds and a plain request; used up, they are a limit where they have a name."""
    play = Play(*LOOP, use_attempts=2, attempts_limit=name).go()
    assert [request.offer for request in play.requests] == [True, True, False]
    assert play.end.status == status
    assert play.end.limit == limit
    assert play.end.answer == "forced"
    if limit:
        assert play.end.reason == "The limit maximum_use_attempts=2 was reached."


def test_attempts_that_are_not_used_up_reach_no_limit() -> None:
    """A plain reply before the attempts are used is an answer."""
    assert (
        Play(calls("f"), says("done"), use_attempts=2, attempts_limit="a")
        .go()
        .end.status
        == "answered"
    )


def test_a_required_choice_holds_for_each_tool_round() -> None:
    """``required`` is sent as long as functions are offered, and not after."""
    play = Play(*LOOP, use_attempts=2, tool_choice="required").go()
    assert [request.tool_choice for request in play.requests] == [
        "required",
        "required",
        None,
    ]


def test_a_step_ends_with_a_plain_reply() -> None:
    """After its tool rounds a step is closed by a reply without functions, and the next step is announced."""
    play = Play(
        calls("f"),
        says("one"),
        calls("f"),
        says("two"),
        says("done"),
        rounds_per_step=1,
    ).go()
    assert [request.offer for request in play.requests] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert [request.withheld for request in play.requests] == [None] * 5
    assert [action for action in play.actions if isinstance(action, AddMessage)] == [
        AddMessage(purpose="step")
    ] * 2
    assert (play.end.status, play.end.answer) == ("answered", "done")


def test_a_step_without_functions_to_offer_is_an_answer() -> None:
    """Without any functions, a plain reply in a fresh step answers the run."""
    assert (
        Play(says("done", available=False), rounds_per_step=1).go().end.status
        == "answered"
    )


def test_a_step_closed_on_the_reserved_trip_is_the_forced_answer() -> None:
    """The last trip answers the run, though it closes a step at the same time."""
    play = Play(calls("f"), rounds_per_step=1, limits=Budget(max_iterations=2)).go(
        says("sorry")
    )
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_iterations"
    assert play.end.answer == "sorry"


def test_a_limit_needs_functions_to_withhold() -> None:
    """Where no function exists, the reserved trip withheld nothing: its reply is an answer."""
    play = Play(says("done", available=False), limits=Budget(max_iterations=1)).go()
    assert (play.end.status, play.end.limit) == ("answered", None)


def test_a_required_final_answer_is_insisted_on() -> None:
    """Where the final-answer function is required, a plain reply does not end the run: the model is asked again."""
    play = Play(says("hm"), calls("final"), require_final_answer=True).go()
    assert AddMessage(purpose="insist") in play.actions
    assert (play.end.status, play.end.answer) == ("answered", "42")
    assert [as_type(dict, entry)["text"] for entry in play.state.transcript[:3]] == [
        "goal",
        "hm",
        "insist",
    ]


def test_a_final_answer_is_not_insisted_on_where_it_was_not_offered() -> None:
    """A plain reply to a request without functions is taken for want of better."""
    play = Play(calls("f"), use_attempts=1, require_final_answer=True).go(says("plain"))
    assert (play.end.status, play.end.answer) == ("answered", "plain")


def test_a_final_answer_beside_other_calls_is_taken() -> None:
    """The others are answered without running, the answer is taken, and no further request is made."""
    play = Play(calls("f", "final", "unknown", "g"), verdicts={"g": "defer"}).go()
    read = ["Not executed", "answer to final", "answer to unknown", "Not executed"]
    assert [text.split(":")[0] for text in play.results] == read
    assert play.end.status == "answered"
    assert play.end.answer == "42"
    assert len(play.requests) == 1
    assert play.state.usage.tool_calls == 0
    assert violations(play.state.transcript) == []


@pytest.mark.parametrize("reason", ["length", "content_filter"])
@each_of("turn", [says("half an ans"), says(""), calls("f", text="I w"), calls("f")])
def test_a_reply_cut_short_does_not_answer(turn: Any, reason: str) -> None:
    """A reply that was cut is incomplete, none of its calls run, and the reason is named."""
    play = Play(replace(turn, finish_reason=reason)).go()
    assert (play.end.status, play.end.answer) == ("incomplete", "")
    assert reason in play.end.reason
    assert play.state.usage.tool_calls == 0
    assert violations(play.state.transcript) == []


def test_an_empty_reply_is_incomplete() -> None:
    """A reply without text and calls is incomplete."""
    play = Play(says("")).go()
    assert (play.end.status, play.end.reason) == (
        "incomplete",
        "The reply has neither text nor calls.",
    )


def test_calls_to_a_request_without_functions_are_not_run() -> None:
    """A model that calls where nothing was offered has its text taken, and its calls dropped."""
    stubborn = calls("f", text="anyway", stubborn=True)
    play = Play(calls("f"), limits=Budget(max_iterations=2)).go(stubborn)
    assert (play.end.status, play.end.answer) == ("limit_reached", "anyway")
    assert play.state.usage.tool_calls == 1
    assert violations(play.state.transcript) == []


def test_an_answer_out_of_form_keeps_the_limit_that_ended_the_run() -> None:
    """Where no further request may be made either, the end names the limit that withheld the functions."""
    limits = Budget(max_iterations=3, max_tool_calls=1)
    play = Play(
        calls("f"),
        calls("f"),
        says("prose"),
        structured=True,
        formed={"{}"},
        limits=limits,
    ).go()
    assert [request.withheld for request in play.requests] == [
        None,
        None,
        "max_tool_calls",
    ]
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_tool_calls"
    assert play.end.answer == "prose"
    assert play.end.reason.startswith("The answer is not in its form")


FORM: dict[str, Any] = {"structured": True, "formed": ("{}",)}


def test_an_answer_out_of_form_is_asked_for_again_with_what_is_wrong() -> None:
    """The message says it, the request offers no functions and asks for the form, and the run ends with the answer."""
    play = Play(says("prose"), says("{}"), **FORM).go()
    (message,) = [action for action in play.actions if isinstance(action, AddMessage)]
    assert (message.purpose, message.problem) == ("structure", "It is not in the form.")
    assert [(request.offer, request.structured) for request in play.requests] == [
        (True, True),
        (False, True),
    ]
    assert (play.end.status, play.end.answer) == ("answered", "{}")


def test_an_answer_by_the_final_function_is_checked_like_any_other() -> None:
    """Out of its form it is asked for again, and it is not the answer any more."""
    play = Play(calls("final"), says("{}"), **FORM).go()
    assert (play.end.status, play.end.answer) == ("answered", "{}")


def test_an_end_without_an_answer_is_not_checked() -> None:
    """An empty reply has no structure to check."""
    play = Play(says(""), **FORM).go()
    assert not any(isinstance(action, CheckAnswer) for action in play.actions)
    assert play.end.status == "incomplete"


@each_of("steps", [1, 2, 3], ids=["replied", "checked", "asked for again"])
def test_a_stop_keeps_an_answer_out_of_form(steps: int) -> None:
    """No further request is made for its form, and the run ends with it, stopped."""
    play = (
        Play(says("prose"), says("{}"), **FORM).go(steps=steps).add(stop("enough")).go()
    )
    assert play.end.status == "stopped"
    assert play.end.answer == "prose"
    assert play.end.reason == "enough"
    assert len(play.requests) == 1


def test_a_limit_that_shrinks_keeps_an_answer_out_of_form() -> None:
    """Where no request may follow after it was asked for again, the run ends at the limit with it."""
    play = Play(says("prose"), says("{}"), **FORM).go(steps=3)
    play.add(budget_changed(Budget(max_iterations=1))).go()
    assert play.end.status == "limit_reached"
    assert play.end.answer == "prose"
    assert play.end.limit == "max_iterations"
    assert "no further request may be made. It is not in the form." in play.end.reason


def test_a_reply_that_was_cut_short_does_not_answer_after_the_form_was_asked_for() -> (
    None
):
    """Resumed where no request may follow, the run ends without one."""
    play = Play(says("prose"), says("{", finish_reason="length"), **FORM).go()
    play.add(RESUMED, stop("enough")).go()
    assert play.end.status == "stopped"
    assert play.end.answer == ""
    assert play.end.reason == "enough"
    play.add(Resumed(limits=Budget(max_iterations=2), at=0.0)).go()
    assert play.end.status == "limit_reached"
    assert play.end.answer == ""
    assert play.end.limit == "max_iterations"
    assert play.end.reason == "The limit max_iterations=2 was reached."


CHECKED: dict[str, Any] = {"checked": True, "formed": ("{}",)}


def test_a_refused_answer_is_asked_for_again_with_functions() -> None:
    """The model may call functions to mend it; the reply after these is checked anew."""
    play = Play(says("prose"), calls("f"), says("{}"), **CHECKED).go()
    (message,) = [action for action in play.actions if isinstance(action, AddMessage)]
    assert message.purpose == "revise"
    assert [request.offer for request in play.requests] == [True, True, True]
    assert (play.end.status, play.end.answer) == ("answered", "{}")


@each_of("steps", [1, 2, 3], ids=["replied", "checked", "asked for again"])
@pytest.mark.parametrize("on_limit", ["stop", "answer"])
def test_a_limit_that_shrinks_keeps_a_refused_answer(steps: int, on_limit: Any) -> None:
    """Where no request may follow, the run ends at the limit with it and the reason."""
    play = Play(says("prose"), says("{}"), **CHECKED).go(steps=steps)
    play.add(budget_changed(Budget(max_iterations=1, on_limit=on_limit))).go()
    assert (play.end.status, play.end.answer) == ("limit_reached", "prose")
    assert "The answer was refused, and no further request" in play.end.reason


@each_of("steps", [1, 2, 3], ids=["replied", "checked", "asked for again"])
def test_a_stop_keeps_a_refused_answer(steps: int) -> None:
    """No further request is made, and the run ends with it, stopped."""
    play = Play(says("prose"), says("{}"), **CHECKED).go(steps=steps)
    play.add(stop("enough")).go()
    assert (play.end.status, play.end.answer) == ("stopped", "prose")
    assert len(play.requests) == 1


@pytest.mark.parametrize(("most", "status"), [(2, "answered"), (1, "limit_reached")])
def test_the_last_round_trip_may_ask_for_the_form(most: int, status: str) -> None:
    """One that is left is enough; without any the answer is taken as it is."""
    play = Play(
        says("prose"),
        says("{}"),
        limits=Budget(max_iterations=most, on_limit="stop"),
        **FORM,
    ).go()
    assert play.end.status == status


def test_the_reply_that_closes_a_step_needs_no_form() -> None:
    """Unless a limit makes it the answer; each other request asks for the form."""
    rules: dict[str, Any] = {"rounds_per_step": 1, **FORM}
    play = Play(calls("f"), says("closed"), says("{}"), **rules).go()
    assert [request.structured for request in play.requests] == [True, False, True]
    last = Play(calls("f"), says("{}"), limits=Budget(max_iterations=2), **rules).go()
    assert [(request.withheld, request.structured) for request in last.requests] == [
        (None, True),
        ("max_iterations", True),
    ]


def test_a_call_beside_no_text_where_none_was_offered_is_named() -> None:
    """The reason of the end names the function that the model called, the first characters of a long name."""
    name = "n" * 65
    play = Play(calls(name, stubborn=True), limits=Budget(max_iterations=1)).go()
    assert play.end.status == "limit_reached"
    assert (
        f"The model called {'n' * 64}, and no functions were offered" in play.end.reason
    )
