"""Questions in the machine: when a person is asked, what is over the cap, and what limits, stops and resuming do."""

from dataclasses import fields
from typing import Any

import pytest

from planner_ext.approval.waiting import only_asks
from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.facts import Fact, RunStarted
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import (
    NO_MORE_QUESTIONS,
    AskPerson,
    Finish,
    Pause,
    WithholdCalls,
    next_action,
)
from planner_ext.core.state import Phase, asks
from planner_ext.core.values import TextMessage, Usage
from support.core import (
    PAUSED,
    RESUMED,
    Play,
    Turn,
    calls,
    clarified,
    decided,
    replied,
    run_started,
    says,
    stop,
)
from support.narrow import as_type
from support.values import each_of

INSISTING: dict[str, Any] = {"require_final_answer": True}


@each_of(
    "text",
    [
        "Which city?",
        "Which city?\n",
        "**Which city?**",
        "(in which unit?)",
        "“Which city?”",
        "どの都市ですか\uff1f",
        "أي مدينة؟",
    ],
)
def test_a_text_that_ends_in_a_question_mark_asks(text: str) -> None:
    """Blanks, quotes, brackets and emphasis after the mark do not count, and other scripts have marks of their own."""
    assert asks(text)


@each_of("text", ["", "?!", "Which city? Tell me.", "It is 3.", "Why? Because."])
def test_any_other_text_asks_nothing(text: str) -> None:
    """Only the end of a text counts."""
    assert not asks(text)


def test_a_question_is_put_to_the_clarifier_before_its_batch_runs() -> None:
    """The calls beside it wait for the answer, under ``hold_all``; each question is asked for itself."""
    play = Play(
        calls("f", "ask", "ask"),
        says("done"),
        clarifier=True,
        answers=["Oslo", "Rome", None],
    ).go()
    kinds = [type(action).__name__ for action in play.actions]
    assert kinds.index("AskPerson") < kinds.index("RunCalls")
    assert play.results == ["result of f", "Oslo", "Rome"]
    assert (play.end.status, play.state.clarifications) == ("answered", 2)


def test_safe_calls_run_before_a_question_where_that_is_wanted() -> None:
    """Under ``run_safe_first`` the other calls do not wait for it."""
    play = Play(calls("f", "ask"), on_deferred="run_safe_first").go()
    assert play.state.phase == Phase.PAUSED
    assert play.state.usage.tool_calls == 1
    assert only_asks(play.state) is True


def test_a_call_that_waits_beside_a_question_makes_it_a_pause() -> None:
    """Where a decision is due, too, the run is not only asking."""
    play = Play(calls("g", "ask"), verdicts={"g": "defer"}).go()
    assert (play.state.phase, only_asks(play.state)) == (Phase.PAUSED, False)
    assert not only_asks(play.add(RESUMED).state)


def test_questions_over_the_cap_are_answered_without_being_asked() -> None:
    """Never one more than the cap is asked, of one batch neither."""
    play = Play(
        calls("ask", "ask"),
        says("where?"),
        max_clarifications=1,
        clarifier=True,
        answers=["Oslo"] * 3,
    ).go()
    assert play.results == ["Oslo", NO_MORE_QUESTIONS]
    assert (play.end.status, play.end.answer) == ("answered", "where?")


def test_the_answer_may_take_all_trips_but_the_one_that_uses_it() -> None:
    """``trips`` is what is left less one, 0 where nothing is left, None without a limit."""
    for limit, trips in ((None, None), (5, 3), (2, 0)):
        play = Play(
            calls("ask"),
            says("done"),
            limits=Budget(max_iterations=limit),
            clarifier=True,
            answers=["x"],
        ).go()
        assert [
            action.iterations
            for action in play.actions
            if isinstance(action, AskPerson)
        ][:1] == [trips]


def test_no_person_is_asked_once_a_limit_is_spent() -> None:
    """A call that asks is answered with the limit, and the answer is forced; a plain reply counts as it is."""
    costly = Usage(prompt_tokens=9)
    limits = Budget(max_total_tokens=5)
    play = Play(
        calls("ask", usage=costly), says("sorry"), limits=limits, clarifier=True
    ).go()
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_total_tokens"
    assert play.end.answer == "sorry"
    assert not any(isinstance(action, AskPerson) for action in play.actions)

    plain = Play(says("where?", usage=costly), limits=limits, clarifier=True).go()
    assert (plain.end.status, plain.end.answer) == ("answered", "where?")


def test_a_plain_question_waits_only_where_a_final_answer_is_owed() -> None:
    """Insisted upon, it pauses and is answered as the user's next message; else it is the answer."""
    assert Play(says("where?")).go().end.answer == "where?"
    play = Play(says("where?"), calls("final"), **INSISTING).go()
    assert (play.state.phase, only_asks(play.state)) == (Phase.PAUSED, True)
    play.add(RESUMED).go()
    assert play.state.phase is Phase.PAUSED
    play.add(RESUMED, clarified("Oslo", None)).go()
    assert (play.end.status, play.end.answer) == ("answered", "42")
    assert TextMessage(role="user", text="Oslo") in play.state.transcript


def test_a_plain_question_that_the_clarifier_left_open_is_not_put_to_it_again() -> None:
    """It pauses where an answer is owed, and stays paused without one."""
    play = (
        Play(says("where?"), clarifier=True, answers=[None], **INSISTING)
        .go()
        .add(RESUMED)
        .go()
    )
    assert play.state.phase is Phase.PAUSED
    assert (
        len([action for action in play.actions if isinstance(action, AskPerson)]) == 1
    )


