"""Which calls of a paused run wait for a person: those that were deferred, and those that are in doubt."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from planner_ext.approval.fingerprint import fingerprint_of
from planner_ext.core.facts import CallDecided
from planner_ext.core.state import Phase, State
from planner_ext.core.values import RequestedCall

__all__ = ["IN_DOUBT_PROMPT", "WaitingCall", "waiting_calls"]

IN_DOUBT_PROMPT = (
    "This call is in doubt: it had started when its process ended, and may have taken effect. "
    "Approve runs it again, Supply tells the model its result, Deny leaves the model with the doubt."
)
"""What a person is asked about a call that started and was not seen to finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCall:
    """A call that waits for a person.

    Attributes:
        index: Its place in the batch.
        request: As the model asked for it.
        decided: What was decided so far; of a call in doubt with the question that is open now, which does not expire.
        fingerprint: Digest of run, trip, call, function and the arguments that will be used.
        in_doubt: Whether it had started.
    """

    index: int
    request: RequestedCall
    decided: CallDecided
    fingerprint: str
    in_doubt: bool

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the function will get from the model, or from the person who edited it; empty where that is no JSON."""
        text = self.request.arguments if self.decided.edited is None else self.decided.edited
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return {}
        return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def waiting_calls(state: State) -> tuple[WaitingCall, ...]:
    """List the calls of a run that wait for a person, in call order; none where the run has ended."""
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
            fingerprint = fingerprint_of(state.run_id, fact.iteration, call.request.id, fact.digest)
        found.append(
            WaitingCall(index=index, request=call.request, decided=fact, fingerprint=fingerprint, in_doubt=in_doubt)
        )
    return tuple(found)
