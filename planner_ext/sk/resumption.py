"""The facts with which a run is resumed: decisions, a budget, and the outcome of calls that were interrupted."""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from planner_ext.approval.decisions import Decision
from planner_ext.approval.pending import InDoubt
from planner_ext.core.facts import CallDecided, CallFinished, CallOutcome, Fact, Resumed
from planner_ext.core.fold import apply
from planner_ext.core.limits import Limits
from planner_ext.core.machine import IN_DOUBT
from planner_ext.core.state import Call, State
from planner_ext.engine.batch import is_as_decided
from planner_ext.engine.effects import Effect, NoEffect, Probe, TookEffect, idempotency_key
from planner_ext.engine.ports import Functions
from planner_ext.sk.approval import check_record, decision_facts, pending_calls
from planner_ext.sk.arguments import InvalidArguments, parse_object
from planner_ext.sk.budget import Budget, tightest
from planner_ext.sk.checkpoint import Checkpoint

__all__ = ["ResumeRequest", "recovery_facts"]

# Handling of calls that had started when their process died: run again, asked about, or left in doubt.

logger = logging.getLogger(__name__)


async def recovery_facts(
    state: State, *, effect_of: Callable[[str], Effect], functions: Functions, in_doubt: InDoubt, at: float
) -> tuple[Fact, ...]:
    """List the facts with which an interrupted run is resumed.

    A call in doubt that a person must decide gets no fact: the run pauses on it.

    Args:
        state: The run's state from its journal. Its process died, so no started call has finished.
        effect_of: Returns a function's declared effect, given its fully qualified name.
        functions: Encodes results.
        in_doubt: Who handles a call in doubt.
        at: Now, in seconds since the epoch.
    """
    batch = state.batch
    if batch is None:
        return ()
    facts: list[Fact] = []
    for call in batch.calls:
        decided = call.decided
        if not call.started or call.answer is not None or decided is None:
            continue
        effect = effect_of(decided.function)
        if effect.kind == "once":
            answer = await _probed(effect.probe, state, call, decided)
        else:  # a call that would get another value is not repeated: the first one may have taken effect
            answer = NoEffect() if is_as_decided(functions.check(call.request, decided.edited), decided) else None
        if isinstance(answer, NoEffect):
            facts.append(replace(decided, at=at))
        elif isinstance(answer, TookEffect):
            facts.append(_finished(decided, "ok", functions.encode(answer.result), at))
        elif in_doubt == "model":
            facts.append(_finished(decided, "cancelled", IN_DOUBT, at))
    return tuple(facts)


async def _probed(probe: Probe | None, state: State, call: Call, decided: CallDecided) -> TookEffect | NoEffect | None:
    """Ask a function's probe; one that raises, or returns an invalid answer, cannot tell."""
    if probe is None:
        return None
    arguments = parse_object(decided.arguments_of(call.request))
    assert not isinstance(arguments, InvalidArguments), "a call that started had arguments"
    key = idempotency_key(state.run_id, decided.iteration, decided.call_id)
    try:
        answer = probe(key, arguments)
        if inspect.isawaitable(answer):
            answer = await answer
    except Exception:
        logger.exception("The probe of %s failed; the call %s stays in doubt.", decided.function, key)
        return None
    if answer is None or isinstance(answer, TookEffect | NoEffect):  # pyright: ignore[reportUnnecessaryIsInstance]
        return answer
    logger.error("The probe of %s answered %r; the call %s stays in doubt.", decided.function, answer, key)
    return None


def _finished(decided: CallDecided, outcome: CallOutcome, result: str, at: float) -> CallFinished:
    return CallFinished(
        iteration=decided.iteration,
        index=decided.index,
        call_id=decided.call_id,
        function=decided.function,
        outcome=outcome,
        result=result,
        at=at,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequest:
    """A checkpoint, the decisions on its pending calls, and the budget that replaces its own, if any.

    Attributes:
        decided_at: When each decision was made, by call id; decisions without an entry are made now.
    """

    checkpoint: Checkpoint
    decisions: Mapping[str, Decision]
    budget: Limits | None
    decided_at: Mapping[str, float] = field(default_factory=dict[str, float])

    def within(self, outer_budget: Limits | None) -> "ResumeRequest":
        """Limit a new budget by an outer one: of each limit the tighter applies."""
        return self if self.budget is None else replace(self, budget=tightest(self.budget, outer_budget))

    def resumed_state(self, at: float) -> State:
        """Return the state of the resumed run, before any decision.

        Raises:
            InvalidCheckpointError: If the record cannot be resumed.
        """
        state = self.checkpoint.state()
        check_record(state)
        return apply(state, self._resumed(at))

    def facts(self, functions: Functions, at: float) -> tuple[Fact, ...]:
        """Convert the request to facts: all decisions, or none.

        Raises:
            InvalidCheckpointError: If the record cannot be resumed.
            DecisionRefusedError: If one of the decisions is invalid.
        """
        state = self.checkpoint.state()
        check_record(state)
        pending_calls(state)
        decided = decision_facts(state, self.decisions, functions, at, decided_at=self.decided_at)
        return (self._resumed(at), *decided)

    def _resumed(self, at: float) -> Resumed:
        limits = self.budget.limits if isinstance(self.budget, Budget) else self.budget
        return Resumed(limits=limits, at=at)
