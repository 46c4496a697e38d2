"""What a run is resumed with, as the facts that it goes on with."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from planner_ext.approval.decisions import Decision
from planner_ext.core.facts import Fact, Resumed
from planner_ext.core.fold import apply
from planner_ext.core.limits import Limits
from planner_ext.core.state import State
from planner_ext.kernel.approval import check_record, decision_facts, pending_calls
from planner_ext.kernel.budget import Budget, tightest
from planner_ext.kernel.checkpoint import Checkpoint
from planner_ext.ports import Functions

__all__ = ["Resumption"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A checkpoint, the decisions on its calls that wait, and the budget that replaces its own, if any.

    Attributes:
        decided_at: When each decision was made, by call id; those that are not named are made now.
    """

    checkpoint: Checkpoint
    decisions: Mapping[str, Decision]
    budget: Limits | None
    decided_at: Mapping[str, float] = field(default_factory=dict[str, float])

    def within(self, held: Limits | None) -> "Resumption":
        """Keep a new budget within one that holds all the same: of each limit the tighter holds."""
        if self.budget is None or held is None:
            return self
        both = tightest(self.budget, held)
        limits = {item.name: getattr(both, item.name) for item in fields(both)}
        return replace(self, budget=replace(self.budget, **limits))

    def reopened(self, at: float) -> State:
        """Give the run as it is once it goes on, before any decision.

        Raises:
            InvalidCheckpointError: If the record cannot be gone on with.
        """
        state = self.checkpoint.state()
        check_record(state)
        return apply(state, self._resumed(at))

    def facts(self, functions: Functions, at: float) -> tuple[Fact, ...]:
        """Write it as facts: all decisions, or none.

        Raises:
            InvalidCheckpointError: If the record cannot be gone on with.
            DecisionRefusedError: If one of the decisions cannot be taken.
        """
        state = self.checkpoint.state()
        check_record(state)
        pending_calls(state)
        decided = decision_facts(state, self.decisions, functions, at, decided_at=self.decided_at)
        return (self._resumed(at), *decided)

    def _resumed(self, at: float) -> Resumed:
        limits = self.budget.limits if isinstance(self.budget, Budget) else self.budget
        return Resumed(limits=limits, at=at)
