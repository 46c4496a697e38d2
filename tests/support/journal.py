"""One journal with every kind of fact, and ways to write and to damage it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from planner_ext.core.errors import InvalidJournalError
from planner_ext.core.facts import (
    AnswerChecked,
    BudgetChanged,
    CallDecided,
    CallFinished,
    CallLeft,
    CallStarted,
    CallsWithheld,
    Clarified,
    Ended,
    Fact,
    FurtherQuestion,
    Guards,
    HappenedInside,
    IterationCompleted,
    MessageAdded,
    ModelAsked,
    ModelReplied,
    NestedCallStarted,
    Panel,
    Paused,
    Planned,
    RequestFailed,
    Resumed,
    Rules,
    RunStarted,
    SharedBudgetsChecked,
    StopRequested,
)
from planner_ext.core.limits import Budget
from planner_ext.core.values import Cut, RequestedCall, Usage
from planner_ext.engine.document import SCHEMA, check_schema, dump_facts, load_facts

LIMITS = Budget(
    max_result_tokens=9,
    max_iterations=9,
    max_tool_calls=0,
    max_total_tokens=10**12,
    max_cost=0.1,
    max_active_seconds=1.5,
    deadline=datetime(
        2030, 1, 1, 12, 30, 15, 123456, tzinfo=timezone(timedelta(hours=5, minutes=45))
    ),
    max_calls_per_function={"plugin-f": 0, "plugin-ü": 3},
    max_consecutive_errors=1,
    max_repeated_calls=2,
    max_repeated_denials=3,
    max_calls_per_reply=9,
    on_limit="return_calls",
    batch_over_limit="fill_remaining",
    last_trip="none",
    tell_budget=0.25,
)


RULES = Rules(
    limits=LIMITS,
    plan=True,
    charge_plan=False,
    use_attempts=3,
    attempts_limit="maximum_use_attempts",
    tool_choice="required",
    rounds_per_step=1,
    require_final_answer=True,
    on_denial="reask",
    close_on_denial=True,
    on_deferred="run_safe_first",
    structured=True,
    checked=True,
    clarifier=True,
    max_clarifications=0,
)


USAGE = Usage(
    iterations=2,
    prompt_tokens=1,
    completion_tokens=2,
    cost=0.1,
    active_seconds=0.30000000000000004,
)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALL = RequestedCall(id="c0", name="plugin-f", arguments='{"a": "\\u00fc"}')


FACTS: tuple[Fact, ...] = (
    RunStarted(
        run_id="r",
        rules=RULES,
        messages=({"role": "user"}, "text", None, 3),
        goal="Grüße 🙂",
        guards=Guards(
            interceptors=("{}",),
            filters=("{}",),
            unmatched="defer",
            expires_in=9.5,
            marked=("plugin-f",),
        ),
        trace=TRACE,
        at=1e9 + 0.1,
    ),
    Planned(
        plan="p", messages=({"a": [1, {"b": None}]},), usage=USAGE, at=1.0, seconds=0.1
    ),
    MessageAdded(message={"role": "user"}, purpose="said", by="ann", at=2.0),
    ModelReplied(
        iteration=0,
        message={"calls": ["c0"]},
        text="a\nb\u2028\x00",
        calls=(CALL, replace(CALL, id="c1", arguments="")),
        finish_reason="tool_calls",
        usage=USAGE,
        offered=True,
        withheld="max_cost",
        final_answer="42",
        at=3.0,
        seconds=0.2,
    ),
    CallDecided(
        iteration=0,
        index=0,
        call_id="c0",
        function="plugin-f",
        kind="function",
        verdict="defer",
        answer="a",
        reason="r",
        digest="d",
        repetition="e",
        further=(
            FurtherQuestion(
                prompt="And you?",
                roles=("boss",),
                source="f",
                expires_in=60.0,
                asked_by="a rule",
                panel=Panel(quorum=2),
            ),
        ),
        fingerprint="f",
        arguments='{"a":2}',
        edited='{"a":1}',
        by="ann",
        cut=Cut(shown=1, left_out=2),
        sticky="arguments",
        grant="grant_1",
        panel=Panel(quorum=2, escalates_in=4.0, escalates_to=("lead",)),
        votes=("bo", "ann"),
        expires_at=9.5,
        prompt="?",
        summary="Pays 1.",
        asked_by="policy rule 1",
        final_answer="42",
        person=True,
        nested=True,
        approved=True,
        signature="a=1",
        roles=("finance",),
        source="e" * 64,
        parameters="{}",
        at=4.0,
    ),
    CallsWithheld(
        iteration=0, indexes=(0, 1), answer="no", limit="max_tool_calls", at=5.0
    ),
    CallStarted(
        iteration=0,
        index=1,
        call_id="c1",
        function="plugin-f",
        attempt=2,
        at=6.0,
    ),
    CallFinished(
        iteration=0,
        index=1,
        call_id="c1",
        function="plugin-f",
        outcome="timed_out",
        result="text",
        error="TimeoutError: late",
        terminate=True,
        spent=replace(USAGE, tool_calls=1, calls_by_function={"plugin-g": 1}),
        brought=("web-fetch",),
        cut=Cut(shown=2, left_out=1),
        at=7.0,
    ),
    IterationCompleted(
        iteration=0,
        called=True,
        terminate=True,
        reason="r",
        messages=({"role": "user"},),
        at=8.0,
        seconds=0.3,
    ),
    IterationCompleted(iteration=1, called=False, messages=None, at=8.0, seconds=0.3),
    StopRequested(reason="enough", at=9.0),
    Paused(trace=TRACE, at=10.0, seconds=0.4),
    Resumed(limits=LIMITS, trace=TRACE, at=11.0),
    Resumed(limits=None, trace=TRACE, at=11.0),
    AnswerChecked(answer="a", problem="p", purpose="revise", at=11.0),
    Ended(
        status="limit_reached",
        answer="a",
        limit="max_cost",
        reason="r",
        returned=True,
        at=12.0,
        seconds=0.5,
    ),
    Clarified(
        question="where?",
        answer="here",
        iteration=0,
        index=1,
        by="ann",
        denied="no time",
        usage=USAGE,
        at=7.5,
        seconds=0.2,
    ),
    ModelAsked(iteration=1, index=0, usage=USAGE, at=7.0),
    NestedCallStarted(iteration=1, index=1, function="plugin-f", usage=USAGE, at=7.0),
    RequestFailed(
        iteration=1,
        reason="it broke",
        failure="refused",
        usage=USAGE,
        at=8.0,
        seconds=0.2,
    ),
    CallLeft(
        iteration=1,
        index=1,
        call_id="call_2",
        function="plugin-f",
        spent=USAGE,
        at=8.2,
    ),
    HappenedInside(
        iteration=1,
        index=1,
        run=2,
        fact=HappenedInside(
            iteration=3,
            index=4,
            run=1,
            fact=ModelAsked(iteration=5, index=6, usage=USAGE, at=8.3),
        ),
    ),
    BudgetChanged(limits=LIMITS, by="ann", at=9.5, seconds=0.4),
    SharedBudgetsChecked(
        limit="per user: max_cost", reason="It was reached.", answer=True, at=9.6
    ),
)


"""One of each fact, every field of it set to something that is not its default."""


def text_of(*facts: Fact) -> str:
    """Write a journal as a document with its schema number, as a checkpoint has it."""
    return json.dumps(
        {"schema": SCHEMA, "facts": dump_facts(facts or FACTS)}, separators=(",", ":")
    )


def read(text: str) -> tuple[Fact, ...]:
    """Read such a document."""
    data = json.loads(text)
    check_schema(data.get("schema"))
    return load_facts(data["facts"])


def through_json(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Write facts as JSON text and read them again."""
    return load_facts(json.loads(json.dumps(dump_facts(tuple(facts)))))


def altered(change: Callable[[list[Any]], object]) -> str:
    """Write the journal with something changed in its facts."""
    data = json.loads(text_of())
    change(data["facts"])
    return json.dumps(data)


def refusal(text: str) -> str:
    """Return the message with which a text is refused."""
    with pytest.raises(InvalidJournalError) as caught:
        read(text)
    return str(caught.value)
