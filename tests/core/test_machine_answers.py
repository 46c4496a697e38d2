"""`next_action` on replies and steps: what is an answer, and when functions are withdrawn."""

from dataclasses import replace
from typing import Any

import pytest

from planner_ext.core.limits import Budget
from planner_ext.core.machine import (
    AddMessage,
)
from support.core import (
    LOOP,
    Play,
    calls,
    says,
    violations,
)
from support.narrow import as_type


@pytest.mark.parametrize(
    ("name", "status", "limit"),
    [("maximum_use_attempts", "limit_reached", "maximum_use_attempts"), ("", "answered", None)],
)
def test_used_attempts_withdraw_functions(name: str, status: str, limit: str | None) -> None:
    """Two attempts are two tool rounds and a plain request; used up, they are a limit where they have a name."""
    play = Play(*LOOP, use_attempts=2, attempts_limit=name).go()
    assert [request.offer for request in play.requests] == [True, True, False]
    assert (play.end.status, play.end.limit, play.end.answer) == (status, limit, "forced")
    if limit:
        assert play.end.reason == "The limit maximum_use_attempts=2 was reached."


def test_attempts_that_are_not_used_up_are_no_limit() -> None:
    """A plain reply before the attempts are used is an answer."""
    assert Play(calls("f"), says("done"), use_attempts=2, attempts_limit="a").go().end.status == "answered"


def test_a_required_choice_holds_for_each_tool_round() -> None:
    """``required`` is sent as long as functions are offered, and not after."""
    play = Play(*LOOP, use_attempts=2, tool_choice="required").go()
    assert [request.tool_choice for request in play.requests] == ["required", "required", None]


def test_a_step_ends_with_a_plain_reply() -> None:
    """After its tool rounds a step is closed by a reply without functions, and the next step is announced."""
    play = Play(calls("f"), says("one"), calls("f"), says("two"), says("done"), rounds_per_step=1).go()
    assert [request.offer for request in play.requests] == [True, False, True, False, True]
    assert [request.withheld for request in play.requests] == [None] * 5
    assert [action for action in play.actions if isinstance(action, AddMessage)] == [AddMessage(purpose="step")] * 2
    assert (play.end.status, play.end.answer) == ("answered", "done")


def test_a_step_without_functions_to_offer_is_an_answer() -> None:
    """Where there is no function at all, a plain reply in a fresh step answers the run."""
    assert Play(says("done", available=False), rounds_per_step=1).go().end.status == "answered"


def test_a_step_closed_on_the_reserved_trip_is_the_forced_answer() -> None:
    """The last trip answers the run, though it closes a step at the same time."""
    play = Play(calls("f"), rounds_per_step=1, limits=Budget(max_iterations=2)).go(says("sorry"))
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_iterations", "sorry")


def test_a_limit_needs_functions_to_withhold() -> None:
    """Where no function exists, the reserved trip withheld nothing: its reply is an answer."""
    play = Play(says("done", available=False), limits=Budget(max_iterations=1)).go()
    assert (play.end.status, play.end.limit) == ("answered", None)


def test_a_required_final_answer_is_insisted_on() -> None:
    """A plain reply is not enough where the final-answer function is required: the model is told, and asked again."""
    play = Play(says("hm"), calls("final"), require_final_answer=True).go()
    assert AddMessage(purpose="insist") in play.actions
    assert (play.end.status, play.end.answer) == ("answered", "42")
    assert [as_type(dict, entry)["text"] for entry in play.state.transcript[:3]] == ["goal", "hm", "insist"]


def test_a_final_answer_is_not_insisted_on_where_it_was_not_offered() -> None:
    """A plain reply to a request without functions is taken for want of better."""
    play = Play(calls("f"), use_attempts=1, require_final_answer=True).go(says("plain"))
    assert (play.end.status, play.end.answer) == ("answered", "plain")


def test_a_final_answer_beside_other_calls_is_taken() -> None:
    """The others are answered without running, the answer is taken, and no further request is made."""
    play = Play(calls("f", "final", "unknown", "g"), verdicts={"g": "defer"}).go()
    read = ["Not executed", "answer to final", "answer to unknown", "Not executed"]
    assert [text.split(":")[0] for text in play.results] == read
    assert (play.end.status, play.end.answer, len(play.requests)) == ("answered", "42", 1)
    assert play.state.ledger.tool_calls == 0
    assert violations(play.state.transcript) == []


@pytest.mark.parametrize("reason", ["length", "content_filter"])
@pytest.mark.parametrize("turn", [says("half an ans"), says(""), calls("f", text="I w"), calls("f")])
def test_a_reply_cut_short_is_no_answer(turn: Any, reason: str) -> None:
    """A reply that was cut is incomplete, none of its calls run, and the reason is named."""
    play = Play(replace(turn, finish_reason=reason)).go()
    assert (play.end.status, play.end.answer) == ("incomplete", "")
    assert reason in play.end.reason
    assert play.state.ledger.tool_calls == 0
    assert violations(play.state.transcript) == []


def test_an_empty_reply_is_no_answer() -> None:
    """A reply without text and calls is incomplete."""
    play = Play(says("")).go()
    assert (play.end.status, play.end.reason) == ("incomplete", "The reply has neither text nor calls.")


def test_calls_to_a_request_without_functions_are_not_run() -> None:
    """A model that calls where nothing was offered has its text taken, and its calls dropped."""
    stubborn = calls("f", text="anyway", stubborn=True)
    play = Play(calls("f"), limits=Budget(max_iterations=2)).go(stubborn)
    assert (play.end.status, play.end.answer) == ("limit_reached", "anyway")
    assert play.state.ledger.tool_calls == 1
    assert violations(play.state.transcript) == []


def test_an_answer_out_of_form_keeps_the_limit_that_ended_the_run() -> None:
    """Where no further request may be made either, the end names the limit that withheld the functions."""
    limits = Budget(max_iterations=3, max_tool_calls=1)
    play = Play(calls("f"), calls("f"), says("prose"), structured=True, formed={"{}"}, limits=limits).go()
    assert [request.withheld for request in play.requests] == [None, None, "max_tool_calls"]
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_tool_calls", "prose")
    assert play.end.reason.startswith("The answer is not in its form")
