"""What a store knows, as values: a run, and a call or question that waits for a person."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Literal

from planner_ext.approval.decisions import digests_of, fingerprint_of
from planner_ext.approval.pending import DecisionRecord
from planner_ext.core.facts import Fact
from planner_ext.core.state import ASK_USER
from planner_ext.durable.database import Row, Value
from planner_ext.durable.errors import ApprovalRefusedError, StoreError

__all__ = ["PendingApproval", "RunRecord", "StoredRun", "approval_id", "read_approval", "read_refusal", "read_run"]

_LONGEST_NAME = 500
"""Characters of a call's id in a question's; with a run's name that fits PostgreSQL's 2.6 KB for a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run, as the store lists it.

    Attributes:
        run_id: Its name.
        goal: What it is to reach.
        status: ``running``, also where its worker died; ``paused``; or how it ended, as in a result.
        owner: The worker that drives it, or None.
        wake_at: When the first question of a paused run expires, in seconds since the epoch; None: never.
        created_at: When it was started, in seconds since the epoch.
        updated_at: When it last paused, went on or ended, likewise.
    """

    run_id: str
    goal: str
    status: str
    owner: str | None
    wake_at: float | None
    created_at: float
    updated_at: float

    @property
    def unfinished(self) -> bool:
        """Whether there may be something left to do."""
        return self.status in ("running", "paused")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run with its journal."""

    record: RunRecord
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingApproval:
    """A call that waits for a person, or did; a question of the model is one, too.

    Attributes:
        id: ``{run_id}/{iteration}/{call_id}``, of a long call id its beginning and a digest; decisions go by it. A call
            that a person approved and that then came to be in doubt asks anew, under an id of its own: with the number
            of its start behind an ``@``.
        run_id: The run that waits.
        call_id: The call's id within its batch.
        kind: ``function``: a call, which `Approve` runs; ``question``: the model asks, and `Supply` answers it.
        fully_qualified_name: The function that will run; of a question ``UserInteraction-AskUser``, which does not.
        arguments: Exactly what it will get from the model; of a question ``{"question"}``.
        goal: What the run is to reach.
        prompt: What the person is asked, "" for nothing in particular.
        fingerprint: Digest of run, trip, call, function and arguments; decisions bind to it.
        in_doubt: Whether the call had started when its process died, so that it may have taken effect: `Approve` runs
            it again, `Supply` gives the model its result, `Deny` leaves the model with the doubt.
        asked_at: Since when it waits.
        expires_at: When the question is no longer open, or None.
        status: ``open``; ``decided``, until a worker takes the decision; ``closed``.
        decided_at: When a person decided, or None.
        problem: Why the last decision could not be taken by a worker, "" where there was none.
        decision: Who decided, when, what, and with which arguments; None while it is undecided.
        refused: The decisions on it that were not taken, the first one first: late, second, made for something else,
            or impossible.
    """

    id: str
    run_id: str
    call_id: str
    kind: Literal["function", "question"]
    fully_qualified_name: str
    arguments: Mapping[str, Any]
    goal: str
    prompt: str
    fingerprint: str
    in_doubt: bool
    asked_at: datetime
    expires_at: datetime | None
    status: str
    decided_at: datetime | None
    problem: str
    decision: DecisionRecord | None = None
    refused: tuple[DecisionRecord, ...] = ()


def approval_id(run_id: str, iteration: int, call_id: str) -> str:
    """Name a call among all runs; what a model may have put into its id beyond plain text is escaped, as in JSON.

    Of an id that is too long for a key, the end is a digest: some models keep whole signatures in theirs.
    """
    name = json.dumps(call_id)[1:-1]
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}~{sha256(name.encode()).hexdigest()}"
    return f"{run_id}/{iteration}/{name}"


