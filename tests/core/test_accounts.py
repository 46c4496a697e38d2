"""What a run may still spend while its functions run, and while runs inside them do."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from planner_ext.core.accounts import Account, SharedBudgets, Tab, current_tab
from planner_ext.core.facts import CallFinished, CallStarted, Fact
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget, Left
from planner_ext.core.machine import (
    AskModel,
    AskPerson,
    Finish,
    RunCalls,
    WithholdCalls,
)
from planner_ext.core.state import State
from planner_ext.core.values import Usage
from support.core import (
    Silent,
    began,
    budget_changed,
    calls,
    completed,
    decided,
    finished,
    replied,
    run_started,
    says,
)
from support.narrow import present
from support.values import each_of

SILENT = Silent()


class Run:
    """A run as its journal so far, and its account."""

    def __init__(self, *facts: Fact, within: Tab | None = None) -> None:
        self.facts = list(facts)
        self.account = Account(lambda: fold(self.facts), within, nullcontext())

    @property
    def left(self) -> Mapping[str, float]:
        """What its functions may still take of its limits."""
        return self.account.left().amounts

    def tab(self, index: int = 0) -> Tab:
        """Open the tab of a call, as around its function."""
        tab = self.account.tabs[index] = Tab(self.account, index, SILENT)
        return tab


def calling(*names: str, **limits: object) -> Run:
    """A run whose functions run."""
    given = Budget(**{"on_limit": "stop", **limits})  # pyright: ignore[reportArgumentType]  (fields by name)
    decisions = [decided(index, name) for index, name in enumerate(names)]
    starts = [began(index, name) for index, name in enumerate(names)]
    return Run(run_started(limits=given), replied(calls(*names)), *decisions, *starts)


def asking(within: Tab, **rules: object) -> Run:
    """A run inside a call, about to make its first request."""
    run = Run(run_started(**rules), within=within)
    assert run.account.open() is None
    return run


def test_a_tab_is_current_while_its_function_runs() -> None:
    """The function finds its own call; a call inside it hides it, until that ends; outside there is nothing to find."""
    run = calling("f", "g")
    with Tab(run.account, 0, SILENT) as outer:
        with Tab(run.account, 1, SILENT) as inner:
            assert current_tab() is inner
            assert not inner.closed
        assert current_tab() is outer
    assert current_tab() is None


def test_what_a_call_takes_is_taken_from_the_run_at_once() -> None:
    """Requests, functions and tokens of a running function count before they are in the usage, those expected, too."""
    run = calling("f", max_iterations=9, max_tool_calls=5, max_total_tokens=100)
    tab = run.tab()
    assert (tab.spent, run.left) == (
        None,
        {"max_iterations": 8, "max_tool_calls": 4, "max_total_tokens": 100},
    )
    assert tab.take_request() is None
    assert tab.take_call("g") is None
    tab.expect("request", Usage(prompt_tokens=30))
    assert run.left == {
        "max_iterations": 7,
        "max_tool_calls": 3,
        "max_total_tokens": 70,
    }
    tab.charge(Usage(prompt_tokens=20), instead_of="request")
    assert run.left == {
        "max_iterations": 7,
        "max_tool_calls": 3,
        "max_total_tokens": 80,
    }
    assert tab.left() == run.account.left()
    assert tab.spent == Usage(
        iterations=1, tool_calls=1, prompt_tokens=20, calls_by_function={"g": 1}
    )


def test_a_call_that_has_its_result_is_in_the_usage_alone() -> None:
    """Its tab counts no more, although it is still open; the tab of a call of an earlier batch never does."""
    run = calling("f", "g", max_iterations=9)
    run.tab(0).charge(Usage(iterations=2))
    run.tab(2).charge(Usage(iterations=3))
    assert run.left["max_iterations"] == 9 - 1 - 2
    done = finished(0, spent=Usage(iterations=2))
    assert isinstance(done, CallFinished)
    run.facts.append(done)
    assert run.left["max_iterations"] == 9 - 1 - 2


def test_nothing_is_taken_after_the_end_of_a_call() -> None:
    """A function that continued after its result finds nothing left: no request, and no function."""
    run = calling("f")
    with Tab(run.account, 0, SILENT) as tab:
        assert tab.take_request() is None
    assert tab.left() == Left(amounts={"max_iterations": 0, "max_tool_calls": 0})
    assert tab.take_request() == "max_iterations"
    assert tab.take_call("g") == "max_tool_calls"


def test_a_request_beyond_the_limit_is_not_taken() -> None:
    """It is refused by the name of the limit, and is charged nothing."""
    run = calling("f", max_iterations=2)
    tab = run.tab()
    assert (tab.take_request(), tab.take_request()) == (None, "max_iterations")
    assert present(tab.spent).iterations == 1


def test_functions_of_a_call_are_limited_by_name() -> None:
    """A function's own limit counts the starts in the usage and those that running functions made."""
    run = calling("f", max_calls_per_function={"f": 3, "g": 1})
    tab = run.tab()
    assert run.account.left().starts == {"f": 2, "g": 1}
    assert (tab.take_call("g"), tab.take_call("g")) == (None, "max_calls_per_function")
    assert [tab.take_call("f") for _ in range(3)] == [
        None,
        None,
        "max_calls_per_function",
    ]
    assert tab.take_call("h") is None


