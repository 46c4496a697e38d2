"""`next_action` on decisions: denied, deferred and returned calls, pauses, stops and resumed runs."""

from typing import Any

import pytest

from planner_ext.core.facts import Resumed
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import (
    Finish,
    Pause,
    ReviewCalls,
    RunCalls,
    WithholdCalls,
    next_action,
)
from planner_ext.core.state import Phase
from support.core import (
    BATCH,
    LOOP,
    RESUMED,
    SAMPLES,
    Play,
    began,
    calls,
    decided,
    finished,
    says,
    stop,
    violations,
)
from support.values import each_of


def test_a_denied_call_is_answered_with_a_refusal() -> None:
    """By default the model reads the refusal beside the other results, and functions stay offered."""
    play = Play(calls("f", "g"), says("done"), verdicts={"f": "deny"}).go()
    assert play.results == ["answer to f", "result of g"]
    assert [request.offer for request in play.requests] == [True, True]


def test_reask_removes_the_call_and_asks_without_functions() -> None:
    """Under ``reask`` the denied call leaves no trace, and one request goes without functions; that is not a limit."""
    play = Play(
        calls("f"), says("plain"), verdicts={"f": "deny"}, on_denial="reask"
    ).go()
    assert [(request.offer, request.withheld) for request in play.requests] == [
        (True, None),
        (False, None),
    ]
    assert len(play.state.transcript) == 2
    assert play.end.status == "answered"
    assert play.end.limit is None
    assert play.end.answer == "plain"


def test_a_denial_can_close_the_chain_of_tool_rounds() -> None:
    """Where the rules say so, the request after a denied call goes without functions, the refusal in its transcript."""
    play = Play(
        calls("f", "g"), says("plain"), verdicts={"f": "deny"}, close_on_denial=True
    ).go()
    assert play.results == ["answer to f", "result of g"]
    assert [(request.offer, request.withheld) for request in play.requests] == [
        (True, None),
        (False, None),
    ]
    assert play.end.status == "answered"
    assert play.end.limit is None
    assert play.end.answer == "plain"
    allowed = Play(calls("f"), says("plain"), close_on_denial=True).go()
    assert [request.offer for request in allowed.requests] == [True, True]


@each_of("names", [("f",), ("f", "f"), ("f", "g"), ("f", "unknown"), ("f", "mine")])
def test_a_denied_call_can_send_its_batch_back(names: tuple[str, ...]) -> None:
    """Under ``return_calls`` a batch with a denied call goes back to the caller, with all its calls; none ran."""
    play = Play(
        calls(*names), says("x"), verdicts={"f": "deny"}, on_denial="return_calls"
    ).go()
    assert play.end.returned
    assert (play.end.status, play.end.limit) == ("stopped", None)
    assert play.state.usage.tool_calls == 0
    assert len(play.requests) == 1


def test_a_call_of_the_callers_own_function_goes_back() -> None:
    """A function that is known by its schema only is for the caller to run; its batch is returned whole."""
    play = Play(calls("f", "mine")).go()
    assert play.end.returned
    assert (play.end.status, play.end.limit) == ("stopped", None)
    assert play.state.usage.tool_calls == 0


def test_a_deferred_call_holds_its_batch() -> None:
    """Under ``hold_all`` nothing of a batch runs while one of its calls waits; then all of it runs together."""
    play = Play(calls("f", "g"), verdicts={"g": "defer"}).go()
    assert isinstance(play.actions[-1], Pause)
    assert play.state.usage.tool_calls == 0
    play.add(RESUMED, decided(1, "g")).go(says("done"))
    assert RunCalls(iteration=0, indexes=(0, 1)) in play.actions
    assert play.end.status == "answered"


def test_safe_calls_can_run_before_the_pause() -> None:
    """Under ``run_safe_first`` the undeferred calls run, then the run pauses, and the deferred one runs later."""
    play = Play(
        calls("f", "g"), verdicts={"g": "defer"}, on_deferred="run_safe_first"
    ).go()
    assert play.actions[-2:] == [RunCalls(iteration=0, indexes=(0,)), Pause()]
    play.add(RESUMED, decided(1, "g")).go(says("done"))
    assert play.results == ["result of f", "result of g"]
    assert play.state.usage.tool_calls == 2


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
    play.add(Resumed(limits=Budget(max_tool_calls=0), at=0.0), decided(0)).go(
        says("sorry")
    )
    assert play.results == ["Not executed: The limit max_tool_calls=0 was reached."]
    assert play.end.limit == "max_tool_calls"


def test_a_limit_reached_before_a_pause_still_ends_the_run_after_it() -> None:
    """A call that was refused before the pause makes the request after it tool-free, as without a pause."""
    limits = Budget(max_tool_calls=1, batch_over_limit="fill_remaining")
    play = Play(
        calls("f", "g", "h"),
        verdicts={"h": "defer"},
        on_deferred="run_safe_first",
        limits=limits,
    ).go()
    play.add(RESUMED, decided(2, "h", "deny")).go(says("sorry"))
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_tool_calls"
    assert play.end.answer == "sorry"


def test_a_fault_does_not_forget_a_limit_that_was_reached() -> None:
    """A run resumed after its forced request failed still owes that request, unless new limits replace the old."""
    play = (
        Play(calls("f"), limits=Budget(max_tool_calls=0))
        .go()
        .add(RESUMED)
        .go(says("sorry"))
    )
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_tool_calls"
    assert play.end.answer == "sorry"


