"""The context of one run, with its kernel, connector and options: every door prepares it in the same way."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast
from uuid import uuid4
from weakref import WeakSet

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import (
    FunctionChoiceBehavior,
    PromptExecutionSettings,
)
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelFunction

from planner_ext.approval.decisions import approval_required
from planner_ext.approval.guards import guard_name, hook_names
from planner_ext.core.accounts import CallWaits, SharedBudgets
from planner_ext.core.errors import shown
from planner_ext.core.facts import Fact, Guards, Rules
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.state import Phase, State
from planner_ext.engine.batch import BudgetHandle, CallFailedError
from planner_ext.engine.concurrency import GRACE, StopHandle
from planner_ext.engine.engine import Engine
from planner_ext.engine.gate import InterceptorChain
from planner_ext.engine.log import is_listening
from planner_ext.engine.ports import (
    AnswerCheck,
    Clock,
    Emit,
    Ports,
    Prompts,
    RunStore,
)
from planner_ext.sk.charging.filters import (
    CallFilter,
    approval_filters,
    refuse_without_store,
    report_unused_rules,
)
from planner_ext.sk.charging.nested import (
    ParentRun,
    RunGate,
    Wrap,
    nothing_left,
    request_meter,
    whole,
)
from planner_ext.sk.chat.history import (
    check_history,
    one_result_each,
    render,
    repair_history,
)
from planner_ext.sk.chat.prices import RequestMeter
from planner_ext.sk.chat.round_trip import KernelChat
from planner_ext.sk.chat.transport import connector_settings
from planner_ext.sk.checkpoint import DecisionsTaken
from planner_ext.sk.errors import (
    InvalidOptionError,
    InvalidSettingsError,
    ToolExecutionError,
)
from planner_ext.sk.functions.questions import OWN_FUNCTIONS, OWN_PLUGIN, AskedClarifier
from planner_ext.sk.functions.toolset import Select, ToolSet
from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.run.iteration import IterationCompletedHook
from planner_ext.sk.run.options import CheckedOptions
from planner_ext.sk.run.outcome import carry_run
from planner_ext.sk.run.prompts import message_of
from planner_ext.sk.run.tools import KernelFunctions

if TYPE_CHECKING:
    from planner_ext.engine.telemetry import Invocation
    from planner_ext.sk.run.form import ResponseForm

logger = logging.getLogger(__name__)


class Tape(Protocol):
    """Records or replays the runs whose service has it as ``tape``: see `planner_ext.testing.tape`."""

    def run_id(self, goal: str) -> str:
        """Name a run that begins."""
        ...

    def clock(self, clock: Clock) -> Clock:
        """Return the clock of a run, given its own."""
        ...

    def ports(self, ports: Ports, facts: Sequence[Fact]) -> Ports:
        """Return the ports of a run, given its own and its journal so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext:
    """One run: its options and its parts, as `prepare` put them together.

    It is not part of a reference cycle, so it is freed at once when the run has ended.

    Attributes:
        options: The door's, with those of everything around and inside the run.
        parent: The run inside whose function this run started, or None.
        chat, functions: The engine's ports.
        shared: The budgets shared with other runs, those of ``parent`` included.
        meter: Makes the meter of the requests, given ``limits``.
        invocation: The spans and metrics; None if nobody listens.
        plans: Whether a planner makes the run.
        hands_over: Whether a function sends the final answer.
        refused: What was refused of a resumption once a run inside was made again.
    """

    kernel: Kernel
    options: CheckedOptions
    behavior: FunctionChoiceBehavior
    parent: ParentRun | None
    tools: ToolSet
    chat: KernelChat
    functions: KernelFunctions
    gate: RunGate
    form: "ResponseForm | None"
    prompts: Prompts | None
    shared: SharedBudgets | None
    meter: Callable[..., RequestMeter]
    stop: StopHandle | None
    store: RunStore | None
    invocation: "Invocation | None"
    tape: Tape | None
    plans: bool
    hands_over: bool
    refused: list[Exception] = field(default_factory=list[Exception])

    def new_run_id(self, goal: str = "") -> str:
        """Name the run that begins; one inside a call has the same name whenever its function is called again."""
        if self.parent is not None and self.parent.run is not None:
            return self.parent.tab.name_of(self.parent.run)
        if self.tape is None:
            return uuid4().hex
        return self.tape.run_id(goal)

    def rules(self) -> Rules:
        """Build the run's `Rules`; under ``Required`` attempts count forced rounds and are no limit."""
        options = self.options
        behavior = self.behavior
        required = behavior.type_ is FunctionChoiceType.REQUIRED
        bounded = isinstance(behavior, BoundedFunctionChoiceBehavior)
        attempts = (
            behavior.maximum_use_attempts
            if bounded
            else behavior.maximum_auto_invoke_attempts
        )
        if self.plans and not bounded:
            # A stock behavior's attempts limit Semantic Kernel's own loop; only forced attempts limit a planner's.
            attempts = (attempts or 1) if required else None
        rules = Rules(
            limits=options.budget,
            use_attempts=attempts,
            attempts_limit=""
            if required
            else "maximum_use_attempts"
            if bounded
            else "maximum_auto_invoke_attempts",
            tool_choice="required" if required else "auto",
            on_denial=options.approval.on_denial,
            on_deferred=options.approval.on_deferred,
            structured=self.form is not None,
            checked=bool(options.check_answer),
            clarifier=options.clarifier is not None,
            max_clarifications=options.max_clarifications,
        )
        if self.tools.available:
            _report_unreachable(rules, options.taken[0])
        return rules

    def guards(self) -> Guards:
        """List the controls on the run's calls."""
        options = self.options
        functions = self.tools.functions
        listed = cast("Any", self.kernel)
        registered = (
            *listed.auto_function_invocation_filters,
            *listed.function_invocation_filters,
        )
        return Guards(
            interceptors=tuple(map(guard_name, options.interceptors)),
            pre_invoke=tuple(map(guard_name, options.pre_invoke)),
            checks=tuple(map(guard_name, options.check_for_intervention)),
            filters=tuple(
                guard_name(one.policy)
                for _, one in registered
                if isinstance(one, CallFilter)
            ),
            answers=tuple(map(guard_name, options.check_answer)),
            unmatched=options.approval.unmatched,
            expires_in=options.approval.expires_in,
            marked=tuple(
                sorted(
                    name
                    for name in functions
                    if approval_required(functions.get(name)) is not None
                )
            ),
            shared_budgets=tuple(
                sorted(budget.name for budget in options.shared_budgets)
            ),
            authorize=hook_names(options.approval.authorize),
        )

    def guards_inside(self) -> Guards | None:
        """List the guards of a run inside a call that a store keeps; None of any other."""
        parent = self.parent
        is_kept = parent is not None and parent.run is not None and parent.tab.is_kept
        return self.guards() if is_kept else None

    def engine(
        self,
        facts: Sequence[Fact],
        *,
        emit: Emit | None = None,
        follow: Callable[[State, Fact], None] | None = None,
        budget: BudgetHandle | None = None,
    ) -> Engine:
        """Make the engine that drives a journal; for ``follow`` see `planner_ext.engine.ports.Ports`."""
        options = self.options
        chat = self.chat
        completed = options.iteration_completed
        clarifier = options.clarifier
        around = None
        if self.parent is not None:
            around = self.parent.tab
        charged_around = around is not None and self.shared is around.account.shared
        if self.invocation is not None:
            follow = self.invocation.following(follow)
            emit = self.invocation.timing(emit)
        ports = Ports(
            chat=chat,
            functions=self.functions,
            message=partial(message_of, form=self.form, hands_over=self.hands_over),
            clock=options.clock,
            prompts=self.prompts,
            gate=self.gate,
            hook=None
            if completed is None
            else IterationCompletedHook(
                callback=completed, messages=chat.messages, streaming=chat.streaming
            ),
            answer_check=self._answer_check(),
            respondent=None
            if clarifier is None
            else AskedClarifier(
                clarifier=clarifier, history=partial(_transcript, chat)
            ),
            store=self.store,
            observers=options.observers,
            follow=follow,
            max_concurrency=options.execution.max_concurrency,
            max_threads=options.execution.max_threads,
            raise_errors=options.execution.on_error == "raise",
            stop_on_unknown=options.execution.stop_on_unknown_function,
            min_iteration_seconds=options.min_iteration_time_ms / 1000,
            within=around,
            run=None if self.parent is None else self.parent.run,
            new_budget=None if budget is None else partial(self._new_budget, budget),
            next_message=None if budget is None else budget.next_message,
            shared=None if charged_around else self.shared,
            tracing=self.invocation,
            count_tokens=self._tokens_of,
        )
        if self.tape is not None:
            ports = self.tape.ports(ports, facts)
        engine = Engine(facts, ports, emit=emit, stop=self.stop)
        if engine.state.cut:  # a call of the open batch may read
            self.tools.reads = True
            self.tools.refresh()
        return engine

    def _answer_check(self) -> AnswerCheck | None:
        checks = self.options.check_answer
        if self.form is None and not checks:
            return None
        from planner_ext.sk.run.answers import AnswerChecks  # noqa: PLC0415  (only where answers are checked)

        history = partial(_transcript, self.chat)
        return AnswerChecks(form=self.form, checks=checks, history=history)

    def _tokens_of(self, text: str) -> int:
        return self.chat.meter.tokens_of(text)

    def _new_budget(self, handle: BudgetHandle) -> tuple[Budget, str] | None:
        options = self.options
        new = handle.take()
        if new is None:
            return None
        given, by = new
        limits = options.bounded(given)
        limits = replace(
            limits,
            max_iterations=limits.max_iterations or options.budget.max_iterations,
        )
        if limits.max_result_tokens is not None:
            self.tools.reserve_reading()
        self.chat.meter = self.meter(limits=limits)
        return limits, by

    async def drive(self, engine: Engine, first: Sequence[Fact]) -> None:
        """Record the first new facts, and run an engine to its next pause or end.

        An exception carries the history and a checkpoint.
        """
        key = self.options.checkpoint_key
        known = tuple(engine.facts)
        parent = self.parent
        if parent is not None and parent.known and parent.left is not None:
            first = await parent.left(self)
        invocation = self.invocation if first or engine.is_running else None
        with nullcontext() if invocation is None else invocation.of(engine):
            try:
                await engine.begin(
                    first if invocation is None else invocation.stamped(first)
                )
            except BaseException as error:
                # Nothing has started: a resumed run is as it was.
                facts = known or tuple(engine.facts)
                if facts:
                    carry_run(error, fold(facts), facts, key)
                raise
            if (
                limit := engine.account.open(continues=bool(known))
            ) is not None:  # other runs in the call have taken the rest meanwhile
                raise nothing_left(limit)
            try:
                await self._run(engine)
            except CallFailedError as error:
                failed = ToolExecutionError(
                    f"{error}. Its batch is answered and in the history."
                )
                carry_run(failed, engine.state, engine.facts, key)
                raise failed from error.__cause__
            except BaseException as error:
                carry_run(error, engine.state, engine.facts, key)
                raise
            finally:
                engine.account.close()
        if parent is not None and engine.state.phase is Phase.PAUSED:
            await _leave_function(parent)

    async def _run(self, engine: Engine) -> None:
        """Run an engine; raises what was refused once a run inside was made again, which still waits."""
        try:
            await engine.run()
        except CallWaits:
            if not self.refused:
                raise
        if self.refused:
            raise self.refused[0]


