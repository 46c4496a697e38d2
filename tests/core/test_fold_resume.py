"""A run in the fold that continues: after an iteration, a pause, a stop or its end."""

import pytest

from planner_ext.core.facts import Fact, Resumed
from planner_ext.core.fold import apply, fold
from planner_ext.core.limits import Budget
from planner_ext.core.state import Phase, State
from planner_ext.core.values import TextMessage
from support.core import (
    BATCH,
    CALLED,
    GOAL,
    PAUSED,
    RESUMED,
    SAMPLES,
    added,
    began,
    calls,
    clarified,
    completed,
    decided,
    ended,
    finished,
    planned,
    replied,
    run_started,
    says,
    stop,
    withheld,
)


def test_a_completed_iteration_may_replace_the_transcript() -> None:
    """What the callback puts in place is the transcript from then on; without it nothing changes."""
    facts = SAMPLES[Phase.COMPLETING]
    assert fold([*facts, completed(messages=("compact",))]).transcript == ("compact",)
    assert fold([*facts, completed()]).transcript == fold(facts).transcript


@pytest.mark.parametrize(
    ("reason", "stopping"), [("enough", "enough"), ("", "callback")]
)
def test_a_completed_iteration_may_ask_to_stop(reason: str, stopping: str) -> None:
    """The callback's reason is kept; without one the callback is named; an older reason stands."""
    asked = completed(terminate=True, reason=reason)
    assert stopping in (fold([*SAMPLES[Phase.COMPLETING], asked]).stopping or "")
    assert fold([*SAMPLES[Phase.COMPLETING], stop("first"), asked]).stopping == "first"


def test_rounds_are_counted_in_the_request_and_in_the_step() -> None:
    """A completed iteration is a round of both; a step's message starts the step's count again, insisting does not."""
    facts = [*SAMPLES[Phase.COMPLETING], completed()]
    assert (fold(facts).rounds, fold(facts).step_rounds) == (1, 1)
    closed = [*facts, replied(says("hm"), iteration=1)]
    assert (
        fold([*closed, added("step")]).rounds,
        fold([*closed, added("step")]).step_rounds,
    ) == (1, 0)
    assert fold([*closed, added("insist")]).step_rounds == 1


def test_a_message_of_the_planner_answers_the_reply_before_it() -> None:
    """What the model said is then no answer any more: it stays in the transcript, also when the run is resumed."""
    facts = [run_started(), replied(says("hm")), added("insist"), ended(), RESUMED]
    assert len(fold(facts).transcript) == 3
    assert fold(facts[:3]).reply is None


def test_the_first_reason_to_stop_stands() -> None:
    """Asking twice to stop changes nothing."""
    assert fold([run_started(), stop("one"), stop("two")]).stopping == "one"


def test_a_paused_run_that_is_stopped_has_its_batch_to_answer() -> None:
    """Stopping a paused run leads back to its open batch."""
    state = fold([*SAMPLES[Phase.PAUSED], stop()])
    assert state.phase is Phase.CALLING
    assert state.batch is not None


def test_a_resumed_pause_keeps_what_was_spent_and_decided() -> None:
    """Resuming a pause with new limits changes the limits and nothing else of the usage or the batch."""
    paused = fold(SAMPLES[Phase.PAUSED])
    limits = Budget(max_iterations=9)
    state = apply(paused, Resumed(limits=limits, at=1.0))
    assert state.rules.limits == limits
    assert state.usage == paused.usage
    assert state.batch == paused.batch
    assert state.transcript == paused.transcript


def test_a_pause_does_not_forget_a_limit_that_was_reached() -> None:
    """The consequence of a reached limit is still due after a pause, unless new limits replace the old ones."""
    rules = run_started(on_deferred="run_safe_first")
    facts = [
        rules,
        BATCH[1],
        decided(0),
        decided(1, "g", "defer"),
        withheld(0, limit="max_tool_calls"),
        PAUSED,
    ]
    assert fold([*facts, RESUMED]).limit == "max_tool_calls"
    assert fold([*facts, Resumed(limits=Budget(), at=0.0)]).limit is None


