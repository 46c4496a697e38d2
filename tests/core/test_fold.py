"""`apply`, one fact at a time: what each phase refuses, and what each fact changes."""

from dataclasses import replace
from typing import Any

import pytest

from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.facts import (
    AnswerChecked,
    CallLeft,
    Fact,
    HappenedInside,
    ModelAsked,
    NestedCallStarted,
)
from planner_ext.core.fold import apply, fold
from planner_ext.core.state import TRANSITIONS, Phase, State, name_inside
from planner_ext.core.values import CallResult, EditedReply, Usage
from support.core import (
    BATCH,
    CALLED,
    GOAL,
    ONE_OF_EACH,
    SAMPLES,
    added,
    began,
    budget_changed,
    calls,
    clarified,
    completed,
    decided,
    finished,
    planned,
    replied,
    request_failed,
    run_started,
    says,
    withheld,
)
from support.narrow import as_type
from support.values import each_of

NESTED = (*BATCH, decided(0, nested=True), decided(1, "g"))
LEFT = CallLeft(iteration=0, index=0, call_id="c0", function="f", at=0.0)


@each_of(
    ("phase", "fact"),
    [
        (phase, fact)
        for phase in Phase
        for fact in ONE_OF_EACH
        if (phase, fact.type) not in TRANSITIONS
    ],
    ids=lambda value: value.type if hasattr(value, "type") else str(value),
)
def test_a_fact_that_the_table_does_not_list_is_refused(
    phase: Phase, fact: Fact
) -> None:
    """A fact that cannot happen in a phase is refused by its name, and by the phase's name."""
    with pytest.raises(IllegalTransitionError, match=rf"{fact.type} .*{phase}"):
        apply(fold(SAMPLES[phase]), fact)


@each_of(
    ("phase", "fact"),
    [
        (phase, fact)
        for phase in Phase
        for fact in ONE_OF_EACH
        if (phase, fact.type) in TRANSITIONS
    ],
    ids=lambda value: value.type if hasattr(value, "type") else str(value),
)
def test_a_listed_fact_leads_where_the_table_says(phase: Phase, fact: Fact) -> None:
    """A legal fact is applied, its time is kept, and the phase after it is one of those listed."""
    running = phase is Phase.CALLING and fact.type in (
        "CallFinished",
        "CallDecided",
        "NestedCallStarted",
    )
    state = fold([*SAMPLES[phase], *((began(0),) if running else ())])
    assert state.phase is phase
    whole = (
        withheld(0, 1)
        if phase is Phase.REVIEWING and fact.type == "CallsWithheld"
        else fact
    )
    after = apply(state, replace(whole, at=7.0))
    assert after.phase in TRANSITIONS[phase, fact.type]
    assert after.at == 7.0


@each_of("index", [2, 99, -1])
@each_of("make", [decided, withheld, began, finished])
def test_a_call_that_is_not_in_the_batch_is_refused(make: Any, index: int) -> None:
    """A damaged journal that names a call beyond its batch is refused by name, not by an accident of indexing."""
    with pytest.raises(IllegalTransitionError):
        apply(fold(CALLED), make(index))


@each_of(
    "facts",
    [
        pytest.param(
            (*BATCH, decided(0, verdict="defer"), decided(1), began(0)),
            id="started while deferred",
        ),
        pytest.param(
            (*BATCH, decided(0, verdict="deny"), decided(1), began(0)),
            id="started though denied",
        ),
        pytest.param((*CALLED, began(0), began(0)), id="started twice"),
        pytest.param((*CALLED, began(0), finished(0), began(0)), id="started again"),
        pytest.param((*CALLED, finished(0)), id="finished, not started"),
        pytest.param(
            (*CALLED, began(0), finished(0), finished(0)), id="finished twice"
        ),
        pytest.param(
            (*CALLED, began(0), finished(0), withheld(0)), id="withheld though finished"
        ),
        pytest.param(
            (*CALLED, began(0), finished(0), decided(0)), id="decided though finished"
        ),
        pytest.param((*CALLED, decided(0)), id="decided twice"),
        pytest.param((*NESTED, LEFT), id="left, not started"),
        pytest.param((*NESTED, began(0), finished(0), LEFT), id="left though finished"),
        pytest.param((*CALLED, began(0), LEFT), id="left, not to be called again"),
        pytest.param((*CALLED, began(0, iteration=3)), id="of another trip"),
        pytest.param((*CALLED, replace(began(0), call_id="c9")), id="of another id"),
    ],
)
def test_a_call_follows_its_own_order(facts: tuple[Fact, ...]) -> None:
    """A call is decided, then started, then finished, each once: a journal that says otherwise is refused."""
    fold(facts[:-1])
    with pytest.raises(IllegalTransitionError):
        apply(fold(facts[:-1]), facts[-1])


