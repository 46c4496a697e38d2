"""The timeline of a run is computed from its facts alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given

from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.facts import (
    AnswerChecked,
    Ended,
    Fact,
    ModelAsked,
    ModelReplied,
    NestedCallStarted,
    Paused,
    Resumed,
    RunStarted,
    SharedBudgetsChecked,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import IN_DOUBT
from planner_ext.core.values import Usage
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.engine.journal import REQUEST_LOST
from planner_ext.engine.timeline import TimelineReader
from planner_ext.timeline import (
    CallAttempt,
    Gap,
    Spending,
    Timeline,
    page_of,
    timeline_of,
)
from support.core import (
    PAUSED,
    RESUMED,
    added,
    began,
    budget_changed,
    calls,
    clarified,
    completed,
    decided,
    ended,
    finished,
    model_asked,
    planned,
    replied,
    request_failed,
    run_started,
    says,
    stop,
    withheld,
)
from support.examples import tried
from support.property_world import Plan, World, plans
from support.values import each_of


def timed(*facts: Fact) -> list[Fact]:
    """The facts, one second after another."""
    return [replace(fact, at=float(second)) for second, fact in enumerate(facts)]


def drawn(*facts: Fact) -> Timeline:
    return timeline_of(timed(*facts))


@tried(60)
@given(plans)
def test_every_journal_has_a_timeline_up_to_each_of_its_facts(plan: Plan) -> None:
    """Each head of a journal can be drawn, and what is drawn agrees with the fold."""
    world = World(plan)
    facts = asyncio.run(world.finish(world.start()))
    for place in range(1, len(facts) + 1):
        timeline, state = timeline_of(facts[:place]), fold(facts[:place])
        assert timeline.spent == state.usage
        assert (timeline.ended is None) == (state.ended is None)
        assert all(
            call.ended is None
            for call in timeline.calls
            if call.outcome in ("requested", "ready", "running")
        )
    whole = timeline_of(facts)
    assert len(whole.calls) == sum(
        len(fact.calls) for fact in facts if isinstance(fact, ModelReplied)
    )
    assert sum(len(call.attempts) for call in whole.calls) == whole.spent.tool_calls
    assert whole == timeline_of(load_facts(dump_facts(facts)))


def test_iterations_have_their_request_their_reply_and_their_calls() -> None:
    """Each request is one iteration, from the plan on; calls have their start, end, arguments and result."""
    timeline = drawn(
        run_started(plan=True),
        planned(),
        replied(calls("f", "g", usage=Usage(prompt_tokens=7, completion_tokens=2))),
        decided(0, "f"),
        decided(1, "g", arguments='{"a": 1}'),
        began(0, "f"),
        began(1, "g"),
        finished(1, "g"),
        finished(0, "f", "failed", error="ValueError: no"),
        completed(),
        replied(says("done"), iteration=1),
        ended(status="answered", answer="done"),
    )
    assert [iteration.number for iteration in timeline.iterations] == [-1, 0, 1]
    assert [iteration.started for iteration in timeline.iterations] == [0.0, 1.0, 9.0]
    plan, batch, answer = timeline.iterations
    assert (timeline.plan, plan.reply and plan.reply.text) == ("plan", "plan")
    assert [message.text for message in batch.messages] == ["goal", "plan"]
    assert batch.replaced
    assert (batch.request.ended, batch.request.usage.total_tokens) == (2.0, 9)
    f, g = batch.calls
    assert (f.outcome, f.attempts, f.error) == (
        "failed",
        (CallAttempt(started=5.0, ended=8.0),),
        "ValueError: no",
    )
    assert (g.outcome, g.attempts, g.result) == (
        "ok",
        (CallAttempt(started=6.0, ended=7.0),),
        "result of g",
    )
    assert (g.requested, g.arguments) == ("{}", '{"a": 1}')
    assert answer.reply is not None
    assert (answer.reply.text, timeline.answer, timeline.status) == (
        "done",
        "done",
        "answered",
    )
    assert (timeline.started, timeline.ended, timeline.lives) == (0.0, 11.0, 1)


def test_a_decision_says_who_and_when_and_how_long_it_took() -> None:
    """A deferred call has the time at which it was asked about, and the record of the decision; the pause is a gap."""
    timeline = drawn(
        run_started(),
        replied(calls("f")),
        decided(0, verdict="defer", prompt="Really?", expires_at=99.0, roles=("boss",)),
        PAUSED,
        RESUMED,
        decided(0, by="ann", person=True, approved=True, edited='{"a": 2}'),
        began(0),
        finished(0),
    )
    (call,) = timeline.calls
    assert (call.asked, call.prompt, call.roles, call.outcome) == (
        2.0,
        "Really?",
        ("boss",),
        "ok",
    )
    (record,) = call.decisions
    assert (record.kind, record.by, record.at) == (
        "approve",
        "ann",
        datetime.fromtimestamp(5, UTC),
    )
    assert (call.requested, call.arguments) == ("{}", '{"a": 2}')
    assert timeline.iterations[0].gaps == (Gap(started=3.0, ended=4.0, kind="paused"),)
    assert [event.kind for event in timeline.events] == ["paused", "resumed"]
    assert timeline.lives == 2


def test_a_paused_run_shows_what_waits() -> None:
    """A run that waits is paused, its call is waiting, and the gap has no end."""
    timeline = drawn(
        run_started(),
        replied(calls("f")),
        decided(0, verdict="defer", expires_at=99.0),
        PAUSED,
    )
    assert timeline.status == "paused"
    assert (timeline.calls[0].outcome, timeline.calls[0].expires) == ("waiting", 99.0)
    assert timeline.iterations[0].gaps == (Gap(started=3.0, ended=None, kind="paused"),)


def test_calls_that_did_not_run_say_why() -> None:
    """Denied, unknown, invalid, withheld and answered calls have different outcomes, as has the final answer."""
    timeline = drawn(
        run_started(),
        replied(calls("f", "unknown", "bad", "g", "ask", "h")),
        decided(0, "f", "deny", reason="too much", by="policy"),
        decided(1, "unknown"),
        decided(2, "bad"),
        decided(3, "g", "answer", reason="supplied", by="ann"),
        decided(4, "ask"),
        decided(5, "h"),
        withheld(5, limit="max_tool_calls"),
        clarified(index=4, by="bob"),
        completed(),
        replied(calls("final"), iteration=1),
        decided(0, "final", iteration=1),
    )
    outcomes = [call.outcome for call in timeline.calls]
    assert outcomes == [
        "denied",
        "unknown",
        "invalid",
        "answered",
        "answered",
        "withheld",
        "final_answer",
    ]
    assert (
        timeline.calls[0].decisions[0].by,
        timeline.calls[0].decisions[0].reason,
    ) == ("policy", "too much")
    assert timeline.calls[5].error == "max_tool_calls"
    (question,) = timeline.events
    assert (question.kind, question.text, question.answer, question.by) == (
        "question",
        "where?",
        "Oslo",
        "bob",
    )


def test_a_failed_request_is_an_attempt_of_its_iteration() -> None:
    """Requests without a reply are listed before the one that was answered, with what they cost."""
    timeline = drawn(
        run_started(),
        request_failed(),
        model_asked(),
        request_failed(0),
        model_asked(),
        replied(says("hello")),
    )
    (iteration,) = timeline.iterations
    failed = iteration.request.failed
    assert [(one.started, one.ended, one.charged, one.lost) for one in failed] == [
        (0.0, 1.0, 1, False),
        (2.0, 3.0, 0, False),
    ]
    assert (iteration.request.started, iteration.request.ended) == (4.0, 5.0)
    assert [gap.kind for gap in iteration.gaps] == ["retry", "retry"]


def test_after_a_failure_no_request_is_under_way_until_the_next_is_announced() -> None:
    """A run that waits for its next attempt has no request that goes on; the attempt is one again."""
    started, failed, asked = run_started(), request_failed(), model_asked()
    (waiting,) = drawn(started, failed).iterations
    assert (waiting.request.started, waiting.request.ended) == (1.0, 1.0)
    (again,) = drawn(started, failed, asked).iterations
    assert (again.request.started, again.request.ended) == (2.0, None)


@pytest.mark.parametrize("request_of_the_clarifier", [model_asked(), request_failed()])
def test_a_request_of_a_clarifier_does_not_count_as_an_iteration(
    request_of_the_clarifier: Fact,
) -> None:
    """What a clarifier asks its model while a question is open leaves the calls where they are."""
    timeline = drawn(
        run_started(),
        replied(calls("ask")),
        decided(0, "ask"),
        request_of_the_clarifier,
        clarified(index=0),
    )
    answered, under_way = timeline.iterations
    assert [call.outcome for call in answered.calls] == ["answered"]
    assert (under_way.number, under_way.request.failed) == (1, ())


def test_a_plan_request_under_way_has_its_number() -> None:
    """The plan request is -1 before its reply, too."""
    assert [
        iteration.number for iteration in drawn(run_started(plan=True)).iterations
    ] == [-1]


def test_calls_in_flight_are_in_doubt_once_a_crash_is_seen() -> None:
    """A batch of which one call has been taken up again shows that its other calls may have taken effect."""
    timeline = drawn(
        run_started(),
        replied(calls("f", "g")),
        decided(0),
        decided(1, "g"),
        began(0),
        began(1, "g"),
        decided(0),
    )
    assert [call.outcome for call in timeline.calls] == ["ready", "in_doubt"]


def test_a_reader_says_which_calls_a_fact_changed() -> None:
    """Fed fact by fact, a reader returns the calls of a reply, then each call as it changes."""
    reader = TimelineReader()
    journal = timed(
        run_started(),
        replied(calls("f", "g")),
        decided(0),
        decided(1, "g", "deny"),
        began(0),
        finished(0),
    )
    changed = [
        [(call.id, call.outcome) for call in reader.read(fact)] for fact in journal
    ]
    assert changed == [
        [],
        [("c0", "requested"), ("c1", "requested")],
        [("c0", "ready")],
        [("c1", "denied")],
        [("c0", "running")],
        [("c0", "ok")],
    ]
    assert reader.timeline() == timeline_of(journal)


def test_a_process_that_ended_during_a_request_is_a_crash() -> None:
    """The next process records the request as lost; the time between is a gap, and the run has two lives."""
    lost = replace(request_failed(), reason=REQUEST_LOST)
    timeline = drawn(
        run_started(),
        replied(calls("f")),
        decided(0),
        began(0),
        finished(0),
        completed(),
        lost,
    )
    crashed = timeline.iterations[1]
    assert [event.kind for event in crashed.events] == ["crashed"]
    assert crashed.request.failed[0].lost
    assert crashed.gaps == (Gap(started=5.0, ended=6.0, kind="crashed"),)
    assert timeline.lives == 2


def recovered(how: str) -> Sequence[Fact]:
    """What the next process records of a call that had started."""
    match how:
        case "again":
            return (decided(0), began(0), finished(0))
        case "asked":
            again = decided(0, by="ann", person=True, approved=True)
            return (PAUSED, RESUMED, again, began(0), finished(0))
        case _:
            return (replace(finished(0, outcome="cancelled"), result=IN_DOUBT),)


@each_of(
    ("how", "lives", "attempts", "outcome"),
    [("again", 2, 2, "ok"), ("asked", 3, 2, "ok"), ("model", 2, 1, "cancelled")],
)
def test_a_process_that_ended_during_a_call_is_a_crash(
    how: str, lives: int, attempts: int, outcome: str
) -> None:
    """A call that is started again, asked about, or left in doubt tells of a crash; its first attempt has no end."""
    timeline = drawn(
        run_started(), replied(calls("f")), decided(0), began(0), *recovered(how)
    )
    (call,) = timeline.calls
    assert timeline.events[0].kind == "crashed"
    assert (timeline.lives, len(call.attempts), call.outcome) == (
        lives,
        attempts,
        outcome,
    )
    assert call.attempts[0].ended is None


def test_a_call_in_doubt_waits_for_a_person() -> None:
    """A run that pauses because of a call in doubt shows it as such, and asked about from the pause on."""
    timeline = drawn(run_started(), replied(calls("f")), decided(0), began(0), PAUSED)
    assert timeline.calls[0].outcome == "in_doubt"
    assert timeline.calls[0].asked == timeline.until


def test_spending_is_shown_against_each_limit_that_is_set() -> None:
    """Each limit has what was used of it, and the part that nested runs used."""
    limits = Budget(
        max_iterations=5,
        max_tool_calls=4,
        deadline=datetime.fromtimestamp(100, UTC),
        max_calls_per_function={"f": 2, "g": 1},
        max_repeated_calls=3,
        max_calls_per_reply=None,
    )
    spent = Usage(iterations=2, tool_calls=1, calls_by_function={"g": 1})
    timeline = drawn(
        run_started(limits=limits),
        replied(calls("f")),
        decided(0, nested=True),
        began(0),
        finished(0, spent=spent),
        completed(),
    )
    assert timeline.spending == (
        Spending(name="max_iterations", used=3, limit=5, nested=2),
        Spending(name="max_tool_calls", used=2, limit=4, nested=1),
        Spending(name="deadline", used=5.0, limit=100.0),
        Spending(name="max_calls_per_function", function="f", used=1, limit=2),
        Spending(name="max_calls_per_function", function="g", used=1, limit=1),
        Spending(name="max_repeated_calls", used=1, limit=3),
    )
    assert (timeline.calls[0].nested, timeline.calls[0].spent) == (True, spent)


def test_a_call_shows_what_it_spent_in_all_its_lives() -> None:
    """What it had recorded when its process ended was charged, and its end reports what it took in the last life."""
    asked = ModelAsked(iteration=0, index=0, at=0.0)
    life = [
        decided(0),
        began(0),
        asked,
        NestedCallStarted(iteration=0, index=0, function="g", at=0.0),
    ]
    spent = Usage(iterations=1, tool_calls=1, calls_by_function={"g": 1})
    (call,) = drawn(
        run_started(), replied(calls("f")), *life, *life, finished(0, spent=spent)
    ).calls
    assert call.spent == Usage(iterations=2, tool_calls=2, calls_by_function={"g": 2})


def test_a_run_under_way_is_shown_up_to_now() -> None:
    """A request without a reply is the last iteration; a call without an end runs."""
    asking = timeline_of(timed(run_started()), now=9.0)
    assert (asking.status, asking.until) == ("running", 9.0)
    assert [(one.number, one.request.ended) for one in asking.iterations] == [(0, None)]
    calling = drawn(run_started(), replied(calls("f")), decided(0), began(0))
    assert (calling.calls[0].outcome, calling.calls[0].attempts[0].ended) == (
        "running",
        None,
    )


def test_a_queued_run_has_a_timeline() -> None:
    """Without any fact there is nothing in it."""
    assert timeline_of(()) == Timeline()


def test_a_refusal_by_a_shared_budget_is_no_change_of_the_budget() -> None:
    """What a shared budget refused is an event with its reason; that an earlier refusal ended is none."""
    refused = SharedBudgetsChecked(
        limit="per user: max_iterations", reason="Nothing is left today.", at=1.0
    )
    timeline = drawn(run_started(), refused, SharedBudgetsChecked(at=2.0))
    assert [(one.kind, one.text) for one in timeline.events] == [
        ("refused", "Nothing is left today.")
    ]
    assert "a shared budget allowed nothing more" in page_of([timeline])


def test_changes_from_outside_are_events() -> None:
    """A stop, a changed budget and a reopened run are events, with who and what."""
    timeline = drawn(
        run_started(limits=Budget(max_iterations=5, max_calls_per_reply=None)),
        budget_changed(Budget(max_iterations=9, max_calls_per_reply=None), by="bob"),
        stop("enough"),
        ended(status="stopped", reason="enough"),
        RESUMED,
        replied(says("hello")),
    )
    assert [(event.kind, event.text, event.by) for event in timeline.events] == [
        ("budget", "max_iterations 5 → 9", "bob"),
        ("stopped", "enough", ""),
        ("ended", "enough", ""),
        ("resumed", "", ""),
    ]
    assert timeline.iterations[0].gaps == (Gap(started=3.0, ended=4.0, kind="left"),)
    assert timeline.ended is None


def test_a_run_that_was_not_under_way_when_it_was_stopped_has_a_gap() -> None:
    """A fork, or a run cancelled days later, did not work in the time before; one stopped while it works did."""
    left = timeline_of(
        [
            run_started(),
            replace(stop(), at=99.0),
            replace(ended(), at=99.0, seconds=0.0),
        ]
    )
    assert left.iterations[0].gaps == (Gap(started=0.0, ended=99.0, kind="left"),)
    working = timeline_of(
        [
            run_started(),
            replace(stop(), at=99.0),
            replace(ended(), at=99.0, seconds=99.0),
        ]
    )
    assert working.iterations[0].gaps == ()


def test_messages_are_those_that_the_transcript_got() -> None:
    """Added messages belong to the request that sent them; a compacted transcript replaces the one before."""
    timeline = drawn(
        run_started(),
        replied(says("thinking")),
        added(),
        replied(calls("f"), iteration=1),
        decided(0, iteration=1),
        began(0, iteration=1),
        finished(0, iteration=1),
        completed(1, messages=({"role": "system", "content": "short"},)),
        replied(says("done"), iteration=2),
    )
    texts = [
        [message.text for message in iteration.messages]
        for iteration in timeline.iterations
    ]
    assert texts == [["goal"], ["step"], ["short"]]
    assert [iteration.replaced for iteration in timeline.iterations] == [
        False,
        False,
        True,
    ]


def test_the_parts_of_a_message_are_described() -> None:
    """Parts other than text have a line each; large data is measured."""
    parts = [
        {"content_type": "text", "text": "look"},
        {"content_type": "image", "mime_type": "image/png", "data": "A" * 4000},
        {"content_type": "function_result", "name": "f-g", "result": "42"},
    ]
    message = {"role": "user", "items": parts}
    started = run_started()
    assert isinstance(started, RunStarted)
    timeline = timeline_of([replace(started, messages=(message,))])
    (shown,) = timeline.iterations[0].messages
    assert (shown.role, shown.text) == ("user", "look")
    assert shown.others == (
        "image, mime_type: image/png, data: 4,000 characters",
        "returns f-g: 42",
    )


def test_a_journal_that_contradicts_itself_is_refused() -> None:
    """A fact that cannot follow the ones before it is refused as by the fold."""
    with pytest.raises(IllegalTransitionError):
        drawn(run_started(), began(0))
    assert isinstance(ended(), Ended)


def test_what_a_callback_a_check_and_a_person_say_is_shown() -> None:
    """A callback that ends the run and a wrong form are events; a doubt that a person leaves is a denial."""
    timeline = drawn(
        run_started(structured=True),
        model_asked(),
        replied(calls("f")),
        decided(0, verdict="answer", person=True, by="ann"),
        completed(terminate=True, reason="enough"),
    )
    (iteration,) = timeline.iterations
    assert [(event.kind, event.text) for event in iteration.events] == [
        ("callback", "enough")
    ]
    assert iteration.gaps == ()
    (call,) = iteration.calls
    assert (call.outcome, call.started) == ("denied", None)
    checked = AnswerChecked(answer="42", problem="no JSON", at=0.0)
    answered = drawn(run_started(structured=True), replied(says("42")), checked)
    assert [(event.kind, event.text) for event in answered.events] == [
        ("check", "no JSON")
    ]


def test_a_run_that_is_resumed_before_its_first_request_has_no_gap() -> None:
    """It has two lives, and was not idle in an iteration."""
    timeline = drawn(run_started(), Resumed(at=0.0))
    (iteration,) = timeline.iterations
    assert (timeline.lives, iteration.gaps) == (2, ())


def test_a_call_of_a_history_is_a_line_of_its_message() -> None:
    """A message that the run began with shows the functions that it calls."""
    part = {"content_type": "function_call", "name": "f-g", "arguments": "{}"}
    started = run_started()
    assert isinstance(started, RunStarted)
    given = replace(started, messages=({"role": "assistant", "items": [part]},))
    (shown,) = timeline_of([given, model_asked()]).iterations[0].messages
    assert shown.others == ("calls f-g({})",)


def test_a_stop_ends_the_pause() -> None:
    """A paused run that is stopped no longer waits: its gap ends there."""
    paused = Paused(at=0.0, seconds=0.0)
    deferred = decided(0, verdict="defer")
    timeline = drawn(run_started(), replied(calls("f")), deferred, paused, stop())
    (gap,) = timeline.iterations[0].gaps
    assert (gap.kind, gap.started, gap.ended) == ("paused", 3.0, 4.0)
