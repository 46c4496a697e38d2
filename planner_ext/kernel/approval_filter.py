"""``ApprovalFilter``: the policy and the person, brought to stock kernels as a filter."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

from semantic_kernel import Kernel
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)
from semantic_kernel.exceptions import FunctionCallInvalidArgumentsException, KernelException
from semantic_kernel.filters.auto_function_invocation.auto_function_invocation_context import (
    AutoFunctionInvocationContext,
)
from semantic_kernel.filters.functions.function_invocation_context import FunctionInvocationContext
from semantic_kernel.functions import FunctionResult, KernelArguments, KernelFunction

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, Interceptor, Supply, ToolCall, problem_of
from planner_ext.approval.fingerprint import digest_of, fingerprint_of
from planner_ext.approval.gate import InterceptorChain
from planner_ext.approval.marks import approval_required
from planner_ext.approval.settings import ApprovalOptions
from planner_ext.core.errors import InvalidLimitError
from planner_ext.core.state import State
from planner_ext.kernel.approval import DecisionRefusedError, PendingCall
from planner_ext.kernel.arguments import InvalidArguments, parameters_of, parse_arguments
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.results import result_text

__all__ = ["ApprovalFilter", "Approver"]

_logger = logging.getLogger(__name__)

Approver = Callable[[ToolCall], Decision | Awaitable[Decision]]
"""Asks a person, and gives their decision; async or not."""

_Next = Callable[[Any], Awaitable[None]]

_REFUSED = "The call was refused and did not run: "
_WAITING = "This call waits for a person's approval and has not run: "
"""How the model reads that a call waits; its function, fingerprint and question follow."""

_MARK = "planner_ext.waiting"
"""Where the metadata of a result says that its call waits; no function's text gets there."""


@dataclass(slots=True)
class _Approval:
    """One approval of a filter, for one run; ``names`` are the arguments that it covers."""

    by: "ApprovalFilter"
    function: KernelFunction
    arguments: KernelArguments
    names: frozenset[str]
    digest: str
    used: bool = False


_approvals: ContextVar[tuple[_Approval, ...]] = ContextVar("planner_ext_approvals", default=())
"""What was approved around the present call: a filter registered under both types asks once."""


@dataclass(frozen=True, slots=True)
class _Marked:
    """A call of a history whose result says that it waits."""

    message: int
    item: int
    content: FunctionCallContent
    pending: PendingCall


