"""The values in the rows of a store. Text of a model or a person is stored as JSON, in ASCII."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Self, cast
from urllib.parse import quote

from planner_ext.approval.decisions import (
    Approve,
    Decision,
    DecisionKind,
    DecisionRecord,
    Deny,
    MadeDecision,
    Supply,
    ToolCall,
    digest_of,
    fingerprint_of,
    further_digest,
    problem_of,
)
from planner_ext.approval.waiting import shown_call
from planner_ext.core.errors import InvalidJournalError, described, reading, shown
from planner_ext.core.facts import CallDecided, Fact
from planner_ext.core.fold import fold
from planner_ext.core.state import ASK_USER, Call, OpenRun, State, path_of
from planner_ext.core.values import frozen
from planner_ext.durable.database import Row, read_values
from planner_ext.durable.errors import ApprovalRefusedError, reading_row
from planner_ext.durable.inputs import RunInputs, SaidMessage, read_said
from planner_ext.engine.document import check_schema, load_facts
from planner_ext.engine.timeline import Timeline, TimelineIteration, timeline_of

_LONGEST_NAME = 500
"""Characters of a call's id in an approval's; with a run's name that fits PostgreSQL's
2.6 KB for a key."""


_DECISION_SCHEMA = 1
"""The number of a decision's form; one line per number. 1: the first."""

_KINDS: dict[str, type[Approve | Deny | Supply]] = {
    "approve": Approve,
    "deny": Deny,
    "supply": Supply,
}


@frozen
class RunRecord:
    """A run, as the store lists it; times are in seconds since the epoch.

    Attributes:
        status: ``queued``: no worker has begun it; ``running``, even if its worker
            died; ``paused``; ``failed``: its faults ran out of retries;
            ``quarantined``: its worker's process ended too often; or how it ended, as
            in a result.
        owner: The worker that drives it, or None.
        wake_at: When it is next due: the earliest start of a queued run, the first
            expiry of a paused one, the next retry of a running one. None: at once, or
            after a decision.
        outage_at: Since when it waits for the endpoint of its model; None if it does
            not.
        updated_at: When it last got a reply, paused, resumed or ended.
        problem: Its last fault, or why it is in quarantine; "" without one.
        retries: The faults since its last reply, start of a call, or result.
        attempts: How many tries the worker of its last fault allows; 0 without a fault.
        deaths: How often its worker's process ended, counted as ``retries``.
        iterations: The round trips charged to it, up to its last reply; so are
            ``tool_calls``, ``tokens`` and ``cost``.
        cost: In the unit of its price; None if unknown.
        tags: The tags that it began with, and those of `Runs.say`'s ``once``.
        priority: Of due runs a worker takes those with the highest first.
        waits_for: In a list: the functions of the first open calls, with the roles of
            those who may decide, "an answer" for a question, and how many more there
            are; a worker; or the next try. "" elsewhere.
    """

    run_id: str
    goal: str
    status: str
    owner: str | None
    wake_at: float | None
    created_at: float
    updated_at: float
    problem: str = ""
    retries: int = 0
    attempts: int = 0
    deaths: int = 0
    iterations: int = 0
    tool_calls: int = 0
    tokens: int = 0
    cost: float | None = None
    tags: tuple[str, ...] = ()
    priority: int = 0
    outage_at: float | None = None
    waits_for: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether the run may still have work to do."""
        return self.status in ("queued", "running", "paused")

    @classmethod
    def from_row(cls, row: Row) -> Self:
        """@private Read the columns `RUN_COLUMNS`; raise `StoreError` if they are damaged."""
        values: dict[str, Any] = dict(zip(RUN_COLUMNS, row, strict=True))
        with reading_row(f"The row of run {row[0]!r} is"):
            values["goal"] = json.loads(values["goal"])
            values["problem"] = json.loads(values["problem"] or '""')
            lines = (values["tags"] or "").split("\n")
            values["tags"] = lines[1:-1:2]
            for name in ("wake_at", "created_at", "updated_at", "outage_at"):
                read_moment(values[name])
            return read_values(cls, values)


RUN_COLUMNS = tuple(
    column.name for column in fields(RunRecord) if column.name != "waits_for"
)
"""The columns of a run's row."""

