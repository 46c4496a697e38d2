"""How a run is ended from outside, with every call answered; and the facts of actions that need no adapter."""

from collections.abc import Mapping

from planner_ext.core.facts import CallFinished, CallsWithheld, Ended, Fact, IterationCompleted, Paused, StopRequested
from planner_ext.core.fold import apply
from planner_ext.core.limits import Consumption
from planner_ext.core.machine import IN_DOUBT, CompleteIteration, Finish, Pause, WithholdCalls, next_action
from planner_ext.core.state import State

__all__ = ["cancellation_reason", "plain_fact", "stopping_facts"]


def cancellation_reason(by: str, reason: str) -> str:
    """Say who cancelled a run and why, as far as that is known: for the record and for the model."""
    who = f"Cancelled by {by}" if by else "Cancelled"
    return f"{who}: {reason}" if reason else f"{who}."


def stopping_facts(
    state: State, *, reason: str, at: float, seconds: float = 0.0, spent: Mapping[int, Consumption] | None = None
) -> tuple[Fact, ...]:
    """List the facts that end a run now: started calls as cancelled, the others as not executed, then the end.

    Args:
        state: A run that has begun and has not ended.
        reason: Why, for the record and for the model.
        at: Now, in seconds since the epoch.
        seconds: Active time since the last fact that has one; charged with the end.
        spent: What the started calls have spent, by their index in the batch.
    """
    facts: list[Fact] = [StopRequested(reason=reason, at=at), *_cancelled(state, at, spent or {})]
    for fact in facts:
        state = apply(state, fact)
    while (action := next_action(state)) is not None:
        if isinstance(action, CompleteIteration):
            fact = IterationCompleted(iteration=action.iteration, called=action.called, at=at, seconds=0.0)
        else:
            assert isinstance(action, WithholdCalls | Finish), "a run that is stopping asks for nothing else"
            fact = plain_fact(action, at=at, seconds=seconds)
        facts.append(fact)
        state = apply(state, fact)
    return tuple(facts)


def _cancelled(state: State, at: float, spent: Mapping[int, Consumption]) -> list[Fact]:
    batch = state.batch
    if batch is None:
        return []
    return [
        CallFinished(
            iteration=batch.iteration,
            index=index,
            call_id=call.request.id,
            function=call.decided.function,
            outcome="cancelled",
            result=IN_DOUBT,
            spent=spent.get(index),
            at=at,
        )
        for index, call in enumerate(batch.calls)
        if call.started and call.answer is None and call.decided is not None
    ]


def plain_fact(
    action: WithholdCalls | Pause | Finish, *, at: float, seconds: float = 0.0, iterations: int = 0
) -> CallsWithheld | Paused | Ended:
    """Turn an action that needs no adapter into its fact; an end is charged with these round trips."""
    match action:
        case WithholdCalls(iteration=iteration, indexes=indexes, answer=answer, limit=limit):
            return CallsWithheld(iteration=iteration, indexes=indexes, answer=answer, limit=limit, at=at)
        case Pause():
            return Paused(at=at, seconds=seconds)
        case Finish():
            return Ended(
                status=action.status,
                answer=action.answer,
                limit=action.limit,
                reason=action.reason,
                returned=action.returned,
                iterations=iterations,
                at=at,
                seconds=seconds,
            )
