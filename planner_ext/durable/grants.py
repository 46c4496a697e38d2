"""Grants: a decision on one call that answers the same question about later calls, too.

A grant is a row. The transaction in which a run pauses decides the calls that a grant
answers, and counts that. A worker takes such a decision as it takes a person's: it asks
the ``authorize`` hook again, and the fact names the grant. A use that a worker refuses
is not counted.
"""

import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from planner_ext.approval.decisions import (
    Approve,
    Decision,
    DecisionRecord,
    Deny,
    ReadByKey,
    ToolCall,
    source_of,
)
from planner_ext.approval.waiting import shown_call
from planner_ext.core.errors import shown
from planner_ext.core.fold import sticky_keys
from planner_ext.core.state import Call, OpenRun
from planner_ext.core.values import frozen
from planner_ext.durable.database import Row, Step
from planner_ext.durable.errors import ApprovalRefusedError, StoreError, reading_row
from planner_ext.durable.records import (
    PendingApproval,
    decision_record,
    read_moment,
    write_decision,
)
from planner_ext.durable.store import GRANT_HOLDS, JournalStore

if TYPE_CHECKING:
    from planner_ext.approval.policy import Grant

logger = logging.getLogger(__name__)

_ADD = """
    INSERT INTO planner_grants (id, question, kind, terms, decision, given_at, expires_at, uses)
    SELECT :id, :question, :kind, :terms, :decision, :at, :expires_at, CAST(:uses AS BIGINT)
    WHERE CAST(:first AS TEXT) IS NULL OR EXISTS (
        SELECT 1 FROM planner_approvals
        WHERE id = :call AND status = 'decided' AND decision = :first AND decided_at = :at
    )
"""
_USE = f"""
    UPDATE planner_grants SET used = used + 1, used_for = :id, used_at = :at
    WHERE id = :grant AND {GRANT_HOLDS} AND EXISTS (
        SELECT 1 FROM planner_approvals WHERE id = :id AND status = 'open' AND asked_at = :asked_at
    ) AND NOT EXISTS (SELECT 1 FROM planner_refusals WHERE id = :id AND decision LIKE :own)
"""  # noqa: S608  (only the package's own text)
"""Only for a question that was opened now, whose row this transaction locks, and once."""
_DECIDE = """
    UPDATE planner_approvals SET status = 'decided', decision = :decision, decided_at = :at, problem = NULL
    WHERE id = :id AND status = 'open' AND EXISTS (
        SELECT 1 FROM planner_grants WHERE id = :grant AND used_for = :id AND used_at = :at
    )
"""


@frozen
class GrantRecord(ReadByKey):
    """A grant, as the store lists it.

    Attributes:
        decision: What it answers: its author, its time, the function, and the call in
            whose question it was given. ``deny`` is a standing no.
        prompt, roles: Those of the question that it answers.
        terms: Its lifetime, uses and conditions.
        run_id, guards: The run in which it was given, and the names of its
            ``authorize`` hooks.
        used: How many questions it answered.
        used_for: The id of the last call that it decided, or None.
    """

    id: str
    decision: DecisionRecord
    prompt: str
    roles: Sequence[str]
    terms: "Grant"
    run_id: str
    guards: Sequence[str]
    expires_at: datetime | None
    used: int
    used_for: str | None

    @property
    def question(self) -> ToolCall:
        """The question as the ``authorize`` hook sees it, without the call's arguments."""
        return ToolCall(
            id=self.decision.call,
            fully_qualified_name=self.decision.fully_qualified_name,
            arguments={},
            fingerprint="",
            prompt=self.prompt,
            roles=self.roles,
        )

    def as_dict(self) -> dict[str, Any]:
        """Convert the record to JSON values, times in ISO format."""
        decision = self.decision.as_dict()
        terms = self.terms.model_dump(exclude_unset=True)
        values = {**dict(self), "decision": decision, "terms": terms}
        return json.loads(json.dumps(values, default=datetime.isoformat))


def typed_grant(typed: Mapping[str, str]) -> "Grant | None":
    """Read the terms of a grant as a person typed them, in JSON; None where all are empty.

    Raises:
        ApprovalRefusedError: Names the term that cannot be used.
    """
    from pydantic import ValidationError  # noqa: PLC0415  (loaded with the policy)

    from planner_ext.approval.policy import Grant  # noqa: PLC0415  (loads YAML)

    given: dict[str, Any] = {}
    try:
        for name, text in typed.items():
            if text:
                given[name] = json.loads(text)
        return Grant.model_validate(given) if given else None
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise ApprovalRefusedError(
        f"The terms of the grant cannot be used: {problem}. It needs a lifetime; a condition is JSON, such as "
        '{"amount": {"le": 100}}. Nothing was changed.'
    )


