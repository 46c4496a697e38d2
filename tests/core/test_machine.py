"""`next_action`, rule by rule: the machine plays against a scripted model, without an engine."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from core_builders import (
    RESUMED,
    SAMPLES,
    Play,
    began,
    calls,
    decided,
    finished,
    run_started,
    says,
    stop,
    violations,
)

from planner_ext.core.actions import (
    AddMessage,
    AskModel,
    AskPlan,
    CompleteIteration,
    Finish,
    Pause,
    ReviewCalls,
    RunCalls,
    WithholdCalls,
)
from planner_ext.core.facts import Resumed
from planner_ext.core.fold import fold
from planner_ext.core.limits import Limits
from planner_ext.core.machine import iterations_left, next_action
from planner_ext.core.state import Phase
from planner_ext.core.values import Usage

LOOP = (calls("f"),) * 20
"""A model that never stops calling where it can."""


@pytest.mark.parametrize(
    ("phase", "action"),
    [
        (Phase.NEW, type(None)),
        (Phase.PLANNING, AskPlan),
        (Phase.ASKING, AskModel),
        (Phase.REVIEWING, ReviewCalls),
        (Phase.CALLING, RunCalls),
        (Phase.COMPLETING, CompleteIteration),
        (Phase.ANSWERING, Finish),
        (Phase.PAUSED, type(None)),
        (Phase.ENDED, type(None)),
    ],
)
def test_every_phase_has_its_action(phase: Phase, action: type) -> None:
    """What is next follows from the phase; a run that waits, has ended or has not begun asks for nothing."""
    assert type(next_action(fold(SAMPLES[phase]))) is action


def test_a_run_is_request_review_calls_completion_request() -> None:
    """One tool round and an answer: the actions in their order, with functions offered and nothing withheld."""
    play = Play(calls("f", "g"), says("done")).go()
    assert play.actions == [
        AskModel(iteration=0, offer=True, tool_choice="auto", withheld=None),
        ReviewCalls(iteration=0, indexes=(0, 1)),
        RunCalls(iteration=0, indexes=(0, 1)),
        CompleteIteration(iteration=0, called=True),
        AskModel(iteration=1, offer=True, tool_choice="auto", withheld=None),
        Finish(status="answered", answer="done"),
    ]
    assert violations(play.state.transcript) == []


def test_the_plan_is_asked_for_once_before_the_first_trip() -> None:
    """The plan request comes first, is charged, and is not one of the loop's trips."""
    play = Play(says("done"), plan=True).go()
    assert [type(action) for action in play.actions] == [AskPlan, AskModel, Finish]
    assert play.requests[0].iteration == 0
    assert play.state.ledger.iterations == 2


def test_no_plan_request_unless_two_charged_trips_remain() -> None:
    """With a single trip left, that trip is the answer's: a plan request would leave none."""
    play = Play(says("done"), plan=True).add(Resumed(limits=Limits(max_iterations=1), at=0.0)).go()
    assert AskPlan() not in play.actions
    assert play.end.answer == "done"


def test_two_charged_trips_are_enough_for_a_plan() -> None:
    """With two trips left there is a plan, and an answer to it."""
    play = Play(says("done"), plan=True, limits=Limits(max_iterations=2)).go()
    assert [type(action) for action in play.actions] == [AskPlan, AskModel, Finish]
    assert play.end.answer == "done"


def test_a_deadline_that_has_passed_leaves_no_plan_request() -> None:
    """Limits on time are checked before each request, and the plan request is one."""
    start = replace(run_started(plan=True, limits=Limits(deadline=datetime(2000, 1, 1, tzinfo=UTC))), at=2e9)
    play = Play(start=False).add(start).go()
    assert AskPlan() not in play.actions


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_last_trip_is_reserved_for_an_answer(limit: int) -> None:
    """Under ``answer``, N trips are N requests: N - 1 with functions, and a last one without that gives the answer."""
    play = Play(*LOOP, limits=Limits(max_iterations=limit)).go()
    assert [request.offer for request in play.requests] == [True] * (limit - 1) + [False]
    assert play.requests[-1].withheld == "max_iterations"
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_iterations", "forced")
    assert play.state.ledger.iterations == limit