def test_a_second_start_is_limited_by_the_run_around() -> None:
    """A filter may run a function again as long as the run outside, whose budget it is, has a start left."""
    tab = calling("f", max_tool_calls=3).tab()
    run = Run(
        run_started(), replied(calls("g")), decided(0, "g"), began(0, "g"), within=tab
    )
    assert run.account.open() is None
    assert run.account.restart("g") is None
    assert run.left["max_tool_calls"] == 1
    run.facts.append(
        CallStarted(iteration=0, index=0, call_id="c0", function="g", attempt=2, at=0.0)
    )
    run.account.restarted()
    assert run.left["max_tool_calls"] == 1
    tab.charge(Usage(tool_calls=1))
    assert run.account.restart("g") == "max_tool_calls"


def test_calls_that_are_about_to_start_are_taken() -> None:
    """A running function cannot take the starts of the calls that were let in with its own."""
    run = calling("f", max_tool_calls=4, max_iterations=9)
    run.facts[1:] = [
        replied(calls("f", "g", "h")),
        decided(0),
        decided(1, "g", nested=True),
        decided(2, "h"),
        began(0),
    ]
    run.account.starting((0, 1, 2, 3))
    assert run.left == {"max_iterations": 8, "max_tool_calls": 4 - 1 - 2}
    run.facts.append(began(1, "g"))
    assert run.left == {"max_iterations": 8, "max_tool_calls": 1}
    run.account.starting(())
    assert run.left == {"max_iterations": 8, "max_tool_calls": 2}


def test_a_run_keeps_its_answers_trip_from_the_run_around() -> None:
    """A run inside a call holds the trip for its answer, and gives it back when it is closed."""
    outer = calling("f", max_iterations=9)
    inner = asking(outer.tab(), limits=Budget(max_iterations=5))
    assert (inner.account.held, outer.left["max_iterations"]) == (1, 7)
    inner.account.close()
    assert (inner.account.held, outer.left["max_iterations"]) == (0, 8)


def test_a_run_inside_that_may_not_ask_is_not_opened() -> None:
    """The limit around it is named before its first request; a run without one around is always opened."""
    spent = calling("f", max_iterations=1)
    assert Run(run_started(), within=spent.tab()).account.open() == "max_iterations"
    assert spent.account.tabs[0].runs == []
    assert Run(run_started()).account.open() is None