def test_a_fact_in_a_run_inside_a_call_has_its_own_time() -> None:
    """It happens at the same moment in the run around."""
    state = fold([*NESTED, began(0)])
    begun = replace(run_started(), run_id=name_inside(state, 0, 0), at=7.0)
    assert apply(state, HappenedInside(iteration=0, index=0, fact=begun)).at == 7.0


def test_a_call_without_an_open_batch_is_refused() -> None:
    """A state that says a batch is open and has none is damaged, and is refused as such."""
    with pytest.raises(IllegalTransitionError, match="no batch is open"):
        apply(State(phase=Phase.CALLING), began(0))


def test_a_fact_cannot_lead_past_the_table() -> None:
    """Withholding part of a batch under review, so that the rest would run unseen, is refused."""
    with pytest.raises(
        IllegalTransitionError, match="cannot lead from reviewing to calling"
    ):
        fold([*BATCH, decided(0), withheld(1)])


def test_a_run_starts_with_its_plan_or_its_first_request() -> None:
    """The rules say whether a plan is asked for; goal, transcript and rules are kept."""
    state = fold([run_started(plan=True)])
    assert state.phase == Phase.PLANNING
    assert state.run_id == "run"
    assert state.goal == "goal"
    assert state.transcript == (GOAL,)
    assert fold([run_started()]).phase is Phase.ASKING


@pytest.mark.parametrize(("charge", "charged"), [(True, 2), (False, 0)])
def test_the_plan_request_is_charged_as_the_rules_say(
    charge: bool, charged: int
) -> None:
    """Its round trips count unless the rules leave it free; its time always does; its messages open the transcript."""
    state = fold([run_started(plan=True, charge_plan=charge), planned(iterations=2)])
    assert state.usage.iterations == charged
    assert state.usage.active_seconds == 1.0
    assert state.transcript == (GOAL, "plan")


def test_a_reply_is_charged_what_it_reports() -> None:
    """Round trips, tokens and seconds of a reply are added to the usage, and the next trip has the next number."""
    usage = Usage(prompt_tokens=3, completion_tokens=4, cost=0.5)
    state = fold([run_started(), replied(says("hello", iterations=3, usage=usage))])
    assert state.usage == replace(usage, iterations=3, active_seconds=1.0)
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
    state = fold(
        [run_started(), replied(calls("f", text="I will", finish_reason=reason))]
    )
    assert (state.phase, state.batch) == (Phase.ANSWERING, None)
    assert [type(entry) for entry in state.transcript] == [dict, EditedReply]
    assert as_type(EditedReply, state.transcript[-1]).kept == ()


def test_calls_that_were_not_offered_open_no_batch() -> None:
    """Where no function was offered, calls are left out and their text is kept."""
    state = fold(
        [
            run_started(),
            replied(calls("f", text="I will", stubborn=True), offered=False),
        ]
    )
    assert state.phase is Phase.ANSWERING
    assert state.transcript[-1] == EditedReply(
        message=as_type(EditedReply, state.transcript[-1]).message, kept=()
    )


def test_a_reply_without_text_leaves_no_empty_message() -> None:
    """A reply with neither text nor calls adds nothing that a service would refuse."""
    assert fold([run_started(), replied(says(""))]).transcript == (GOAL,)


@each_of(
    ("fact", "charged"),
    [
        (decided(0), (2, 1, 1)),
        (withheld(0), (2, 1, 2)),
        (finished(0, outcome="cancelled"), (2, 1, 2)),
        (finished(0, spent=Usage(iterations=3)), (3, 0, 1)),
    ],
    ids=["runs again", "withheld", "cancelled", "reported"],
)
def test_what_a_function_has_recorded_is_charged_if_it_does_not_report(
    fact: Fact, charged: tuple[int, ...]
) -> None:
    """Its process ended: requests and calls that it recorded before count; otherwise the function's own report does."""
    asked, nested = (
        ModelAsked(iteration=0, index=0, at=0.0),
        NestedCallStarted(iteration=0, index=0, function="g", at=0),
    )
    usage = fold(
        (
            run_started(),
            replied(calls("f")),
            decided(0),
            began(0),
            asked,
            nested,
            asked,
            fact,
        )
    ).usage
    assert (
        usage.iterations - 1,
        usage.calls_by_function.get("g", 0),
        usage.tool_calls,
    ) == charged