def read_run(row: Row) -> RunRecord:
    """Read a row of ``planner_runs``.

    Raises:
        StoreError: If it is damaged.
    """
    run_id, goal, status, owner, wake_at, created_at, updated_at = row
    try:
        return RunRecord(
            run_id=str(run_id),
            goal=str(json.loads(str(goal))),
            status=str(status),
            owner=None if owner is None else str(owner),
            wake_at=None if wake_at is None else float(wake_at),
            created_at=float(created_at or 0),
            updated_at=float(updated_at or 0),
        )
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"The row of run {run_id!r} is damaged: {error}. Mend it from the run's journal, which is the truth."
        ) from error


def _kind(call: Mapping[str, Any]) -> Literal["function", "question"]:
    """Read what waits: only the fingerprint is proof, so a question is one by the name of its function, too."""
    return "question" if call.get("kind") == "question" and call["function"] == ASK_USER else "function"


def _moment(at: Value) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(float(at), UTC)


def read_approval(row: Row, refused: Sequence[Row] = ()) -> PendingApproval:
    """Read a row of ``planner_approvals``, and those of the decisions on it that were refused.

    Raises:
        ApprovalRefusedError: If what it shows is not what the fingerprint was made of: nobody may decide on that.
    """
    key, run_id, status, fingerprint, text, asked_at, expires_at, decision, decided_at, problem = row
    try:
        call = json.loads(str(text))
        shown = [
            fingerprint_of(str(run_id), call["iteration"], call["call_id"], digest, call.get("signature", ""))
            for digest in digests_of(call["function"], call["arguments"])
        ]
        approval = PendingApproval(
            id=str(key),
            run_id=str(run_id),
            call_id=call["call_id"],
            kind=_kind(call),
            fully_qualified_name=call["function"],
            arguments=call["arguments"],
            goal=call["goal"],
            prompt=call["prompt"],
            fingerprint=str(fingerprint),
            in_doubt=call["in_doubt"] is True,
            asked_at=datetime.fromtimestamp(float(asked_at or 0), UTC),
            expires_at=_moment(expires_at),
            status=str(status),
            decided_at=_moment(decided_at),
            problem=str(json.loads(str(problem))) if problem else "",
            decision=_record(str(key), decision, decided_at, function=call["function"], requested=call["arguments"]),
            refused=tuple(read_refusal(row, call["function"], call["arguments"]) for row in refused),
        )
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError) as error:
        raise ApprovalRefusedError(f"The row of approval {key!r} is damaged, it cannot be shown: {error!r}.") from error
    if fingerprint not in shown:
        raise ApprovalRefusedError(
            f"The row of approval {key!r} was altered: its function and arguments are not those that were asked about. "
            "Cancel the run, or mend the row from the run's journal."
        )
    return approval


def read_refusal(row: Row, function: str = "", requested: Mapping[str, Any] | None = None) -> DecisionRecord:
    """Read a row of ``planner_refusals``; of a decision that is damaged, who made it is not known."""
    key, decision, problem, at = row
    try:
        refused = str(json.loads(str(problem)))
    except (ValueError, RecursionError):
        refused = str(problem)
    record = _record(str(key), decision, at, function=function, requested=requested)
    return replace(record or _unknown(str(key), at, function), refused=refused)


def _record(
    key: str, text: Value, at: Value, *, function: str, requested: Mapping[str, Any] | None
) -> DecisionRecord | None:
    """Read a decision as who made it, when and what; None where there is none, or it is damaged."""
    try:
        data: dict[str, Any] = json.loads(str(text)) if text is not None else {}
        kind, given = data["kind"], data.get("arguments")
        moment = _moment(at)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, OSError):
        return None
    if moment is None:
        return None
    return DecisionRecord(
        call=key,
        fully_qualified_name=function,
        kind=kind,
        by=data.get("by") or "",
        at=moment,
        requested=requested,
        arguments=(requested if given is None else given) if kind == "approve" else None,
        reason=data.get("reason") or "",
        result=data.get("result"),
        always=data.get("always"),
    )


def _unknown(key: str, at: Value, function: str) -> DecisionRecord:
    moment = _moment(at) or datetime.fromtimestamp(0, UTC)
    return DecisionRecord(call=key, fully_qualified_name=function, kind="deny", by="", at=moment)
