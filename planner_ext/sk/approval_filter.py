"""``ApprovalFilter``: the policy and the person, brought to stock kernels as a filter."""

import inspect
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final, cast

from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.exceptions import FunctionCallInvalidArgumentsException, KernelException
from semantic_kernel.filters.auto_function_invocation.auto_function_invocation_context import (
    AutoFunctionInvocationContext,
)
from semantic_kernel.filters.functions.function_invocation_context import FunctionInvocationContext
from semantic_kernel.functions import FunctionResult, KernelArguments, KernelFunction

from planner_ext.approval.decisions import (
    ApprovalOptions,
    Approve,
    Decision,
    Defer,
    Deny,
    Interceptor,
    Supply,
    ToolCall,
    approval_required,
    digest_of,
    fingerprint_of,
    problem_of,
    takes_no_more,
)
from planner_ext.approval.policy import ApprovalPolicy
from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.state import State
from planner_ext.engine.effects import effect_of
from planner_ext.engine.gate import InterceptorChain
from planner_ext.sk.approval import DecisionRefusedError, PendingCall
from planner_ext.sk.arguments import InvalidArguments, Parameters, parameters_of, parse_arguments
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.execution import (
    ApprovedArgumentsChangedError,
    CallGuard,
    NotRunAgainError,
    Raised,
    behind_filters,
    caught,
    guard_of,
    result_text,
    signature_of,
    watch,
)
from planner_ext.sk.waiting_results import (
    STARTED,
    WaitingResult,
    arguments_text,
    mark_of,
    replace_result,
    waiting_results,
)

__all__ = ["ApprovalFilter", "Approver"]

_logger = logging.getLogger(__name__)

Approver = Callable[[ToolCall], Decision | Awaitable[Decision]]
"""Asks a person, and gives their decision; async or not."""

_Next = Callable[[Any], Awaitable[None]]

_REFUSED = "The call was refused and did not run: "
_ANY_EFFECT: Final = ("idempotent", "keyed")