def test_a_stop_ends_a_run_that_asks() -> None:
    """The question is answered "not executed"; a plain one is left, and no answer is made of it."""
    assert Play(calls("ask")).go().add(stop()).go().end.status == "stopped"
    plain = Play(says("where?"), **INSISTING).go().add(stop()).go()
    assert (plain.end.status, plain.end.answer) == ("stopped", "")


def test_a_final_answer_that_was_not_offered_is_taken_as_the_forced_one() -> None:
    """It stands in the transcript as plain text; a larger budget opens the run again without it."""
    withheld = replied(
        Turn(names=("final",), stubborn=True), offered=False, withheld="max_iterations"
    )
    play = (
        Play(limits=Budget(max_iterations=1))
        .add(type(withheld)(**{**_fields(withheld), "final_answer": "42"}))
        .go()
    )
    assert (play.end.status, play.end.answer) == ("limit_reached", "42")
    assert play.state.transcript[-1] == TextMessage(role="assistant", text="42")
    assert (
        play.add(RESUMED).state.transcript
        == as_type(RunStarted, play.facts[0]).messages
    )


def _fields(fact: Fact) -> dict[str, Any]:
    return {field.name: getattr(fact, field.name) for field in fields(fact)}


@each_of(
    "fact",
    [
        clarified(index=1),
        clarified(index=5),
        clarified(iteration=3),
        clarified(index=-1),
    ],
    ids=str,
)
def test_an_answer_to_no_question_is_refused_by_name(fact: Fact) -> None:
    """A damaged journal cannot answer a call that does not ask, or one that is not there."""
    journal = (
        run_started(),
        replied(calls("ask", "f")),
        decided(0, "ask"),
        decided(1),
        PAUSED,
        RESUMED,
    )
    with pytest.raises(IllegalTransitionError, match="Clarified in iteration"):
        fold((*journal, fact))
    with pytest.raises(IllegalTransitionError, match="it asks nothing"):
        fold((*journal, clarified(), clarified()))


@each_of(
    ("cap", "put", "refused"),
    [(None, [0, 1, 2], ()), (3, [0, 1, 2], ()), (2, [0, 1], (2,)), (0, [], (0, 1, 2))],
)
def test_so_many_questions_of_a_batch_are_answered(
    cap: int | None, put: list[int], refused: tuple[int, ...]
) -> None:
    """Those over the cap are refused before any is put, the last ones first."""
    play = Play(
        calls("ask", "ask", "ask"),
        says("done"),
        clarifier=True,
        max_clarifications=cap,
        answers=["Oslo"] * 3,
    )
    play.go()
    asked = [action.index for action in play.actions if isinstance(action, AskPerson)]
    assert [
        index for index in asked if index is not None
    ] == put  # None: the last reply may be a question, too
    assert [
        action.indexes for action in play.actions if isinstance(action, WithholdCalls)
    ] == [refused] * bool(refused)


def test_questions_that_were_answered_before_count() -> None:
    """The cap is the run's, not the batch's."""
    rules: dict[str, Any] = {
        "clarifier": True,
        "max_clarifications": 2,
        "answers": ["Oslo"] * 3,
    }
    play = Play(calls("ask"), calls("ask", "ask"), says("done"), **rules).go()
    assert play.results == ["Oslo", "Oslo", NO_MORE_QUESTIONS]


def test_a_question_that_the_clarifier_left_open_waits_for_a_person() -> None:
    """It is put to the clarifier once; the others of its batch are, too, before the run pauses."""
    play = Play(calls("ask", "ask"), clarifier=True, answers=[None, "Oslo"]).go()
    assert [
        action.index for action in play.actions if isinstance(action, AskPerson)
    ] == [0, 1]
    assert (play.actions[-1], play.state.phase) == (Pause(), Phase.PAUSED)


def test_without_a_clarifier_a_question_waits_for_a_person() -> None:
    """The run pauses at once."""
    play = Play(calls("ask")).go()
    assert play.actions[-1] == Pause()
    assert not any(isinstance(action, AskPerson) for action in play.actions)


def test_a_question_does_not_wait_past_the_time_of_the_run() -> None:
    """Left open by the clarifier, it is refused once a limit of time has passed; another limit lets it wait."""
    facts = [replied(calls("ask")), decided(0, "ask"), clarified(None, 0)]
    late = as_type(
        WithholdCalls,
        next_action(fold([run_started(limits=Budget(max_active_seconds=1)), *facts])),
    )
    assert (late.indexes, late.limit) == ((0,), "max_active_seconds")
    spent = [replied(calls("ask", usage=Usage(prompt_tokens=9))), *facts[1:]]
    assert (
        next_action(fold([run_started(limits=Budget(max_total_tokens=9)), *spent]))
        == Pause()
    )


def test_a_call_that_waits_for_its_decision_waits_past_the_time_of_the_run() -> None:
    """Nothing runs while it waits; what may still happen is decided when the decision comes."""
    facts = [
        run_started(limits=Budget(max_active_seconds=1)),
        replied(calls("f")),
        decided(0, verdict="defer"),
    ]
    assert next_action(fold(facts)) == Pause()


def test_one_round_trip_is_enough_to_use_an_answer() -> None:
    """A reply that asks is put to the clarifier as long as a request may follow, and not without one."""
    for most, action in ((2, AskPerson), (1, Finish)):
        limits = Budget(max_iterations=most, on_limit="stop")
        facts = [run_started(limits=limits, clarifier=True), replied(says("where?"))]
        assert isinstance(next_action(fold(facts)), action)