RUN_ID = re.compile(r"(?!\.\.?\Z)[^/\x00-\x1f\x7f\ud800-\udfff]{1,200}")
"""The name of a run: a part of addresses, in which ``.`` and ``..`` name no page."""


@frozen
class StoredRun:
    """A run with its journal, its inputs from `Runs.submit`, and what was said to it and it has not read."""

    record: RunRecord
    facts: tuple[Fact, ...]
    inputs: RunInputs
    said: tuple[SaidMessage, ...] = ()

    def timeline(self, *, now: float | None = None) -> Timeline:
        """Compute the run's timeline, with the store's status and last problem.

        Args:
            now: The end of unfinished work, see `planner_ext.timeline.timeline_of`.

        Raises:
            InvalidJournalError: If the facts contradict each other, or are another
                run's.
        """
        record = self.record
        is_parked = record.status in ("failed", "quarantined")
        waits_for_retry = record.status == "running" and record.wake_at is not None
        is_idle = is_parked or waits_for_retry
        with _reading_journal(record.run_id):
            timeline = timeline_of(
                self.facts, now=record.updated_at if is_idle else now
            )
        if is_parked:  # nobody works on it
            stopped = tuple(map(_stopped, timeline.iterations))
            timeline = replace(timeline, iterations=stopped)
        if self.facts:
            _check_run_id(record.run_id, timeline.run_id)
        reason = record.problem or timeline.reason
        return replace(
            timeline,
            run_id=record.run_id,
            goal=record.goal,
            status=record.status,
            reason=reason,
        )


def _stopped(iteration: TimelineIteration) -> TimelineIteration:
    """Show what was in flight when a run was set aside as in doubt, not as running."""
    calls = tuple(
        replace(call, outcome="in_doubt") if call.outcome == "running" else call
        for call in iteration.calls
    )
    return replace(iteration, calls=calls)


@frozen
class PendingApproval(ToolCall):
    """A call or question of a kept run that waits for a person's decision, or did.

    Attributes:
        id: ``{run_id}/{iteration}/{call_id}``; a long call id is cut and ends in a
            digest. A call in doubt that was approved asks again under an id that no
            model can foresee: with ``@`` and the name of its start.
        call_id: The call's id within its batch.
        asked_at: When it started to wait.
        status: ``open``; ``decided``, until a worker takes the decision; ``closed``.
        decided_at: When a person decided, or None.
        problem: Why a worker could not take the last decision; "" if it could.
        decision: The decision with its author, time and arguments; None while it is
            open.
        refused: The refused decisions on it, the oldest first: late, second, made for
            another call, or invalid.
        said: What was said to the run and waits for the decision, the oldest first.
        source: Digest of who asks, and what; "" until it is stored. A `Grant` binds to
            it.
        roles: Who may decide now: after its escalation, ``escalates_to``.
        quorum: How many persons have to approve it before it runs.
        votes: Their approvals so far, the oldest first.
        escalates_at: When it asks, or began to ask, ``escalates_to``; None: never.
        is_escalated: Whether it asks them now.
    """

    run_id: str
    call_id: str
    asked_at: datetime
    status: str = "open"
    decided_at: datetime | None = None
    problem: str = ""
    refused: tuple[DecisionRecord, ...] = ()
    said: tuple[SaidMessage, ...] = ()
    source: str = ""
    quorum: int = 1
    votes: tuple[DecisionRecord, ...] = ()
    escalates_at: datetime | None = None
    escalates_to: Sequence[str] = ()
    is_escalated: bool = False

    @property
    def tally(self) -> str:
        """How many persons approve it, and who, such as ``1 of 2: ann``; "" where one decides.

        Votes from before its escalation are listed apart: at the next vote the
        ``authorize`` hook says whether they still count.
        """
        if self.quorum == 1:
            return ""
        since = self.escalates_at if self.is_escalated else None
        early = [one.by for one in self.votes if since and one.at < since]
        now = [one.by for one in self.votes if not (since and one.at < since)]
        names = f": {', '.join(now)}" if now else ""
        before = f"; before it was escalated: {', '.join(early)}" if early else ""
        return f"{len(now)} of {self.quorum}{names}{before}"