def test_an_answer_before_the_last_trip_is_no_limit() -> None:
    """A run that answers while trips remain is answered, and names no limit."""
    play = Play(calls("f"), says("done"), limits=Limits(max_iterations=3)).go()
    assert (play.end.status, play.end.limit, play.end.answer) == ("answered", None, "done")


@pytest.mark.parametrize(("last_trip", "choice"), [("withdraw", None), ("none", "none")])
def test_the_last_trip_keeps_the_schema_where_asked(last_trip: Any, choice: str | None) -> None:
    """The reserved request drops the functions, or keeps their schema with the choice "none"."""
    play = Play(*LOOP, limits=Limits(max_iterations=2, last_trip=last_trip)).go()
    assert [request.tool_choice for request in play.requests] == ["auto", choice]


@pytest.mark.parametrize("on_limit", ["raise", "stop"])
def test_without_a_forced_answer_the_last_calls_are_answered_not_executed(on_limit: Any) -> None:
    """Under ``stop`` and ``raise`` every trip offers functions, and the calls of the last one are answered, not run."""
    play = Play(*LOOP, limits=Limits(max_iterations=2, on_limit=on_limit)).go()
    assert [request.offer for request in play.requests] == [True, True]
    assert play.results == ["result of f", "Not executed: The limit max_iterations=2 was reached."]
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_iterations", "")
    assert play.state.ledger.tool_calls == 1
    assert violations(play.state.transcript) == []


def test_under_return_calls_the_last_calls_go_back_unanswered() -> None:
    """Under ``return_calls`` the calls of the last trip end the run, unanswered, and stay out of the transcript."""
    play = Play(*LOOP, limits=Limits(max_iterations=2, on_limit="return_calls")).go()
    assert play.end.returned
    assert (play.end.status, play.end.limit) == ("limit_reached", "max_iterations")
    assert play.state.batch is not None
    assert play.state.batch.calls[0].answer is None
    assert violations(play.state.transcript) == []


@pytest.mark.parametrize("on_limit", ["raise", "stop", "return_calls"])
def test_an_answer_on_the_last_trip_is_an_answer(on_limit: Any) -> None:
    """Where the last trip was not withheld, a plain reply in it, or a final answer, is the run's own."""
    limits = Limits(max_iterations=1, on_limit=on_limit)
    assert Play(says("done"), limits=limits).go().end.status == "answered"
    final = Play(calls("final"), limits=limits).go()
    assert (final.end.status, final.end.answer) == ("answered", "42")


def test_trips_left_are_counted_where_they_are_limited() -> None:
    """What may still be asked is the limit less what was charged; without a limit there is no number."""
    assert iterations_left(Play().state) is None
    assert iterations_left(Play(calls("f", iterations=3), limits=Limits(max_iterations=5)).go().state) == 2


@pytest.mark.parametrize("on_limit", ["answer", "stop", "raise"])
def test_a_service_that_overcharges_with_calls_ends_the_run(on_limit: Any) -> None:
    """A foreign service that spends more than is left gets no function run and no further request."""
    play = Play(calls("f", iterations=9), limits=Limits(max_iterations=3, on_limit=on_limit)).go()
    assert (play.end.status, play.end.limit) == ("limit_reached", "max_iterations")
    assert play.state.ledger.iterations == 9
    assert play.state.ledger.tool_calls == 0
    assert violations(play.state.transcript) == []


def test_a_service_that_overcharges_with_text_ends_at_the_limit() -> None:
    """What a foreign service answered over its budget is kept, and the limit is named."""
    play = Play(says("late", iterations=4), limits=Limits(max_iterations=3)).go()
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_iterations", "late")
    assert Play(says("in time", iterations=3), limits=Limits(max_iterations=3)).go().end.status == "answered"


def test_a_service_that_overcharges_beside_another_limit_names_the_first() -> None:
    """The first limit that was reached names the end, also where the forced answer was overcharged."""
    limits = Limits(max_iterations=3, max_tool_calls=0)
    play = Play(calls("f"), says("late", iterations=5), limits=limits).go()
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_tool_calls", "late")


