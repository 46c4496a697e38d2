"""A batch in the fold: results in call order, what is counted, what enters the transcript."""

from typing import Any

import pytest

from planner_ext.core.facts import Fact, FunctionOutcome, Resumed
from planner_ext.core.fold import fold, sticky_keys
from planner_ext.core.limits import Budget
from planner_ext.core.state import Phase
from planner_ext.core.values import CallResult, EditedReply
from support.core import (
    BATCH,
    CALLED,
    PAUSED,
    RESUMED,
    SAMPLES,
    began,
    calls,
    completed,
    decided,
    ended,
    finished,
    replied,
    run_started,
    says,
    stop,
    withheld,
)
from support.narrow import as_type
from support.values import each_of


def test_the_results_enter_in_call_order() -> None:
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
    """The usage counts starts: in all, by function, and by function with arguments where repeats are limited."""
    facts = [
        run_started(limits=Budget(max_repeated_calls=2)),
        *CALLED[1:],
        began(0),
        finished(0, outcome="failed"),
    ]
    state = fold(facts)
    assert state.usage.tool_calls == 1
    assert state.usage.calls_by_function == {"f": 1}
    assert state.calls_by_digest == {"digest of f": 1}


def test_a_call_in_doubt_that_runs_again_is_charged_once() -> None:
    """However often its process died, it is one call; where it is answered instead, it stays charged as started."""
    again = fold([*CALLED, began(0), decided(0), began(0), finished(0)])
    answered = fold([*CALLED, began(0), decided(0, verdict="answer")])
    for state in (again, answered):
        assert state.usage.tool_calls == 1
        assert state.usage.calls_by_function == {"f": 1}
        assert state.calls_by_digest == {"digest of f": 1}


def test_repeats_are_counted_before_they_are_limited() -> None:
    """What was spent stays spent: a repeat limit set on resume counts the calls that were made before it."""
    facts = [*CALLED, began(0), finished(0), withheld(1), completed(), ended()]
    state = fold([*facts, Resumed(limits=Budget(max_repeated_calls=1), at=0.0)])
    assert state.calls_by_digest == {"digest of f": 1}


@pytest.mark.parametrize("name", ["unknown", "bad"])
def test_a_batch_of_answered_calls_settles_in_review(name: str) -> None:
    """Calls that cannot run are answered by their decision alone, and no function was called."""
    state = fold([run_started(), replied(calls(name)), decided(0, name)])
    assert state.phase is Phase.COMPLETING
    assert as_type(CallResult, state.transcript[-1]).text == f"answer to {name}"
    assert not state.called
    assert state.errors_in_row == 1
    assert state.usage.tool_calls == 0


def test_one_error_makes_a_batch_an_error_and_one_start_a_batch_that_called() -> None:
    """Of a mixed batch each counts: that a function was called, and that something in it failed."""
    mixed = [
        run_started(),
        replied(calls("f", "unknown")),
        decided(0),
        decided(1, "unknown"),
        began(0),
        finished(0),
    ]
    assert fold(mixed).errors_in_row == 1
    assert fold(mixed).called


def test_a_clean_batch_resets_the_errors_in_a_row() -> None:
    """Only batches in a row count: one without an error starts the count again."""
    trips: list[Fact] = []
    outcomes: list[FunctionOutcome] = ["failed", "timed_out", "ok"]
    for trip, outcome in enumerate(outcomes):
        trips += [
            replied(calls("f"), iteration=trip),
            decided(0, iteration=trip),
            began(0, iteration=trip),
            finished(0, outcome=outcome, iteration=trip),
            completed(trip),
        ]
    assert fold([run_started(), *trips[:5]]).errors_in_row == 1
    assert fold([run_started(), *trips[:10]]).errors_in_row == 2
    assert fold([run_started(), *trips]).errors_in_row == 0


def test_only_a_batch_that_was_denied_whole_counts_as_a_denial() -> None:
    """Denials in a row are batches in which nothing was let through."""
    whole = [*BATCH, decided(0, verdict="deny"), decided(1, "g", "deny")]
    part = [
        *BATCH,
        decided(0, verdict="deny"),
        decided(1, "g"),
        began(1, "g"),
        finished(1, "g"),
    ]
    assert fold(whole).denials_in_row == 1
    assert fold(part).denials_in_row == 0


def test_a_deferred_call_is_decided_a_second_time() -> None:
    """The second decision of a deferred call replaces the first, and the batch continues."""
    deferred = [
        *BATCH,
        decided(0, verdict="defer"),
        decided(1, "g", "deny"),
        PAUSED,
        RESUMED,
    ]
    state = fold([*deferred, decided(0, verdict="deny", answer="no")])
    assert state.phase is Phase.COMPLETING
    assert [as_type(CallResult, entry).text for entry in state.transcript[2:]] == [
        "no",
        "answer to g",
    ]


