"""Lines for Python's logging, on ``planner_ext.runs``; and whether OpenTelemetry listens.

A line has the run's name and one event, and no text of a model, argument or result.
Texts of persons and errors are cut, and their control characters escaped.

    INFO      start, resumption, pause, decisions on calls, and the end; without a store, the class of an error
              that ended the run
    DEBUG     approvals by an interceptor or an approver
    WARNING   of kept runs: a limit that ended the run, a fault, a takeover from a dead worker
    ERROR     of kept runs: the run failed, or is in quarantine

A line is written after its fact is stored, so that of several workers one writes it.
"""

import json
import logging
from collections.abc import Mapping, Sequence

from opentelemetry.metrics import get_meter_provider
from opentelemetry.trace import get_tracer_provider

from planner_ext.approval.decisions import DecisionKind, kind_of
from planner_ext.approval.waiting import waiting_everywhere
from planner_ext.core.errors import counted, text_of
from planner_ext.core.facts import (
    CallDecided,
    Clarified,
    Ended,
    Fact,
    Paused,
    Resumed,
    RunStarted,
    place_of_fact,
    unwrapped,
)
from planner_ext.core.state import State, run_at

logger = logging.getLogger("planner_ext.runs")

_LONGEST = 500
"""Characters of a text in a line."""


def is_listening() -> bool:
    """Whether a tracer or meter provider is set, so that a run has spans and metrics."""
    return is_set(get_tracer_provider()) or is_set(get_meter_provider())


def is_set(provider: object) -> bool:
    """Whether an OpenTelemetry provider is the application's; the API's own record nothing."""
    return not type(provider).__module__.startswith(
        ("opentelemetry.trace", "opentelemetry.metrics")
    )


def log_run(level: int, run_id: str, event: str) -> None:
    """Log an event of a run; foreign texts in it have passed `escaped`."""
    logger.log(level, "run %s %s", escaped(run_id), event)


def escaped(text: object) -> str:
    """Cut a text, and escape what is not printable in it, line ends included."""
    given = text_of(text)
    cut = given if len(given) <= _LONGEST else f"{given[:_LONGEST]}..."
    return "".join(
        each if each.isprintable() else json.dumps(each)[1:-1] for each in cut
    )


def log_facts(state: State, facts: Sequence[Fact], *, kept: bool) -> None:
    """Log the events among facts; of kept runs, a limit is a warning."""
    if logger.isEnabledFor(logging.WARNING if kept else logging.INFO):
        for fact in facts:
            of = run_at(state, place_of_fact(fact)) or state
            for level, event in _events(of, unwrapped(fact)):
                log_run(level if kept else min(level, logging.INFO), of.run_id, event)


def _events(state: State, fact: Fact) -> Sequence[tuple[int, str]]:
    match fact:
        case RunStarted():
            return [(logging.INFO, "started")]
        case Resumed():
            return [(logging.INFO, "resumed")]
        case Paused():
            return [(logging.INFO, f"paused: {_waiting_text(state)}")]
        case CallDecided() if (decided := _decided_text(fact)) is not None:
            by = f" by {escaped(fact.by)}" if fact.by else ""
            is_rule = fact.verdict == "run" and not fact.person
            return [
                (
                    logging.DEBUG if is_rule else logging.INFO,
                    f"call {escaped(fact.function)} {decided}{by}",
                )
            ]
        case Clarified(answer=str()) | Clarified(denied=str()):
            by = f" by {escaped(fact.by)}" if fact.by else ""
            return [
                (
                    logging.INFO,
                    f"question {'answered' if fact.denied is None else 'denied'}{by}",
                )
            ]
        case Ended():
            end = (logging.INFO, _ended_text(state, fact))
            return (
                [end]
                if fact.limit is None
                else [(logging.WARNING, f"limit {escaped(fact.limit)} reached"), end]
            )
        case _:
            return ()


def _waiting_text(state: State) -> str:
    waiting = waiting_everywhere(state)
    questions = sum(
        call.decided_fact.kind == "question" for _, call in waiting.values()
    )
    numbers = {"call": len(waiting) - questions, "question": questions}
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{' and '.join(counted(number, noun) for noun, number in numbers.items() if number)} {verb}"


_DECIDED: Mapping[DecisionKind | None, str] = {
    "approve": "approved",
    "deny": "denied",
    "supply": "answered",
    "expire": "expired",
}


def _decided_text(fact: CallDecided) -> str | None:
    text = _DECIDED.get(kind_of(fact))
    if text != "approved":
        return text
    if fact.verdict == "defer":
        return "approved (others are still asked)"
    return text if fact.edited is None else "approved with edited arguments"


def _ended_text(state: State, fact: Ended) -> str:
    spent = state.usage
    numbers = {
        "iteration": spent.iterations,
        "call": spent.tool_calls,
        "token": spent.total_tokens,
    }
    text = f"{fact.status}: {', '.join(counted(number, noun) for noun, number in numbers.items())}"
    return (
        text
        if fact.status != "stopped" or not fact.reason
        else f"{text}; {escaped(fact.reason)}"
    )
