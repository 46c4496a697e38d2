"""Calling the kernel's functions: one call resolved and checked, one call run through the application's filters.

Only an offered function runs. The application's kernel, functions and arguments are not
changed. Every outcome but cancellation is a value. Must not know the loop, nor decide
whether a call may run.
"""

import json
import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, partial
from typing import Any, Final, cast

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.filters import AutoFunctionInvocationContext, FilterTypes
from semantic_kernel.functions import FunctionResult, KernelArguments, KernelFunction

from planner_ext.core.accounts import current_tab
from planner_ext.core.errors import described
from planner_ext.core.facts import CallDecided
from planner_ext.core.state import READ_RESULT, State
from planner_ext.core.values import RequestedCall, ResolvedCall
from planner_ext.engine.concurrency import (
    OutOfTime,
    Raised,
    caught,
    in_time,
    seconds_from_now,
    time_left,
)
from planner_ext.engine.effects import KEY_PARAMETER, TIME_PARAMETER, idempotency_key
from planner_ext.engine.ports import Finished
from planner_ext.sk.charging.nested import (
    ParentRun,
    Wrap,
    may_be_called_again,
    refusal_in,
)
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object, quoted
from planner_ext.sk.functions.execution import (
    ApprovedArgumentsChangedError,
    CallGuard,
    NotRunAgainError,
    ToolExecution,
    invoked,
    is_observed,
    result_text,
    runnable,
    sendable,
    watch,
)
from planner_ext.sk.functions.toolset import (
    Tool,
    ToolSet,
    conversion_problem,
    convert_arguments,
    read_result,
)
from planner_ext.sk.messages import names_in

NOT_RUN_BY_FILTER: Final = (
    "Not executed: a filter of the application did not run this function."
)
"""The model reads this where a filter neither ran the function nor set a result."""

_NOTHING_CUT: Final = (
    f"There is no function {READ_RESULT} now: no result of this request was cut, and those of earlier requests are not "
    "kept. Call the function of such a result again."
)
_NAMES_SHOWN: Final = 50
_DETAIL_CHARACTERS: Final = 2000

_JSON: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
)

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """One call that is about to run; ``target`` is invoked, with a guard where there are filters."""

    call: RequestedCall
    checked: ResolvedCall
    function: KernelFunction
    tool: Tool
    decided: CallDecided | None
    arguments: KernelArguments
    target: KernelFunction
    observed: bool


