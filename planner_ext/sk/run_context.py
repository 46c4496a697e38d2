"""One run's adapters around one kernel and one connector: what every door, planner or service, sets up alike."""

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from functools import partial
from typing import Any, Literal

from opentelemetry.trace import get_tracer
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.const import AUTO_FUNCTION_INVOCATION_SPAN_NAME
from semantic_kernel.contents import ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelFunction
from semantic_kernel.utils.telemetry.model_diagnostics.gen_ai_attributes import AVAILABLE_FUNCTIONS

from planner_ext.approval.policy import ApprovalPolicy, guard_name
from planner_ext.core.accounts import Tab
from planner_ext.core.errors import shown
from planner_ext.core.facts import Fact, Guards
from planner_ext.core.limits import Consumption
from planner_ext.core.state import State
from planner_ext.engine.engine import CallFailedError, Engine, StopHandle
from planner_ext.engine.gate import InterceptorChain
from planner_ext.engine.ports import Emit, Ports, Prompts, RunStore
from planner_ext.sk.approval_filter import ApprovalFilter
from planner_ext.sk.budget import Price
from planner_ext.sk.chat import KernelChat
from planner_ext.sk.errors import PlannerInvalidConfigurationError, PromptTooLargeError, ToolExecutionError
from planner_ext.sk.gates import RunGate, approval_filters, mark_of
from planner_ext.sk.history import check_history, one_result_each, render, repair_history
from planner_ext.sk.iteration import IterationCompletedHook
from planner_ext.sk.nested import ParentRun, Wrap, nothing_left, whole
from planner_ext.sk.options import RunSettings
from planner_ext.sk.outcome import carry_run
from planner_ext.sk.prices import price_of
from planner_ext.sk.questions import OWN_FUNCTIONS, OWN_PLUGIN, AskedClarifier
from planner_ext.sk.structured import ResponseForm
from planner_ext.sk.tools import KernelFunctions
from planner_ext.sk.toolset import ToolSet

__all__ = ["FunctionNames", "Loop", "check_service", "checked_messages", "new_run_id"]

logger = logging.getLogger(__name__)
tracer = get_tracer("planner_ext")

_NOT_SENT = (PlannerInvalidConfigurationError, PromptTooLargeError)
"""What a request is refused with before it is sent."""


