"""The runs inside a run that goes on, as they will be when their functions are called again: to check decisions first.

A decision on a call is checked, and asked of the hooks, before anything runs: with the
functions, gates and options of the run that makes the call. Those of a nested planner,
a prompt and an agent are known from their function. What code of the application does
in a function is known only while that runs: a run that it makes is resumed or recovered
by the same checks when it has been made again, and what is refused there still waits.
"""

import threading
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.functions import (
    KernelArguments,
    KernelFunction,
    KernelFunctionFromPrompt,
)

from planner_ext.approval.waiting import InDoubt
from planner_ext.core.accounts import Account, CallRecorder, CallWaits, Tab
from planner_ext.core.errors import RunRefusedError
from planner_ext.core.facts import (
    Fact,
    HappenedInside,
    Place,
    RunStarted,
    unwrapped,
)
from planner_ext.core.fold import fold
from planner_ext.core.state import OpenRun, State, open_runs
from planner_ext.engine.activation import check_guards
from planner_ext.engine.batch import is_as_decided
from planner_ext.engine.effects import Effect, effect_of
from planner_ext.sk.charging.nested import (
    own_agent_of,
    planner_kernel_of,
    planner_of,
)
from planner_ext.sk.checkpoint import Taking
from planner_ext.sk.errors import DecisionRefusedError, InvalidOptionError
from planner_ext.sk.run.context import RunContext
from planner_ext.sk.run.resume import (
    Deciding,
    ResumeRequest,
    calls_taken,
    check_calls,
    recovery_facts,
)


async def resumed(
    context: RunContext, request: ResumeRequest, taking: Taking | None = None
) -> tuple[Fact, ...]:
    """List the facts with which a run is resumed; see `ResumeRequest.facts`.

    ``taking`` gets the calls that they decide, and those that are decided once their
    runs have been made again.
    """
    runs = RunsInside(context, request.checkpoint.facts)
    runs.check()
    facts = await request.facts(runs.deciding, context.options.clock.now())
    if taking is not None:
        taking.calls.update(calls_taken(request.checkpoint.facts, facts))
    runs.leave(partial(_decided, runs, request, taking, [*facts]))
    return facts


async def _decided(
    runs: "RunsInside",
    request: ResumeRequest,
    taking: Taking | None,
    before: list[Fact],
    run: OpenRun,
) -> Sequence[Fact]:
    """List the facts of a run that is made again, and add them to those ``before`` it; what is refused waits on."""
    context = runs.outermost
    while True:
        at = context.options.clock.now()
        try:
            facts = await request.facts(runs.deciding, at, within=run)
            if taking is not None:
                known = request.checkpoint.facts
                taking.add(calls_taken(known, (*before, *facts)))
        except Exception as error:
            context.refused.append(error)
            if not request.named_in(run):
                return ()
            request = request.without(getattr(error, "call_id", None), run)
        else:
            before += facts
            return facts


async def recovered(
    context: RunContext, facts: Sequence[Fact], in_doubt: InDoubt
) -> tuple[Fact, ...]:
    """List the facts with which a run is recovered whose process died; see `recovery_facts`."""
    runs = RunsInside(context, facts)
    runs.check()
    check_calls(runs.state)

    async def recover(within: OpenRun | None = None) -> tuple[Fact, ...]:
        at = context.options.clock.now()
        return await recovery_facts(
            runs.state,
            deciding=runs.deciding,
            in_doubt=in_doubt,
            at=at,
            within=within,
        )

    runs.leave(recover)
    return await recover()


class FunctionMissingError(DecisionRefusedError, RunRefusedError):
    """A run waits in a function that this process lacks: a store leaves it to another process."""