class ApprovalFilter:
    """Decides calls of a stock kernel before they run.

    Register it where you need it, also under both types; it asks once per call. Filters with different policies each
    have their say:

        kernel.add_filter("auto_function_invocation", ApprovalFilter(policy, approver=ask))
        kernel.add_filter("function_invocation", ApprovalFilter(policy, approver=ask))

    With an approver the request is held open while the person decides; after ``timeout`` the call is refused. Without
    one the call is answered "waits for approval" and the loop is asked to terminate (only possible under
    ``auto_function_invocation``; elsewhere the call is refused): `pending` lists such calls of the history, and
    `resume` runs or refuses them and puts their results in place, after which the history can be sent again.

    What it approves is bound: where a filter that was registered after it, of either type, changes the function or an
    argument that the policy saw or the model could have given, the function does not run, and the model reads so. A
    filter that was registered before it acts before: the policy sees what that made of the call. One approval is one
    start: a further ``next`` of an inner filter gives the outcome again, unless the function is declared
    ``@effect("idempotent")`` or ``"keyed"``. Where a policy is silent nothing is bound.

    On a kernel that a planner, service or handler of this package works on, it decides with the interceptors of the
    run, before any call of a batch runs; without an approver the call waits as the run's own (`PendingCall`, decided by
    the run's ``resume``). What a person decided there it does not ask about again.

    In the stock loop Semantic Kernel starts the calls of a batch together, so there a safe sibling may run before a
    risky call is decided, and hidden parameters, bare names and exception texts are handled as the stock kernel does.
    Where that matters, use `FunctionInvokingChatCompletion`.
    """

    def __init__(self, policy: Interceptor, approver: Approver | None = None, timeout: float | None = None) -> None:
        """Make a filter.

        Args:
            policy: An `ApprovalPolicy`, or any interceptor: what it defers is asked of a person.
            approver: Asks the person; None terminates the loop instead.
            timeout: Seconds in which the person has to decide; after that the call is refused. None waits for ever.

        Raises:
            PlannerInvalidConfigurationError: If one of them cannot be used.
        """
        for name, value in (("policy", policy), ("approver", approver)):
            if not callable(value) and not (name == "approver" and value is None):
                raise PlannerInvalidConfigurationError(
                    f"{name} must be something that decides a call; got {shown(value)}."
                )
        try:
            ApprovalOptions(interceptor_timeout=timeout)
        except InvalidLimitError:
            raise PlannerInvalidConfigurationError(
                f"timeout must be a number of seconds above 0, or None for no limit; got {shown(timeout)}."
            ) from None
        self._policy = policy
        self._approver = approver
        self._timeout = timeout
        self._taken: set[str] = set()
        self._reported = False

    @property
    def policy(self) -> Interceptor:
        """What decides calls."""
        return self._policy

    async def __call__(self, context: Any, next: _Next) -> None:
        """Decide a call, then run it or answer it. The signature is Semantic Kernel's for filters."""
        if self._has_decided(context):
            await next(context)
            return
        self.report_unused_rules(context.kernel)
        call = _described(context)
        if isinstance(call, InvalidArguments):
            _answer(context, f"{_REFUSED}{call.message}")
            return
        decision = await self.decide(context.function, call)
        match decision:
            case Approve() | None:
                await self._run(context, next, call, decision)
            case Deny(reason=reason):
                _answer(context, f"{_REFUSED}{reason}" if reason else "The call was refused.")
            case Supply(result=result):
                _answer(context, result_text(result))
            case Defer(prompt=prompt):
                self._wait(context, replace(call, prompt=prompt or ""))

    def _has_decided(self, context: Any) -> bool:
        """Whether a filter of this policy and person decided this very run of the call, so that it is asked once."""
        starts = guard_of(context.function if isinstance(context, FunctionInvocationContext) else context)
        return starts is not None and starts.decided_by(self.decides_as, context.arguments)

    def decides_as(self, other: object) -> bool:
        """Whether another filter has the same policy and asks the same person."""
        return isinstance(other, ApprovalFilter) and (
            _is_same(other._policy, self._policy) and _is_same(other._approver, self._approver)
        )

    def report_unused_rules(self, kernel: Kernel) -> None:
        """Say once which rules of a policy are for no function of the kernel: a misspelt name guards nothing."""
        if self._reported or not isinstance(self._policy, ApprovalPolicy):
            return
        self._reported = True
        functions = kernel.get_full_list_of_function_metadata()
        for number in self._policy.unused_rules([(one.plugin_name or "", one.name) for one in functions]):
            _logger.warning("Rule %d of the approval policy is for no function of this kernel.", number)

    async def decide(
        self, function: KernelFunction, call: ToolCall, state: State | None = None, *, asks: bool = True
    ) -> Decision | None:
        """Decide a call by the policy and the function's own mark, and by the approver what these defer.

        Args:
            function: What will run.
            call: The call.
            state: The run, whose approvals for good stand in place of a question; None on a stock kernel.
            asks: Whether the approver is asked.
        """
        chain = InterceptorChain(
            options=ApprovalOptions(interceptor_timeout=self._timeout),
            interceptors=(self._policy,),
            marked=lambda _: approval_required(getattr(function, "method", None)),
        )
        decision = (await chain.review([call], state or State()))[0]
        if asks and isinstance(decision, Defer) and self._approver is not None:
            return await self._ask(self._approver, replace(call, prompt=decision.prompt or ""))
        return decision

    async def _ask(self, approver: Approver, call: ToolCall) -> Decision:
        """Ask the person; who does not decide in time, fails, or answers with what is no decision, refuses."""
        chain = InterceptorChain(
            options=ApprovalOptions(interceptor_timeout=self._timeout, unmatched="deny"), interceptors=(approver,)
        )
        decision = (await chain.review([call], State()))[0]
        return Deny("Nobody decided.") if decision is None or isinstance(decision, Defer) else decision

    async def _run(self, context: Any, next: _Next, call: ToolCall, decision: Approve | None) -> None:
        """Run a call with the arguments that were decided on; an approval binds it, silence does not."""
        parameters, given = parameters_of(context.function), call.arguments
        if decision is not None and decision.arguments is not None:
            edited = parse_arguments(arguments_text(decision.arguments), parameters)
            if isinstance(edited, InvalidArguments):
                _answer(context, f"{_REFUSED}{edited.message}")
                return
            given = edited
        arguments: dict[str, Any] = {}
        parameters.put(given, arguments)
        values = cast("dict[str, Any]", context.arguments)
        if arguments.keys() != call.arguments.keys() or any(values[name] is not arguments[name] for name in arguments):
            context.arguments = copy(context.arguments)  # these may be the caller's own
            values = cast("dict[str, Any]", context.arguments)
            for name in call.arguments:
                values.pop(name, None)
            values.update(arguments)
        starts = self._starts(context.function, context.arguments, given, binds=decision is not None)
        if (running := guard_of(context)) is not None:  # a run of this package guards its calls itself
            running.join(starts)
            await next(context)
            return
        try:
            await _guarded(context, next, starts)
        except (ApprovedArgumentsChangedError, NotRunAgainError) as error:
            _answer(context, str(error))
        finally:
            starts.end()

    def _starts(
        self, function: KernelFunction, values: Mapping[str, Any], shown: Iterable[str], *, binds: bool
    ) -> CallGuard:
        effect = effect_of(getattr(function, "method", None))
        again = not binds or (effect is not None and effect.kind in _ANY_EFFECT)
        return CallGuard(
            function.fully_qualified_name,
            unchanged=watch(values, {*shown, *parameters_of(function).by_name}),
            binds=binds,
            restart=_always if again else None,
            decided=[self],
            each_once=True,
        )

    def _wait(self, context: Any, call: ToolCall) -> None:
        if not isinstance(context, AutoFunctionInvocationContext) or guard_of(context) is not None:
            _answer(context, f"{_REFUSED}it needs a person's approval, and nobody can be asked.")
            return
        history, content = context.chat_history, context.function_call_content
        text, metadata = mark_of(history, content, call, signature_of(context.function))
        _answer(context, text, metadata)
        context.terminate = True

    def pending(self, history: ChatHistory) -> tuple[PendingCall, ...]:
        """List the calls of a history that wait for a person, as they will run."""
        return tuple(waiting.pending for waiting in waiting_results(history))

    async def resume(
        self,
        kernel: Kernel,
        history: ChatHistory,
        decisions: Mapping[str, Decision],
        *,
        arguments: KernelArguments | None = None,
    ) -> tuple[PendingCall, ...]:
        """Carry out decisions on calls that wait, and put their results in place in the history.

        Before a function starts, its result in the history says that it has started and is in doubt: so a second
        `resume` does not find the call waiting, and where this one is cancelled the call is not run again. Calls that
        it had not started then wait again.

        Args:
            kernel: Whose functions run, through its function-invocation filters.
            history: Is changed; when no call waits any more it can be sent again. It must hold what user and assistant
                said before the call, as it stood when the call was asked about.
            decisions: By the call's id, or by its fingerprint; all are taken, or none. Where an id waits twice, the
                fingerprint is needed, as the key or in the `Approve`.
            arguments: The application's arguments for the functions.

        Returns:
            The calls that still wait.

        Raises:
            DecisionRefusedError: If a decision cannot be taken, naming the call; nothing ran.
        """
        self.report_unused_rules(kernel)
        chosen = self._chosen(kernel, waiting_results(history), decisions)
        approved = [(one, given) for one, given in chosen if isinstance(given, Approve)]
        for one, given in chosen:
            if not isinstance(given, Approve):
                replace_result(history, one.item, _answer_of(given))
        standing = [replace_result(history, one.item, STARTED) for one, _ in approved]
        self._taken.update(one.pending.fingerprint for one, _ in chosen)
        to_run = deque(zip(approved, standing, strict=True))
        try:
            while to_run:
                (one, given), item = to_run.popleft()
                replace_result(history, item, await self._carry_out(kernel, one, given, arguments))
        finally:
            for (one, _), item in to_run:
                replace_result(history, item, one.item)
                self._taken.discard(one.pending.fingerprint)
        return self.pending(history)

    def _chosen(
        self, kernel: Kernel, waiting: Sequence[WaitingResult], decisions: Mapping[str, Decision]
    ) -> list[tuple[WaitingResult, Decision]]:
        """Find the waiting call of each decision, and check that all can be taken."""
        chosen: list[tuple[WaitingResult, Decision]] = []
        for name, decision in decisions.items():
            found = [one for one in waiting if name in (one.pending.id, one.pending.fingerprint)]
            if len(found) > 1 and isinstance(decision, Approve) and decision.fingerprint is not None:
                found = [one for one in found if one.pending.fingerprint == decision.fingerprint]
            _check(kernel, name, decision, found)
            if found[0].pending.fingerprint in self._taken:
                raise DecisionRefusedError(f"The call {name!r} was decided before, in another copy of this history.")
            if any(one is found[0] for one, _ in chosen):
                raise DecisionRefusedError(f"Two decisions were given for the call {name!r}; give one.")
            chosen.append((found[0], decision))
        return chosen

    async def _carry_out(
        self, kernel: Kernel, waiting: WaitingResult, decision: Approve, arguments: KernelArguments | None
    ) -> str:
        function = _function(kernel, name := waiting.pending.fully_qualified_name)
        own = _to_run(function, waiting, decision)
        assert not isinstance(own, InvalidArguments), "it was checked before any decision was taken"
        given = KernelArguments()
        cast("dict[str, Any]", given).update(cast("dict[str, Any]", arguments or {}))
        parameters_of(function).put(own, cast("dict[str, Any]", given))
        starts = self._starts(function, given, own, binds=True)
        guarded = starts.guarding(function)
        try:
            ended = await caught(guarded.invoke(kernel, given, metadata={"id": waiting.pending.id}))
        finally:
            starts.end()
        if not isinstance(ended, Raised):
            return result_text(ended)
        if isinstance(ended.error, ApprovedArgumentsChangedError | NotRunAgainError):
            return str(ended.error)
        _logger.error("The approved function %s failed.", name, exc_info=ended.error)
        return f"The function {name} failed."


