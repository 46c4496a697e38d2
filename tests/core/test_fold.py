"""`apply`, one fact at a time: what each phase refuses, and what each fact changes."""

from dataclasses import replace
from typing import Any

import pytest
from core_builders import (
    GOAL,
    PAUSED,
    RESUMED,
    SAMPLES,
    added,
    began,
    calls,
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

from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.facts import Fact, Resumed
from planner_ext.core.fold import apply, fold
from planner_ext.core.limits import Limits
from planner_ext.core.state import Phase, State
from planner_ext.core.transitions import TRANSITIONS
from planner_ext.core.values import CallResult, ReplyEntry, Usage

ONE_OF_EACH: list[Fact] = [
    run_started(),
    planned(),
    added(),
    replied(says("hello")),
    decided(0),
    withheld(0),
    began(0),
    finished(0),
    completed(),
    stop(),
    PAUSED,
    RESUMED,
    ended(),
]
BATCH = (run_started(), replied(calls("f", "g")))
CALLED = (*BATCH, decided(0), decided(1, "g"))


@pytest.mark.parametrize(
    ("phase", "fact"),
    [(phase, fact) for phase in Phase for fact in ONE_OF_EACH if (phase, fact.type) not in TRANSITIONS],
    ids=lambda value: value.type if hasattr(value, "type") else str(value),
)
def test_a_fact_that_the_table_does_not_list_is_refused(phase: Phase, fact: Fact) -> None:
    """Whatever cannot happen in a phase is refused by name, and by the phase's name."""
    with pytest.raises(IllegalTransitionError, match=rf"{fact.type} .*{phase}"):
        apply(fold(SAMPLES[phase]), fact)


@pytest.mark.parametrize(
    ("phase", "fact"),
    [(phase, fact) for phase in Phase for fact in ONE_OF_EACH if (phase, fact.type) in TRANSITIONS],
    ids=lambda value: value.type if hasattr(value, "type") else str(value),
)
def test_a_listed_fact_leads_where_the_table_says(phase: Phase, fact: Fact) -> None:
    """A legal fact is applied, its time is kept, and the phase after it is one of those listed."""
    before = {"CallFinished": (began(0),), "CallDecided": (began(0),)} if phase is Phase.CALLING else {}
    state = fold([*SAMPLES[phase], *before.get(fact.type, ())])
    assert state.phase is phase
    whole = withheld(0, 1) if phase is Phase.REVIEWING and fact.type == "CallsWithheld" else fact
    after = apply(state, replace(whole, at=7.0))
    assert after.phase in TRANSITIONS[phase, fact.type]
    assert after.at == 7.0


@pytest.mark.parametrize("index", [2, 99, -1])
@pytest.mark.parametrize("make", [decided, withheld, began, finished])
def test_a_call_that_is_not_in_the_batch_is_refused(make: Any, index: int) -> None:
    """A damaged journal that names a call beyond its batch is refused by name, not by an accident of indexing."""
    with pytest.raises(IllegalTransitionError):
        apply(fold(CALLED), make(index))


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param((*BATCH, decided(0, verdict="defer"), decided(1), began(0)), id="started while deferred"),
        pytest.param((*BATCH, decided(0, verdict="deny"), decided(1), began(0)), id="started though denied"),
        pytest.param((*CALLED, began(0), began(0)), id="started twice"),
        pytest.param((*CALLED, began(0), finished(0), began(0)), id="started again"),
        pytest.param((*CALLED, finished(0)), id="finished, not started"),
        pytest.param((*CALLED, began(0), finished(0), finished(0)), id="finished twice"),
        pytest.param((*CALLED, began(0), finished(0), withheld(0)), id="withheld though finished"),
        pytest.param((*CALLED, began(0), finished(0), decided(0)), id="decided though finished"),
        pytest.param((*CALLED, decided(0)), id="decided twice"),
        pytest.param((*CALLED, began(0, iteration=3)), id="of another trip"),
        pytest.param((*CALLED, replace(began(0), call_id="c9")), id="of another id"),
    ],
)
def test_a_call_follows_its_own_order(facts: tuple[Fact, ...]) -> None:
    """A call is decided, then started, then finished, each once: a journal that says otherwise is refused."""
    fold(facts[:-1])
    with pytest.raises(IllegalTransitionError):
        apply(fold(facts[:-1]), facts[-1])