def test_resuming_an_ended_run_starts_its_counts_in_a_row_again() -> None:
    """A run that a limit ended continues: attempts, errors and denials in a row start again, what was spent stays."""
    facts = [
        run_started(),
        replied(calls("unknown")),
        decided(0, "unknown"),
        completed(),
        ended(),
    ]
    before, state = fold(facts), fold([*facts, RESUMED])
    assert state.phase == Phase.ASKING
    assert state.ended is None
    assert state.rounds == 0
    assert state.usage == before.usage


def test_resuming_forgets_the_wish_to_stop() -> None:
    """A run that was stopped continues when it is resumed."""
    assert fold([run_started(), stop(), ended(), RESUMED]).stopping is None


def test_resuming_drops_the_forced_answer() -> None:
    """The answer that a limit forced makes room for a real one; a reply without text left nothing to drop."""
    forced = [run_started(), replied(says("forced"), offered=False), ended()]
    assert fold([*forced, RESUMED]).transcript == (GOAL,)
    empty = [run_started(), replied(says(""), offered=False), ended()]
    assert fold([*empty, RESUMED]).transcript == (GOAL,)
    assert fold([*SAMPLES[Phase.ENDED], RESUMED]).transcript == (GOAL,)


def test_resuming_a_run_that_returned_its_calls_reviews_them_again() -> None:
    """Calls that went back to the caller are undecided again when the run continues."""
    state = fold([*CALLED, ended(returned=True), RESUMED])
    assert state.phase is Phase.REVIEWING
    assert state.batch is not None
    assert [call.decided for call in state.batch.calls] == [None, None]


def test_resuming_returned_calls_never_runs_a_finished_one_again() -> None:
    """A call of a returned batch that has already run keeps its result: nothing runs twice."""
    state = fold([*CALLED, began(0), finished(0), ended(returned=True), RESUMED])
    assert state.batch is not None
    assert [call.answer for call in state.batch.calls] == ["result of f", None]


def test_resuming_returned_calls_does_not_forget_that_one_is_in_doubt() -> None:
    """A call that a dead process had started stays in doubt when its batch is returned: nothing runs it unasked."""
    state = fold([*CALLED, began(0), ended(returned=True), RESUMED])
    assert state.phase is Phase.REVIEWING
    assert state.batch is not None
    assert [call.started for call in state.batch.calls] == [True, False]
    assert (
        fold([*CALLED, began(0), ended(returned=True), RESUMED, decided(1, "g")]).phase
        is Phase.CALLING
    )


def test_resuming_a_run_that_was_stopped_before_its_plan_still_plans() -> None:
    """A run that was to plan and was stopped before it did has its plan to make when it continues."""
    assert (
        fold([run_started(plan=True), stop(), ended(), RESUMED]).phase is Phase.PLANNING
    )


def test_a_plan_is_made_once() -> None:
    """A run that has its plan does not plan again when it is resumed, however it was interrupted."""
    facts = [run_started(plan=True), planned()]
    assert fold([*facts, RESUMED]).phase is Phase.ASKING
    assert fold([*facts, ended(), RESUMED]).phase is Phase.ASKING


def test_a_fold_is_its_facts_applied_one_by_one() -> None:
    """Folding a journal is folding its head and applying the rest; of nothing, it is a new run."""
    facts = SAMPLES[Phase.COMPLETING]
    assert fold([]) == State()
    assert fold(facts) == apply(fold(facts[:-1]), facts[-1])


def test_an_answered_question_is_not_taken_back_when_the_run_ends_later() -> None:
    """The user's answer stays in the transcript of a run that was stopped after it and is resumed."""
    facts = [
        run_started(),
        replied(says("where?")),
        clarified("Oslo", None),
        stop(),
        ended(),
        RESUMED,
    ]
    assert fold(facts[:3]).reply is None
    assert [
        entry.text for entry in fold(facts).transcript if isinstance(entry, TextMessage)
    ] == ["Oslo"]


