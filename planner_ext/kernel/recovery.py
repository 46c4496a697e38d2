"""What becomes of calls that had started when their process died: run again, asked about, or left in doubt."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace

from planner_ext.approval.waiting import InDoubt
from planner_ext.core.facts import CallDecided, CallFinished, CallOutcome, Fact
from planner_ext.core.machine import IN_DOUBT
from planner_ext.core.state import Call, State
from planner_ext.effects import Effect, NoEffect, Probe, TookEffect, idempotency_key
from planner_ext.kernel.arguments import InvalidArguments, parse_object
from planner_ext.ports import Functions
from planner_ext.review import is_as_decided

__all__ = ["recovery_facts"]

logger = logging.getLogger(__name__)


async def recovery_facts(
    state: State, *, effect_of: Callable[[str], Effect], functions: Functions, in_doubt: InDoubt, at: float
) -> tuple[Fact, ...]:
    """List the facts with which an interrupted run goes on.

    A call in doubt that a person is to decide has none: the run pauses on it.

    Args:
        state: The run, as its journal leaves it: its process died, so whatever is started has not finished.
        effect_of: Gives what a function declares, by its fully qualified name.
        functions: Encodes results.
        in_doubt: Who hears of a call in doubt.
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
        else:  # a call that would now get another value is not repeated: whether the first took effect is not known
            answer = NoEffect() if is_as_decided(functions.check(call.request, decided.edited), decided) else None
        if isinstance(answer, NoEffect):
            facts.append(replace(decided, at=at))
        elif isinstance(answer, TookEffect):
            facts.append(_finished(decided, "ok", functions.encode(answer.result), at))
        elif in_doubt == "model":
            facts.append(_finished(decided, "cancelled", IN_DOUBT, at))
    return tuple(facts)


async def _probed(probe: Probe | None, state: State, call: Call, decided: CallDecided) -> TookEffect | NoEffect | None:
    """Ask a function's probe; one that raises, or answers something else, cannot tell."""
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