def test_a_request_under_way_inside_is_taken_outside_until_its_reply_is_charged() -> (
    None
):
    """It counts once: while it is made by the account, and from its reply on in the usage."""
    outer = calling("f", max_iterations=9)
    inner = asking(outer.tab())
    assert isinstance(inner.account.decide(fold(inner.facts)), AskModel)
    assert inner.account.total().iterations == 1
    assert outer.left["max_iterations"] == 9 - 1 - 1 - 1
    inner.facts.append(replied(says("done")))
    assert inner.account.total() == Usage(iterations=1)
    assert outer.left["max_iterations"] == 9 - 1 - 1 - 1


def test_a_question_inside_takes_the_trips_that_its_answer_may() -> None:
    """A clarifier that asks a model may spend what it was given, and nothing else may take that meanwhile."""
    outer = calling("f", max_iterations=9)
    inner = asking(outer.tab(), clarifier=True, limits=Budget(max_iterations=4))
    inner.facts.append(replied(says("where?")))
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, AskPerson)
    assert action.iterations == 2
    assert outer.left["max_iterations"] == 9 - 1 - (1 + 2) - 1


def test_functions_inside_are_taken_outside_before_they_start() -> None:
    """Those that a run in a call is about to start count around it, by name."""
    outer = calling("f", max_tool_calls=4, max_calls_per_function={"g": 2})
    inner = asking(outer.tab())
    inner.facts += [replied(calls("g")), decided(0, "g")]
    assert isinstance(inner.account.decide(fold(inner.facts)), RunCalls)
    assert (outer.left["max_tool_calls"], outer.account.left().starts) == (2, {"g": 1})


def test_a_run_inside_sees_what_is_left_around_it() -> None:
    """It ends at the limit around it, which its own result names, as if that were its own."""
    outer = calling("f", max_iterations=3)
    tab = outer.tab()
    inner = asking(tab, limits=Budget(on_limit="stop"))
    assert isinstance(inner.account.decide(fold(inner.facts)), AskModel)
    tab.charge(Usage(iterations=2))
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, Finish)
    assert (action.status, action.limit) == ("limit_reached", "max_iterations")


def test_a_run_inside_a_call_that_has_ended_stops() -> None:
    """Nothing is left for it: its function's result is recorded."""
    outer = calling("f")
    with Tab(outer.account, 0, SILENT) as tab:
        inner = asking(tab)
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, Finish)
    assert (action.status, action.reason) == (
        "stopped",
        "The call in which this run was begun has ended.",
    )


def test_what_running_calls_have_spent_is_known_by_index() -> None:
    """A run that breaks off records it; a call that spent nothing is not named."""
    run = calling("f", "g", "h")
    run.tab(0).charge(Usage(iterations=1))
    run.tab(1)
    assert run.account.unrecorded() == {0: Usage(iterations=1)}


async def test_what_happens_in_a_call_is_recorded_in_every_journal_around_it() -> None:
    """Each call around it whose run is kept records it."""
    seen: list[tuple[Tab, str | None]] = []

    class Noting(Silent):
        async def record(self, tab: Tab, function: str | None) -> None:
            seen.append((tab, function))

    outer = Tab(calling("f").account, 0, Noting())
    inner = Tab(Run(within=outer).account, 0, Noting())
    await inner.record_request()
    await inner.record_call("f")
    assert seen == [(inner, None), (outer, None), (inner, "f"), (outer, "f")]


def test_a_run_that_asks_for_its_answer_takes_the_trip_that_it_held() -> None:
    """It may be the last one around it, and it is taken once."""
    outer = calling("f", max_iterations=3)
    inner = asking(outer.tab(), limits=Budget(max_iterations=5))
    inner.facts += [replied(calls("g")), decided(0, "g", "deny"), completed()]
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, AskModel)
    assert (action.withheld, action.offer) == ("max_iterations", False)
    assert (inner.account.held, outer.left["max_iterations"]) == (0, 0)


def test_a_run_with_a_trip_to_spare_keeps_the_one_for_its_answer() -> None:
    """It is held until nothing else is left around it."""
    outer = calling("f", max_iterations=3)
    inner = asking(outer.tab(), limits=Budget(max_iterations=5))
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, AskModel)
    assert action.offer is True
    assert inner.account.held == 1
    assert outer.left["max_iterations"] == 0