async def _always() -> None:
    """Let a function start again: nothing counts the starts of a stock kernel."""


async def _guarded(context: Any, next: _Next, starts: CallGuard) -> None:
    """Run the rest of the stack of filters, with a guard behind the last one; see `CallGuard`."""
    function: KernelFunction = context.function
    if not isinstance(context, AutoFunctionInvocationContext):
        await behind_filters(next, lambda run: lambda inner: starts.run_for(function, inner, run))(context)
        return
    target = starts.guarding(function)

    def last(run: _Next) -> _Next:
        async def run_target(inner: AutoFunctionInvocationContext) -> None:
            if inner.function is not function and inner.function is not target:
                raise ApprovedArgumentsChangedError(function.fully_qualified_name)
            inner.function = target
            try:
                await run(inner)
            finally:
                inner.function = function

        return run_target

    await behind_filters(next, last)(context)


def _answer_of(decision: Decision) -> str:
    if isinstance(decision, Supply):
        return result_text(decision.result)
    return f"{_REFUSED}{decision.reason}".rstrip(": ") if isinstance(decision, Deny) else ""


def _described(context: AutoFunctionInvocationContext | FunctionInvocationContext) -> ToolCall | InvalidArguments:
    """Show a call of a stock kernel: the function that will run, and what the model gave it, converted."""
    content = context.function_call_content if isinstance(context, AutoFunctionInvocationContext) else None
    function = context.function
    values = cast("dict[str, Any]", context.arguments)
    given = _given(content) if content is not None else None
    parameters = parameters_of(function)
    names = parameters.by_name if given is None else given
    shown = _converted({name: values[name] for name in names if name in values}, parameters)
    if isinstance(shown, InvalidArguments):
        return shown
    call_id = (content.id if content is not None else None) or function.fully_qualified_name
    return ToolCall(
        id=call_id,
        plugin_name=function.plugin_name,
        function_name=function.name,
        fully_qualified_name=function.fully_qualified_name,
        arguments=shown,
        raw_arguments=arguments_text(shown if content is None else content.arguments),
        iteration=getattr(context, "request_sequence_index", 0),
        index=getattr(context, "function_sequence_index", 0),
        batch_size=getattr(context, "function_count", 1) or 1,
        fingerprint=_fingerprint(call_id, function.fully_qualified_name, shown),
    )