def test_a_request_of_a_function_that_does_not_run_cannot_be_recorded() -> None:
    """The journal contradicts itself."""
    with pytest.raises(IllegalTransitionError, match="it is not running"):
        fold(
            (
                run_started(),
                replied(calls("f")),
                decided(0),
                ModelAsked(iteration=0, index=0, at=0.0),
            )
        )


@pytest.mark.parametrize(("charge", "charged"), [(True, 1), (False, 0)])
def test_a_plan_request_that_failed_is_charged_as_the_rules_say(
    charge: bool, charged: int
) -> None:
    """Like one that was answered; a request of the loop is always charged."""
    lost = request_failed(iteration=-1, usage=Usage(prompt_tokens=7))
    usage = fold([run_started(plan=True, charge_plan=charge), lost]).usage
    assert usage.iterations == charged
    assert usage.prompt_tokens == 7
    assert usage.active_seconds == 1.0
    assert (
        fold([run_started(charge_plan=charge), request_failed(2)]).usage.iterations == 2
    )
    assert (
        fold(
            [run_started(charge_plan=False), request_failed(iteration=0)]
        ).usage.iterations
        == 1
    )


def test_a_reply_is_judged_by_itself() -> None:
    """What was checked and asked of the reply before it says nothing about this one."""
    before = [
        run_started(),
        replied(says("one?")),
        clarified(None, None),
        ANSWER_CHECKED,
    ]
    asked = fold(before)
    assert (asked.asked, asked.checked) == (True, ANSWER_CHECKED)
    after = fold([*before, added("structure"), replied(says("two"), iteration=1)])
    assert (after.asked, after.checked) == (False, None)


ANSWER_CHECKED = AnswerChecked(answer="one?", problem="It is not in the form.", at=0.0)


def test_a_clarifier_is_charged_whether_or_not_it_answered() -> None:
    """Its round trips and tokens are the run's; only an answer counts as a clarification."""
    spent: dict[str, Any] = {"iterations": 2, "usage": Usage(prompt_tokens=5)}
    for answer, clarifications in (("Oslo", 1), (None, 0)):
        facts = [
            run_started(),
            replied(says("where?")),
            clarified(answer, None, **spent),
        ]
        state = fold(facts)
        assert (state.usage.iterations, state.usage.prompt_tokens) == (3, 5)
        assert state.clarifications == clarifications


def test_the_active_time_before_a_pause_and_a_new_budget_is_charged() -> None:
    """One second each, in addition to the reply's."""
    paused = fold(SAMPLES[Phase.PAUSED]).usage.active_seconds
    changed = fold(
        [run_started(), replied(says("hm")), budget_changed()]
    ).usage.active_seconds
    assert (paused, changed) == (2.0, 2.0)


def test_what_a_run_began_with_is_kept() -> None:
    """A transcript that is compacted later leaves the first messages where they were."""
    facts = [*SAMPLES[Phase.COMPLETING], completed(messages=("compact",))]
    assert (fold(facts).given, fold(facts).transcript) == ((GOAL,), ("compact",))


def test_functions_of_completed_batches_are_earlier_ones() -> None:
    """Those of the open batch are not, until it is complete."""
    assert (
        dict(fold([*BATCH, decided(0), decided(1, "g"), began(0), finished(0)]).earlier)
        == {}
    )
    facts = [*BATCH, decided(0), decided(1, "g", "deny"), began(0), finished(0)]
    assert dict(fold(facts).earlier) == {"f": 1}


def calls_inside(state: State) -> list[tuple[str, ...]]:
    return [item.inside for item in state.transcript if isinstance(item, CallResult)]


def test_a_result_says_what_ran_inside_its_call() -> None:
    """What its function started, and what came with the runs inside it; a call without either says nothing."""
    spent = Usage(tool_calls=1, calls_by_function={"g": 1})
    ended = finished(0, spent=spent, brought=("web-fetch",))
    state = fold(
        [
            *BATCH,
            decided(0),
            decided(1, "g"),
            began(0),
            began(1, "g"),
            ended,
            finished(1, "g"),
        ]
    )
    assert calls_inside(state) == [("g", "web-fetch"), ()]
    assert state.inside == {"g", "web-fetch"}


def test_what_ran_in_a_life_that_ended_stays_inside_its_call() -> None:
    """A call whose process died is decided again; with any result then, its function had started others."""
    nested = NestedCallStarted(iteration=0, index=0, function="web-fetch", at=0.0)
    supplied = decided(0, "f", "answer")
    state = fold(
        [*BATCH, decided(0), decided(1, "g", "deny"), began(0), nested, supplied]
    )
    assert calls_inside(state) == [("web-fetch",), ()]