def test_a_run_that_is_not_opened_holds_and_spends_nothing() -> None:
    """A run without one around decides by its own limits alone."""
    run = Run(run_started(limits=Budget(max_iterations=2)))
    assert (run.account.held, run.account.total()) == (0, Usage())
    assert isinstance(run.account.decide(fold(run.facts)), AskModel)
    assert run.account.total() == Usage()


def test_only_what_a_resumed_run_spends_from_now_on_is_taken_around_it() -> None:
    """Its older round trips and calls were charged where it ran before."""
    before = [
        run_started(),
        replied(calls("g")),
        decided(0, "g"),
        began(0, "g"),
        finished(0, "g"),
        completed(),
    ]
    inner = Run(*before, within=calling("f").tab())
    assert inner.account.open() is None
    assert inner.account.total() == Usage()
    inner.facts += [
        replied(calls("h"), iteration=1),
        decided(0, "h", iteration=1),
        began(0, "h", iteration=1),
    ]
    assert inner.account.total() == Usage(
        iterations=1, tool_calls=1, calls_by_function={"h": 1}
    )


def test_a_second_start_is_taken_by_name_until_it_is_in_the_usage() -> None:
    """A function whose starts are limited has none left meanwhile."""
    run = calling("f", max_calls_per_function={"f": 2}, max_tool_calls=5)
    assert run.account.restart("f") is None
    assert (run.account.left().starts, run.left["max_tool_calls"]) == ({"f": 0}, 3)
    assert run.account.restart("f") == "max_calls_per_function"


def test_functions_start_without_a_round_trip_but_not_without_tokens_or_time() -> None:
    """A function needs no request, but a limit that is used up still forbids it."""
    assert calling("f", max_iterations=1).tab().take_call("g") is None
    spent = calling("f", max_total_tokens=10).tab()
    spent.charge(Usage(prompt_tokens=10))
    assert spent.take_call("g") == "max_total_tokens"


def test_a_run_inside_is_limited_by_name_around_it() -> None:
    """The smaller count of both holds, of its own functions and of those that are limited around it only."""
    outer = calling("f", max_calls_per_function={"g": 1, "h": 5})
    limits = Budget(max_calls_per_function={"h": 1, "i": 1}, on_limit="stop")
    inner = asking(outer.tab(), limits=limits)
    inner.facts += [replied(calls("g", "g", "h", "h", "i", "i"))]
    inner.facts += [decided(index, name) for index, name in enumerate("gghhii")]
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, WithholdCalls)
    assert (action.indexes, action.limit) == ((1, 3, 5), "max_calls_per_function")


@each_of(
    ("limits", "spent", "limit"),
    [
        ({"max_total_tokens": 10}, Usage(prompt_tokens=10), "max_total_tokens"),
        ({"max_cost": 1.0}, Usage(cost=1.0), "max_cost"),
        ({"max_total_tokens": 10}, Usage(prompt_tokens=9), None),
        ({"max_cost": 1.0}, Usage(cost=0.5), None),
    ],
)
def test_a_run_inside_ends_at_any_limit_around_it(
    limits: dict[str, Any], spent: Usage, limit: str | None
) -> None:
    """What other functions of the call spent counts, whether or not the run has such a limit itself."""
    for own in ({}, {"max_total_tokens": 1000, "max_cost": 100.0}):
        tab = calling("f", **limits).tab()
        inner = asking(tab, limits=Budget(on_limit="stop", **own))
        tab.charge(spent)
        action = inner.account.decide(fold(inner.facts))
        assert action is not None
        assert getattr(action, "limit", None) == limit