def test_only_the_last_reply_of_an_ended_run_is_asked_for_again() -> None:
    """Everything before it stays."""
    before = [*SAMPLES[Phase.COMPLETING], completed()]
    facts = [
        *before,
        replied(says("done"), iteration=1),
        ended(status="answered"),
        RESUMED,
    ]
    assert fold(facts).transcript == fold(before).transcript


def test_a_run_that_was_answered_by_its_function_can_be_resumed() -> None:
    """Its final answer is a result like any other then."""
    facts = [run_started(), replied(calls("final")), decided(0, "final"), completed()]
    ended_with_answer = [*facts, ended(status="answered", answer="42")]
    assert fold(ended_with_answer).final_answer == "42"
    assert fold([*ended_with_answer, RESUMED]).final_answer is None


def test_a_resumed_run_may_ask_for_its_form_again_as_often() -> None:
    """However often it was asked for, it is asked for still, and counted anew."""
    facts = [
        run_started(structured=True),
        replied(says("prose")),
        added("structure"),
        *_in_form(1),
        *_in_form(2),
    ]
    assert fold(facts).refusals == 3
    again = fold([*facts, ended(), RESUMED])
    assert (again.refusals, again.structuring) == (0, True)
    assert not fold([run_started(structured=True), ended(), RESUMED]).structuring


def _in_form(iteration: int) -> tuple[Fact, Fact]:
    return replied(says("prose"), iteration=iteration), added("structure")


def test_a_returned_batch_is_decided_from_the_beginning() -> None:
    """Also calls that were answered without running; what a filter asked for is over."""
    facts = [
        run_started(),
        replied(calls("mine", "unknown", "f")),
        decided(0, "mine"),
        decided(1, "unknown"),
        decided(2, "f"),
        began(2),
        finished(2, terminate=True),
        ended(status="stopped", returned=True),
    ]
    assert fold(facts).ending is not None
    state = fold([*facts, RESUMED])
    assert state.phase == Phase.REVIEWING
    assert state.ended is None
    assert state.ending is None
    assert state.rounds == 0
    assert state.batch is not None
    assert (state.batch.undecided, state.batch.unanswered) == (2, 2)
    assert [call.answer for call in state.batch.calls] == [None, None, "result of f"]


def test_what_counts_in_a_row_starts_again_with_a_resumed_run() -> None:
    """Errors and denials of the run before do not end it at once."""
    failed = [run_started(), replied(calls("bad")), decided(0, "bad"), completed()]
    denied = [
        run_started(),
        replied(calls("f")),
        decided(0, verdict="deny"),
        completed(),
    ]
    assert (fold(failed).errors_in_row, fold(denied).denials_in_row) == (1, 1)
    for facts in (failed, denied):
        resumed = fold([*facts, ended(), RESUMED])
        assert (resumed.errors_in_row, resumed.denials_in_row) == (0, 0)


def test_a_run_that_ended_before_its_plan_plans_when_it_is_resumed() -> None:
    """It is open again, in the phase in which it began."""
    state = fold([run_started(plan=True), ended(), RESUMED])
    assert (state.phase, state.ended) == (Phase.PLANNING, None)


def test_a_run_that_ends_again_before_its_next_reply_keeps_what_it_had() -> None:
    """The reply that it ended with was taken back once; nothing before it is."""
    facts = [
        *SAMPLES[Phase.COMPLETING],
        completed(),
        replied(says("done"), iteration=1),
        ended(status="answered"),
    ]
    once = [*facts, RESUMED]
    assert fold([*once, ended(), RESUMED]).transcript == fold(once).transcript


def test_the_end_charges_what_it_says() -> None:
    """The time since the last fact."""
    assert fold([run_started(), ended()]).usage.active_seconds == 1.0
