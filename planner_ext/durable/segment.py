"""What a store asks of a planner: to drive one segment of a run, from its start or a decision to its next pause or end.

Whoever drives runs knows planners by these protocols alone; the store and `Approvals` need nothing of Semantic Kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from planner_ext.approval.decisions import Decision
from planner_ext.approval.pending import InDoubt
from planner_ext.core.facts import Fact
from planner_ext.core.limits import Limits
from planner_ext.core.values import Usage
from planner_ext.engine.ports import RunStore

__all__ = ["DurablePlanner", "Segment", "SegmentRun"]

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where a run stands, and what it goes on with.

    Attributes:
        run_id: The run's name.
        goal: What it is to reach.
        store: Takes each new fact before what follows from it happens.
        facts: The journal so far; none: the run is to start.
        decisions: On calls that wait, by call id.
        decided_at: When each was made, in seconds since the epoch, by call id.
        budget: Replaces the run's limits; None keeps them.
        price: Prices the requests in place of the planner's own; no journal holds it.
        in_doubt: Who hears of calls in doubt.
        reopen: Whether a run that has ended is resumed without a new budget, too; else its result is given again.
    """

    run_id: str
    goal: str
    store: RunStore
    facts: Sequence[Fact] = ()
    decisions: Mapping[str, Decision] = field(default_factory=dict[str, Decision])
    decided_at: Mapping[str, float] = field(default_factory=dict[str, float])
    budget: Limits | None = None
    price: Callable[[str, Usage], float] | None = None
    in_doubt: InDoubt = "person"
    reopen: bool = False


class SegmentRun(Protocol[R_co]):
    """A segment that is ready to run."""

    async def result(self) -> R_co:
        """Drive the run to its next pause or end; what a run that has ended came to, without a request.

        Raises:
            DecisionRefusedError: If a decision cannot be taken, with its ``call_id``; then nothing was recorded.
            Exception: On a fault; the journal holds what happened before it.
        """
        ...


class DurablePlanner(Protocol[R_co]):
    """A planner whose runs can be kept in a store."""

    def journaled(self, kernel: Any, segment: Segment, *, arguments: Any = None) -> SegmentRun[R_co]:
        """Get ready to drive a segment with a kernel, and the application's arguments, which are not stored."""
        ...