def _converted(values: dict[str, Any], parameters: Parameters) -> dict[str, Any] | InvalidArguments:
    """Convert what a model may have given to the types of the function; an application's own object stays as it is."""
    shown = dict(values)
    for name, value in values.items():
        parameter = parameters.by_name.get(name)
        if parameter is None or not isinstance(value, str | int | float | list | dict | None):
            continue
        try:
            text = json.dumps({name: value})
        except (TypeError, ValueError, RecursionError):
            continue
        alone = Parameters(function=parameters.function, by_name={name: parameter})
        converted = parse_arguments(text, alone)
        if isinstance(converted, InvalidArguments):
            return converted
        if json.dumps(converted) != text:
            shown[name] = converted[name]
    return shown


def _given(content: FunctionCallContent) -> dict[str, Any] | None:
    """Read a call's arguments as Semantic Kernel itself will, which takes more than JSON; None if it cannot."""
    try:
        given: Any = content.parse_arguments() or {}
    except (FunctionCallInvalidArgumentsException, RecursionError):
        return None
    return dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else None


def _check(kernel: Kernel, name: str, decision: Decision, found: Sequence[WaitingResult]) -> None:
    if not found:
        raise DecisionRefusedError(f"A decision was given for the call {name!r}, which does not wait for one.")
    if len(found) > 1:
        fingerprints = ", ".join(one.pending.fingerprint for one in found)
        raise DecisionRefusedError(
            f"The id {name!r} waits {len(found)} times in this history. Decide by the fingerprint: {fingerprints}."
        )
    if not isinstance(decision, Approve | Deny | Supply):
        raise DecisionRefusedError(
            f"The call {name!r} was answered {shown(decision)}; expected Approve, Deny or Supply."
        )
    if (problem := problem_of(decision)) is not None:
        raise DecisionRefusedError(f"The decision on {name!r} cannot be taken: {problem}. The call still waits.")
    if isinstance(decision, Approve):
        _check_approval(kernel, name, decision, found[0])


