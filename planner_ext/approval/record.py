"""The decisions of a run, read from its facts."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from planner_ext.approval.decisions import DecisionRecord, question_id, record_of
from planner_ext.core.facts import (
    CallDecided,
    Clarified,
    Fact,
    ModelReplied,
    Place,
    place_of_fact,
    unwrapped,
)
from planner_ext.core.state import ASK_USER, path_of
from planner_ext.core.values import RequestedCall


def decisions_of(facts: Iterable[Fact]) -> tuple[DecisionRecord, ...]:
    """List the decisions of a run in the order in which they were taken."""
    found: list[DecisionRecord] = []
    calls: dict[Place, tuple[RequestedCall, ...]] = {}
    before: dict[tuple[Place, int, int], CallDecided] = {}
    for fact in facts:
        place = place_of_fact(fact)
        record: DecisionRecord | None = None
        match unwrapped(fact):
            case ModelReplied() as reply:
                calls[place] = reply.calls
            case CallDecided(iteration=iteration, index=index) as decided:
                again = before.get((place, iteration, index))
                before[place, iteration, index] = decided
                # A recovery records a decision again.
                repeated = (
                    again is not None and replace(again, at=decided.at) == decided
                )
                if not repeated:
                    record = record_of(decided, calls[place][index])
            case Clarified(answer=str(answer)) as answered:
                record = _answer(answered, answer, calls.get(place, ()))
            case _:
                pass
        if record is not None and place:
            around = (
                calls[place[:depth]][index].id
                for depth, (_, index, _) in enumerate(place)
            )
            names = [*around, record.call]
            record = replace(record, call="/".join(map(path_of, names)))
        if record is not None:
            found.append(record)
    return tuple(found)


def _answer(
    fact: Clarified, answer: str, calls: tuple[RequestedCall, ...]
) -> DecisionRecord:
    return DecisionRecord(
        call=question_id(fact.iteration)
        if fact.index is None
        else calls[fact.index].id,
        fully_qualified_name=ASK_USER,
        kind="supply" if fact.denied is None else "deny",
        by=fact.by,
        at=datetime.fromtimestamp(fact.at, UTC),
        requested={"question": fact.question},
        reason=fact.denied or "",
        result=answer if fact.denied is None else None,
    )