_TEXTS = (
    *("id", "path", "fully_qualified_name", "goal", "prompt", "signature"),
    *("summary", "asked_by"),
)
_STORED = (*_TEXTS, "kind", "arguments", "iteration", "roles", "in_doubt", "parameters")
"""What a row holds of a call as JSON."""


def call_values(run: OpenRun, call: Call) -> dict[str, Any]:
    """Convert a call that waits to the JSON values of its row; see `read_approval`."""
    shown = shown_call(run.state, call, run.path + path_of(call.request.id))
    values = {name: shown[name] for name in _STORED}
    if run.place:
        values["run_id"] = run.state.run_id
    values["source"] = call.decided_fact.source
    values |= _panel_values(call.decided_fact)
    if call.decided_fact.approved and not call.started:
        values["further"] = True  # others have approved it
    return values


def question_digest(function: str, arguments: Mapping[str, Any], prompt: str) -> str:
    """Digest what is asked about a call."""
    return digest_of(function, {"arguments": arguments, "prompt": prompt})


def approval_path(id_: str) -> str:
    """Return the address of a call's page in the inbox, relative to its root."""
    return f"approvals/{quote(id_, safe='')}"


def _panel_values(fact: CallDecided) -> dict[str, Any]:
    """Say how many decide a call, and who later, if that is not one for ever."""
    panel = fact.panel
    values: dict[str, Any] = {"quorum": panel.quorum} if panel.quorum > 1 else {}
    if panel.escalates_in is not None:
        values["escalates_at"] = fact.escalates_at
        values["escalates_to"] = panel.escalates_to
    return values


def asked_call(
    call: ToolCall, id_: str, state: State, waiting: Call
) -> PendingApproval:
    """Show a call that waits as its row will, once the run has paused."""
    values: dict[str, Any] = {name: call[name] for name in call}
    panel = _panel_values(waiting.decided_fact)
    values |= panel | {"escalates_at": read_moment(panel.get("escalates_at"))}
    values["id"] = id_
    return PendingApproval(
        **values,
        run_id=state.run_id,
        call_id=call.id,
        asked_at=datetime.fromtimestamp(state.at, UTC),
    )


def approval_id(run_id: str, iteration: int, call_id: str) -> str:
    """Build a call's id across all runs, escaped as in JSON.

    Some models put whole signatures in their call ids: what is too long for a key is
    cut and ends in a digest. So is the name of a run inside another one.
    """
    name = json.dumps(path_of(call_id))[1:-1]
    run = json.dumps(run_id)[1:-1] if "/" in run_id else run_id
    return f"{_cut(run)}/{iteration}/{_cut(name)}"


def _cut(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}~{sha256(name.encode()).hexdigest()}"


def read_facts(run_id: str, rows: Sequence[Row], *, first: int = 0) -> tuple[Fact, ...]:
    """Read the rows ``(seq, schema, fact)`` of a journal from its ``first`` on.

    Raises:
        NewerSchemaError: If a newer version of this package wrote a row.
        InvalidJournalError: If a row is damaged; names it.
    """
    values: list[object] = []
    for place, (seq, schema, fact, *_) in enumerate(rows, first):
        if seq != place:
            raise InvalidJournalError(
                f"The journal of run {run_id!r} is damaged: expected row {place}, found {seq}."
            )
        if fact == "":
            raise InvalidJournalError(
                f"The journal of run {run_id!r} was forgotten, as its store's retention says. Its row tells how it "
                "ended: planner-ext runs list."
            )
        try:
            check_schema(schema)
            values.append(json.loads(fact))
        except InvalidJournalError as error:
            raise type(error)(f"Row {place} of run {run_id!r}: {error}") from error
        except Exception as error:
            raise InvalidJournalError(
                f"Row {place} of run {run_id!r} is not JSON: {described(error)}."
            ) from error
    try:
        return load_facts(values)
    except InvalidJournalError as error:
        raise type(error)(f"Run {run_id!r}: {error}") from error