async def _leave_function(parent: ParentRun) -> None:
    """Leave the function in which a run waits, once the function's other runs wait or have ended, too: see `CallLeft`.

    In a function that may not be called again this returns, and the run's result says
    that it is paused.
    """
    tab = parent.tab
    if parent.run is None or not tab.can_wait:
        return
    loop = asyncio.get_running_loop()
    while tab.is_busy or tab.expects_more:
        is_busy = tab.is_busy
        quiet = asyncio.Event()

        def wake(quiet: asyncio.Event = quiet) -> None:
            loop.call_soon_threadsafe(quiet.set)

        tab.when_quiet.append(wake)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if is_busy else GRACE):
                await quiet.wait()
        tab.when_quiet.remove(wake)
        if not (is_busy or tab.is_busy or quiet.is_set()):
            break  # it does not make the other run again
    raise CallWaits


def prepare(
    *,
    kernel: Kernel,
    service: ChatCompletionClientBase,
    settings: PromptExecutionSettings,
    options: CheckedOptions,
    arguments: KernelArguments | None,
    streaming: bool,
    parent: ParentRun | None,
    wrap: Wrap,
    stop: StopHandle | None,
    store: RunStore | None = None,
    select: Select | None = None,
    final_answer: KernelFunction | None = None,
    ask_user: KernelFunction | None = None,
    max_completion_tokens: int | None = None,
    plan_settings: Mapping[str, Any] | None = None,
    form: "ResponseForm | None" = None,
    prompts: Callable[[ToolSet], Prompts] | None = None,
    planner: object | None = None,
) -> RunContext:
    """Prepare one run for a door, each part from those before it.

    A door gives the connector and the options without the services around it that make
    runs; see `unwrapped`. ``wrap`` charges the services that functions find. ``stop``
    is that of ``parent`` if None. ``select`` narrows the functions that the settings'
    behaviour offers; the planner's own come beside them. ``prompts`` is called with
    what is offered.
    """
    sent = connector_settings(service, settings)
    if max_completion_tokens:
        sent = _with_completion_limit(sent, max_completion_tokens)
    behavior = sent.function_choice_behavior or ALL_FUNCTIONS
    tape: Tape | None = vars(service).get("tape")
    filters = approval_filters(kernel)
    merged = _merged(options, parent, behavior, tape, filters)
    budget = merged.budget

    own = [one for one in (final_answer, ask_user) if one is not None]
    tools = ToolSet(kernel, behavior, sent, own=own, select=select)
    _check_names(merged, kernel, tools)
    _check_kept(merged, store, parent)
    if budget.max_result_tokens is not None:
        tools.reserve_reading()
    check_service(service, sent, tools)
    answer_form = None if form is None else form.within(sent)

    around = None if parent is None else parent.tab
    shared = None if around is None else around.account.shared
    # Budgets that the run around takes from are not charged twice.
    if merged.shared_budgets:
        given = KernelArguments() if arguments is None else arguments
        shared = merged.charges(given, shared)
    meter = partial(
        request_meter,
        service,
        sent,
        price=merged.price,
        around=around,
        shared=shared,
        max_prompt_tokens=merged.max_prompt_tokens or 0,
    )
    chat = KernelChat(
        service,
        sent,
        kernel=kernel,
        arguments=arguments,
        tools=tools,
        meter=meter(limits=budget),
        streaming=streaming,
        strict_finish_reason=merged.strict_finish_reason,
        plan_settings=plan_settings or {},
        answer_settings={} if answer_form is None else answer_form.settings,
    )

    chain = InterceptorChain(
        options=merged.approval,
        interceptors=merged.interceptors,
        pre_invoke=merged.pre_invoke,
        checks=merged.check_for_intervention,
        approver=merged.approver,
    )
    planners = () if planner is None else (planner,)
    gates = (chain,)
    if parent is not None:
        planners = parent.planners + planners
        gates = _with_shortest(parent.gates + gates)
        stop = stop or parent.stop
    gate = RunGate(
        gates,
        filters,
        functions=lambda: tools.functions,
        expires_in=gates[0].options.expires_in,
        marked=not filters,
        can_wait=parent is None or parent.tab.can_wait,
        tab=around,
    )
    for one in filters:
        one.report_unused_rules(kernel)
    for interceptor in merged.interceptors:
        report_unused_rules(interceptor, tools.functions.values(), "run")

    invocation = None
    if is_listening():
        from planner_ext.sk.run.tracing import invocation_of  # noqa: PLC0415  (only where somebody listens)

        invocation = invocation_of(service, planner, merged)
    functions = KernelFunctions(
        whole(kernel),
        tools=tools,
        arguments=arguments,
        execution=merged.execution,
        final_answer=final_answer,
        ask_user=ask_user,
        settings=sent,
        history=partial(_with_batch, chat),
        streaming=streaming,
        decided_by=gate.decided_by,
        as_parent=partial(
            ParentRun,
            planners=planners,
            gates=gates,
            price=merged.price,
            stop=stop,
            left=None if parent is None else parent.left,
        ),
        wrap=wrap,
    )
    return RunContext(
        kernel=kernel,
        options=merged,
        behavior=behavior,
        parent=parent,
        tools=tools,
        chat=chat,
        functions=functions,
        gate=gate,
        form=answer_form,
        prompts=None if prompts is None else prompts(tools),
        shared=shared,
        meter=meter,
        stop=stop,
        store=store,
        invocation=invocation,
        tape=tape,
        plans=planner is not None,
        hands_over=final_answer is not None,
    )