@pytest.mark.parametrize(
    ("policy", "results"), [("reject_batch", ["not", "not", "not"]), ("fill_remaining", ["ran", "ran", "not"])]
)
def test_a_batch_over_the_call_limit(policy: Any, results: list[str]) -> None:
    """A batch over ``max_tool_calls`` runs not at all, or as far as it fits; the rest is answered; then an answer."""
    limits = Limits(max_tool_calls=2, batch_over_limit=policy)
    play = Play(calls("f", "g", "h"), calls("f"), limits=limits).go()
    assert ["ran" if text.startswith("result") else "not" for text in play.results] == results
    assert play.state.ledger.tool_calls == results.count("ran")
    assert play.requests[-1] == AskModel(iteration=1, offer=False, tool_choice=None, withheld="max_tool_calls")
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_tool_calls", "forced")
    assert violations(play.state.transcript) == []


def test_the_call_limit_counts_batches_as_they_are() -> None:
    """Two batches of two fill a limit of four; the fifth call is one too many."""
    play = Play(calls("f", "g"), calls("f", "g"), calls("f"), limits=Limits(max_tool_calls=4)).go(says("x"))
    assert play.state.ledger.tool_calls == 4
    assert [request.offer for request in play.requests] == [True, True, True, False]


def test_calls_that_do_not_run_are_free() -> None:
    """Denied, unknown, invalid and final-answer calls do not count as tool calls."""
    play = Play(calls("f", "unknown", "bad"), says("done"), verdicts={"f": "deny"}, limits=Limits(max_tool_calls=0))
    assert play.go().end.status == "answered"
    assert play.state.ledger.tool_calls == 0


@pytest.mark.parametrize("on_limit", ["stop", "raise"])
def test_another_limit_ends_the_run_where_no_answer_is_wanted(on_limit: Any) -> None:
    """Under ``stop`` and ``raise`` the refused calls are answered, and no further request is made."""
    play = Play(calls("f", "g"), limits=Limits(max_tool_calls=1, on_limit=on_limit)).go()
    assert len(play.requests) == 1
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_tool_calls", "")
    assert "max_tool_calls=1" in play.end.reason
    assert violations(play.state.transcript) == []


@pytest.mark.parametrize("policy", ["reject_batch", "fill_remaining"])
def test_another_limit_returns_the_whole_batch(policy: Any) -> None:
    """Under ``return_calls`` a batch over the limit goes back whole; none of it has run."""
    limits = Limits(max_tool_calls=1, on_limit="return_calls", batch_over_limit=policy)
    play = Play(calls("f", "g"), limits=limits).go()
    assert play.end.returned
    assert play.state.ledger.tool_calls == 0


def test_a_function_has_its_own_limit() -> None:
    """Only calls of the limited function are refused; the others of the batch run, then an answer is asked for."""
    limits = Limits(max_calls_per_function={"f": 1})
    play = Play(calls("f", "f", "g"), limits=limits).go(says("sorry"))
    assert [text.split(":")[0] for text in play.results] == ["result of f", "Not executed", "result of g"]
    assert play.state.ledger.calls_by_function == {"f": 1, "g": 1}
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_calls_per_function", "sorry")


def test_a_function_is_limited_by_the_name_it_was_resolved_to() -> None:
    """What counts is the function that would run, whatever name the model used for it."""
    play = Play(calls("f"), limits=Limits(max_calls_per_function={"plugin-f": 0})).go(steps=1)
    play.add(replace(decided(0), function="plugin-f")).go(says("sorry"))
    assert play.state.ledger.tool_calls == 0
    assert play.end.limit == "max_calls_per_function"


def test_the_same_call_may_be_repeated_so_often() -> None:
    """``max_repeated_calls=2`` lets the same call run twice, wherever; another call is not the same."""
    play = Play(calls("f", "g"), calls("f"), calls("f"), limits=Limits(max_repeated_calls=2)).go(says("sorry"))
    assert play.state.ledger.calls_by_function == {"f": 2, "g": 1}
    assert play.end.limit == "max_repeated_calls"
    twice = Play(calls("f", "f", "f"), limits=Limits(max_repeated_calls=2)).go(says("sorry"))
    assert [text.split(":")[0] for text in twice.results] == ["result of f", "result of f", "Not executed"]