def fold_journal(run_id: str, facts: Sequence[Fact]) -> State:
    """Compute the state of a run.

    Raises:
        InvalidJournalError: If the facts contradict each other, or are another run's.
    """
    with _reading_journal(run_id):
        state = fold(facts)
    if facts:
        _check_run_id(run_id, state.run_id)
    return state


def _reading_journal(run_id: str) -> AbstractContextManager[None]:
    return reading(
        f"The journal of run {run_id!r} contradicts itself, it is", InvalidJournalError
    )


def _check_run_id(run_id: str, found: str) -> None:
    if found != run_id:
        raise InvalidJournalError(
            f"The journal of run {run_id!r} holds the facts of run {found!r}."
        )


def read_approval(
    row: Row, refused: Sequence[Row] = (), *, now: float = 0.0
) -> PendingApproval:
    """Read a row of ``planner_approvals``, and the rows of its refused decisions.

    Args:
        row: The columns of `JournalStore.approval`.
        refused: The rows of refused decisions.
        now: Seconds since the epoch, for whom it asks.

    Raises:
        ApprovalRefusedError: If it is damaged, or its call does not match its
            fingerprint.
    """
    (
        key,
        run_id,
        status,
        fingerprint,
        text,
        asked_at,
        expires_at,
        decision,
        decided_at,
        problem,
        votes,
        said,
    ) = row
    with reading_row(f"The row of approval {key!r} is", ApprovalRefusedError):
        call = json.loads(text)
        function = call["fully_qualified_name"]
        arguments = call["arguments"]
        roles = tuple(call["roles"])
        digest = digest_of(function, arguments)
        if call.pop("further", False):
            digest = further_digest(digest, call["source"], roles)
        run = call.pop("run_id", run_id)  # of a run inside, its own name
        within = run == run_id or run.startswith(f"{run_id}/")
        asked = fingerprint_of(
            run, call["iteration"], call["id"], digest, call["signature"]
        )
        # only the fingerprint is proof, so a question must have the function name of a question, too
        is_question = call.get("kind") == "question" and function == ASK_USER
        escalates_at = call.get("escalates_at")
        escalates_to = tuple(call.get("escalates_to", ()))
        is_escalated = escalates_at is not None and now >= escalates_at
        read: dict[str, Any] = {
            "id": key,
            "call_id": call["id"],
            "kind": "question" if is_question else "function",
            "in_doubt": call["in_doubt"] is True,
            "roles": escalates_to if is_escalated else roles,
            "is_escalated": is_escalated,
            "votes": tuple(
                DecisionRecord(
                    call=key,
                    fully_qualified_name=function,
                    kind="approve",
                    by=by,
                    at=at,
                    requested=arguments,
                    arguments=arguments,
                )
                for by, at in read_votes(votes)
            ),
            "run_id": run_id,
            "fingerprint": fingerprint,
            "asked_at": asked_at,
            "expires_at": expires_at,
            "status": status,
            "decided_at": decided_at,
            "problem": json.loads(problem or '""'),
            "refused": [read_refusal(one, function, arguments) for one in refused],
            "said": read_said(run_id, said),
        }
        if decision is not None:
            read["decision"] = decision_record(
                key, decision, decided_at, function, arguments
            )
        approval = read_values(PendingApproval, {**call, **read})
    if fingerprint != asked or not within:
        raise ApprovalRefusedError(
            f"The row of approval {key!r} was altered: its function and arguments differ from those that were asked. "
            "Cancel the run, or restore the store from a backup."
        )
    return approval


def read_refusal(
    row: Row, function: str = "", requested: Mapping[str, Any] | None = None
) -> DecisionRecord:
    """Read a row of ``planner_refusals``; raise `StoreError` if it is damaged."""
    key, decision, problem, at = row
    with reading_row(f"A refused decision on {key!r} is"):
        record = decision_record(key, decision, at, function, requested)
        return replace(record, refused=json.loads(problem))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text; got {shown(value)}")
    return value