@each_of("phase", [Phase.PLANNING, Phase.ASKING, Phase.COMPLETING, Phase.ANSWERING])
def test_a_run_that_a_fault_interrupted_can_be_resumed(phase: Phase) -> None:
    """A connector, callback or template can fail in any phase that calls one; the run is resumed in that phase."""
    assert fold([*SAMPLES[phase], RESUMED]).phase is phase


@each_of("on_limit", ["answer", "stop", "return_calls"])
def test_a_limited_run_continues_with_a_larger_budget(on_limit: Any) -> None:
    """Resumed with more trips, a run continues where it ended; what was spent counts, the forced answer is gone."""
    play = Play(*LOOP, limits=Budget(max_iterations=2, on_limit=on_limit)).go()
    spent = play.state.usage.iterations
    play.turns = [calls("g"), says("done")]
    play.add(Resumed(limits=Budget(max_iterations=9, on_limit=on_limit), at=0.0)).go()
    assert (play.end.status, play.end.answer) == ("answered", "done")
    assert play.state.usage.iterations == spent + 2
    assert all(
        entry != {"role": "assistant", "text": "forced", "calls": []}
        for entry in play.state.transcript
    )
    assert violations(play.state.transcript) == []


def test_a_limited_run_resumed_with_its_old_budget_ends_again() -> None:
    """Without a larger budget nothing is asked and nothing runs: the same limit ends the run again."""
    play = Play(*LOOP, limits=Budget(max_iterations=2)).go()
    play.add(RESUMED).go()
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_iterations"
    assert len(play.requests) == 2


def test_an_incomplete_run_asks_again_when_it_is_resumed() -> None:
    """The cut reply is dropped and the request made again."""
    play = Play(says("half", finish_reason="length")).go()
    play.add(RESUMED).go(says("whole"))
    assert play.end.status == "answered"
    assert play.end.answer == "whole"
    assert len(play.state.transcript) == 2


def test_used_attempts_start_again_on_resume() -> None:
    """A run that ended because its attempts were used has new ones when it continues."""
    play = Play(*LOOP, use_attempts=1, attempts_limit="a").go()
    play.turns = [calls("f")]
    play.add(RESUMED).go(says("done"))
    assert [request.offer for request in play.requests] == [True, False, True, False]


def test_nothing_finished_runs_again_on_resume() -> None:
    """A batch of which a part ran before it was returned has that part's result when the run continues."""
    limits = Budget(max_tool_calls=1, on_limit="return_calls")
    play = Play(
        calls("f", "g"),
        verdicts={"g": "defer"},
        on_deferred="run_safe_first",
        limits=limits,
    ).go()
    play.add(RESUMED, decided(1, "g")).go()
    assert play.end.returned
    play.verdicts = {}
    play.add(Resumed(limits=Budget(), at=0.0)).go(says("done"))
    assert play.state.usage.calls_by_function == {"f": 1, "g": 1}


@each_of("steps", range(4))
def test_a_stopped_run_answers_its_calls_and_asks_no_more(steps: int) -> None:
    """From a stop on, no request is made and no function starts; every call is answered, and the reason is given."""
    play = (
        Play(calls("f", "g"), verdicts={"g": "deny"})
        .go(steps=steps)
        .add(stop("enough"))
        .go(says("x"))
    )
    assert (play.end.status, play.end.reason) == ("stopped", "enough")
    assert len(play.requests) == min(steps, 1)
    assert play.state.usage.tool_calls == (1 if steps == 3 else 0)
    assert violations(play.state.transcript) == []


def test_a_stop_does_not_throw_an_answer_away() -> None:
    """A reply that answers the run, and arrived while it was being stopped, is its answer."""
    play = Play(says("done")).go(steps=1).add(stop()).go()
    assert (play.end.status, play.end.answer) == ("answered", "done")


@pytest.mark.parametrize(
    "rules", [{"rounds_per_step": 1}, {"require_final_answer": True}]
)
def test_a_stopped_run_says_nothing_more_to_the_model(rules: dict[str, Any]) -> None:
    """From a stop on, no message of the planner is added either."""
    play = Play(calls("f"), says("hm"), **rules).go(steps=5).add(stop("enough"))
    assert play.state.phase is Phase.ANSWERING
    assert [type(action) for action in play.go().actions[5:]] == [Finish]
    assert play.end.status == "stopped"


def test_a_run_that_a_filter_ends_asks_no_further_question() -> None:
    """Once a filter asked to end the run, a call that would wait for a person is answered, and the run ends."""
    play = Play(
        calls("f", "g"), verdicts={"g": "defer"}, on_deferred="run_safe_first"
    ).go(steps=2)
    play.add(began(0), finished(0, terminate=True)).go()
    assert Pause() not in play.actions
    assert play.end.status == "stopped"
    assert play.results[0] == "result of f"
    assert play.results[1].startswith("Not executed")


def test_a_run_that_a_filter_ended_can_be_resumed() -> None:
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
    limits = Budget(max_tool_calls=1, batch_over_limit="fill_remaining")
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


def test_calls_that_were_decided_are_not_reviewed_again() -> None:
    """A review that was interrupted continues with the others."""
    assert next_action(fold([*BATCH, decided(0)])) == ReviewCalls(
        iteration=0, indexes=(1,)
    )


@pytest.mark.parametrize(("name", "why"), [("mine", "schema only"), ("f", "denied")])
def test_a_returned_batch_says_why(name: str, why: str) -> None:
    """The caller reads whether a denial or its own function sent the calls back."""
    verdicts = {"f": "deny"}
    play = Play(calls(name), verdicts=verdicts, on_denial="return_calls").go()
    assert play.end.returned
    assert why in play.end.reason