def _check_approval(kernel: Kernel, name: str, decision: Approve, waiting: WaitingResult) -> None:
    if decision.fingerprint not in (None, waiting.pending.fingerprint):
        raise DecisionRefusedError(f"The approval of {name!r} was given for another call or other arguments.")
    function = _function(kernel, waiting.pending.fully_qualified_name)
    if not takes_no_more(waiting.signature, signature_of(function)):
        raise DecisionRefusedError(
            f"The call {name!r} is no longer what was asked about: the parameters of "
            f"{waiting.pending.fully_qualified_name} changed. Deny it, or resume with the kernel it was asked for."
        )
    if isinstance(checked := _to_run(function, waiting, decision), InvalidArguments):
        raise DecisionRefusedError(f"The arguments of {name!r} cannot be used: {checked.message}")


def _to_run(function: KernelFunction, waiting: WaitingResult, decision: Approve) -> dict[str, Any] | InvalidArguments:
    """Give the arguments of an approved call: those that were shown, or those that were put in their place."""
    if decision.arguments is None:
        return dict(waiting.pending.arguments)
    return parse_arguments(arguments_text(decision.arguments), parameters_of(function))


def _function(kernel: Kernel, name: str) -> KernelFunction:
    try:
        return kernel.get_function_from_fully_qualified_function_name(name)
    except KernelException as error:
        message = f"{name} was to run, and this kernel has no such function. Resume with the kernel it was asked for."
        raise DecisionRefusedError(message) from error


def _answer(context: Any, text: str, metadata: Mapping[str, Any] | None = None) -> None:
    """Put a text in place of the function's result; the two kinds of context call it differently."""
    result = FunctionResult(function=context.function.metadata, value=text, metadata=dict(metadata or {}))
    if isinstance(context, AutoFunctionInvocationContext):
        context.function_result = result
    else:
        context.result = result


def _fingerprint(call_id: str, function: str, arguments: Mapping[str, Any]) -> str:
    try:
        digest = digest_of(function, arguments)
    except (TypeError, ValueError):  # an application may pass what is no JSON
        digest = digest_of(function, {"": repr(arguments)})
    return fingerprint_of("approval-filter", 0, call_id, digest)


def _is_same(one: object, other: object) -> bool:
    return one is other or (inspect.ismethod(one) and one == other)  # a method is made anew where it is looked up