def decision_record(
    key: str,
    text: str,
    at: float,
    function: str,
    requested: Mapping[str, Any] | None = None,
) -> DecisionRecord:
    """Read the decision on a call from the text that `write_decision` wrote."""
    data: dict[str, Any] = json.loads(text)
    kind, by, reason, grant = (
        _text(data.get(name) or "") for name in ("kind", "by", "reason", "grant")
    )
    arguments = None
    if kind == "approve":
        given = data.get("arguments")
        arguments = requested if given is None else dict(given)
    return DecisionRecord(
        call=key,
        fully_qualified_name=function,
        kind=cast("DecisionKind", kind),
        by=by,
        at=datetime.fromtimestamp(at, UTC),
        requested=requested,
        arguments=arguments,
        reason=reason,
        result=data.get("result"),
        always=data.get("always"),
        grant=grant,
    )


def read_moment(at: float | None) -> datetime | None:
    """Read a column of a time."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC)


def write_votes(votes: Iterable[tuple[str, datetime]]) -> str:
    """Write who voted, and when, as JSON text; "" if nobody did."""
    written = [(by, at.timestamp()) for by, at in votes]
    return json.dumps(written) if written else ""


def read_votes(text: str | None) -> list[tuple[str, datetime]]:
    """Read what `write_votes` wrote."""
    read = json.loads(text or "[]")
    return [(_text(by), datetime.fromtimestamp(float(at), UTC)) for by, at in read]


def write_decision(
    decision: Decision,
    *,
    verified: bool = False,
    grant: str = "",
    votes: Sequence[str] = (),
) -> str:
    """Write a decision as JSON text, whether its author is vouched for, its grant, and the names whose votes made it.

    Raises:
        ApprovalRefusedError: If it is no decision, or holds a value that is not JSON.
    """
    kind = _kind_of(decision)
    if kind is None:
        raise ApprovalRefusedError(
            f"Expected Approve, Deny or Supply; got {shown(decision)}."
        )
    _check_decision(decision)
    more: dict[str, Any] = {"verified": True} if verified else {}
    more |= {"grant": grant} if grant else {}
    more |= {"votes": [{"by": name} for name in votes]} if votes else {}
    try:
        return json.dumps(
            {"schema": _DECISION_SCHEMA, "kind": kind, **more, **asdict(decision)},
            allow_nan=False,
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ApprovalRefusedError(
            f"Expected a decision that can be written as JSON, since another process takes it: {error}."
        ) from error


def any_decision_text(decision: object, *, grant: str = "") -> str:
    """Write any decision as JSON text; of one that is not JSON, only its kind and its author."""
    try:
        return write_decision(cast("Decision", decision), grant=grant)
    except ApprovalRefusedError:
        kind = _kind_of(decision) or type(decision).__name__
        by = getattr(decision, "by", None)
        return json.dumps(
            {
                "schema": _DECISION_SCHEMA,
                "kind": kind,
                "by": by if isinstance(by, str) else None,
            }
        )


def read_decision(text: str) -> MadeDecision:
    """Read what `write_decision` wrote; its time is in the row.

    Raises:
        ApprovalRefusedError: If it is damaged, or newer than this version reads.
    """
    with reading_row("The row of the decision is", ApprovalRefusedError):
        data = cast("dict[str, Any]", json.loads(text))
        schema = data.pop("schema")
        if schema != _DECISION_SCHEMA:
            raise ApprovalRefusedError(
                f"Expected a decision of schema {_DECISION_SCHEMA}; got {schema!r}. Take it with the version that "
                "wrote it."
            )
        verified = data.pop("verified", False) is True
        grant = _text(data.pop("grant", ""))
        votes = tuple(_text(vote["by"]) for vote in data.pop("votes", ()))
        decision = _KINDS[data.pop("kind")](**data)
    _check_decision(decision)
    return MadeDecision(decision=decision, verified=verified, grant=grant, votes=votes)


def _kind_of(decision: object) -> str | None:
    return next((name for name in _KINDS if isinstance(decision, _KINDS[name])), None)


def _check_decision(decision: Decision) -> None:
    problem = problem_of(decision)
    if problem is not None:
        raise ApprovalRefusedError(f"The decision cannot be taken: {problem}.")