@dataclass(eq=False, repr=False)
class KernelFunctions:
    """The functions of a kernel, as the loop calls them; implements `planner_ext.engine.ports.Functions`.

    Attributes:
        arguments: The application's; each call gets a shallow copy, with the model's.
        final_answer, ask_user: The planner's own, recognised by identity; never run.
        settings, streaming: The request's, for filters.
        history: Returns the messages up to this batch, for filters.
        decided_by: Lists the approval filters that decided a call before it ran.
        as_parent: Describes this run to the runs inside its functions, given the
            ``tab`` of the call.
        wrap: Charges the services that functions find.
    """

    kernel: Kernel
    _: KW_ONLY
    tools: ToolSet
    arguments: KernelArguments | None
    execution: ToolExecution
    final_answer: KernelFunction | None = None
    ask_user: KernelFunction | None = None
    settings: PromptExecutionSettings | None = None
    history: Callable[[State], ChatHistory]
    streaming: bool = False
    decided_by: Callable[[CallDecided | None], Sequence[object]] = lambda _: ()
    as_parent: Callable[..., ParentRun] | None = None
    wrap: Wrap | None = None
    _runnable: dict[str, tuple[KernelFunction, KernelFunction]] = field(
        default_factory=dict[str, tuple[KernelFunction, KernelFunction]], init=False
    )
    _observed: bool = field(default=True, init=False)
    _looked_in: int | None = field(default=None, init=False)
    """The iteration in which `is_observed` was asked last: asking takes half as long as a call."""

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        """Resolve a call by the exact name of an offered function, and validate its arguments.

        ``edited`` is JSON text of arguments that replace the model's. A call that is
        ``unknown`` or ``invalid`` has an answer that the model can act on.
        """
        name = call.name
        if name in self.tools.schema_only:
            return ResolvedCall(kind="external", function=name, arguments={})
        function = self.tools.functions.get(name)
        if function is None:
            # A note in the history of an earlier run may name this function.
            reads = name == READ_RESULT
            answer = _NOTHING_CUT if reads else self._unknown(name)
            return ResolvedCall(
                kind="invalid" if reads else "unknown",
                function=name,
                arguments={},
                answer=answer,
            )
        tool = self.tools.tools[name]
        given = parse_object(call.arguments if edited is None else edited)
        parsed = convert_arguments(given, tool)
        if isinstance(parsed, InvalidArguments):
            return _own_call(function, "invalid", parsed.message)
        if function is self.final_answer:
            answer = result_text(cast("dict[str, Any]", given).get("answer"))
            return (
                _own_call(function, "final_answer", answer)
                if answer.strip()
                else _missing(function, "answer")
            )
        converted = None if parsed is given else _JSON.encode(parsed)
        if self.tools.reads and function is read_result():
            return replace(_own_call(function, "read", ""), arguments=parsed)
        if function is self.ask_user:
            question = result_text(parsed.get("question"))
            if not question.strip():
                return _missing(function, "question")
            return replace(
                _own_call(function, "question", question),
                arguments=parsed,
                converted=converted,
            )
        return ResolvedCall(
            kind="function",
            function=name,
            plugin_name=function.plugin_name or "",
            function_name=function.name,
            arguments=parsed,
            converted=converted,
            signature=tool.signature,
            parameters=tool.schema,
            nested=may_be_called_again(function, tool),
            threaded=self.execution.threads and tool.blocks,
            said=tool.said(parsed),
        )

    async def run(
        self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State
    ) -> Finished:
        """Run a function through the application's filters; see `planner_ext.engine.ports.Functions`."""
        tab = current_tab()
        if tab is not None:
            tab.around = self.as_parent
            tab.names_in = names_in
        function = self.tools.functions.get(checked.function)
        if function is None:
            text = self._unknown(checked.function)
            return Finished(
                outcome="failed",
                text=text,
                error=f"{checked.function} is no longer offered.",
            )
        run = self._start(call, checked, function, state, index)
        if tab is not None and self.wrap is not None and run.tool.asks_model:
            from planner_ext.sk.charging.view import with_own_view  # noqa: PLC0415  (only where it asks a model)

            own = with_own_view(function, tab, self.wrap)
            if own is not function:
                run.target = runnable(own, run.tool, threads=self.execution.threads)
        kernel: Any = self.kernel  # its lists of filters are typed in part only
        if not (
            kernel.auto_function_invocation_filters
            or kernel.function_invocation_filters
        ):
            return _unfiltered(await self._invoke(run, function, run.arguments))
        guard = self._guard(run)
        run.target = guard.guarding(run.target)
        try:
            if kernel.auto_function_invocation_filters:
                return await self._run_filtered(run, guard, state, index)
            return _unfiltered(await self._invoke(run, function, run.arguments))
        finally:
            guard.end()

    def encode(self, result: Any) -> str:
        """Turn a value into the text that the model reads as a function's result."""
        return result_text(result)

    def _unknown(self, name: str) -> str:
        names = list(
            dict.fromkeys([*self.tools.functions, *sorted(self.tools.schema_only)])
        )
        if not names:
            return f"There is no function {quoted(name)}, and no other may be called now. Answer without functions."
        more = (
            f", and {len(names) - _NAMES_SHOWN} more"
            if len(names) > _NAMES_SHOWN
            else ""
        )
        return (
            f"There is no function {quoted(name)}. Call one of these by its exact name: "
            f"{', '.join(names[:_NAMES_SHOWN])}{more}."
        )

    def _start(
        self,
        call: RequestedCall,
        checked: ResolvedCall,
        function: KernelFunction,
        state: State,
        index: int,
    ) -> _Run:
        tool = self.tools.tools[checked.function]
        known, target = self._runnable.get(checked.function, (None, function))
        if known is not function:
            target = runnable(function, tool, threads=self.execution.threads)
            self._runnable[checked.function] = (function, target)
        batch = state.batch
        assert batch is not None, "a call is run while its batch is open"
        arguments = (
            KernelArguments() if self.arguments is None else copy(self.arguments)
        )
        values = cast("dict[str, Any]", arguments)
        tool.put(checked.arguments, values)
        if KEY_PARAMETER in tool.injected:
            values[KEY_PARAMETER] = idempotency_key(
                state.run_id, batch.iteration, call.id
            )
        decided = batch.calls[index].decided
        if decided is not None and decided.edited is not None:
            call = replace(call, arguments=decided.edited)
        if batch.iteration != self._looked_in:
            self._looked_in = batch.iteration
            self._observed = is_observed(self.kernel)
        return _Run(
            call, checked, function, tool, decided, arguments, target, self._observed
        )

    def _guard(self, run: _Run) -> CallGuard:
        """Bind filters to what was decided: no other call, and no second run unless it is safe."""
        binds = run.decided is not None and run.decided.binds
        filters = self.decided_by(run.decided)
        tab = current_tab() if run.tool.restarts else None
        bound = {KEY_PARAMETER, *run.checked.arguments, *run.tool.parameters}
        return CallGuard(
            run.checked.function,
            unchanged=watch(run.arguments, bound) if binds or filters else None,
            binds=binds,
            restart=None if tab is None else tab.restart,
            decided=filters,
        )

    async def _run_filtered(
        self, run: _Run, guard: CallGuard, state: State, index: int
    ) -> Finished:
        function = run.function
        batch = state.batch
        assert batch is not None, "a call is run while its batch is open"
        context = _context_class()(
            function=function,
            kernel=self.kernel,
            arguments=run.arguments,
            is_streaming=self.streaming,
            chat_history=self.history(state),
            function_call_content=FunctionCallContent(
                id=run.call.id,
                name=run.checked.function,
                function_name=function.name,
                plugin_name=function.plugin_name or None,
                arguments=run.call.arguments,
            ),
            execution_settings=self.settings,
            function_result=FunctionResult(function=function.metadata, value=None),
            function_count=len(batch.calls),
            request_sequence_index=batch.iteration,
            function_sequence_index=index,
        )
        guard.attach(context)
        outcomes: list[FunctionResult | Finished | None] = []

        async def inner(context: AutoFunctionInvocationContext) -> None:
            ended = await self._invoke(run, context.function, context.arguments)
            outcomes.append(ended)
            if isinstance(ended, Finished):
                ended = FunctionResult(
                    function=context.function.metadata, value=ended.text
                )
            if ended is not None:
                context.function_result = ended

        async def through_filters() -> None:
            """Run the filters; one that does not take ``(context, next)``, Semantic Kernel's names, fails here."""
            await self.kernel.construct_call_stack(
                FilterTypes.AUTO_FUNCTION_INVOCATION, inner
            )(context)

        outcome = await caught(through_filters())
        if isinstance(outcome, Raised):
            _logger.warning(
                "A filter around %s failed.",
                run.checked.function,
                exc_info=outcome.error,
            )
            ended = self._failed(run, outcome.error)
        else:
            ended = _after_filters(context.function_result, outcomes)
        return replace(ended, terminate=context.terminate)

    async def _invoke(
        self, run: _Run, function: KernelFunction, arguments: KernelArguments
    ) -> FunctionResult | Finished | None:
        """Run a function through its function-invocation filters; None if they set no result either."""
        name = run.checked.function
        tool = run.tool
        if function is not run.function:
            return self._failed(run, ApprovedArgumentsChangedError(name))
        seconds = self.execution.timeout_of(name)
        if TIME_PARAMETER in tool.injected:
            values = cast("dict[str, Any]", arguments)
            values.pop(TIME_PARAMETER, None)
            left = [limit for limit in (seconds, time_left()) if limit is not None]
            if left:
                # Without a limit the function gets its default, or None.
                values[TIME_PARAMETER] = min(left)
        tab = current_tab()
        kernel = self.kernel
        if tab is not None and self.wrap is not None and tool.asks_model:
            from planner_ext.sk.charging.view import view_of  # noqa: PLC0415  (only where it asks a model)

            kernel = view_of(kernel, tab, self.wrap)
        invocation = invoked(
            run.target, kernel, arguments, run.call.id, observed=run.observed
        )
        if seconds is None:
            outcome = await caught(invocation)
        else:
            outcome = await caught(in_time(invocation, seconds_from_now(seconds)))
        if isinstance(outcome, OutOfTime):
            return self._failed(
                run, _TimedOutError(f"no result within {seconds:g} seconds")
            )
        return (
            self._failed(run, outcome.error) if isinstance(outcome, Raised) else outcome
        )

    def _failed(self, run: _Run, error: BaseException) -> Finished:
        name = run.checked.function
        recorded = sendable(described(error))
        failed = partial(Finished, outcome="failed", error=recorded, exception=error)
        if isinstance(error, _TimedOutError):
            after = f"{self.execution.timeout_of(name):g} seconds; whether it took effect is not known."
            return failed(
                outcome="timed_out",
                text=f"The function {name} did not answer within {after}",
            )
        if isinstance(error, ApprovedArgumentsChangedError | NotRunAgainError):
            return failed(text=str(error))
        if (
            problem := conversion_problem(error, run.tool, run.checked.arguments)
        ) is not None:
            return failed(text=problem)
        refusal = refusal_in(error)
        if refusal is not None:
            return failed(
                text=f"The function {name} could not do all of its work: {refusal}"
            )
        if self.execution.include_error_detail:
            return failed(
                text=f"The function {name} failed: {recorded[:_DETAIL_CHARACTERS]}"
            )
        return failed(text=f"The function {name} failed.")