def grant_step(
    approval: PendingApproval,
    decision: Decision,
    grant: object,
    *,
    at: float,
    verified: bool,
    guards: Sequence[str],
    first: str | None,
) -> Step:
    """Return the step that stores a grant.

    Args:
        approval: The call whose question it answers from now on.
        decision: What it answers.
        grant: Its terms.
        at: When it is given.
        verified: Whether its author is vouched for.
        guards: The names of the run's ``authorize`` hooks.
        first: The decision on the call itself, as JSON text: unless that counts,
            nothing is stored. None: the call is not decided.

    Raises:
        ApprovalRefusedError: If the decision, or one on this call, cannot be given so.
    """
    from planner_ext.approval.policy import Grant  # noqa: PLC0415  (loads YAML)

    if not isinstance(grant, Grant):
        raise ApprovalRefusedError(
            f"Expected a Grant, with a lifetime, such as Grant(expires_in=3600); got {shown(grant)}."
        )
    is_one_persons = approval.quorum == 1 and not approval.is_escalated
    if approval.kind == "question" or approval.in_doubt or not is_one_persons:
        raise ApprovalRefusedError(
            f"No grant can be given for {approval.id!r}: questions of the model, calls in doubt, and what several "
            "persons have to approve, or was escalated, are decided one by one. Decide it without a grant."
        )
    match decision:
        case Approve(arguments=None, by=by):
            kind = "approve"
            answer = Approve(by=by)
        case Deny():
            kind = "deny"
            answer = decision
        case _:
            raise ApprovalRefusedError(
                "A grant is given with Deny, or with Approve without edited arguments: an edit, or a supplied result, "
                f"is of one call. Got {shown(decision)}. Decide the call without a grant."
            )
    grant_id = uuid.uuid4().hex[:12]
    told = {
        "function": approval.fully_qualified_name,
        "call": approval.id,
        "prompt": approval.prompt,
        "roles": [*approval.roles],
        "run_id": approval.run_id,
        "guards": [*guards],
        "terms": grant.model_dump(exclude_unset=True),
    }
    values = {
        "id": grant_id,
        "question": _question_of(approval, approval.source),
        "kind": kind,
        "terms": json.dumps(told),
        "decision": write_decision(answer, verified=verified, grant=grant_id),
        "at": at,
        "expires_at": at + grant.expires_in,
        "uses": grant.uses,
        "call": approval.id,
        "first": first,
    }
    return _ADD, values


def read_grants(rows: Iterable[Row]) -> Iterator[tuple[Row, GrantRecord]]:
    """Read rows of `JournalStore.grants`; a damaged one is skipped and logged, and stops no run."""
    for row in rows:
        try:
            yield row, _read_grant(row)
        except StoreError as error:
            logger.error("A grant is skipped: %s", error)


def _read_grant(row: Row) -> GrantRecord:
    from planner_ext.approval.policy import Grant  # noqa: PLC0415  (loads YAML)

    id_, _, text, decision, given_at, expires_at, used, used_for = row
    with reading_row(f"The row of grant {id_!r} is"):
        told: dict[str, Any] = json.loads(text)
        call = told.pop("call")
        function = told.pop("function")
        told |= {
            "id": id_,
            "decision": decision_record(call, decision, given_at, function),
            "terms": Grant.model_validate(told["terms"]),
            "expires_at": read_moment(expires_at),
            "used": used,
            "used_for": used_for,
        }
        return GrantRecord(**told)


async def using_steps(
    store: JournalStore,
    asked: Mapping[str, tuple[OpenRun, Call]],
    run_arguments: Mapping[str, Any],
    *,
    at: float,
) -> list[Step]:
    """Return the steps that decide the questions of a pause by the grants of the store.

    They follow those that open the approvals. Each finds out for itself whether the
    grant still holds, and the question is new. Of several grants a standing no comes
    first, then the oldest.

    Args:
        store: Has the grants.
        asked: The calls that wait, with their runs, by the ids of their approvals.
        run_arguments: The application's, of the outermost run.
        at: When it paused.
    """
    questions: list[tuple[str, str, ToolCall, float]] = []
    for id_, (run, one) in asked.items():
        fact = one.decided_fact
        if fact.kind == "function" and not one.started:
            call = shown_call(run.state, one, run.path)
            question = _question_of(call, fact.source)
            questions.append((question, id_, call, run.state.at))
    steps: list[Step] = []
    rows = await store.grants(at) if questions else ()
    for row, grant in read_grants(rows):
        unknown = grant.decision.kind == "deny"
        for key, id_, call, asked_at in questions:
            if key == row[1] and grant.terms.covers(
                call.arguments, run_arguments, unknown=unknown
            ):
                values = {
                    "id": id_,
                    "grant": grant.id,
                    "decision": row[3],
                    "own": f'%"grant": "{grant.id}"%',
                    "asked_at": asked_at,
                    "at": at,
                }
                steps += [(_USE, values), (_DECIDE, values)]
    return steps


def _question_of(call: ToolCall, source: str) -> str:
    """Name a question as a sticky approval of the function does, over all runs."""
    keys = sticky_keys(
        call.fully_qualified_name, "", call.signature, source=source, roles=call.roles
    )
    return source_of(keys["function"])