def test_the_names_of_functions_that_were_started_before_are_known_inside() -> None:
    """Those of earlier batches, of the calls around, and of what else runs in the same call; its own are left out."""
    outer = calling("f")
    outer.facts += [finished(0), completed(), replied(calls("p"), iteration=1)]
    outer.facts += [decided(0, "p", iteration=1), began(0, "p", iteration=1)]
    tab = outer.tab()
    tab.charge(Usage(tool_calls=1, calls_by_function={"lookup": 1}))
    first, second = asking(tab), asking(tab)
    first.facts += [replied(calls("g")), decided(0, "g"), began(0, "g")]
    first.tab().charge(Usage(calls_by_function={"deep": 1}))
    assert outer.account.earlier() == {"f"}
    assert second.account.earlier() == {"f", "lookup", "g", "deep"}
    assert first.account.earlier() == {"f", "lookup"}
    assert tab.runs_around() == [fold(outer.facts)]
    assert first.tab().runs_around() == [fold(first.facts), fold(outer.facts)]


def texts(messages: Sequence[Any]) -> set[str]:
    """Take the text of a message for the name of the function that it is of."""
    return {message["text"] for message in messages}


def test_the_names_in_the_histories_of_a_call_are_known_inside() -> None:
    """What it sends to a model, what its other runs began with, and what was in the calls of these."""
    tab = calling("f").tab()
    tab.names_in = texts
    tab.bring([{"text": "sent"}])
    first, second = asking(tab), asking(tab)
    first.facts += [replied(calls("g", "h")), decided(0, "g"), decided(1, "h")]
    first.facts += [began(0, "g"), finished(0, "g", brought=("fetch",)), began(1, "h")]
    first.facts += [finished(1, "h"), completed(), replied(calls("i"), iteration=1)]
    deep = first.tab()
    deep.names_in = texts
    deep.bring([{"text": "deep"}])
    assert tab.brought == {"sent", "goal", "fetch", "deep"}
    assert second.account.earlier() == {"sent", "goal", "g", "h", "fetch", "deep"}
    assert first.account.earlier() == {"sent", "goal", "g", "h", "fetch"}


def test_a_call_is_busy_while_a_run_in_it_is_driven() -> None:
    """From the run's opening to its pause or end, of which the call is told."""
    tab = calling("f").tab()
    inner = Run(run_started(), within=tab).account
    told: list[bool] = []
    tab.when_quiet.append(lambda: told.append(tab.is_busy))
    assert not inner.is_driven
    assert inner.open() is None
    assert tab.is_busy
    inner.close()
    assert told == [False]


def test_a_run_inside_keeps_what_it_used_beside_what_is_left_around_it() -> None:
    """Without a limit of its own it continues as long as anything is left, however much it used before."""
    inner = asking(calling("f", max_iterations=9).tab())
    inner.facts += [
        replied(calls("g", iterations=4)),
        decided(0, "g", "deny"),
        completed(),
    ]
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, AskModel)
    assert action.offer


def test_a_function_that_was_used_up_around_a_run_starts_no_more_in_it() -> None:
    """Not even once."""
    outer = calling("f", max_calls_per_function={"g": 1})
    tab = outer.tab()
    tab.charge(Usage(tool_calls=1, calls_by_function={"g": 1}))
    inner = asking(tab, limits=Budget(on_limit="stop"))
    inner.facts += [replied(calls("g")), decided(0, "g")]
    assert isinstance(inner.account.decide(fold(inner.facts)), WithholdCalls)


def test_the_last_call_that_is_left_may_start() -> None:
    """Exactly as many as the limit says start, those of running functions included."""
    tab = calling("f", max_tool_calls=2).tab()
    assert (tab.take_call("g"), tab.take_call("h")) == (None, "max_tool_calls")


def test_between_two_batches_only_the_answer_is_kept_back() -> None:
    """No call is open then."""
    assert Run(run_started(limits=Budget(max_iterations=9))).left == {
        "max_iterations": 8
    }