def _merged(
    options: CheckedOptions,
    parent: ParentRun | None,
    behavior: FunctionChoiceBehavior,
    tape: Tape | None,
    filters: Sequence[CallFilter],
) -> CheckedOptions:
    if parent is not None:
        options = options.inside(parent, continues=parent.continues)
    changes: dict[str, Any] = {}
    if (
        isinstance(behavior, BoundedFunctionChoiceBehavior)
        and behavior.pre_invoke_callback is not None
    ):
        changes["pre_invoke"] = (*options.pre_invoke, behavior.pre_invoke_callback)
    if tape is not None:
        changes["clock"] = tape.clock(options.clock)
    hooks = tuple(hook for one in filters for hook in one.authorize)
    if hooks:
        changes["approval"] = options.approval.asking(hooks)
    return replace(options, **changes) if changes else options


def _check_kept(
    options: CheckedOptions, store: RunStore | None, parent: ParentRun | None
) -> None:
    if store is None and (parent is None or not parent.tab.is_kept):
        refuse_without_store(options.interceptors)


def _check_names(options: CheckedOptions, kernel: Kernel, tools: ToolSet) -> None:
    counted = options.budget.max_calls_per_function
    timeout = options.execution.timeout
    if counted and (unknown := sorted(counted.keys() - tools.functions.keys())):
        raise InvalidOptionError(
            f"max_calls_per_function names {', '.join(unknown)}, which this run does not offer; it offers "
            f"{', '.join(sorted(tools.functions)) or 'no function'}. Name functions in full: plugin-function."
        )
    if isinstance(timeout, Mapping):
        there = function_names(kernel) | tools.functions.keys()
        refuse_unknown("ToolExecution.timeout", timeout, there)


