"""The runs inside a run that waits, as they will be when their functions are called again: to check decisions first.

A decision on a call is checked, and asked of the hooks, before anything runs: with the
functions, gates and options of the run that makes the call. Those of a nested planner
are known from its function. What code of the application does in a function is known
only while that runs: there, calls are checked against the kernel of the run around, and
no edit is taken.
"""

import threading
from collections.abc import Sequence
from copy import copy
from typing import Any, cast

from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.functions import KernelArguments, KernelFunction
from semantic_kernel.functions.kernel_function_from_prompt import (
    KernelFunctionFromPrompt,
)

from planner_ext.approval.decisions import Approve, Defer, ToolCall
from planner_ext.core.accounts import Account, CallRecorder, Tab
from planner_ext.core.facts import Fact, Guards, Place, RunStarted, unwrapped
from planner_ext.core.state import OpenRun, State
from planner_ext.engine.activation import missing_guards
from planner_ext.engine.batch import is_as_decided
from planner_ext.engine.effects import Effect, effect_of
from planner_ext.engine.ports import Reviewed
from planner_ext.sk.charging.nested import (
    own_agent_of,
    planner_kernel_of,
    planner_of,
)
from planner_ext.sk.errors import DecisionRefusedError, InvalidOptionError
from planner_ext.sk.run.context import RunContext
from planner_ext.sk.run.resume import Deciding, ResumeRequest


async def resumed(context: RunContext, request: ResumeRequest) -> tuple[Fact, ...]:
    """List the facts with which a run is resumed; see `ResumeRequest.facts`."""
    begun = next(iter(request.checkpoint.facts), None)
    checked = isinstance(begun, RunStarted) and begun.rules.checked
    if checked and not context.options.check_answer:
        raise InvalidOptionError(
            "The run began with check_answer, which neither a checkpoint nor a store holds; there is none here. "
            "Resume it with the one that it began with."
        )
    runs = RunsInside(context, request.checkpoint.state())
    return await request.facts(runs.deciding, context.options.clock.now())


class RunsInside:
    """The contexts of a run, and of the runs in its open calls."""

    def __init__(self, context: RunContext, state: State) -> None:
        self._state = state
        self._known: dict[Place, RunContext] = {(): context}

    def deciding(self, run: OpenRun) -> Deciding:
        """Return what decisions on the calls of one of these runs are checked with.

        Raises:
            DecisionRefusedError: If a function around it is missing, or another one has
                its name.
        """
        context = self.context(run)
        functions = context.tools.functions
        is_known = run.place in self._known

        async def refused(
            call: ToolCall, _: Approve, __: Defer, ___: State
        ) -> Reviewed:
            raise DecisionRefusedError(
                f"The arguments of {call.path!r} cannot be edited: the run that makes the call is begun by code of the "
                "application, and its rules are known only while that runs. Approve the call as it is, deny it, or "
                "supply its result."
            )

        return Deciding(
            functions=context.functions,
            authorize=context.options.approval.authorize,
            review_edit=context.gate.review_edit if is_known else refused,
            effect_of=lambda name: effect_of(functions.get(name)) or Effect(),
        )

    def context(self, run: OpenRun) -> RunContext:
        """Return the context of one of these runs; of one that is begun by code of the application, the one around it.

        Raises:
            DecisionRefusedError: As `deciding`.
        """
        context = self._known[()]
        state = self._state
        tab: Tab | None = None
        for depth, (_, index, number) in enumerate(run.place, 1):
            place = run.place[:depth]
            function = _function_of(context, state, index)
            batch = state.batch
            assert batch is not None, "a run is made in an open call"
            tab = _WaitingTab(state, tab, index)
            inner = batch.calls[index].runs[number]
            known = self._known.get(place)
            if known is None and self._known.get(place[:-1]) is context:
                known = _context_in(context, function, inner, tab)
                if known is not None:
                    self._known[place] = known
            context = known or context
            state = inner
        return context

    def missing_guards(
        self, runs: Sequence[OpenRun], facts: Sequence[Fact]
    ) -> list[str]:
        """List the guards that the runs inside began with and that are missing now."""
        begun: dict[str, Guards | None] = {
            fact.run_id: fact.guards
            for fact in map(unwrapped, facts)
            if isinstance(fact, RunStarted)
        }
        found: list[str] = []
        for run in runs:
            before = begun.get(run.state.run_id) if run.place else None
            if before is not None:
                context = self.context(run)
                found += missing_guards(
                    before, context.guards(), context.tools.functions
                )
        return found


def _function_of(context: RunContext, state: State, index: int) -> KernelFunction:
    """Return the function of an open call, if it is the one that was decided."""
    assert state.batch is not None, "a run is made in an open call"
    call = state.batch.calls[index]
    decided = call.decided_fact
    resolved = context.functions.check(call.request, decided.edited)
    if not (resolved.nested and is_as_decided(resolved, decided)):
        raise DecisionRefusedError(
            f"The function {decided.function} is not here, or is no longer the one in which the call waits: its "
            "parameters changed, or another function has its name. Nothing ran, and the call still waits. Resume with "
            "the kernel and the functions that the run began with.",
            call_id=call.request.id,
        )
    return context.tools.functions[decided.function]


def _context_in(
    context: RunContext, function: KernelFunction, run: State, tab: Tab
) -> RunContext | None:
    """Prepare the run of a planner, a prompt or an agent; None of a function with code of its own."""
    as_parent = context.functions.as_parent
    if as_parent is None:
        return None
    parent = as_parent(tab=tab, continues=True)
    given = context.functions.arguments
    arguments = KernelArguments() if given is None else copy(given)
    planner = planner_of(function)
    if planner is not None:
        kernel = planner_kernel_of(function) or context.kernel
        return planner._looked_at(
            kernel, run.goal, arguments, rules=run.rules, parent=parent
        )
    agent = own_agent_of(function)
    kernel = context.kernel if agent is None else agent.kernel
    service: Any
    settings: Any
    if agent is not None:
        service, settings = kernel.select_ai_service(
            arguments=agent.arguments or KernelArguments(),
            type=ChatCompletionClientBase,
        )
        if settings.function_choice_behavior is None:
            settings.function_choice_behavior = agent.function_choice_behavior
    elif isinstance(function, KernelFunctionFromPrompt):
        service, settings = kernel.select_ai_service(
            function=function, arguments=arguments
        )
    else:
        return None
    if context.functions.wrap is None:
        return None
    wrapped: Any = context.functions.wrap(service, tab)
    return wrapped._looked_at(kernel, settings, rules=run.rules, parent=parent)


class _WaitingTab(Tab):
    """The tab of a call that does not run now, but waits: nothing happens in it."""

    def __init__(self, state: State, within: Tab | None, index: int) -> None:
        account = Account(lambda: state, within, threading.RLock())
        super().__init__(account, index, cast("CallRecorder", None))

    @property
    def can_wait(self) -> bool:
        return True

    @property
    def is_kept(self) -> bool:
        return True