@each_of("sticky", [None, "function", "arguments"])
def test_a_sticky_approval_is_kept_for_the_run(sticky: Any) -> None:
    """What was approved for good is part of the state, by function or arguments, and by the question and its roles."""
    keys = sticky_keys("f", "digest of f", "", source="rule", roles=("clerk",))
    kept = fold(
        [*BATCH, decided(0, sticky=sticky, source="rule", roles=("clerk",))]
    ).sticky
    assert kept == {key for kind, key in keys.items() if kind == sticky}


@each_of("other", [{"source": "mark"}, {"roles": ("boss",)}, {"roles": ()}], ids=str)
def test_another_question_has_other_keys(other: dict[str, Any]) -> None:
    """No key of a question is one of another source's, or of other roles'; their order makes no difference."""
    asked: dict[str, Any] = {"source": "rule", "roles": ("clerk", "cashier")}
    one = sticky_keys("f", "digest", "", **asked)
    assert set(one.values()).isdisjoint(
        sticky_keys("f", "digest", "", **{**asked, **other}).values()
    )
    assert one == sticky_keys(
        "f", "digest", "", source="rule", roles=("cashier", "clerk")
    )


def test_the_first_final_answer_counts() -> None:
    """Of two final answers in one message, the first is taken."""
    first, second = (
        decided(0, "final", final_answer="one"),
        decided(1, "final", final_answer="two"),
    )
    assert (
        fold(
            [run_started(), replied(calls("final", "final")), first, second]
        ).final_answer
        == "one"
    )


def test_edited_arguments_appear_in_the_transcript() -> None:
    """The model reads the arguments that were used, not those it sent."""
    facts = [*BATCH, decided(0, edited='{"a":1}'), decided(1, "g"), withheld(0, 1)]
    entry = as_type(EditedReply, fold(facts).transcript[1])
    assert entry == EditedReply(
        message=entry.message, kept=("c0", "c1"), edited=(("c0", '{"a":1}'),)
    )


def test_reask_removes_denied_calls() -> None:
    """Under reask, denied calls and their results are left out; the others stay, and the next request asks again."""
    rules = run_started(on_denial="reask")
    state = fold(
        [
            rules,
            BATCH[1],
            decided(0, verdict="deny"),
            decided(1, "g"),
            began(1, "g"),
            finished(1, "g"),
        ]
    )
    assert as_type(EditedReply, state.transcript[1]).kept == ("c1",)
    assert [as_type(CallResult, entry).call_id for entry in state.transcript[2:]] == [
        "c1"
    ]
    assert state.reask
    assert not fold(
        [rules, BATCH[1], decided(0), decided(1, "g"), withheld(0, 1)]
    ).reask


@pytest.mark.parametrize(("text", "entries"), [("", 1), ("I will", 2)])
def test_reask_keeps_the_text_beside_removed_calls(text: str, entries: int) -> None:
    """A message whose every call was removed stays for its text, and goes where it has none."""
    state = fold(
        [
            run_started(on_denial="reask"),
            replied(calls("f", text=text)),
            decided(0, verdict="deny"),
            completed(),
        ]
    )
    assert len(state.transcript) == entries
    assert fold([*SAMPLES[Phase.ASKING], replied(says("ok"))]).reask is False


def test_the_reask_is_over_with_the_reply_to_it() -> None:
    """One request goes without functions because of a removed call, not every later one."""
    facts = [
        run_started(on_denial="reask"),
        replied(calls("f")),
        decided(0, verdict="deny"),
        completed(),
    ]
    assert fold(facts).reask
    assert not fold([*facts, replied(says("ok"), iteration=1)]).reask


def test_withheld_calls_name_the_first_limit() -> None:
    """The limit that withheld calls first is kept until its consequence is due; without a limit it is None."""
    assert fold([*CALLED, withheld(0)]).limit is None
    assert (
        fold([*CALLED, withheld(0, limit="max_tool_calls")]).limit == "max_tool_calls"
    )
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


def test_what_a_filter_asked_for_is_done_with_its_batch() -> None:
    """From then on the run stops, and nothing of it is left for the next batch once it is resumed."""
    facts = [
        run_started(),
        replied(calls("f")),
        decided(0),
        began(0),
        finished(0, terminate=True),
    ]
    state = fold(facts)
    assert (state.ending, state.stopping) == (
        None,
        "A filter asked to end the run after f.",
    )
