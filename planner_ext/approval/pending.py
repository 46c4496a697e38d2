"""What a person decides in a run: the calls and questions that wait, and the record of the decisions made."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias, cast

from planner_ext.approval.decisions import digest_of, fingerprint_of
from planner_ext.core.facts import CallDecided, Clarified, Fact, ModelReplied
from planner_ext.core.state import ASK_USER, Phase, State, waiting_reply
from planner_ext.core.values import RequestedCall

__all__ = [
    "IN_DOUBT_PROMPT",
    "DecisionRecord",
    "InDoubt",
    "WaitingCall",
    "decisions_of",
    "question_id",
    "record_of",
    "waiting_calls",
]

DecisionKind: TypeAlias = Literal["approve", "deny", "supply", "expire"]
"""The kinds of decisions; ``expire`` is the end of a question that was not decided in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision on a call, or the answer to a question: who made it, when, and whether it was taken.

    Attributes:
        call: The call's id: within its batch, or in a store as `PendingApproval` names it.
        fully_qualified_name: The function that was decided on; "" if that is not known.
        kind: What the decision was.
        by: Who or what decided: a person, an interceptor, a policy's rule; "" if no name was given.
        at: When, in UTC.
        requested: The arguments that were decided on; None if they are not known.
        arguments: Those that an approved call runs with: edited, or as they were; None if it does not run.
        reason: Why the call was denied, "" if no reason was given.
        result: What was supplied in the function's place, or as an answer; None if nothing was.
        always: What else an approval is for, for the rest of the run, or None.
        refused: Why the decision was not taken; "" if it was.
    """

    call: str
    fully_qualified_name: str
    kind: DecisionKind
    by: str
    at: datetime
    requested: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] | None = None
    reason: str = ""
    result: Any = None
    always: Literal["function", "arguments"] | None = None
    refused: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Convert the record to JSON values."""
        return asdict(self) | {"at": self.at.isoformat()}


def decisions_of(facts: Iterable[Fact]) -> tuple[DecisionRecord, ...]:
    """List the decisions of a run in the order in which they were taken; silence is not a decision."""
    found: list[DecisionRecord] = []
    calls: tuple[RequestedCall, ...] = ()
    before: dict[tuple[int, int], CallDecided] = {}
    for fact in facts:
        match fact:
            case ModelReplied():
                calls = fact.calls
            case CallDecided(iteration=iteration, index=index):
                again, before[iteration, index] = before.get((iteration, index)), fact
                repeated = again is not None and replace(again, at=fact.at) == fact  # by a recovery
                if not repeated and (record := record_of(fact, calls[index])) is not None:
                    found.append(record)
            case Clarified(answer=str(answer)):
                found.append(_answer(fact, answer, calls))
            case _:
                pass
    return tuple(found)


def record_of(fact: CallDecided, request: RequestedCall) -> DecisionRecord | None:
    """Read who decided what from a fact; None if the call was not decided, but answered or run."""
    kind: DecisionKind
    match fact.verdict, fact.reason:
        case "run", _ if fact.binds:
            kind = "approve"
        case "deny", _:
            kind = "deny"
        case "answer", "supplied":
            kind = "supply"
        case "answer", "expired":
            kind = "expire"
        case "answer", _ if fact.person:  # a denied call that is in doubt
            kind = "deny"
        case _:
            return None
    return DecisionRecord(
        call=fact.call_id,
        fully_qualified_name=fact.function,
        kind=kind,
        by=fact.by,
        at=datetime.fromtimestamp(fact.at, UTC),
        requested=_object(replace(fact, edited=None).arguments_of(request)),
        arguments=_object(fact.arguments_of(request)) if kind == "approve" else None,
        reason=fact.reason if kind == "deny" else "",
        result=fact.answer if kind == "supply" else None,
        always=fact.sticky,
    )


def _answer(fact: Clarified, answer: str, calls: tuple[RequestedCall, ...]) -> DecisionRecord:
    return DecisionRecord(
        call=f"question_{fact.iteration}" if fact.index is None else calls[fact.index].id,
        fully_qualified_name=ASK_USER,
        kind="supply" if fact.denied is None else "deny",
        by=fact.by,
        at=datetime.fromtimestamp(fact.at, UTC),
        requested={"question": fact.question},
        reason=fact.denied or "",
        result=answer if fact.denied is None else None,
    )


def _object(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else None


InDoubt: TypeAlias = Literal["person", "model"]
"""Who is asked about a call in doubt: a person decides it, or the model reads that its effect is unknown."""

IN_DOUBT_PROMPT = (
    "This call is in doubt: it had started when its process ended, and may have taken effect. "
    "Approve runs it again, Supply tells the model its result, Deny leaves the model with the doubt."
)
"""The prompt for a call that started and did not finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCall:
    """A call that waits for a person; a plain reply that asks is shown as a call of the function that asks the user.

    Attributes:
        index: Its place in the batch; None for a plain reply.
        request: As the model asked for it.
        decided: What was decided so far; for a call in doubt, with the question that is open now and does not expire.
        fingerprint: Digest of run, iteration, call, function and the arguments that will be used.
        in_doubt: Whether it had started.
    """

    index: int | None
    request: RequestedCall
    decided: CallDecided
    fingerprint: str
    in_doubt: bool

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The function's arguments, from the model or the person who edited them; empty if they are not JSON."""
        return _object(self.decided.arguments_of(self.request)) or {}


def waiting_calls(state: State) -> tuple[WaitingCall, ...]:
    """List the calls of a run that wait for a person, in call order; empty if the run has ended."""
    if (reply := waiting_reply(state)) is not None:
        return (_plain_question(state, reply),)
    batch = state.batch
    if batch is None or state.ended is not None:
        return ()
    found: list[WaitingCall] = []
    for index, call in enumerate(batch.calls):
        fact = call.decided
        in_doubt = call.started and state.phase is Phase.PAUSED
        if fact is None or call.answer is not None or not (in_doubt or fact.verdict == "defer"):
            continue
        fingerprint = fact.fingerprint
        if in_doubt:
            fact = replace(fact, expires_at=None, prompt=IN_DOUBT_PROMPT)
            fingerprint = fingerprint_of(state.run_id, fact.iteration, call.request.id, fact.digest, fact.signature)
        found.append(
            WaitingCall(index=index, request=call.request, decided=fact, fingerprint=fingerprint, in_doubt=in_doubt)
        )
    return tuple(found)


def question_id(reply: ModelReplied) -> str:
    """Give the id under which a plain reply is shown as a call."""
    return f"question_{reply.iteration}"


def _plain_question(state: State, reply: ModelReplied) -> WaitingCall:
    """Show a plain reply that asks as a call with a separate id."""
    name, arguments = question_id(reply), {"question": reply.text}
    digest = digest_of(ASK_USER, arguments)
    fingerprint = fingerprint_of(state.run_id, reply.iteration, name, digest)
    decided = CallDecided(
        iteration=reply.iteration,
        index=0,
        call_id=name,
        function=ASK_USER,
        kind="question",
        verdict="defer",
        digest=digest,
        fingerprint=fingerprint,
        prompt=reply.text,
        at=reply.at,
    )
    request = RequestedCall(id=name, name=ASK_USER, arguments=json.dumps(arguments))
    return WaitingCall(index=None, request=request, decided=decided, fingerprint=fingerprint, in_doubt=False)