class Loop:
    """The world of one run. Make one for each run: it remembers what was offered and written.

    Nothing in it refers back to it, so that all of it is freed at once when the run is over.

    Attributes:
        chat: The connector, as the engine asks it.
        offer: The functions that may be called.
        functions: How they are called.
        guards: Writes down who has a say before a call runs.
        form: What the final answer has to be, or None.
        checkpoint_key: Signs the checkpoints of the run that leave; None leaves them unsigned.
    """

    def __init__(
        self,
        *,
        kernel: Kernel,
        service: ChatCompletionClientBase,
        settings: PromptExecutionSettings,
        offer: ToolSet,
        arguments: KernelArguments | None,
        options: RunSettings,
        streaming: bool,
        prompts: Prompts,
        final_answer: KernelFunction | None = None,
        ask_user: KernelFunction | None = None,
        plan_settings: dict[str, Any] | None = None,
        store: RunStore | None = None,
        planner: object | None = None,
        within: ParentRun | None = None,
        wrap: Wrap,
        form: ResponseForm | None = None,
    ) -> None:
        self.offer = offer
        self.form = form
        self.guards = partial(_guards, options, offer, kernel)
        self.checkpoint_key = options.checkpoint_key
        self._options = options
        self._check_names(kernel)
        self._report_unused_rules()
        check_service(service, settings, offer)
        self.chat = KernelChat(
            service,
            settings,
            kernel=kernel,
            arguments=arguments,
            offer=self.offer,
            streaming=streaming,
            strict_finish_reason=options.strict_finish_reason,
            price=price_of(service, settings, options.price, options.budget.max_cost),
            max_prompt_tokens=options.max_prompt_tokens,
            estimates=options.budget.max_total_tokens is not None,
            plan_settings=plan_settings,
            answer_settings=None if form is None else form.settings,
        )
        filters = approval_filters(kernel)
        for one in filters:
            one.report_unused_rules(kernel)
        own = InterceptorChain(
            options=options.approval,
            interceptors=options.interceptors,
            pre_invoke=options.pre_invoke,
            checks=options.checks,
        )
        gate = RunGate(
            [*(() if within is None else within.gates), (own, None)],
            filters,
            functions=lambda: offer.functions,
            expires_in=options.approval.expires_in,
            marked=not filters,
            can_wait=within is None,
        )
        self.within = within
        self.functions = KernelFunctions(
            whole(kernel),
            tools=offer,
            arguments=arguments,
            execution=options.execution,
            final_answer=final_answer,
            ask_user=ask_user,
            settings=settings,
            history=partial(_history, self.chat),
            streaming=streaming,
            decided_by=gate.decided_by,
            parent=partial(_parent_run, within=within, gate=own, planner=planner, price=options.price),
            wrap=wrap,
        )
        self._ports = partial(
            Ports,
            chat=self.chat,
            functions=self.functions,
            prompts=prompts,
            clock=options.clock,
            gate=gate,
            hook=self._hook(streaming=streaming),
            answer_form=form,
            respondent=self._respondent(),
            store=store,
            observers=options.observers,
            max_concurrency=options.execution.max_concurrency,
            max_threads=options.execution.max_threads,
            raise_errors=options.execution.on_error == "raise",
            stop_on_unknown=options.execution.stop_on_unknown_function,
            min_iteration_seconds=options.min_iteration_time_ms / 1000,
            within=None if within is None else within.tab,
        )

    def engine(
        self,
        facts: Sequence[Fact],
        *,
        emit: Emit | None = None,
        stop: StopHandle | None = None,
        follow: Callable[[State, Fact], None] | None = None,
    ) -> Engine:
        """Make the engine that drives a journal in this world; for ``follow`` see `planner_ext.engine.ports.Ports`."""
        stop = stop or (self.within and self.within.stop) or StopHandle()
        self.functions.stopped_by(stop)
        return Engine(facts, self._ports(follow=follow), emit=emit, stop=stop)

    async def drive(self, engine: Engine) -> None:
        """Run an engine to its next pause or end, under the span that Semantic Kernel's own loop has.

        Raises:
            ToolExecutionError: If a function failed and the execution is told to raise.
            LimitReachedError: If the run is made in a function, and nothing is left of the budget around it.
            BaseException: On a fault or a cancellation; whatever kind it is of, it carries the history and a checkpoint
                as attributes.
        """
        if (limit := engine.account.open()) is not None:
            raise nothing_left(limit)
        names = ",".join(self.offer.functions)
        with tracer.start_as_current_span(AUTO_FUNCTION_INVOCATION_SPAN_NAME, attributes={AVAILABLE_FUNCTIONS: names}):
            try:
                await engine.run()
            except CallFailedError as error:
                failed = ToolExecutionError(f"{error}. Its batch is answered and in the history.")
                carry_run(failed, engine.state, engine.facts, self.checkpoint_key)
                raise failed from error.__cause__
            except BaseException as error:
                engine.account.close(sent=not isinstance(error, _NOT_SENT))
                carry_run(error, engine.state, engine.facts, self.checkpoint_key)
                raise
            finally:
                engine.account.close()
                if self.within is not None and self.chat.unanswered.total_tokens:
                    self.within.tab.charge(Consumption(usage=self.chat.unanswered))

    def _hook(self, *, streaming: bool) -> IterationCompletedHook | None:
        callback = self._options.iteration_completed
        return None if callback is None else IterationCompletedHook(callback, self.chat.messages, streaming=streaming)

    def _respondent(self) -> AskedClarifier | None:
        clarifier, shown = self._options.clarifier, partial(_transcript, self.chat)
        return None if clarifier is None else AskedClarifier(clarifier=clarifier, history=shown)

    def _report_unused_rules(self) -> None:
        """Say which rules of a policy are for no function that is offered: a misspelt name guards nothing."""
        names = [(function.plugin_name, function.name) for function in self.offer.functions.values()]
        for interceptor in self._options.interceptors:
            if isinstance(interceptor, ApprovalPolicy):
                for number in interceptor.unused_rules(names):
                    logger.warning("Rule %d of the approval policy is for no function of this run.", number)

    def _check_names(self, kernel: Kernel) -> None:
        unknown = sorted(set(self._options.budget.max_calls_per_function) - self.offer.functions.keys())
        if unknown:
            raise PlannerInvalidConfigurationError(
                f"max_calls_per_function names {', '.join(unknown)}, which this run does not offer; it offers "
                f"{', '.join(sorted(self.offer.functions)) or 'no function'}. Name functions in full: plugin-function."
            )
        timeout = self._options.execution.timeout
        if isinstance(timeout, Mapping):
            refuse_unknown("ToolExecution.timeout", timeout, function_names(kernel) | self.offer.functions.keys())


def _parent_run(
    tab: Tab,
    *,
    within: ParentRun | None,
    gate: InterceptorChain,
    planner: object | None,
    price: Price | None,
    stop: StopHandle | None = None,
) -> ParentRun:
    """What the functions of a run learn of it."""
    outer, gates = ((), ()) if within is None else (within.planners, within.gates)
    planners = outer if planner is None else (*outer, planner)
    return ParentRun(planners=planners, gates=(*gates, (gate, tab.account)), price=price, stop=stop, tab=tab)


def _history(chat: KernelChat, state: State) -> ChatHistory:
    """Show a state as filters see it: the transcript, and the message whose calls are being run."""
    messages = chat.messages(state.transcript)
    if state.batch is not None:
        messages += render((state.batch.message,))
    return ChatHistory.model_construct(messages=messages)