def test_batches_with_errors_in_a_row_end_the_run() -> None:
    """After n failed, unknown or invalid batches in a row the next request goes without functions."""
    play = Play(calls("f"), calls("unknown"), limits=Limits(max_consecutive_errors=2))
    play.outcomes["f"] = "failed"
    play.go(says("sorry"))
    assert [request.offer for request in play.requests] == [True, True, False]
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_consecutive_errors", "sorry")


def test_a_clean_batch_forgives_errors() -> None:
    """Errors that are not in a row never reach the limit."""
    play = Play(calls("bad"), calls("f"), calls("bad"), says("done"), limits=Limits(max_consecutive_errors=2)).go()
    assert play.end.status == "answered"


def test_denials_in_a_row_end_the_run() -> None:
    """After n batches denied whole the next request goes without functions."""
    play = Play(calls("f"), calls("f"), verdicts={"f": "deny"}, limits=Limits(max_repeated_denials=2)).go(says("sorry"))
    assert [request.offer for request in play.requests] == [True, True, False]
    assert play.end.limit == "max_repeated_denials"


def test_a_spent_limit_is_checked_before_a_batch() -> None:
    """Tokens spent by the request that asked for calls refuse those calls; then one answer is forced."""
    many = Usage(prompt_tokens=100)
    play = Play(calls("f", usage=many), limits=Limits(max_total_tokens=50)).go(says("sorry", usage=many))
    assert play.results == ["Not executed: The limit max_total_tokens=50 was reached."]
    assert (play.end.limit, play.end.answer) == ("max_total_tokens", "sorry")
    assert len(play.requests) == 2


def test_a_spent_limit_is_checked_before_a_request() -> None:
    """What a batch spent is seen before the next request."""
    play = Play(calls("f"), limits=Limits(max_active_seconds=2)).go(says("sorry"))
    assert play.state.ledger.tool_calls == 1
    assert [request.withheld for request in play.requests] == [None, "max_active_seconds"]