def unasked_functions(kernel: Kernel, own: CheckedOptions) -> list[str]:
    """List a kernel's functions if nothing can decide their calls."""
    inner: list[Any] = [
        getattr(service, "options", None) for service in kernel.services.values()
    ]
    for options in (own, *inner):
        if isinstance(options, CheckedOptions) and (
            options.interceptors
            or options.pre_invoke
            or options.check_for_intervention
            or options.approval.unmatched != "approve"
        ):
            return []
    functions = [
        function
        for plugin in kernel.plugins.values()
        for function in plugin.functions.values()
    ]
    if approval_filters(kernel) or any(
        approval_required(function) is not None for function in functions
    ):
        return []
    return sorted(function.fully_qualified_name for function in functions)


def _report_unreachable(rules: Rules, told: DecisionsTaken) -> None:
    """Log once if another limit ends an object's runs before its budget."""
    most = rules.limits.max_iterations
    attempts = rules.use_attempts
    if (
        most is None
        or attempts is None
        or not rules.attempts_limit
        or attempts + 1 >= most
        or told in _TOLD
    ):
        return
    _TOLD.add(told)
    logger.warning(
        "The budget's max_iterations=%d cannot be reached: %s=%d of the function choice behavior ends the calls "
        "before. Give the behavior more: BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=%d), or None for no "
        "bound of its own.",
        most,
        rules.attempts_limit,
        attempts,
        most - 1,
    )