def test_a_call_without_an_open_batch_is_refused() -> None:
    """A state that says a batch is open and has none is damaged, and is refused as such."""
    with pytest.raises(IllegalTransitionError, match="no batch is open"):
        apply(State(phase=Phase.CALLING), began(0))


def test_a_fact_cannot_lead_past_the_table() -> None:
    """Withholding part of a batch under review, so that the rest would run unseen, is refused."""
    with pytest.raises(IllegalTransitionError, match="cannot lead from reviewing to calling"):
        fold([*BATCH, decided(0), withheld(1)])


def test_a_run_starts_with_its_plan_or_its_first_request() -> None:
    """The rules say whether a plan is asked for; goal, transcript and rules are kept."""
    state = fold([run_started(plan=True)])
    assert (state.phase, state.run_id, state.goal, state.transcript) == (Phase.PLANNING, "run", "goal", (GOAL,))
    assert fold([run_started()]).phase is Phase.ASKING


@pytest.mark.parametrize(("charge", "charged"), [(True, 2), (False, 0)])
def test_the_plan_request_is_charged_as_the_rules_say(charge: bool, charged: int) -> None:
    """Its round trips count unless the rules leave it free; its time always does; its messages open the transcript."""
    state = fold([run_started(plan=True, charge_plan=charge), planned(iterations=2)])
    assert state.ledger.iterations == charged
    assert state.ledger.usage.active_seconds == 1.0
    assert state.transcript == (GOAL, "plan")


def test_a_reply_is_charged_what_it_reports() -> None:
    """Round trips, tokens and seconds of a reply are added to the ledger, and the next trip has the next number."""
    usage = Usage(prompt_tokens=3, completion_tokens=4, cost=0.5)
    state = fold([run_started(), replied(says("hello", iterations=3, usage=usage))])
    assert state.ledger.iterations == 3
    assert state.ledger.usage == replace(usage, active_seconds=1.0)
    assert state.iteration == 1


def test_calls_open_a_batch_and_leave_the_transcript_alone() -> None:
    """Until each call has its result, the transcript ends before the message that asked for them."""
    state = fold(BATCH)
    assert state.phase is Phase.REVIEWING
    assert state.transcript == (GOAL,)
    assert state.batch is not None
    assert [call.request.name for call in state.batch.calls] == ["f", "g"]


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_calls_of_a_reply_cut_short_open_no_batch(reason: str) -> None:
    """A truncated call is never run; the text beside it is kept, without the calls."""
    state = fold([run_started(), replied(calls("f", text="I will", finish_reason=reason))])
    assert (state.phase, state.batch) == (Phase.ANSWERING, None)
    assert [type(entry) for entry in state.transcript] == [dict, ReplyEntry]
    assert state.transcript[-1].kept == ()


def test_calls_that_were_not_offered_open_no_batch() -> None:
    """Where no function was offered, calls are left out and their text is kept."""
    state = fold([run_started(), replied(calls("f", text="I will", stubborn=True), offered=False)])
    assert state.phase is Phase.ANSWERING
    assert state.transcript[-1] == ReplyEntry(message=state.transcript[-1].message, kept=())


def test_a_reply_without_text_leaves_no_empty_message() -> None:
    """A reply with neither text nor calls adds nothing that a service would refuse."""
    assert fold([run_started(), replied(says(""))]).transcript == (GOAL,)


def test_the_results_enter_in_call_order_whatever_ended_first() -> None:
    """The message comes first, then one result per call, in call order."""
    state = fold([*CALLED, began(0), began(1, "g"), finished(1, "g"), finished(0)])
    assert state.phase is Phase.COMPLETING
    assert state.batch is None
    assert state.transcript[2:] == (
        CallResult(call_id="c0", name="f", text="result of f"),
        CallResult(call_id="c1", name="g", text="result of g"),
    )
    assert state.called


