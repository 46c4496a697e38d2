"""``ApprovalFilter``: an approval policy and a person's decisions, as a filter of a kernel.

On a stock kernel it decides a call when it runs; in a run of this package
`planner_ext.sk.charging.nested.RunGate` asks it.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, cast

from semantic_kernel import Kernel
from semantic_kernel.contents import (
    ChatHistory,
    FunctionCallContent,
    FunctionResultContent,
)
from semantic_kernel.exceptions import FunctionCallInvalidArgumentsException
from semantic_kernel.filters import (
    AutoFunctionInvocationContext,
    FunctionInvocationContext,
)
from semantic_kernel.functions import FunctionResult, KernelArguments, KernelFunction

from planner_ext.approval.decisions import (
    ApprovalSettings,
    Approve,
    AuthorizeHooks,
    Decision,
    Defer,
    Deny,
    Interceptor,
    MadeDecision,
    Supply,
    ToolCall,
    approval_required,
)
from planner_ext.core.accounts import current_tab
from planner_ext.core.errors import InvalidLimitError, require, shown
from planner_ext.core.facts import Panel
from planner_ext.core.state import State
from planner_ext.core.values import Newest
from planner_ext.engine.concurrency import Raised, caught
from planner_ext.engine.gate import Approver
from planner_ext.engine.ports import Reviewed
from planner_ext.engine.review import Review, is_same
from planner_ext.sk.charging.earlier_calls import before_call, before_message_of
from planner_ext.sk.charging.filters import (
    CallFilter,
    approval_filters,
    converted_values,
    edited_call,
    refuse_without_store,
    tool_call,
)
from planner_ext.sk.charging.nested import tab_in
from planner_ext.sk.checks import check_returns
from planner_ext.sk.errors import DecisionRefusedError, InvalidOptionError
from planner_ext.sk.filter.waiting_results import (
    DecidedCall,
    arguments_text,
    asked_again,
    decided_calls,
    replace_result,
    show_edit,
    waiting_result,
    waiting_results,
)
from planner_ext.sk.functions.conversion import InvalidArguments
from planner_ext.sk.functions.execution import (
    ApprovedArgumentsChangedError,
    CallGuard,
    Next,
    NotRunAgainError,
    behind_filters,
    guard_of,
    result_text,
    runnable,
    watch,
)
from planner_ext.sk.functions.toolset import tool_of
from planner_ext.sk.messages import new_call_id
from planner_ext.sk.run.resume import as_given, let_in

_logger = logging.getLogger(__name__)

_REFUSED: Final = "The call was refused and did not run"
_LATE: Final = "it needed a person's approval, and nobody decided in time."
_STARTED: Final = (
    "This call was approved and has started; its result is not known, "
    "and whether it took effect is in doubt."
)
"""The result in the history while an approved function runs."""
_INJECTS: Final = (
    "{} takes a value named {}, as its schema says, and Semantic Kernel's own loop would pass it the application's "
    "object of that name. FunctionInvokingChatCompletion, a planner or a handler passes the value."
)


_STOCK_RUN: Final = "approval-filter"
"""The run in the fingerprints of calls that are of no run of this package."""


class ApprovalFilter(CallFilter):
    """Decides calls of a stock kernel before they run.

    Register it under either type, or both; it asks once per call. Filters with
    different policies each decide:

        kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, ApprovalFilter(policy, approver=ask))
        kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, ApprovalFilter(policy, approver=ask))

    With an approver the request is held open while the person decides; after
    ``timeout`` the call is refused. Without one the call is answered "waits for
    approval" and the loop ends (under ``auto_function_invocation``; elsewhere the call
    is refused); see `pending` and `resume`. An edit is written into the history's call;
    a filter under ``function_invocation`` alone does not know that call.

    An approval is bound: if a later filter changes the function or an argument, the
    function does not run. It allows one start: a further ``next`` of an inner filter
    gives the outcome again, unless the function is declared ``@effect("idempotent")``
    or ``"keyed"``. Where a policy is silent nothing is bound.

    On a kernel of a planner, service or handler of this package it decides with the
    run's interceptors, before any call of a batch runs; without an approver the call
    waits as the run's own.

    Rules with ``after`` see the calls in the chat history before the call's own reply,
    and those that runs of this package made inside them.
    Calls of a compacted history, or inside functions of the stock loop, are not known.
    A call without a history, as under ``function_invocation`` alone, matches every such
    rule, except inside a run of this package.

    Semantic Kernel starts the calls of a batch together, so a safe sibling may run
    before a risky call is decided. It fills in kernel, service and the application's
    arguments by name: a function whose schema (an MCP tool, an OpenAPI operation) has
    such a name is refused. Where that matters, use `FunctionInvokingChatCompletion`.

    Attributes:
        policy: The interceptor that decides calls.
    """

    def __init__(
        self,
        policy: Interceptor,
        approver: Approver | None = None,
        timeout: float | None = None,
        *,
        authorize: AuthorizeHooks = None,
    ) -> None:
        """Make a filter.

        Args:
            policy: An `ApprovalPolicy`, or any interceptor: what it defers is asked of
                a person.
            approver: Asks the person; None terminates the loop instead.
            timeout: Seconds to decide; after that the call is refused. None waits for
                ever.
            authorize: Says who may decide, here and in a run of this package; see
                `ApprovalSettings`.

        Raises:
            InvalidOptionError: If one of them cannot be used; a policy with a quorum or
                an escalation belongs to a kept run.
        """
        for name, value in (("policy", policy), ("approver", approver)):
            fits = callable(value) or (name == "approver" and value is None)
            expected = "a function of the call, or an ApprovalPolicy"
            require(name, fits, expected, value)
            check_returns(name, value)
        refuse_without_store([policy])
        ApprovalSettings(authorize=authorize)  # which refuses what is no hook, by name
        try:
            settings = ApprovalSettings(
                interceptor_timeout=timeout, authorize=authorize
            )
        except InvalidLimitError:
            raise InvalidOptionError(
                f"timeout must be a number of seconds above 0, or None for no limit; got {shown(timeout)}."
            ) from None
        super().__init__(policy, approver, settings)
        self._taken = Newest[str]()

    def __deepcopy__(self, memo: object) -> Self:
        """Share: a kernel's clone copies each filter, and a copy would ask again."""
        return self

    async def __call__(self, context: Any, next: Next) -> None:
        """Decide a call, then run it or answer it; the signature is Semantic Kernel's."""
        guard = guard_of(
            context.function
            if isinstance(context, FunctionInvocationContext)
            else context
        )
        if guard is not None and guard.decided_by(self.decides_as, context.arguments):
            # A filter of this policy and person decided this very run of the call.
            await next(context)
            return
        self.report_unused_rules(context.kernel)
        call = _described(context, in_run=guard is not None)
        if isinstance(call, InvalidArguments):
            _answer(context, _refusal(call.message))
            return
        tab = current_tab()
        # After a pause, the call belongs to a run.
        state = State() if guard is None or tab is None else tab.account.state
        (reviewed,) = await _review([self], context.function).of([call], state)
        if (
            guard is None
            and reviewed.arguments is not None
            and isinstance(context, AutoFunctionInvocationContext)
            and context.function_call_content is not None
        ):
            show_edit(context.function_call_content, reviewed.arguments)
        match reviewed.decision:
            case Approve() | None:
                await self._run(context, next, call, reviewed)
            case Deny(reason=reason):
                _answer(context, _refusal(reason))
            case Supply(result=result):
                _answer(context, result_text(result))
            case Defer() as question:
                edited = (
                    call
                    if reviewed.arguments is None
                    else replace(call, arguments=reviewed.arguments)
                )
                self._wait(context, edited, question)

    async def _run(
        self, context: Any, next: Next, call: ToolCall, reviewed: Reviewed
    ) -> None:
        tool = tool_of(context.function)
        binds = reviewed.decision is not None
        given = call.arguments if reviewed.arguments is None else reviewed.arguments
        values = cast("dict[str, Any]", context.arguments)
        arguments = {
            name: value for name, value in values.items() if name not in call.arguments
        }
        tool.put(given, arguments)
        if arguments.keys() != values.keys() or any(
            values[name] is not arguments[name] for name in arguments
        ):
            context.arguments = copy(context.arguments)  # these may be the caller's own
            values = cast("dict[str, Any]", context.arguments)
            values.clear()
            values.update(arguments)
        guard = self._guard(context.function, context.arguments, given, binds=binds)
        if (
            running := guard_of(context)
        ) is not None:  # a run of this package guards its calls itself
            running.join(guard)
            await next(context)
            return
        try:
            await _guarded(context, next, guard)
        except (ApprovedArgumentsChangedError, NotRunAgainError) as error:
            _answer(context, str(error))
        finally:
            guard.end()

    def _guard(
        self,
        function: KernelFunction,
        values: Mapping[str, Any],
        shown: Iterable[str],
        *,
        binds: bool,
    ) -> CallGuard:
        tool = tool_of(function)
        return CallGuard(
            tool.name,
            unchanged=watch(values, {*shown, *tool.parameters}),
            binds=binds,
            restart=_always if not binds or tool.restarts else None,
            decided=[self],
            each_once=True,
        )

    def _wait(self, context: Any, call: ToolCall, question: Defer) -> None:
        can_wait = (
            isinstance(context, AutoFunctionInvocationContext)
            and guard_of(context) is None
            and question.panel == Panel()
        )
        if not can_wait or (waits := waiting_result(context, call, question)) is None:
            _answer(
                context,
                _refusal("it needs a person's approval, and nobody can be asked."),
            )
            return
        _answer(context, *waits)
        context.terminate = True

    def pending(self, history: ChatHistory) -> tuple[ToolCall, ...]:
        """List the calls of a history that wait for a person, as they will run."""
        return tuple(waiting.pending for waiting in waiting_results(history))

    async def resume(
        self,
        kernel: Kernel,
        history: ChatHistory,
        decisions: Mapping[str, Decision],
        *,
        arguments: KernelArguments | None = None,
    ) -> tuple[ToolCall, ...]:
        """Carry out decisions on calls that wait, and put their results in place in the history.

        While a function runs, its result in the history says that it is in doubt: no
        later `resume` runs it again. Calls that were not started then wait again. A
        question that has expired without a decision is answered so.

        Args:
            kernel: Whose functions run, through its function-invocation filters.
            history: Is changed; can be sent again when no call waits any more. What
                user and assistant said before the call must stand as when it was asked
                about.
            decisions: By the call's id, path or fingerprint; all are taken, or none.
                Where an id waits twice, the fingerprint is needed, as the key or in the
                `Approve`. A key that is one call's fingerprint and another one's id
                means the fingerprint.
            arguments: The application's arguments for the functions.

        Returns:
            The calls that still wait.

        Raises:
            DecisionRefusedError: If a decision cannot be taken, or ``authorize`` does
                not allow it, naming the call; nothing ran. A call with ``roles`` is
                decided only under such a hook.
        """
        self.report_unused_rules(kernel)
        given = as_given(decisions)
        asked = decided_calls(kernel, history, given, self._taken)
        await let_in(
            "",
            [
                (
                    one.waiting.pending,
                    one.waiting.pending.id,
                    MadeDecision(decision=one.decision),
                )
                for one in asked
            ],
            self.authorize,
        )
        reviews = {
            one.waiting.pending.fingerprint: await self._reviewed(kernel, history, one)
            for one in asked
        }
        to_run: deque[tuple[DecidedCall, FunctionResultContent]] = deque()
        for one in decided_calls(kernel, history, given, self._taken):
            item = one.waiting.item
            reviewed = reviews.get(one.waiting.pending.fingerprint)
            match one.decision if reviewed is None else reviewed.decision:
                case Deny(reason=reason):
                    replace_result(history, item, _refusal(reason))
                case Supply(result=result):
                    replace_result(history, item, result_text(result))
                case Defer() if reviewed is not None and one.function is not None:
                    _show_decided(one)
                    replace_result(
                        history, item, asked_again(one.waiting, one.function, reviewed)
                    )
                case _:
                    to_run.append((one, replace_result(history, item, _STARTED)))
            self._taken.add(one.waiting.pending.fingerprint)
        _answer_late(history)
        try:
            while to_run:
                one, item = to_run.popleft()
                _show_decided(one)
                replace_result(
                    history, item, await self._carry_out(kernel, one, arguments)
                )
        finally:
            for one, item in to_run:
                replace_result(history, item, one.waiting.item)
                self._taken.discard(one.waiting.pending.fingerprint)
        return self.pending(history)

    async def _reviewed(
        self, kernel: Kernel, history: ChatHistory, one: DecidedCall
    ) -> Reviewed | None:
        """Review an approved call by the filters that have not seen what will run; None if all have."""
        pending = one.waiting.pending
        approval = one.decision
        others = [
            other for other in approval_filters(kernel) if not other.decides_as(self)
        ]
        if (
            not isinstance(approval, Approve)
            or one.function is None
            or (approval.arguments is None and not others)
        ):
            return None
        call = tool_call(
            one.function,
            pending.arguments,
            run_id=_STOCK_RUN,
            call_id=pending.id,
            raw_arguments=arguments_text(one.waiting.call.arguments),
            iteration=0,
            index=0,
            batch_size=1,
            after=before_message_of(one.waiting.call, history.messages),
        )
        if approval.arguments is None:
            # The others decide when the function is invoked.
            filters = approval_filters(kernel, once_invoked=False)
            reviewed = await _after_question(
                filters, call, one.function, one.waiting.question
            )
        else:
            review = _review([self, *others], one.function)
            reviewed = await review.of_edit(
                call, approval, one.waiting.question, State()
            )
        if reviewed is not None and isinstance(reviewed.decision, Deny):
            reason = reviewed.decision.reason
            problem = (
                f"The approval of {pending.id!r} cannot be taken: {reason} "
                "The call still waits."
            )
            raise DecisionRefusedError(problem, call_id=pending.id)
        return reviewed

    async def _carry_out(
        self, kernel: Kernel, decided: DecidedCall, arguments: KernelArguments | None
    ) -> str:
        pending = decided.waiting.pending
        function = decided.function
        assert function is not None, "an approved call has its function"
        given = KernelArguments()
        values = cast("dict[str, Any]", given)
        values.update(cast("dict[str, Any]", arguments or {}))
        tool_of(function).put(decided.arguments, values)
        guard = self._guard(function, given, decided.arguments, binds=True)
        try:
            target = guard.guarding(
                runnable(function, tool_of(function), threads=False)
            )
            ended = await caught(
                target.invoke(kernel, given, metadata={"id": pending.id})
            )
        finally:
            guard.end()
        if not isinstance(ended, Raised):
            return result_text(ended)
        if isinstance(ended.error, ApprovedArgumentsChangedError | NotRunAgainError):
            return str(ended.error)
        _logger.error(
            "The approved function %s failed.",
            pending.fully_qualified_name,
            exc_info=ended.error,
        )
        return f"The function {pending.fully_qualified_name} failed."