def test_a_deadline_is_named_with_its_moment() -> None:
    """The reason says which deadline passed, in universal time."""
    deadline = datetime(2000, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    start = replace(run_started(limits=Limits(deadline=deadline, on_limit="stop")), at=2e9)
    play = Play(start=False).add(start).go(says("x"))
    assert play.end.reason == "The limit deadline=2000-01-01T10:00:00+00:00 was reached."
    assert play.requests == []


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
    play = Play(calls("f"), rounds_per_step=1, limits=Limits(max_iterations=2)).go(says("sorry"))
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_iterations", "sorry")


def test_a_limit_needs_functions_to_withhold() -> None:
    """Where no function exists, the reserved trip withheld nothing: its reply is an answer."""
    play = Play(says("done", available=False), limits=Limits(max_iterations=1)).go()
    assert (play.end.status, play.end.limit) == ("answered", None)


def test_a_required_final_answer_is_insisted_on() -> None:
    """A plain reply is not enough where the final-answer function is required: the model is told, and asked again."""
    play = Play(says("hm"), calls("final"), require_final_answer=True).go()
    assert AddMessage(purpose="insist") in play.actions
    assert (play.end.status, play.end.answer) == ("answered", "42")
    assert [entry.get("text") for entry in play.state.transcript[:3]] == ["goal", "hm", "insist"]


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
    play = Play(calls("f"), limits=Limits(max_iterations=2)).go(stubborn)
    assert (play.end.status, play.end.answer) == ("limit_reached", "anyway")
    assert play.state.ledger.tool_calls == 1
    assert violations(play.state.transcript) == []


def test_a_denied_call_is_answered_with_a_refusal() -> None:
    """By default the model reads the refusal beside the other results, and functions stay offered."""
    play = Play(calls("f", "g"), says("done"), verdicts={"f": "deny"}).go()
    assert play.results == ["answer to f", "result of g"]
    assert [request.offer for request in play.requests] == [True, True]


def test_reask_removes_the_call_and_asks_without_functions() -> None:
    """Under ``reask`` the denied call leaves no trace, one request goes without functions, and that is no limit."""
    play = Play(calls("f"), says("plain"), verdicts={"f": "deny"}, on_denial="reask").go()
    assert [(request.offer, request.withheld) for request in play.requests] == [(True, None), (False, None)]
    assert len(play.state.transcript) == 2
    assert (play.end.status, play.end.limit, play.end.answer) == ("answered", None, "plain")


def test_a_denial_can_close_the_chain_of_tool_rounds() -> None:
    """Where the rules say so, the request after a denied call goes without functions, the refusal in its transcript."""
    play = Play(calls("f", "g"), says("plain"), verdicts={"f": "deny"}, close_on_denial=True).go()
    assert play.results == ["answer to f", "result of g"]
    assert [(request.offer, request.withheld) for request in play.requests] == [(True, None), (False, None)]
    assert (play.end.status, play.end.limit, play.end.answer) == ("answered", None, "plain")
    allowed = Play(calls("f"), says("plain"), close_on_denial=True).go()
    assert [request.offer for request in allowed.requests] == [True, True]


@pytest.mark.parametrize("names", [("f",), ("f", "f"), ("f", "g"), ("f", "unknown"), ("f", "mine")])
def test_a_denied_call_can_send_its_batch_back(names: tuple[str, ...]) -> None:
    """Under ``return_calls`` a batch with a denied call goes back to the caller, whatever else is in it; none ran."""
    play = Play(calls(*names), says("x"), verdicts={"f": "deny"}, on_denial="return_calls").go()
    assert play.end.returned
    assert (play.end.status, play.end.limit) == ("stopped", None)
    assert play.state.ledger.tool_calls == 0
    assert len(play.requests) == 1


def test_a_call_of_the_callers_own_function_goes_back() -> None:
    """A function that is known by its schema only is for the caller to run; its batch is returned whole."""
    play = Play(calls("f", "mine")).go()
    assert play.end.returned
    assert (play.end.status, play.end.limit) == ("stopped", None)
    assert play.state.ledger.tool_calls == 0


def test_a_deferred_call_holds_its_batch() -> None:
    """Under ``hold_all`` nothing of a batch runs while one of its calls waits; then all of it runs together."""
    play = Play(calls("f", "g"), verdicts={"g": "defer"}).go()
    assert isinstance(play.actions[-1], Pause)
    assert play.state.ledger.tool_calls == 0
    play.add(RESUMED, decided(1, "g")).go(says("done"))
    assert RunCalls(iteration=0, indexes=(0, 1)) in play.actions
    assert play.end.status == "answered"


def test_safe_calls_can_run_before_the_pause() -> None:
    """Under ``run_safe_first`` the undeferred calls run, then the run pauses, and the deferred one runs later."""
    play = Play(calls("f", "g"), verdicts={"g": "defer"}, on_deferred="run_safe_first").go()
    assert play.actions[-2:] == [RunCalls(iteration=0, indexes=(0,)), Pause()]
    play.add(RESUMED, decided(1, "g")).go(says("done"))
    assert play.results == ["result of f", "result of g"]
    assert play.state.ledger.tool_calls == 2


def test_a_partly_decided_batch_pauses_again() -> None:
    """While one call still waits the run pauses again, and no request is made."""
    play = Play(calls("f", "g"), verdicts={"f": "defer", "g": "defer"}).go()
    play.add(RESUMED, decided(0, "f", "deny")).go()
    assert isinstance(play.actions[-1], Pause)
    play.add(RESUMED, decided(1, "g", "deny")).go(says("done"))
    assert play.end.status == "answered"


def test_a_limit_lowered_on_resume_refuses_the_waiting_batch() -> None:
    """New limits hold for the calls that waited: what no longer fits is answered, not run."""
    play = Play(calls("f"), verdicts={"f": "defer"}).go()
    play.add(Resumed(limits=Limits(max_tool_calls=0), at=0.0), decided(0)).go(says("sorry"))
    assert play.results == ["Not executed: The limit max_tool_calls=0 was reached."]
    assert play.end.limit == "max_tool_calls"


def test_a_limit_reached_before_a_pause_still_ends_the_run_after_it() -> None:
    """A call that was refused before the pause makes the request after it tool-free, as without a pause."""
    limits = Limits(max_tool_calls=1, batch_over_limit="fill_remaining")
    play = Play(calls("f", "g", "h"), verdicts={"h": "defer"}, on_deferred="run_safe_first", limits=limits).go()
    play.add(RESUMED, decided(2, "h", "deny")).go(says("sorry"))
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_tool_calls", "sorry")


def test_a_fault_does_not_forget_a_limit_that_was_reached() -> None:
    """A run resumed after its forced request failed still owes that request, unless new limits replace the old."""
    play = Play(calls("f"), limits=Limits(max_tool_calls=0)).go().add(RESUMED).go(says("sorry"))
    assert (play.end.status, play.end.limit, play.end.answer) == ("limit_reached", "max_tool_calls", "sorry")


@pytest.mark.parametrize("phase", [Phase.PLANNING, Phase.ASKING, Phase.COMPLETING, Phase.ANSWERING])
def test_a_run_that_a_fault_interrupted_goes_on(phase: Phase) -> None:
    """A connector, callback or template can fail in any phase that calls one; the run is resumed in that phase."""
    assert fold([*SAMPLES[phase], RESUMED]).phase is phase


@pytest.mark.parametrize("on_limit", ["answer", "stop", "return_calls"])
def test_a_limited_run_goes_on_with_a_larger_budget(on_limit: Any) -> None:
    """Resumed with more trips, a run goes on where it ended; what was spent counts, the forced answer is gone."""
    play = Play(*LOOP, limits=Limits(max_iterations=2, on_limit=on_limit)).go()
    spent = play.state.ledger.iterations
    play.turns = [calls("g"), says("done")]
    play.add(Resumed(limits=Limits(max_iterations=9, on_limit=on_limit), at=0.0)).go()
    assert (play.end.status, play.end.answer) == ("answered", "done")
    assert play.state.ledger.iterations == spent + 2
    assert all(entry != {"role": "assistant", "text": "forced", "calls": []} for entry in play.state.transcript)
    assert violations(play.state.transcript) == []


def test_a_limited_run_resumed_with_its_old_budget_ends_again() -> None:
    """Without a larger budget nothing is asked and nothing runs: the same limit ends the run again."""
    play = Play(*LOOP, limits=Limits(max_iterations=2)).go()
    play.add(RESUMED).go()
    assert (play.end.status, play.end.limit, len(play.requests)) == ("limit_reached", "max_iterations", 2)


def test_an_incomplete_run_asks_again_when_it_is_resumed() -> None:
    """The cut reply is dropped and the request made again."""
    play = Play(says("half", finish_reason="length")).go()
    play.add(RESUMED).go(says("whole"))
    assert (play.end.status, play.end.answer, len(play.state.transcript)) == ("answered", "whole", 2)


def test_used_attempts_start_again_on_resume() -> None:
    """A run that ended because its attempts were used has new ones when it goes on."""
    play = Play(*LOOP, use_attempts=1, attempts_limit="a").go()
    play.turns = [calls("f")]
    play.add(RESUMED).go(says("done"))
    assert [request.offer for request in play.requests] == [True, False, True, False]


def test_nothing_finished_runs_again_on_resume() -> None:
    """A batch of which a part ran before it was returned has that part's result when the run goes on."""
    limits = Limits(max_tool_calls=1, on_limit="return_calls")
    play = Play(calls("f", "g"), verdicts={"g": "defer"}, on_deferred="run_safe_first", limits=limits).go()
    play.add(RESUMED, decided(1, "g")).go()
    assert play.end.returned
    play.verdicts = {}
    play.add(Resumed(limits=Limits(), at=0.0)).go(says("done"))
    assert play.state.ledger.calls_by_function == {"f": 1, "g": 1}


@pytest.mark.parametrize("steps", range(4))
def test_a_stopped_run_answers_its_calls_and_asks_no_more(steps: int) -> None:
    """From a stop on, no request is made and no function starts; every call is answered, and the reason is given."""
    play = Play(calls("f", "g"), verdicts={"g": "deny"}).go(steps=steps).add(stop("enough")).go(says("x"))
    assert (play.end.status, play.end.reason) == ("stopped", "enough")
    assert len(play.requests) == min(steps, 1)
    assert play.state.ledger.tool_calls == (1 if steps == 3 else 0)
    assert violations(play.state.transcript) == []


def test_a_stop_does_not_throw_an_answer_away() -> None:
    """A reply that answers the run, and arrived while it was being stopped, is its answer."""
    play = Play(says("done")).go(steps=1).add(stop()).go()
    assert (play.end.status, play.end.answer) == ("answered", "done")


@pytest.mark.parametrize("rules", [{"rounds_per_step": 1}, {"require_final_answer": True}])
def test_a_stopped_run_says_nothing_more_to_the_model(rules: dict[str, Any]) -> None:
    """From a stop on, no message of the planner is added either."""
    play = Play(calls("f"), says("hm"), **rules).go(steps=5).add(stop("enough"))
    assert play.state.phase is Phase.ANSWERING
    assert [type(action) for action in play.go().actions[5:]] == [Finish]
    assert play.end.status == "stopped"


def test_a_run_that_a_filter_ends_asks_nobody_any_more() -> None:
    """Once a filter asked to end the run, a call that would wait for a person is answered, and the run ends."""
    play = Play(calls("f", "g"), verdicts={"g": "defer"}, on_deferred="run_safe_first").go(steps=2)
    play.add(began(0), finished(0, terminate=True)).go()
    assert Pause() not in play.actions
    assert play.end.status == "stopped"
    assert play.results[0] == "result of f"
    assert play.results[1].startswith("Not executed")


def test_a_run_that_a_filter_ended_goes_on_when_it_is_resumed() -> None:
    """A filter's wish to end the run ends it once: resumed, it asks again."""
    play = Play(calls("f"), says("done")).go(steps=2)
    play.add(began(0), finished(0, terminate=True)).go()
    assert (play.end.status, len(play.requests)) == ("stopped", 1)
    play.add(RESUMED).go()
    assert (play.end.status, play.end.answer) == ("answered", "done")


def test_a_stop_before_the_plan_makes_no_request() -> None:
    """A run that is stopped before its plan ends without any request."""
    play = Play(plan=True).add(stop("enough")).go()
    assert play.actions == [Finish(status="stopped", reason="enough")]


def test_a_call_in_doubt_is_not_said_to_have_not_run() -> None:
    """A function that had started when its process died may have run: the model is never told that it was not."""
    play = Play(calls("f")).go(steps=2)
    play.add(began(0), stop()).go()
    assert not any(text.startswith("Not executed") for text in play.results)


def test_a_call_in_doubt_runs_again_once_a_person_approves_it() -> None:
    """A started, unfinished call waits for a person; approved, it runs; it is never run without that."""
    play = Play(calls("f")).go(steps=2)
    play.add(began(0)).go()
    assert isinstance(play.actions[-1], Pause)
    play.add(RESUMED, decided(0)).go(says("done"))
    assert play.end.status == "answered"


def test_the_withheld_part_of_a_batch_leaves_the_rest_to_run() -> None:
    """Once the calls that do not fit are answered, the others start, and only they."""
    limits = Limits(max_tool_calls=1, batch_over_limit="fill_remaining")
    play = Play(calls("f", "g"), limits=limits).go(steps=4)
    assert isinstance(play.actions[2], WithholdCalls)
    assert play.actions[2].indexes == (1,)
    assert play.actions[3] == RunCalls(iteration=0, indexes=(0,))


def test_the_driver_of_these_tests_sees_broken_transcripts() -> None:
    """The validator used here is itself checked: it finds what a service would refuse."""
    whole = Play(calls("f", "g"), says("done")).go().state.transcript
    assert violations(whole) == []
    assert violations(whole[:2])
    assert violations((*whole[:2], whole[3], whole[2]))
    assert violations((whole[0], *whole[2:]))
    assert violations((*whole[:4], whole[3]))
    assert violations(({"role": "assistant", "text": "", "calls": []},))