def test_started_functions_are_counted_once_each() -> None:
    """The ledger counts starts: in all, by function, and by function with arguments where repeats are limited."""
    facts = [run_started(limits=Limits(max_repeated_calls=2)), *CALLED[1:], began(0), finished(0, outcome="failed")]
    ledger = fold(facts).ledger
    assert ledger.tool_calls == 1
    assert ledger.calls_by_function == {"f": 1}
    assert ledger.calls_by_digest == {"digest of f": 1}


def test_a_call_in_doubt_that_runs_again_is_charged_once() -> None:
    """However often its process died, it is one call; where it is answered instead, it stays charged as started."""
    again = fold([*CALLED, began(0), decided(0), began(0), finished(0)]).ledger
    answered = fold([*CALLED, began(0), decided(0, verdict="answer")]).ledger
    for ledger in (again, answered):
        assert (ledger.tool_calls, ledger.calls_by_function, ledger.calls_by_digest) == (
            1,
            {"f": 1},
            {"digest of f": 1},
        )


def test_repeats_are_counted_before_they_are_limited() -> None:
    """What was spent stays spent: a repeat limit set on resume counts the calls that were made before it."""
    facts = [*CALLED, began(0), finished(0), withheld(1), completed(), ended()]
    state = fold([*facts, Resumed(limits=Limits(max_repeated_calls=1), at=0.0)])
    assert state.ledger.calls_by_digest == {"digest of f": 1}


@pytest.mark.parametrize("name", ["unknown", "bad"])
def test_a_batch_of_answered_calls_settles_in_review(name: str) -> None:
    """Calls that cannot run are answered by their decision alone, and no function was called."""
    state = fold([run_started(), replied(calls(name)), decided(0, name)])
    assert state.phase is Phase.COMPLETING
    assert state.transcript[-1].text == f"answer to {name}"
    assert not state.called
    assert state.ledger.errors_in_row == 1
    assert state.ledger.tool_calls == 0


def test_one_error_makes_a_batch_an_error_and_one_start_a_batch_that_called() -> None:
    """Of a mixed batch each counts: that a function was called, and that something in it failed."""
    mixed = [run_started(), replied(calls("f", "unknown")), decided(0), decided(1, "unknown"), began(0), finished(0)]
    assert fold(mixed).ledger.errors_in_row == 1
    assert fold(mixed).called


def test_a_clean_batch_resets_the_errors_in_a_row() -> None:
    """Only batches in a row count: one without an error starts the count again."""
    trips: list[Fact] = []
    for trip, outcome in enumerate(["failed", "timed_out", "ok"]):
        trips += [
            replied(calls("f"), iteration=trip),
            decided(0, iteration=trip),
            began(0, iteration=trip),
            finished(0, outcome=outcome, iteration=trip),  # type: ignore[arg-type]
            completed(trip),
        ]
    assert fold([run_started(), *trips[:5]]).ledger.errors_in_row == 1
    assert fold([run_started(), *trips[:10]]).ledger.errors_in_row == 2
    assert fold([run_started(), *trips]).ledger.errors_in_row == 0


def test_only_a_batch_that_was_denied_whole_counts_as_a_denial() -> None:
    """Denials in a row are batches in which nothing was let through."""
    whole = [*BATCH, decided(0, verdict="deny"), decided(1, "g", "deny")]
    part = [*BATCH, decided(0, verdict="deny"), decided(1, "g"), began(1, "g"), finished(1, "g")]
    assert fold(whole).ledger.denials_in_row == 1
    assert fold(part).ledger.denials_in_row == 0


def test_a_deferred_call_is_decided_a_second_time() -> None:
    """The second decision of a deferred call takes the place of the first, and the batch goes on."""
    deferred = [*BATCH, decided(0, verdict="defer"), decided(1, "g", "deny"), PAUSED, RESUMED]
    state = fold([*deferred, decided(0, verdict="deny", answer="no")])
    assert state.phase is Phase.COMPLETING
    assert [entry.text for entry in state.transcript[2:]] == ["no", "answer to g"]