class RunsInside:
    """The contexts of a run, and of the runs in its open calls.

    Attributes:
        outermost: The context of the run.
        state: The run, as it was when it was resumed or recovered.
    """

    def __init__(self, context: RunContext, facts: Sequence[Fact]) -> None:
        self.state = fold(facts)
        self._guards = {
            fact.run_id: fact.guards
            for fact in map(unwrapped, filter(_is_inside, facts))
            if isinstance(fact, RunStarted) and fact.guards is not None
        }
        self.outermost = context
        self._known: dict[Place, RunContext] = {(): context}

    def deciding(self, run: OpenRun) -> Deciding | None:
        """Return what decisions on the calls of one of these runs are checked with; None until that is known.

        Raises:
            FunctionMissingError: If a function around it is missing, or another one has
                its name.
        """
        context = self._context(run)
        if context is None:
            return None
        functions = context.tools.functions
        return Deciding(
            functions=context.functions,
            authorize=context.options.approval.authorize,
            review_edit=context.gate.review_edit,
            effect_of=lambda name: effect_of(functions.get(name)) or Effect(),
        )

    def _context(self, run: OpenRun) -> RunContext | None:
        """Return the context of one of these runs; None of one that code of the application makes, or around it."""
        context = self.outermost
        state = self.state
        tab: Tab | None = None
        for depth, (_, index, number) in enumerate(run.place, 1):
            place = run.place[:depth]
            batch = state.batch
            assert batch is not None, "a run is made in an open call"
            function = _function_of(context, state, index)
            tab = _WaitingTab(state, tab, index)
            state = batch.calls[index].runs[number]
            known = self._known.get(place) or _context_in(context, function, state, tab)
            if known is None:
                return None
            self._known[place] = context = known
        return context

    def leave(self, facts: Callable[[OpenRun], Awaitable[Sequence[Fact]]]) -> None:
        """Leave a run that is not known until it is made again: it then begins with these facts."""

        async def first(context: RunContext) -> Sequence[Fact]:
            run = self._made_again(context)
            if run is None:
                return ()
            try:
                self._check(run, context)
            except (RunRefusedError, InvalidOptionError) as error:
                self.outermost.refused.append(error)
                raise CallWaits from None
            return [_inside(run, fact) for fact in await facts(run)]

        functions = self.outermost.functions
        assert functions.as_parent is not None, "a context describes its run"
        functions.as_parent = partial(functions.as_parent, left=first)

    def _made_again(self, context: RunContext) -> OpenRun | None:
        """Find the run that a context is of, and get to know it; None of a run that was known, or is new."""
        parent = context.parent
        assert parent is not None and parent.run is not None, "a run in a call"
        name = parent.tab.name_of(parent.run)
        for run in open_runs(self.state):
            if run.state.run_id == name and run.place not in self._known:
                self._known[run.place] = context
                return run
        return None

    def check(self) -> None:
        """Refuse runs, of those that are known, that lack what they began with.

        Raises:
            RunRefusedError: Naming the guards of a run inside that are missing.
            InvalidOptionError: If ``check_answer`` or a ``response_format`` is missing.
        """
        for run in open_runs(self.state):
            rules = run.state.rules
            if rules.checked or rules.structured or run.state.run_id in self._guards:
                context = self._context(run)
                if context is not None:
                    self._check(run, context)

    def _check(self, run: OpenRun, context: RunContext) -> None:
        before = self._guards.get(run.state.run_id)
        offered = context.tools.functions
        check_guards(self.state.run_id, before, context.guards(), offered)
        if run.state.rules.checked and not context.options.check_answer:
            raise InvalidOptionError(
                "The run began with check_answer, which neither a checkpoint nor a store holds; there is none here. "
                "Resume it with the one that it began with."
            )
        if run.state.rules.structured and context.form is None:
            raise InvalidOptionError(
                "The run has to answer in a form, which neither a checkpoint nor a store holds; the options have no "
                "response_format. Resume it with the one that it began with."
            )


def _is_inside(fact: Fact) -> bool:
    return isinstance(fact, HappenedInside)


def _inside(run: OpenRun, fact: Fact) -> Fact:
    """Return what a fact of the outermost run says of one inside it."""
    for _ in run.place:
        assert isinstance(fact, HappenedInside), "a fact of a run inside"
        fact = fact.fact
    return fact


def _function_of(context: RunContext, state: State, index: int) -> KernelFunction:
    """Return the function of an open call, if it is the one that was decided."""
    assert state.batch is not None, "a run is made in an open call"
    call = state.batch.calls[index]
    decided = call.decided_fact
    resolved = context.functions.check(call.request, decided.edited)
    if not (resolved.nested and is_as_decided(resolved, decided)):
        raise FunctionMissingError(
            f"The function {decided.function} is not here, or is no longer the one in which the call waits: its "
            "parameters changed, or another function has its name. Nothing ran, and the call still waits. Resume with "
            "the kernel and the functions that the run began with."
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
