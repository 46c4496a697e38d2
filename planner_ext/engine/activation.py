"""An activation: what drives a kept run once, from its start or a decision to the next pause or end.

A store of runs makes activations, and a planner drives them: neither needs to know the other.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from planner_ext.approval.decisions import AskedCall, Authorize, Decision, InDoubt, WaitingCall
from planner_ext.core.facts import Fact, Guards
from planner_ext.core.limits import Budget
from planner_ext.engine.engine import BudgetHandle
from planner_ext.engine.ports import Emit, RunStore

__all__ = ["Activation", "ActivationRun", "ArgumentsFor", "DurablePlanner"]

R_co = TypeVar("R_co", covariant=True)


ArgumentsFor = Callable[[str], Any]
"""Returns the application's arguments for a run, by its name: no store keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A run's journal, and the decisions and options to continue it with.

    Attributes:
        run_id: The run's name.
        goal: The goal of the run.
        store: Records each new fact before the run acts on it.
        facts: The journal so far; empty starts the run.
        decisions: Decisions on pending calls, by call id.
        decided_at: When each was made, in seconds since the epoch, by call id.
        budget: Replaces the run's limits; None keeps them.
        arguments: What the run was submitted with, by name. An argument with the same name that the worker's
            application gives, see `ArgumentsFor`, takes precedence.
        in_doubt: Who handles calls in doubt.
        new_budget: Changes the run's limits while it is driven.
        authorize: Says who may decide, besides the planner's own hook; see `ApprovalSettings`.
        described: Shows a call that is decided to that hook, as the store lists it; None shows the planner's own.
        verified: The ids of the calls whose author the application vouches for.
        guards: What a run that was submitted demands of whoever begins it; None demands nothing.
        reopen: Whether to resume an ended run even without a new budget; else its result is returned again.
        emit: Takes the text of replies as it arrives, and each fact; its requests are streamed. None sends plain ones.
    """

    run_id: str
    goal: str
    store: RunStore
    facts: Sequence[Fact] = ()
    decisions: Mapping[str, Decision] = field(default_factory=dict[str, Decision])
    decided_at: Mapping[str, float] = field(default_factory=dict[str, float])
    budget: Budget | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    in_doubt: InDoubt = "person"
    new_budget: BudgetHandle | None = None
    authorize: Authorize | tuple[Authorize, ...] | None = None
    described: Callable[[WaitingCall], AskedCall] | None = None
    verified: Set[str] = frozenset()
    guards: Guards | None = None
    reopen: bool = False
    emit: Emit | None = None


class ActivationRun(Protocol[R_co]):
    """An activation that is ready to run."""

    async def result(self) -> R_co:
        """Drive the run to its next pause or end; a run that has ended returns its result without a request.

        Raises:
            InvalidDecisionError: If a decision cannot be taken, with its ``call_id``; then nothing was recorded.
            Exception: On a fault; the journal holds everything before it.
        """
        ...


class DurablePlanner(Protocol[R_co]):
    """A planner whose runs can be kept in a store."""

    def journaled(self, kernel: Any, activation: Activation, /, *, arguments: Any = None) -> ActivationRun[R_co]:
        """Prepare an activation with a kernel, and the application's arguments, which are not stored."""
        ...