@pytest.mark.parametrize(
    ("sticky", "key"), [(None, set()), ("function", {"function:f"}), ("arguments", {"arguments:digest of f"})]
)
def test_a_sticky_approval_is_kept_for_the_run(sticky: Any, key: set[str]) -> None:
    """What was approved for good is part of the state, by function or by function with arguments."""
    assert fold([*BATCH, decided(0, sticky=sticky)]).sticky == key


def test_the_first_final_answer_counts() -> None:
    """Of two final answers in one message, the first is taken."""
    first, second = decided(0, "final", final_answer="one"), decided(1, "final", final_answer="two")
    assert fold([run_started(), replied(calls("final", "final")), first, second]).final_answer == "one"


def test_edited_arguments_appear_in_the_transcript() -> None:
    """The model reads the arguments that were used, not those it sent."""
    facts = [*BATCH, decided(0, edited='{"a":1}'), decided(1, "g"), withheld(0, 1)]
    entry = fold(facts).transcript[1]
    assert entry == ReplyEntry(message=entry.message, kept=("c0", "c1"), edited=(("c0", '{"a":1}'),))


def test_reask_removes_denied_calls() -> None:
    """Under reask, denied calls and their results are left out; the others stay, and the next request asks again."""
    rules = run_started(on_denial="reask")
    state = fold([rules, BATCH[1], decided(0, verdict="deny"), decided(1, "g"), began(1, "g"), finished(1, "g")])
    assert state.transcript[1].kept == ("c1",)
    assert [entry.call_id for entry in state.transcript[2:]] == ["c1"]
    assert state.reask
    assert not fold([rules, BATCH[1], decided(0), decided(1, "g"), withheld(0, 1)]).reask


@pytest.mark.parametrize(("text", "entries"), [("", 1), ("I will", 2)])
def test_reask_keeps_the_text_beside_removed_calls(text: str, entries: int) -> None:
    """A message whose every call was removed stays for its text, and goes where it has none."""
    state = fold(
        [run_started(on_denial="reask"), replied(calls("f", text=text)), decided(0, verdict="deny"), completed()]
    )
    assert len(state.transcript) == entries
    assert fold([*SAMPLES[Phase.ASKING], replied(says("ok"))]).reask is False


def test_the_reask_is_over_with_the_reply_to_it() -> None:
    """One request goes without functions because of a removed call, not every later one."""
    facts = [run_started(on_denial="reask"), replied(calls("f")), decided(0, verdict="deny"), completed()]
    assert fold(facts).reask
    assert not fold([*facts, replied(says("ok"), iteration=1)]).reask


def test_withheld_calls_name_the_first_limit() -> None:
    """The limit that withheld calls first is kept until its consequence is due; no limit is none."""
    assert fold([*CALLED, withheld(0)]).limit is None
    assert fold([*CALLED, withheld(0, limit="max_tool_calls")]).limit == "max_tool_calls"
    both = [*CALLED, withheld(0, limit="max_tool_calls"), withheld(1, limit="max_cost")]
    assert fold(both).limit == "max_tool_calls"


def test_an_undecided_call_can_be_withheld() -> None:
    """A batch that is withheld while it is under review settles, decided or not."""
    state = fold([*BATCH, decided(0, verdict="defer"), withheld(0, 1)])
    assert state.phase is Phase.COMPLETING
    assert not state.called


def test_a_filter_that_terminates_stops_the_run() -> None:
    """A filter's wish to end the run is, once its batch has settled, a reason to stop, unless there is one already."""
    asked = (began(0), finished(0, terminate=True), began(1, "g"), finished(1, "g"))
    assert "filter" in (fold([*CALLED, *asked]).stopping or "")
    assert fold([*CALLED, stop("first"), *asked]).stopping == "first"