def _show_decided(decided: DecidedCall) -> None:
    decision = decided.decision
    if isinstance(decision, Approve) and decision.arguments is not None:
        show_edit(decided.waiting.call, decided.arguments)


def _review(filters: Sequence[CallFilter], function: KernelFunction) -> Review:
    mark = approval_required(function)
    edit = partial(edited_call, {function.fully_qualified_name: function}, _STOCK_RUN)
    return Review(
        chains=(), filters=[one.chain(lambda _: mark) for one in filters], edit=edit
    )


async def _after_question(
    filters: Sequence[CallFilter],
    call: ToolCall,
    function: KernelFunction,
    question: Defer,
) -> Reviewed | None:
    """Return what the filters behind the one that asked say about an approved call; or None."""
    mark = approval_required(function)
    chains = [one.chain(lambda _: mark) for one in filters]
    decisions = [await chain.decide(call, State()) for chain in chains]
    places = [
        place
        for place, one in enumerate(decisions)
        if isinstance(one, Defer) and is_same(one, question)
    ]
    for decision in decisions[places[0] + 1 if places else 0 :]:
        match decision:
            case Deny() | Supply():
                return Reviewed(decision=decision)
            case Defer() if not is_same(decision, question):
                return Reviewed(decision=decision, question=decision)
            case _:
                pass
    return None


