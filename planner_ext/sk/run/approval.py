"""Approval as a Semantic Kernel application uses it: the calls that wait, and the decisions taken.

Each decision is taken once. A checkpoint does not know that it was resumed before; the planner, service or handler
object that resumes it remembers its decisions. Other objects and processes do not: a run store does.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from planner_ext.approval.decisions import (
    DecisionRecord,
    ReadByKey,
    WaitingCall,
    record_of,
    waiting_calls,
)
from planner_ext.core.errors import shown
from planner_ext.core.facts import CallStarted
from planner_ext.core.state import State
from planner_ext.engine.engine import Engine
from planner_ext.sk.checkpoint import SharedByCopies
from planner_ext.sk.errors import DecisionRefusedError, InvalidCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall(ReadByKey):
    """A call that waits for a person, as it will run if it is approved; or a question that waits for an answer.

    A question is a call of ``UserInteraction-AskUser`` with ``{"question": text}``, answered with `Supply`, or with
    `Deny` where it will not be answered. A plain reply that asks is shown as one, too, under its own id.

    Attributes:
        id: The call's id; decisions go by it.
        fully_qualified_name: The function that will run.
        arguments: The model's arguments, converted to the parameters' types; without the application's and defaults.
        fingerprint: Digest of run, iteration, call, function and arguments; an `Approve` may name it. A further
            question about a call that somebody approved has another one.
        expires_at: When the question expires, or None.
        prompt: The question to the person; "" asks for a plain approval.
        in_doubt: Whether it had started when its process ended, and may have taken effect: `Approve` runs it again,
            `Supply` tells the model its result, `Deny` leaves the model with the doubt.
        decision: Who let a call in doubt run, edited a waiting call, or approved one about which others are still
            asked; when, and with which arguments. Otherwise None.
        roles: Who may decide, by the function's mark or the rule that asks; empty for anyone.
        parameters: JSON schema of the function's parameters, as the model has it; None if it is not known.
    """

    id: str
    fully_qualified_name: str
    arguments: Mapping[str, Any]
    fingerprint: str
    expires_at: datetime | None = None
    prompt: str = ""
    in_doubt: bool = False
    decision: DecisionRecord | None = None
    roles: tuple[str, ...] = ()
    parameters: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert the call to JSON values; ``decision``, ``roles`` and ``parameters`` exist only if they are given."""
        expires_at = None if self.expires_at is None else self.expires_at.isoformat()
        written = asdict(self) | {"arguments": dict(self.arguments), "expires_at": expires_at, "roles": [*self.roles]}
        if self.decision is not None:
            written["decision"] = self.decision.as_dict()
        optional = ("decision", "roles", "parameters")
        return {name: value for name, value in written.items() if value or name not in optional}


def pending_calls(state: State) -> tuple[PendingCall, ...]:
    """List what waits for a person in a paused run: calls, and questions."""
    return tuple(map(pending_call, waiting_calls(state)))


def pending_call(call: WaitingCall) -> PendingCall:
    """Show a call that waits as a person sees it."""
    return PendingCall(
        id=call.request.id,
        fully_qualified_name=call.decided.function,
        arguments=call.arguments,
        fingerprint=call.fingerprint,
        expires_at=_expiry(call.decided.expires_at),
        prompt=call.decided.prompt,
        in_doubt=call.in_doubt,
        decision=record_of(call.decided, call.request),
        roles=call.decided.roles,
        parameters=call.parameters,
    )


def _expiry(at: float | None) -> datetime | None:
    try:
        return None if at is None else datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError) as error:
        raise InvalidCheckpointError(f"Expected a date at which the question expires; got {shown(at)}.") from error


_REMEMBERED = 100_000
"""Decisions that one object remembers, the newest; some 15 MB."""


class DecisionsTaken(SharedByCopies):
    """The decisions that one object took. Copies of the object share it; a pickled object begins with none."""

    def __init__(self) -> None:
        self._takings: dict[bytes, object] = {}

    def take(self, name: bytes, by: object) -> bool:
        """Take one decision atomically; False if another resume has taken it."""
        while len(self._takings) >= _REMEMBERED:
            self._takings.pop(next(iter(self._takings)), None)
        return self._takings.setdefault(name, by) is by

    def give_back(self, name: bytes, by: object) -> None:
        """Forget a decision that this resume has taken."""
        if self._takings.get(name) is by:
            self._takings.pop(name, None)


@dataclass(frozen=True, slots=True)
class Taking:
    """The decisions of one resume, remembered by each object that is resumed, once they are taken.

    Attributes:
        calls: Call ids, by the name under which the decision on the call is remembered.
    """

    taken: Sequence[DecisionsTaken]
    calls: Mapping[bytes, str]
    _resume: object = field(default_factory=object, init=False)

    def take(self) -> None:
        """Take all decisions, or none.

        Raises:
            DecisionRefusedError: If one was taken before; nothing was recorded.
        """
        for memory in self.taken:
            for name, call_id in self.calls.items():
                if not memory.take(name, self._resume):
                    self._give_back()
                    raise DecisionRefusedError(
                        f"The call {call_id!r} was decided before: this object has taken a decision on it already, in "
                        "an earlier resume of this checkpoint or one that still runs. Nothing was run again. Resume "
                        "the checkpoint of that resume's result or error.",
                        call_id=call_id,
                    )

    @contextmanager
    def reserve(self, engine: Engine) -> Generator[None]:
        """Take all decisions, or none; release them if the block fails before it starts a function.

        Raises:
            DecisionRefusedError: If one was taken before; nothing was recorded.
        """
        known = len(engine.facts)
        self.take()
        try:
            yield
        except BaseException:
            if not any(isinstance(fact, CallStarted) for fact in engine.facts[known:]):
                self._give_back()
            raise

    def _give_back(self) -> None:
        for memory in self.taken:
            for name in self.calls:
                memory.give_back(name, self._resume)