def test_a_completed_iteration_may_replace_the_transcript() -> None:
    """What the callback puts in place is the transcript from then on; without it nothing changes."""
    facts = SAMPLES[Phase.COMPLETING]
    assert fold([*facts, completed(messages=("compact",))]).transcript == ("compact",)
    assert fold([*facts, completed()]).transcript == fold(facts).transcript


@pytest.mark.parametrize(("reason", "stopping"), [("enough", "enough"), ("", "callback")])
def test_a_completed_iteration_may_ask_to_stop(reason: str, stopping: str) -> None:
    """The callback's reason is kept, and named in its place where it gave none; an older reason stands."""
    asked = completed(terminate=True, reason=reason)
    assert stopping in (fold([*SAMPLES[Phase.COMPLETING], asked]).stopping or "")
    assert fold([*SAMPLES[Phase.COMPLETING], stop("first"), asked]).stopping == "first"


def test_rounds_are_counted_in_the_request_and_in_the_step() -> None:
    """A completed iteration is a round of both; a step's message starts the step's count again, insisting does not."""
    facts = [*SAMPLES[Phase.COMPLETING], completed()]
    assert (fold(facts).rounds, fold(facts).step_rounds) == (1, 1)
    closed = [*facts, replied(says("hm"), iteration=1)]
    assert (fold([*closed, added("step")]).rounds, fold([*closed, added("step")]).step_rounds) == (1, 0)
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
    """Resuming a pause with new limits changes the limits and nothing else of the ledger or the batch."""
    paused = fold(SAMPLES[Phase.PAUSED])
    limits = Limits(max_iterations=9)
    state = apply(paused, Resumed(limits=limits, at=1.0))
    assert state.rules.limits == limits
    assert (state.ledger, state.batch, state.transcript) == (paused.ledger, paused.batch, paused.transcript)


def test_a_pause_does_not_forget_a_limit_that_was_reached() -> None:
    """The consequence of a reached limit is still due after a pause, unless new limits replace the old ones."""
    rules = run_started(on_deferred="run_safe_first")
    facts = [rules, BATCH[1], decided(0), decided(1, "g", "defer"), withheld(0, limit="max_tool_calls"), PAUSED]
    assert fold([*facts, RESUMED]).limit == "max_tool_calls"
    assert fold([*facts, Resumed(limits=Limits(), at=0.0)]).limit is None


def test_resuming_an_ended_run_starts_its_counts_in_a_row_again() -> None:
    """A run that a limit ended goes on: attempts, errors and denials in a row start again, what was spent stays."""
    facts = [run_started(), replied(calls("unknown")), decided(0, "unknown"), completed(), ended()]
    before, state = fold(facts), fold([*facts, RESUMED])
    assert (state.phase, state.ended, state.rounds) == (Phase.ASKING, None, 0)
    assert state.ledger == replace(before.ledger, errors_in_row=0, denials_in_row=0)


def test_resuming_forgets_the_wish_to_stop() -> None:
    """A run that was stopped goes on when it is resumed."""
    assert fold([run_started(), stop(), ended(), RESUMED]).stopping is None


def test_resuming_drops_the_forced_answer() -> None:
    """The answer that a limit forced makes room for a real one; a reply without text left nothing to drop."""
    forced = [run_started(), replied(says("forced"), offered=False), ended()]
    assert fold([*forced, RESUMED]).transcript == (GOAL,)
    empty = [run_started(), replied(says(""), offered=False), ended()]
    assert fold([*empty, RESUMED]).transcript == (GOAL,)
    assert fold([*SAMPLES[Phase.ENDED], RESUMED]).transcript == (GOAL,)


def test_resuming_a_run_that_returned_its_calls_reviews_them_again() -> None:
    """Calls that went back to the caller are undecided again when the run goes on."""
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
    assert fold([*CALLED, began(0), ended(returned=True), RESUMED, decided(1, "g")]).phase is Phase.CALLING


def test_resuming_a_run_that_was_stopped_before_its_plan_still_plans() -> None:
    """A run that was to plan and was stopped before it did has its plan to make when it goes on."""
    assert fold([run_started(plan=True), stop(), ended(), RESUMED]).phase is Phase.PLANNING


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