class ApprovalFilter:
    """Decides calls of a stock kernel before they run.

    Register it where you need it, also under both types; it asks once per call, and again if another filter changed
    the call in between. Filters with different policies each have their say:

        kernel.add_filter("auto_function_invocation", ApprovalFilter(policy, approver=ask))
        kernel.add_filter("function_invocation", ApprovalFilter(policy, approver=ask))

    With an approver the request is held open while the person decides; after ``timeout`` the call is refused. Without
    one the call is answered "waits for approval" and the loop is asked to terminate (only possible under
    ``auto_function_invocation``; elsewhere the call is refused): `pending` lists such calls of the history, and
    `resume` runs or refuses them and puts their results in place, after which the history can be sent again.

    Semantic Kernel starts the calls of a batch together, so here a safe sibling may run before a risky call is decided,
    and hidden parameters, bare names and exception texts are handled as the stock kernel does. Where that matters, use
    `FunctionInvokingChatCompletion`.
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
                raise PlannerInvalidConfigurationError(f"{name} must be something that decides a call; got {value!r}.")
        try:
            ApprovalOptions(interceptor_timeout=timeout)
        except InvalidLimitError:
            raise PlannerInvalidConfigurationError(
                f"timeout must be a number of seconds above 0, or None for no limit; got {timeout!r}."
            ) from None
        self._policy = policy
        self._approver = approver
        self._timeout = timeout

    @property
    def policy(self) -> Interceptor:
        """What decides calls."""
        return self._policy

    async def __call__(self, context: Any, next: _Next) -> None:
        """Decide a call, then run it or answer it. The signature is Semantic Kernel's for filters."""
        if isinstance(context, FunctionInvocationContext) and self._take_approval(context):
            await next(context)
            return
        call = _described(context)
        decision = await self._decide(context.function, call)
        match decision:
            case Approve():
                await self._run(context, next, call, decision)
            case Deny(reason=reason):
                _answer(context, f"{_REFUSED}{reason}" if reason else "The call was refused.")
            case Supply(result=result):
                _answer(context, result_text(result))
            case Defer(prompt=prompt):
                self._wait(context, replace(call, prompt=prompt or ""))

    def _take_approval(self, context: FunctionInvocationContext) -> bool:
        """Use up what this filter's policy and person approved of this very run."""
        covering = [
            one
            for one in _approvals.get()
            if (not one.used and one.function is context.function and one.arguments is context.arguments)
            and (_is_same(one.by._policy, self._policy) and _is_same(one.by._approver, self._approver))
            and one.digest == _digest(one.function, one.arguments, one.names)
        ]
        for one in covering:
            one.used = True
        return bool(covering)

    @contextmanager
    def _approved(self, function: KernelFunction, arguments: KernelArguments, shown: Iterable[str]) -> Generator[None]:
        """Let a function run once, with its arguments as they are now, without asking about it again."""
        names = frozenset(shown) | frozenset(parameters_of(function).by_name)
        approval = _Approval(self, function, arguments, names, _digest(function, arguments, names))
        token = _approvals.set((*_approvals.get(), approval))
        try:
            yield
        finally:
            approval.used = True  # for tasks that outlive the call
            _approvals.reset(token)

    async def _decide(self, function: KernelFunction, call: ToolCall) -> Decision:
        chain = InterceptorChain(
            options=ApprovalOptions(interceptor_timeout=self._timeout),
            interceptors=(self._policy,),
            marked=lambda _: approval_required(getattr(function, "method", None)),
        )
        decision = (await chain.review([call], State()))[0]
        if isinstance(decision, Defer) and self._approver is not None:
            return await self._ask(self._approver, replace(call, prompt=decision.prompt or ""))
        return decision or Approve()

    async def _ask(self, approver: Approver, call: ToolCall) -> Decision:
        """Ask the person; who does not decide in time, fails, or answers with what is no decision, refuses."""
        chain = InterceptorChain(
            options=ApprovalOptions(interceptor_timeout=self._timeout, unmatched="deny"), interceptors=(approver,)
        )
        decision = (await chain.review([call], State()))[0]
        return Deny("Nobody decided.") if decision is None or isinstance(decision, Defer) else decision

    async def _run(self, context: Any, next: _Next, call: ToolCall, decision: Approve) -> None:
        if decision.arguments is not None:
            edited = parse_arguments(_json(decision.arguments), parameters_of(context.function))
            if isinstance(edited, InvalidArguments):
                _answer(context, f"{_REFUSED}{edited.message}")
                return
            values = cast("dict[str, Any]", context.arguments)
            for name in call.arguments:
                values.pop(name, None)
            values.update(edited)
        if not isinstance(context, AutoFunctionInvocationContext):
            await next(context)
            return
        with self._approved(context.function, context.arguments, call.arguments):
            await next(context)

    def _wait(self, context: Any, call: ToolCall) -> None:
        if not isinstance(context, AutoFunctionInvocationContext):
            _answer(context, f"{_REFUSED}it needs a person's approval, and nobody can be asked.")
            return
        text = f"{_WAITING}{call.fully_qualified_name} {call.fingerprint}\n{call.prompt}".rstrip()
        mark = {"function": call.fully_qualified_name, "fingerprint": call.fingerprint, "prompt": call.prompt}
        _answer(context, text, {_MARK: mark})
        context.terminate = True

    def pending(self, history: ChatHistory) -> tuple[PendingCall, ...]:
        """List the calls of a history that wait for a person, as they will run."""
        return tuple(marked.pending for marked in _waiting(history))

    async def resume(
        self,
        kernel: Kernel,
        history: ChatHistory,
        decisions: Mapping[str, Decision],
        *,
        arguments: KernelArguments | None = None,
    ) -> tuple[PendingCall, ...]:
        """Carry out decisions on calls that wait, and put their results in place in the history.

        Args:
            kernel: Whose functions run, through its function-invocation filters.
            history: Is changed; when no call waits any more it can be sent again.
            decisions: By call id; all are taken, or none.
            arguments: The application's arguments for the functions.

        Returns:
            The calls that still wait.

        Raises:
            DecisionRefusedError: If a decision cannot be taken, naming the call; nothing ran.
        """
        waiting = {marked.pending.id: marked for marked in _waiting(history)}
        for name, decision in decisions.items():
            _check(kernel, name, decision, waiting.get(name))
        for name, decision in decisions.items():
            text = await self._carry_out(kernel, waiting[name], decision, arguments)
            _put_result(history, waiting[name], text)
        return self.pending(history)

    async def _carry_out(
        self, kernel: Kernel, marked: _Marked, decision: Decision, arguments: KernelArguments | None
    ) -> str:
        if isinstance(decision, Deny):
            return f"{_REFUSED}{decision.reason}".rstrip(": ")
        if isinstance(decision, Supply):
            return result_text(decision.result)
        assert isinstance(decision, Approve)
        own = marked.pending.arguments if decision.arguments is None else decision.arguments
        given = KernelArguments()
        cast("dict[str, Any]", given).update({**cast("dict[str, Any]", arguments or {}), **own})
        function = _function(kernel, name := marked.pending.fully_qualified_name)
        try:
            with self._approved(function, given, own):
                return result_text(await function.invoke(kernel, given, metadata={"id": marked.pending.id}))
        except Exception:
            _logger.exception("The approved function %s failed.", name)
            return f"The function {name} failed."


