"""What one planner, service or handler object remembers of the decisions that it took: each is taken once.

A checkpoint is a value and does not know that it was resumed before; the object that resumes it does. Another object,
another process and a checkpoint that nothing was decided of are not seen here: a run store knows those.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Self

from planner_ext.approval.waiting import WaitingCall, waiting_calls
from planner_ext.core.actions import ReviewCalls, RunCalls
from planner_ext.core.facts import CallDecided, CallStarted, Clarified, Ended, Fact
from planner_ext.core.fold import apply, fold
from planner_ext.core.machine import next_action
from planner_ext.core.values import RequestedCall
from planner_ext.engine import Engine
from planner_ext.kernel.approval import DecisionRefusedError

__all__ = ["NOTHING_TAKEN", "DecisionsTaken", "Taking", "calls_taken"]

_REMEMBERED = 100_000
"""Decisions that one object remembers, the newest; some 15 MB."""


class DecisionsTaken:
    """The decisions that one object took. Copies of the object share it; a pickled object begins with none."""

    def __init__(self) -> None:
        self._takings: dict[bytes, object] = {}

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return DecisionsTaken, ()

    def take(self, name: bytes, by: object) -> bool:
        """Take one decision, in one step for all threads; False where another resume has taken it."""
        while len(self._takings) >= _REMEMBERED:
            self._takings.pop(next(iter(self._takings)), None)
        return self._takings.setdefault(name, by) is by

    def give_back(self, name: bytes, by: object) -> None:
        """Forget a decision that this resume has taken."""
        if self._takings.get(name) is by:
            self._takings.pop(name, None)


class Taking:
    """The decisions of one resume."""

    def __init__(self, taken: Sequence[DecisionsTaken], calls: Mapping[bytes, str]) -> None:
        """Name what is to be taken; nothing is taken yet.

        Args:
            taken: What each object remembers that is resumed: the one the caller has, and the services inside it.
            calls: Call ids, by the name under which the decision on the call is remembered.
        """
        self._taken = taken
        self._calls = calls
        self._resume = object()

    def take(self) -> None:
        """Take all decisions, or none.

        Raises:
            DecisionRefusedError: If one was taken before; nothing was recorded.
        """
        for memory in self._taken:
            for name, call_id in self._calls.items():
                if not memory.take(name, self._resume):
                    self._give_back()
                    raise DecisionRefusedError(
                        f"The call {call_id!r} was decided before: this object has taken a decision on it already, in "
                        "an earlier resume of this checkpoint or one that still runs. Nothing was run again. Resume "
                        "the checkpoint of that resume's result or error.",
                        call_id=call_id,
                    )

    @contextmanager
    def held(self, engine: Engine) -> Generator[None]:
        """Take all decisions, or none; give them back where what follows fails before it starts a function.

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
        for memory in self._taken:
            for name in self._calls:
                memory.give_back(name, self._resume)


NOTHING_TAKEN = Taking((), {})
"""What a run takes that starts: there are no decisions."""


def calls_taken(facts: Sequence[Fact], more: Sequence[Fact]) -> dict[bytes, str]:
    """Name the calls that a resume decides, and those that it would start or have reviewed again; with their ids.

    The names are of this place in the journal: a call that was started since and is in doubt has another one, and so
    has one of an ended run, whose decisions were forgotten.

    Args:
        facts: The checkpoint's.
        more: What the run is resumed with.
    """
    state = fold(facts)
    decided = [call.request for call in waiting_calls(state) if _is_decided(call, more)]
    iteration = state.batch.iteration if state.batch is not None else state.iteration
    after = reduce(apply, more, state)
    action = next_action(after)
    next_calls: list[RequestedCall] = []
    if isinstance(action, RunCalls | ReviewCalls) and after.batch is not None:
        next_calls = [after.batch.calls[index].request for index in action.indexes]
    starts = Counter(fact.call_id for fact in facts if isinstance(fact, CallStarted) and fact.iteration == iteration)
    ends = sum(isinstance(fact, Ended) for fact in facts)

    def name(kind: str, request: RequestedCall) -> bytes:
        call = (request.id, request.name, request.arguments, starts[request.id])
        return hashlib.sha256(json.dumps((kind, state.run_id, iteration, ends, call)).encode()).digest()

    return {
        **{name("decided", request): request.id for request in decided},
        **{name(type(action).__name__, request): request.id for request in next_calls},
    }


def _is_decided(call: WaitingCall, facts: Sequence[Fact]) -> bool:
    return any(
        isinstance(fact, Ended)  # a cancelled run: whatever waits is decided
        or (isinstance(fact, CallDecided) and fact.call_id == call.request.id and fact.verdict != "defer")
        or (isinstance(fact, Clarified) and fact.index == call.index)
        for fact in facts
    )