def _own_call(function: KernelFunction, kind: Any, answer: str) -> ResolvedCall:
    return ResolvedCall(
        kind=kind,
        function=function.fully_qualified_name,
        plugin_name=function.plugin_name or "",
        function_name=function.name,
        arguments={},
        answer=answer,
    )


def _missing(function: KernelFunction, what: str) -> ResolvedCall:
    return _own_call(
        function,
        "invalid",
        f"{function.fully_qualified_name} was given no {what}. Call it with one.",
    )


def _unfiltered(ended: FunctionResult | Finished | None) -> Finished:
    if isinstance(ended, Finished):
        return ended
    return Finished(
        outcome="ok", text=NOT_RUN_BY_FILTER if ended is None else result_text(ended)
    )


def _after_filters(
    result: FunctionResult | None, outcomes: Sequence[FunctionResult | Finished | None]
) -> Finished:
    last = outcomes[-1] if outcomes else None
    failure = last if isinstance(last, Finished) else None
    if failure is not None and result is not None and result.value is failure.text:
        return failure
    if any(one is not None for one in outcomes) or (
        result is not None and result.value is not None
    ):
        return Finished(
            outcome="ok",
            text=result_text(result),
            error="" if failure is None else failure.error,
        )
    return Finished(outcome="ok", text=NOT_RUN_BY_FILTER)


@cache
def _context_class() -> type[AutoFunctionInvocationContext]:
    """Resolve the names in the context's annotations, as Semantic Kernel does; each is imported here."""
    AutoFunctionInvocationContext.model_rebuild(_types_namespace=globals())
    return AutoFunctionInvocationContext


class _TimedOutError(TimeoutError):
    """The timeout of the execution options, as opposed to a function's own."""
