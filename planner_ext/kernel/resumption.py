"""What a run is resumed with, as the facts that it goes on with."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner_ext.approval.decisions import Decision
from planner_ext.core.facts import Fact, Resumed
from planner_ext.kernel.approval import decision_facts
from planner_ext.kernel.budget import Budget
from planner_ext.kernel.checkpoint import Checkpoint
from planner_ext.ports import Functions

__all__ = ["Resumption"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A checkpoint, the decisions on its calls that wait, and the budget that replaces its own, if any."""

    checkpoint: Checkpoint
    decisions: Mapping[str, Decision]
    budget: Budget | None

    def facts(self, functions: Functions, at: float) -> tuple[Fact, ...]:
        """Write it as facts: all decisions, or none.

        Raises:
            DecisionRefusedError: If one of the decisions cannot be taken.
        """
        limits = self.budget.limits if self.budget is not None else None
        decided = decision_facts(self.checkpoint.state(), self.decisions, functions, at)
        return (Resumed(limits=limits, at=at), *decided)