async def _always() -> bool:
    """Let a function start again: nothing counts the starts of a stock kernel."""
    return True


async def _guarded(context: Any, next: Next, guard: CallGuard) -> None:
    function: KernelFunction = context.function
    if not isinstance(context, AutoFunctionInvocationContext):

        async def guarded(inner: Any, next: Next) -> None:
            await guard.run_for(function, inner, next)

        await behind_filters(next, lambda run: partial(guarded, next=run))(context)
        return
    target = guard.guarding(function)

    def last(run: Next) -> Next:
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


def _described(
    context: AutoFunctionInvocationContext | FunctionInvocationContext, *, in_run: bool
) -> ToolCall | InvalidArguments:
    content = (
        context.function_call_content
        if isinstance(context, AutoFunctionInvocationContext)
        else None
    )
    tool = tool_of(context.function)
    values = cast("dict[str, Any]", context.arguments)
    if tool.refusal:
        return InvalidArguments(message=tool.refusal)
    # In a view of a kernel the run's gate passes the value itself.
    if tool.unasked and not in_run and tab_in(context.kernel) is None:
        return InvalidArguments(
            message=_INJECTS.format(tool.name, ", ".join(sorted(tool.unasked)))
        )
    if content is not None and not content.id:
        # Semantic Kernel would answer it as "unknown", which is no call of the history.
        content.id = new_call_id()
    given = None if content is None else _given(content)
    names = tool.parameters if given is None else given
    shown = converted_values(
        {name: values[name] for name in names if name in values}, tool
    )
    if isinstance(shown, InvalidArguments):
        return shown
    return tool_call(
        context.function,
        shown,
        run_id=_STOCK_RUN,
        call_id=tool.name if content is None else content.id or tool.name,
        raw_arguments=arguments_text(shown if content is None else content.arguments),
        iteration=getattr(context, "request_sequence_index", 0),
        index=getattr(context, "function_sequence_index", 0),
        batch_size=getattr(context, "function_count", 1) or 1,
        signature=tool.signature if in_run else "",
        after=before_call(context, current_tab(), in_run=in_run),
    )


def _given(content: FunctionCallContent) -> dict[str, Any] | None:
    """Read a call's arguments as Semantic Kernel will, which takes more than JSON; None if it cannot."""
    try:
        given: Any = content.parse_arguments() or {}
    except (FunctionCallInvalidArgumentsException, RecursionError):
        return None
    return (
        dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else None
    )


def _refusal(reason: str) -> str:
    return f"{_REFUSED}: {reason}" if reason else _REFUSED


def _answer_late(history: ChatHistory) -> None:
    for waiting in waiting_results(history):
        if waiting.is_late:
            replace_result(history, waiting.item, _refusal(_LATE))


def _answer(context: Any, text: str, metadata: Mapping[str, Any] | None = None) -> None:
    result = FunctionResult(
        function=context.function.metadata, value=text, metadata=dict(metadata or {})
    )
    if isinstance(context, AutoFunctionInvocationContext):
        context.function_result = result
    else:
        context.result = result