def _transcript(chat: KernelChat, state: State) -> ChatHistory:
    return ChatHistory(messages=deepcopy(chat.messages(state.transcript)))


def _guards(options: RunSettings, offer: ToolSet, kernel: Kernel) -> Guards:
    registered: Any = (*kernel.auto_function_invocation_filters, *kernel.function_invocation_filters)  # pyright: ignore[reportUnknownMemberType]
    return Guards(
        interceptors=tuple(map(guard_name, options.interceptors)),
        pre_invoke=tuple(map(guard_name, options.pre_invoke)),
        checks=tuple(map(guard_name, options.checks)),
        filters=tuple(guard_name(one.policy) for _, one in registered if isinstance(one, ApprovalFilter)),
        unmatched=options.approval.unmatched,
        expires_in=options.approval.expires_in,
        marked=tuple(sorted(name for name in offer.functions if mark_of(offer.functions.get(name)) is not None)),
    )


def check_service(service: ChatCompletionClientBase, settings: PromptExecutionSettings, offer: ToolSet) -> None:
    """Refuse a connector, or a number of answers, with which the functions on offer cannot be called.

    Raises:
        PlannerInvalidConfigurationError: Naming the way out.
    """
    if not offer.available:
        return
    name = f"{type(service).__name__} {service.service_id!r}"
    if not service.SUPPORTS_FUNCTION_CALLING:
        raise PlannerInvalidConfigurationError(
            f"{name} does not support function calling, and there are {', '.join(sorted(offer.functions))} on offer. "
            "Use another connector, or offer no functions."
        )
    extra: Any = getattr(settings, "extra_parameters", None) or {}
    for option in ("number_of_responses", "candidate_count", "n"):  # OpenAI's, Google's, Mistral's and Azure AI's
        answers = getattr(settings, option, None) or extra.get(option)
        if isinstance(answers, int) and answers > 1:
            raise PlannerInvalidConfigurationError(
                f"{option} must be 1 where functions are offered; got {answers}. Ask once, or offer no functions."
            )
    body: Any = getattr(settings, "extra_body", None) or {}
    choice = getattr(settings, "tool_choice", None) or settings.extension_data.get("tool_choice")
    choice = choice or body.get("tool_choice") or extra.get("tool_choice")
    if choice not in (None, "auto", {"type": "auto"}):
        raise PlannerInvalidConfigurationError(
            f"tool_choice={shown(choice)} in the settings contradicts the functions on offer. Leave it out, and say it "
            "with the function choice behaviour: FunctionChoiceBehavior.NoneInvoke() offers none, Required() demands "
            "a call."
        )


def checked_messages(
    messages: Sequence[ChatMessageContent], on_invalid_history: Literal["refuse", "repair"], kernel: Kernel
) -> list[ChatMessageContent]:
    """Take a history that may be sent, or repair one on request; each result becomes a message of its own.

    The names of the kernel's functions may be longer than most servers accept.

    Raises:
        InvalidHistoryError: If it may not be sent and is not to be repaired.
    """
    offered = FunctionNames(kernel)
    if on_invalid_history == "repair":
        return one_result_each(repair_history(messages, offered))
    check_history(messages, offered)
    return one_result_each(messages)


def function_names(kernel: Kernel) -> set[str]:
    """List the fully qualified names of a kernel's functions, and of those that this package offers beside them."""
    names = {function.fully_qualified_name for function in kernel.get_full_list_of_function_metadata()}
    return names | {f"{OWN_PLUGIN}-{name}" for name in OWN_FUNCTIONS}


def refuse_unknown(option: str, given: Iterable[str], there: Set[str], *, also: Set[str] = frozenset()) -> None:
    """Refuse names in an option that nothing has; checked when a run begins or is resumed.

    Args:
        option: The option's name.
        given: The names in it.
        there: The names that there are.
        also: Further names that are accepted, and not listed.

    Raises:
        PlannerInvalidConfigurationError: Naming the option, the names, and what there is.
    """
    if unknown := sorted(set(given) - there - also):
        known, more = sorted(there), len(there) - _MOST_NAMES
        listed = ", ".join(known[:_MOST_NAMES]) + (f", and {more} more" if more > 0 else "")
        raise PlannerInvalidConfigurationError(
            f"{option} names {', '.join(map(shown, unknown[:_MOST_NAMES]))}, which this kernel does not have; it has "
            f"{listed or 'none'}. Correct the name, or leave it out."
        )


_MOST_NAMES = 50


class FunctionNames:
    """The names of a kernel's functions, listed only where one is looked up."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __contains__(self, name: object) -> bool:
        return any(
            name == function.fully_qualified_name for function in self._kernel.get_full_list_of_function_metadata()
        )


def new_run_id() -> str:
    """Make the name of a run: 32 hexadecimal digits, unique everywhere."""
    return uuid.uuid4().hex