ALL_FUNCTIONS = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None)
"""The behaviour of settings that have none. Nothing changes it."""

_TOLD: "WeakSet[DecisionsTaken]" = WeakSet()
"""The objects whose budget was reported, by the memory that their copies share."""


def _with_shortest(
    gates: tuple[InterceptorChain, ...],
) -> tuple[InterceptorChain, ...]:
    """Let a question inside a run be open only as long as each run around allows."""
    given = [gate.options.expires_in for gate in gates]
    shortest = min((seconds for seconds in given if seconds is not None), default=None)
    return tuple(
        replace(gate, options=replace(gate.options, expires_in=shortest))
        for gate in gates
    )


def _with_batch(chat: KernelChat, state: State) -> ChatHistory:
    """Build the history that filters see: the transcript, and the message whose calls run."""
    messages = chat.messages(state.transcript)
    if state.batch is not None:
        messages += render((state.batch.message,))
    return ChatHistory.model_construct(messages=messages)


def _transcript(chat: KernelChat, state: State) -> ChatHistory:
    return ChatHistory(messages=deepcopy(chat.messages(state.transcript)))


def unwrapped(
    service: ChatCompletionClientBase, options: CheckedOptions
) -> tuple[ChatCompletionClientBase, CheckedOptions]:
    """Return the connector inside services that make runs, and the options merged with theirs."""
    outer: Any = service
    while isinstance(inner := getattr(outer, "options", None), CheckedOptions):
        outer = outer.inner
        options = options.within(inner)
    return outer, options