def _described(context: AutoFunctionInvocationContext | FunctionInvocationContext) -> ToolCall:
    """Show a call of a stock kernel: the function that will run, and what the model gave it."""
    content = context.function_call_content if isinstance(context, AutoFunctionInvocationContext) else None
    function = context.function
    values = cast("dict[str, Any]", context.arguments)
    given = _given(content) if content is not None else None
    names = parameters_of(function).by_name if given is None else given
    shown = {name: values.get(name) for name in names if name in values}
    call_id = (content.id if content is not None else None) or function.fully_qualified_name
    return ToolCall(
        id=call_id,
        plugin_name=function.plugin_name,
        function_name=function.name,
        fully_qualified_name=function.fully_qualified_name,
        arguments=shown,
        raw_arguments=_json_text(content.arguments) if content is not None else _json(shown),
        iteration=getattr(context, "request_sequence_index", 0),
        index=getattr(context, "function_sequence_index", 0),
        batch_size=getattr(context, "function_count", 1) or 1,
        fingerprint=_fingerprint(call_id, function.fully_qualified_name, shown),
    )


def _given(content: FunctionCallContent) -> dict[str, Any] | None:
    """Read a call's arguments as Semantic Kernel itself will, which takes more than JSON; None if it cannot."""
    try:
        given: Any = content.parse_arguments() or {}
    except (FunctionCallInvalidArgumentsException, RecursionError):
        return None
    return dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else None


def _waiting(history: ChatHistory) -> list[_Marked]:
    """Find results that are marked as waiting; one that does not fit its call is no such result."""
    calls: dict[str, FunctionCallContent] = {}
    found: list[_Marked] = []
    for place, message in enumerate(history.messages):
        for index, item in enumerate(message.items):
            if isinstance(item, FunctionCallContent):
                calls[item.id or ""] = item
            elif isinstance(item, FunctionResultContent) and str(item.result).startswith(_WAITING):
                marked = _marked(place, index, calls.get(item.id or ""), item.metadata.get(_MARK))
                found += [marked] if marked is not None else []
    return found


def _marked(place: int, index: int, content: FunctionCallContent | None, mark: Any) -> _Marked | None:
    if content is None or (arguments := _given(content)) is None:
        return None
    match mark:
        case {"function": str(function), "fingerprint": str(given), "prompt": str(prompt)}:
            if not _names(content, function) or given != _fingerprint(content.id or "", function, arguments):
                return None
            shown: dict[str, Any] = {"arguments": arguments, "fingerprint": given, "prompt": prompt}
            pending = PendingCall(id=content.id or "", fully_qualified_name=function, **shown)
            return _Marked(place, index, content, pending)
        case _:
            return None


def _names(content: FunctionCallContent, function: str) -> bool:
    """Whether a call is one of this function; a bare name is one of any plugin's function of that name."""
    plugin, _, name = function.rpartition("-")
    return name == content.function_name and content.plugin_name in (plugin, None)


def _check(kernel: Kernel, name: str, decision: Decision, marked: _Marked | None) -> None:
    if marked is None:
        raise DecisionRefusedError(f"A decision was given for the call {name!r}, which does not wait for one.")
    if not isinstance(decision, Approve | Deny | Supply):
        raise DecisionRefusedError(f"The call {name!r} was answered {decision!r}; expected Approve, Deny or Supply.")
    if (problem := problem_of(decision)) is not None:
        raise DecisionRefusedError(f"The decision on {name!r} cannot be taken: {problem}. The call still waits.")
    if isinstance(decision, Approve):
        _check_approval(kernel, name, decision, marked)


def _check_approval(kernel: Kernel, name: str, decision: Approve, marked: _Marked) -> None:
    if decision.fingerprint not in (None, marked.pending.fingerprint):
        raise DecisionRefusedError(f"The approval of {name!r} was given for another call or other arguments.")
    function = _function(kernel, marked.pending.fully_qualified_name)
    given = marked.pending.arguments if decision.arguments is None else decision.arguments
    checked = parse_arguments(_json(given), parameters_of(function))
    if isinstance(checked, InvalidArguments):
        raise DecisionRefusedError(f"The arguments of {name!r} cannot be used: {checked.message}")


def _function(kernel: Kernel, name: str) -> KernelFunction:
    try:
        return kernel.get_function_from_fully_qualified_function_name(name)
    except KernelException as error:
        message = f"{name} was to run, and this kernel has no such function. Resume with the kernel it was asked for."
        raise DecisionRefusedError(message) from error


def _put_result(history: ChatHistory, marked: _Marked, text: str) -> None:
    message = history.messages[marked.message]
    items: list[Any] = list(message.items)
    items[marked.item] = FunctionResultContent(id=marked.pending.id, name=marked.content.name, result=text)
    history.messages[marked.message] = ChatMessageContent(role=AuthorRole.TOOL, items=items, name=message.name)


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


def _digest(function: KernelFunction, values: Mapping[str, Any], names: Iterable[str]) -> str:
    covered = {name: values[name] for name in sorted(names) if name in values}
    return _fingerprint("", function.fully_qualified_name, covered)


def _is_same(one: object, other: object) -> bool:
    return one is other or (inspect.ismethod(one) and one == other)  # a method is made anew where it is looked up


def _json_text(arguments: str | Mapping[str, Any] | None) -> str:
    return arguments if isinstance(arguments, str) else _json(arguments or {})


def _json(values: Mapping[str, Any]) -> str:
    return result_text(dict(values))
