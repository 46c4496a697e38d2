"""A person's decision as JSON text and back: what an approver's process hands to a worker's."""

import json
from dataclasses import asdict
from typing import Any, cast

from planner_ext.approval.decisions import Approve, Decision, Deny, Supply, problem_of
from planner_ext.core.errors import shown
from planner_ext.core.facts import CallDecided, Clarified
from planner_ext.durable.errors import ApprovalRefusedError

__all__ = ["DECISION_SCHEMA", "decided_text", "read_decision", "refused_text", "write_decision"]

DECISION_SCHEMA = 1
"""The number of the form; one line per number. 1: the first."""

_KINDS: dict[str, type[Approve | Deny | Supply]] = {"approve": Approve, "deny": Deny, "supply": Supply}


def write_decision(decision: Decision) -> str:
    """Write a decision as JSON text.

    Raises:
        ApprovalRefusedError: If it is none that answers a question, or holds what is no JSON.
    """
    kind = next((name for name, kind in _KINDS.items() if isinstance(decision, kind)), None)
    if kind is None:
        raise ApprovalRefusedError(f"Expected Approve, Deny or Supply; got {shown(decision)}.")
    if (problem := problem_of(decision)) is not None:
        raise ApprovalRefusedError(f"The decision cannot be taken: {problem}.")
    try:
        return json.dumps({"schema": DECISION_SCHEMA, "kind": kind, **asdict(decision)}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ApprovalRefusedError(
            f"Expected a decision that can be written as JSON, since another process takes it: {error}."
        ) from error


def decided_text(fact: CallDecided | Clarified) -> str | None:
    """Write as JSON text what a person decided; None where the fact records no decision of a person."""
    if isinstance(fact, Clarified):
        return None if fact.answer is None else write_decision(Supply(fact.answer, by=fact.by or None))
    if not fact.person:
        return None
    by = fact.by or None
    if fact.verdict == "run":
        arguments = None if fact.edited is None else json.loads(fact.edited)
        return write_decision(Approve(arguments=arguments, always=fact.sticky, by=by))
    return write_decision(Supply(fact.answer, by=by) if fact.reason == "supplied" else Deny(fact.reason, by=by))


def refused_text(decision: object) -> str:
    """Write a decision that was refused as JSON text: of one that cannot be written, its kind and who made it."""
    try:
        return write_decision(cast("Decision", decision))
    except ApprovalRefusedError:
        kind = next((name for name, kind in _KINDS.items() if isinstance(decision, kind)), type(decision).__name__)
        by = getattr(decision, "by", None)
        return json.dumps({"schema": DECISION_SCHEMA, "kind": kind, "by": by if isinstance(by, str) else None})


def read_decision(text: str) -> Decision:
    """Read what `write_decision` wrote.

    Raises:
        ApprovalRefusedError: If it is damaged, or newer than this version reads.
    """
    try:
        data = cast("dict[str, Any]", json.loads(text))
        if (schema := data.pop("schema")) != DECISION_SCHEMA:
            raise ApprovalRefusedError(
                f"Expected a decision of schema {DECISION_SCHEMA}; got {schema!r}. Take it with the version that wrote "
                "it."
            )
        decision = _KINDS[data.pop("kind")](**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ApprovalRefusedError(f"The row of the decision is damaged: {error!r}.") from error
    if (problem := problem_of(decision)) is not None:
        raise ApprovalRefusedError(f"The decision cannot be taken: {problem}.")
    return decision
