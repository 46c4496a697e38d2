"""A turn that waits inside one of Semantic Kernel's orchestrations; loaded only where a run has paused."""

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from planner_ext.core.facts import Fact
from planner_ext.core.state import State
from planner_ext.sk.checkpoint import SigningKey
from planner_ext.sk.errors import TurnPausedError
from planner_ext.sk.run.outcome import carry_run

_CONTEXT = "semantic_kernel.agents.runtime.in_process.message_handler_context"
"""Loaded with Semantic Kernel's runtime of orchestrations; knows the agent whose turn it is."""

_first: WeakValueDictionary[str, TurnPausedError] = WeakValueDictionary()
"""By the topic of an orchestration's run: the first of its turns that paused."""


def raise_in_orchestration(
    state: State,
    facts: Sequence[Fact],
    key: SigningKey | None,
    pending: Sequence[dict[str, Any]],
) -> None:
    """Raise `TurnPausedError` for a paused turn of an orchestration's agent; elsewhere do nothing.

    An orchestration takes an agent's message for its answer, and gives it to the next
    agent or to its caller; an exception ends it, and its result raises that.
    """
    runtime = sys.modules.get(_CONTEXT)
    if runtime is None:
        return
    try:
        actor = runtime.MessageHandlerContext.agent_id()
    except RuntimeError:  # no orchestration's turn
        return
    agent, _, topic = actor.type.rpartition("_")
    names = ", ".join(call["fully_qualified_name"] for call in pending)
    error = TurnPausedError(
        f"The turn of the agent {agent!r} waits for a person to decide {names}; its orchestration has ended. Decide it "
        "with planner_ext.agent.resume_agent, an empty ChatHistoryAgentThread and this error's checkpoint, and begin "
        "the rest with the answer. To hold a call in place instead, give the service an approver; if a function of a "
        "run asks the orchestration, start its runtime in that function, or give its agents the services of the kernel "
        "that the function takes, and that run waits."
    )
    error.agent = agent
    error.pending = tuple(pending)
    error.status = "paused"
    error.iterations = state.usage.iterations
    error.tool_calls = state.usage.tool_calls
    error.usage = state.usage
    carry_run(error, state, facts, key)
    _add_turn(error, topic)
    raise error


def _add_turn(error: TurnPausedError, topic: str) -> None:
    """Let the error list the turns that paused before, and those list it.

    Agents of a concurrent orchestration pause one after the other, and its result raises
    only one of their errors.
    """
    first = _first.setdefault(topic, error)
    turns = [*first.turns, error]
    for turn in turns:
        turn.turns = turns
