"""What a paused run waits for a person with: calls that were deferred, those that are in doubt, and questions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

from planner_ext.approval.fingerprint import digest_of, fingerprint_of
from planner_ext.core.facts import CallDecided, ModelReplied
from planner_ext.core.questions import ASK_USER, waiting_reply
from planner_ext.core.state import Phase, State
from planner_ext.core.values import RequestedCall

__all__ = ["IN_DOUBT_PROMPT", "InDoubt", "WaitingCall", "question_id", "waiting_calls"]

InDoubt: TypeAlias = Literal["person", "model"]
"""Who learns of a call in doubt: a person, who decides it; or the model, which reads that its effect is not known."""

IN_DOUBT_PROMPT = (
    "This call is in doubt: it had started when its process ended, and may have taken effect. "
    "Approve runs it again, Supply tells the model its result, Deny leaves the model with the doubt."
)
"""What a person is asked about a call that started and was not seen to finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCall:
    """A call that waits for a person; a plain reply that asks is one, too, of the function that asks the user.

    Attributes:
        index: Its place in the batch; None for a plain reply.
        request: As the model asked for it.
        decided: What was decided so far; of a call in doubt with the question that is open now, which does not expire.
        fingerprint: Digest of run, trip, call, function and the arguments that will be used.
        in_doubt: Whether it had started.
    """

    index: int | None
    request: RequestedCall
    decided: CallDecided
    fingerprint: str
    in_doubt: bool

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the function will get from the model, or from the person who edited it; empty where that is no JSON."""
        try:
            value = json.loads(self.decided.arguments_of(self.request) or "{}")
        except (ValueError, RecursionError):
            return {}
        return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def waiting_calls(state: State) -> tuple[WaitingCall, ...]:
    """List the calls of a run that wait for a person, in call order; none where the run has ended."""
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
    """Name the call that a plain reply is shown as."""
    return f"question_{reply.iteration}"


def _plain_question(state: State, reply: ModelReplied) -> WaitingCall:
    """Show a plain reply that asks as the call that it might have been, under an id of its own."""
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