@pytest.mark.parametrize("most", [None, 2])
def test_a_question_without_a_trip_for_its_answer_takes_none(most: int | None) -> None:
    """A clarifier that may ask no model, or as often as it likes, leaves the count of round trips as it is."""
    inner = asking(
        calling("f").tab(), clarifier=True, limits=Budget(max_iterations=most)
    )
    inner.facts.append(replied(says("where?")))
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, AskPerson)
    assert action.iterations == (None if most is None else 0)
    assert inner.account.total().iterations == 1


def test_a_run_inside_shares_the_budgets_of_the_run_around_unless_it_has_others() -> (
    None
):
    """Its requests are charged to them as well."""
    here, there = cast("SharedBudgets", object()), cast("SharedBudgets", object())
    outer = Account(State, None, nullcontext(), here)
    tab = Tab(outer, 0, SILENT)
    assert Account(State, tab, nullcontext()).shared is here
    assert Account(State, tab, nullcontext(), there).shared is there
    assert Account(State, None, nullcontext()).shared is None


def test_what_functions_may_take_follows_a_budget_that_changes() -> None:
    """At once, here and in a run inside, whose own limits stay; less what was spent, and is kept for the answer."""
    outer = calling("f", max_iterations=2)
    inner = asking(outer.tab(), limits=Budget(max_iterations=9))
    outer.facts.append(budget_changed(Budget(max_iterations=5, max_tool_calls=3)))
    assert outer.left == {"max_iterations": 5 - 1 - 1 - 1, "max_tool_calls": 2}
    inner.facts += [
        replied(calls("g", iterations=2)),
        decided(0, "g", "deny"),
        completed(),
    ]
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, AskModel)
    assert (action.withheld, inner.account.state.rules.limits) == (
        "max_iterations",
        Budget(max_iterations=9),
    )


def test_what_a_running_call_has_spent_is_known_before_it_is_recorded() -> None:
    """Requests under way count as expected, and as they were once their usage is known."""
    run = calling("f")
    tab = run.tab()
    tab.charge(Usage(iterations=1))
    tab.expect("request", Usage(prompt_tokens=7))
    assert run.account.unrecorded() == {0: Usage(iterations=1, prompt_tokens=7)}
    tab.charge(Usage(prompt_tokens=9), instead_of="request")
    assert run.account.unrecorded() == {0: Usage(iterations=1, prompt_tokens=9)}


@pytest.mark.parametrize("limits", [{"max_total_tokens": 10}, {"max_cost": 1.0}])
def test_only_the_outermost_run_asks_for_an_answer_beyond_tokens_and_cost(
    limits: dict[str, Any],
) -> None:
    """A run inside ends without one request more, which each level would make, and says whose limit it was."""
    tab = calling("f", **limits).tab()
    inner = asking(tab, limits=Budget(max_total_tokens=10_000, max_cost=100.0))
    tab.charge(Usage(prompt_tokens=10, cost=1.0))
    action = inner.account.decide(fold(inner.facts))
    (limit,) = limits
    assert isinstance(action, Finish)
    assert (action.status, action.limit) == ("limit_reached", limit)
    assert action.reason == f"The limit {limit} of the run around was reached."


@pytest.mark.parametrize("limit", ["max_active_seconds", "deadline"])
def test_the_time_of_the_run_around_ends_a_run_inside(limit: str) -> None:
    """Nothing is frozen when it begins: what is left around is read as of now."""
    given: dict[str, Any] = {
        limit: 5.0 if limit == "max_active_seconds" else datetime.fromtimestamp(5, UTC)
    }
    outer = calling("f", **given)
    inner = asking(outer.tab())
    assert inner.account.within is not None
    assert inner.account.within.seconds_left() == (
        4.0 if limit == "max_active_seconds" else 5.0
    )
    outer.facts.append(budget_changed(Budget(**given), at=5.0, seconds=4.0))
    assert inner.account.within.seconds_left() == 0.0
    action = inner.account.decide(fold(inner.facts))
    assert isinstance(action, Finish)
    assert (action.status, action.limit) == ("limit_reached", limit)