_COMPLETION_LIMITS = (
    "max_tokens",
    "max_output_tokens",
    "max_completion_tokens",
    "max_new_tokens",
)
"""What the settings of Semantic Kernel's connectors call the most tokens of a reply."""


def _with_completion_limit(
    settings: PromptExecutionSettings, limit: int
) -> PromptExecutionSettings:
    kind = type(settings)
    name = next(
        (name for name in _COMPLETION_LIMITS if name in kind.model_fields), None
    )
    if name is None:
        raise InvalidOptionError(
            f"max_completion_tokens={limit} cannot be used: {kind.__name__} has none of the fields "
            f"{', '.join(_COMPLETION_LIMITS)}. Leave it out, and limit the reply in execution_settings."
        )
    return settings.model_copy(update={name: limit})


def check_service(
    service: ChatCompletionClientBase, settings: PromptExecutionSettings, tools: ToolSet
) -> None:
    """Refuse a connector or settings that cannot offer functions."""
    if not tools.available:
        return
    name = f"{type(service).__name__} {service.service_id!r}"
    if not service.SUPPORTS_FUNCTION_CALLING:
        raise InvalidSettingsError(
            f"{name} does not support function calling, and there are {', '.join(sorted(tools.functions))} on offer. "
            "Use another connector, or offer no functions."
        )
    fields: dict[str, Any] = vars(settings)
    extra: Any = fields.get("extra_parameters") or {}
    # The names at OpenAI, Google, Mistral and Azure AI.
    for option in (
        "number_of_responses",
        "candidate_count",
        "n",
    ):
        answers = fields.get(option) or extra.get(option)
        if isinstance(answers, int) and answers > 1:
            raise InvalidSettingsError(
                f"{option} must be 1 where functions are offered; got {answers}. Ask once, or offer no functions."
            )
    body: Any = fields.get("extra_body") or {}
    choice = fields.get("tool_choice") or settings.extension_data.get("tool_choice")
    choice = choice or body.get("tool_choice") or extra.get("tool_choice")
    if choice not in (None, "auto", {"type": "auto"}):
        raise InvalidSettingsError(
            f"tool_choice={shown(choice)} in the settings contradicts the functions on offer. Leave it out, and say it "
            "with the function choice behaviour: FunctionChoiceBehavior.NoneInvoke() offers none, Required() demands "
            "a call."
        )


def checked_messages(
    messages: Sequence[ChatMessageContent],
    on_invalid_history: Literal["refuse", "repair"],
    kernel: Kernel,
) -> list[ChatMessageContent]:
    """Return a history that may be sent, refused or repaired; one message for each result."""
    offered = FunctionNames(kernel)
    if on_invalid_history == "repair":
        return one_result_each(repair_history(messages, offered))
    check_history(messages, offered)
    return one_result_each(messages)


def function_names(kernel: Kernel) -> set[str]:
    """List the fully qualified names of a kernel's functions, and of this package's own."""
    names = {
        function.fully_qualified_name
        for function in kernel.get_full_list_of_function_metadata()
    }
    return names | {f"{OWN_PLUGIN}-{name}" for name in OWN_FUNCTIONS}


def refuse_unknown(
    option: str, given: Iterable[str], there: Set[str], *, also: Set[str] = frozenset()
) -> None:
    """Refuse names that are neither ``there`` nor, unlisted in the error, accepted ``also``."""
    unknown = sorted(set(given) - there - also)
    if unknown:
        known = sorted(there)
        more = len(there) - _MOST_NAMES
        listed = ", ".join(known[:_MOST_NAMES]) + (
            f", and {more} more" if more > 0 else ""
        )
        raise InvalidOptionError(
            f"{option} names {', '.join(map(shown, unknown[:_MOST_NAMES]))}, which this kernel does not have; it has "
            f"{listed or 'none'}. Correct the name, or leave it out."
        )


_MOST_NAMES = 50


@dataclass(frozen=True, slots=True)
class FunctionNames:
    """The fully qualified names of a kernel's functions, listed only at a lookup."""

    kernel: Kernel

    def __contains__(self, name: object) -> bool:
        return any(
            name == function.fully_qualified_name
            for function in self.kernel.get_full_list_of_function_metadata()
        )
