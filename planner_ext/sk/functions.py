"""Calling the kernel's functions: one call resolved and checked, one call run through the application's filters.

Promises that only a function that was offered runs, under the name that was decided on, with arguments it declares to
the model; that what the application gave (kernel, functions, arguments) is not changed; and that whatever happens, but
for cancellation, is a value that says what the model reads. Must not know the loop, nor decide whether a call may run.
"""

import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, cast

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.filters.auto_function_invocation.auto_function_invocation_context import (
    AutoFunctionInvocationContext,
)
from semantic_kernel.filters.filter_types import FilterTypes
from semantic_kernel.functions import FunctionResult, KernelArguments, KernelFunction

from planner_ext.core.accounts import current_tab
from planner_ext.core.facts import CallDecided
from planner_ext.core.state import Call, State
from planner_ext.core.values import RequestedCall, ResolvedCall
from planner_ext.engine.batch import restart_of_call
from planner_ext.engine.concurrency import OutOfTime, in_time, seconds_from_now, time_left
from planner_ext.engine.effects import KEY_PARAMETER, TIME_PARAMETER, Effect, effect_of, idempotency_key, takes
from planner_ext.engine.ports import Finished
from planner_ext.sk.approved import ApprovedArgumentsChangedError, NotRunAgainError, Starts, starts_of, watch
from planner_ext.sk.arguments import (
    InvalidArguments,
    Parameters,
    conversion_problem,
    convert_arguments,
    parameters_of,
    parse_object,
    quoted,
)
from planner_ext.sk.execution import (
    Raised,
    ToolExecution,
    caught,
    result_text,
    runnable,
    runs_in_thread,
    sendable,
    signature_of,
)
from planner_ext.sk.nested import refusal_in
from planner_ext.sk.view import Wrap, may_ask, view_of

__all__ = ["NOT_RUN_BY_FILTER", "KernelFunctions"]

NOT_RUN_BY_FILTER: Final = "Not executed: a filter of the application did not run this function."
"""What the model reads where a filter neither ran the function nor set a result."""

_NAMES_SHOWN: Final = 50
_DETAIL_CHARACTERS: Final = 2000

_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What is worked out once for a function: ``function`` keeps the kernel's own alive, so that its id stays its."""

    function: KernelFunction
    parameters: Parameters
    signature: str
    runnable: KernelFunction
    threaded: bool
    asks_model: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One call that is about to run.

    Attributes:
        target: What is invoked for the function: guarded where there are filters around it.
    """

    call: RequestedCall
    checked: ResolvedCall
    prepared: _Prepared
    arguments: KernelArguments
    target: KernelFunction


class KernelFunctions:
    """The functions of a kernel, as the loop calls them; see `planner_ext.engine.ports.Functions`.

    Args:
        kernel: Whose filters and services the functions get.
        offered: The functions of the last request, by fully qualified name; asked again for each call.
        schema_only: Names of functions that are known by schema only, so that the caller must run them.
        arguments: The application's arguments; each call gets a shallow copy, into which the model's are put.
        execution: How functions are run.
        final_answer: The planner's own final-answer function, recognised by identity; never run.
        ask_user: The function that asks the user, likewise.
        settings: The request's settings, for filters.
        history: The messages up to this batch, for filters; asked only where there are some.
        streaming: Whether requests are streamed, for filters.
        decided_by: Lists the approval filters that decided a call before it ran.
        wrap: How the services are wrapped that functions find, so that their requests are charged to the run.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        offered: Callable[[], Mapping[str, KernelFunction]],
        schema_only: Callable[[], frozenset[str]],
        arguments: KernelArguments | None,
        execution: ToolExecution,
        final_answer: KernelFunction | None = None,
        ask_user: KernelFunction | None = None,
        settings: PromptExecutionSettings | None = None,
        history: Callable[[State], ChatHistory],
        streaming: bool = False,
        decided_by: Callable[[CallDecided | None], Sequence[object]] = lambda _: (),
        wrap: Wrap | None = None,
    ) -> None:
        self._kernel = kernel
        self._wrap = wrap
        self._offered = offered
        self._schema_only = schema_only
        self._arguments = arguments
        self._execution = execution
        self._final_answer = final_answer
        self._ask_user = ask_user
        self._settings = settings
        self._history = history
        self._streaming = streaming
        self._decided_by = decided_by
        self._prepared: dict[int, _Prepared] = {}

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        """Resolve a call by the exact name of a function that was offered, and validate its arguments.

        Args:
            call: As the model asked for it.
            edited: JSON text of arguments that replace the model's.

        Returns:
            What the call is; for ``unknown`` and ``invalid`` with an answer that the model can act on.
        """
        if call.name in self._schema_only():
            return ResolvedCall(kind="external", function=call.name, arguments={})
        function = self._offered().get(call.name)
        if function is None:
            return ResolvedCall(kind="unknown", function=call.name, arguments={}, answer=self._unknown(call.name))
        text = call.arguments if edited is None else edited
        prepared = self._prepare(function)
        given = parse_object(text)
        parsed = convert_arguments(given, prepared.parameters)
        names: dict[str, Any] = {
            "function": call.name,
            "plugin_name": function.plugin_name,
            "function_name": function.name,
        }
        if isinstance(parsed, InvalidArguments):
            return ResolvedCall(kind="invalid", **names, arguments={}, answer=parsed.message)
        if function is self._final_answer:
            answer = result_text(cast("dict[str, Any]", given).get("answer"))
            if not answer.strip():
                problem = f"{call.name} was given no answer. Call it with one."
                return ResolvedCall(kind="invalid", **names, arguments={}, answer=problem)
            return ResolvedCall(kind="final_answer", **names, arguments={}, answer=answer)
        text = None if parsed is given else _JSON.encode(parsed)
        if function is self._ask_user:
            question = result_text(parsed.get("question"))
            if not question.strip():
                problem = f"{call.name} was given no question. Call it with one."
                return ResolvedCall(kind="invalid", **names, arguments={}, answer=problem)
            return ResolvedCall(kind="question", **names, arguments=parsed, converted=text, answer=question)
        return ResolvedCall(
            kind="function",
            **names,
            arguments=parsed,
            converted=text,
            signature=prepared.signature,
            threaded=prepared.threaded,
            asks_model=prepared.asks_model,
        )

    async def run(self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State) -> Finished:
        """Run a function through the application's filters.

        Args:
            call: The call, for its id.
            checked: What `check` made of it.
            index: Its place in the state's open batch.
            state: The run, with the batch open.

        Returns:
            How it ended, and what the model reads.

        Raises:
            asyncio.CancelledError: The run was cancelled.
        """
        function = self._offered().get(checked.function)
        if function is None:
            text = self._unknown(checked.function)
            return Finished(outcome="failed", text=text, error=f"{checked.function} is no longer offered.")
        batch = state.batch
        assert batch is not None, "a call is run while its batch is open"
        key = idempotency_key(state.run_id, batch.iteration, call.id)
        run = self._start(call, checked, function, batch.calls[index], key)
        if not self._has_filters:
            return _unfiltered(await self._invoke(run, function, run.arguments))
        starts = self._starts(run, batch.calls[index].decided)
        run = replace(run, target=starts.guarding(run.target))
        try:
            if self._kernel.auto_function_invocation_filters:  # pyright: ignore[reportUnknownMemberType]
                return await self._run_filtered(run, state, batch.iteration, index, len(batch.calls))
            return _unfiltered(await self._invoke(run, function, run.arguments))
        finally:
            starts.end()

    @property
    def _has_filters(self) -> bool:
        kernel: Any = self._kernel  # its lists of filters are typed in part only
        return bool(kernel.auto_function_invocation_filters or kernel.function_invocation_filters)

    def encode(self, result: Any) -> str:
        """Turn a value into the text that the model reads as a function's result."""
        return result_text(result)

    def _unknown(self, name: str) -> str:
        names = list(dict.fromkeys([*self._offered(), *sorted(self._schema_only())]))
        if not names:
            return f"There is no function {quoted(name)}, and no other may be called now. Answer without functions."
        more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return (
            f"There is no function {quoted(name)}. Call one of these by its exact name: "
            f"{', '.join(names[:_NAMES_SHOWN])}{more}."
        )

    def _prepare(self, function: KernelFunction) -> _Prepared:
        prepared = self._prepared.get(id(function))
        if prepared is None:
            prepared = _Prepared(
                function=function,
                parameters=parameters_of(function),
                signature=signature_of(function),
                runnable=runnable(function, threads=self._execution.threads),
                threaded=self._execution.threads and runs_in_thread(function),
                asks_model=may_ask(function),
            )
            self._prepared[id(function)] = prepared
        return prepared

    def _start(
        self, call: RequestedCall, checked: ResolvedCall, function: KernelFunction, planned: Call, key: str
    ) -> _Run:
        prepared = self._prepare(function)
        arguments = KernelArguments() if self._arguments is None else copy(self._arguments)
        values = cast("dict[str, Any]", arguments)
        prepared.parameters.put(checked.arguments, values)
        if takes(getattr(function, "method", None), KEY_PARAMETER):
            values[KEY_PARAMETER] = key
        decided = planned.decided
        if decided is not None and decided.edited is not None:
            call = replace(call, arguments=decided.edited)
        return _Run(call=call, checked=checked, prepared=prepared, arguments=arguments, target=prepared.runnable)

    def _starts(self, run: _Run, decided: CallDecided | None) -> Starts:
        """Say what filters may make of a call: nothing else of an approved one, and no second run unless it is safe."""
        binds, filters = decided is not None and decided.binds, self._decided_by(decided)
        bound = {KEY_PARAMETER, *run.checked.arguments, *run.prepared.parameters.by_name}
        effect = effect_of(getattr(run.prepared.function, "method", None)) or Effect()
        return Starts(
            run.checked.function,
            unchanged=watch(run.arguments, bound) if binds or filters else None,
            binds=binds,
            restart=None if effect.kind == "once" else restart_of_call(),
            decided=filters,
        )

    async def _run_filtered(self, run: _Run, state: State, iteration: int, index: int, count: int) -> Finished:
        function = run.prepared.function
        _complete_context_class()
        context = AutoFunctionInvocationContext(
            function=function,
            kernel=self._kernel,
            arguments=run.arguments,
            is_streaming=self._streaming,
            chat_history=self._history(state),
            function_call_content=_call_content(run, function),
            execution_settings=self._settings,
            function_result=FunctionResult(function=function.metadata, value=None),
            function_count=count,
            request_sequence_index=iteration,
            function_sequence_index=index,
        )
        if (starts := starts_of(run.target)) is not None:
            starts.attach(context)
        ran = False
        failure: Finished | None = None

        async def inner(context: AutoFunctionInvocationContext) -> None:
            nonlocal ran, failure
            ended = await self._invoke(run, context.function, context.arguments)
            failure = ended if isinstance(ended, Finished) else None
            if isinstance(ended, Finished):
                context.function_result = FunctionResult(function=context.function.metadata, value=ended.text)
            elif ended is not None:
                context.function_result = ended
            ran = ran or ended is not None

        stack = self._kernel.construct_call_stack(FilterTypes.AUTO_FUNCTION_INVOCATION, inner)
        outcome = await caught(_filtered(stack, context))
        if isinstance(outcome, Raised):
            _logger.warning("A filter around %s failed.", run.checked.function, exc_info=outcome.error)
            ended = self._failed(run, outcome.error)
        else:
            ended = _after_filters(context.function_result, ran=ran, failure=failure)
        return replace(ended, terminate=context.terminate)

    async def _invoke(
        self, run: _Run, function: KernelFunction, arguments: KernelArguments
    ) -> FunctionResult | Finished | None:
        """Run a function through its function-invocation filters; None where these did not run it, nor set a result."""
        outcome = await caught(self._invoke_in_time(run, function, arguments))
        return self._failed(run, outcome.error) if isinstance(outcome, Raised) else outcome

    async def _invoke_in_time(
        self, run: _Run, function: KernelFunction, arguments: KernelArguments
    ) -> FunctionResult | None:
        if function is not run.prepared.function:
            raise ApprovedArgumentsChangedError(run.checked.function)
        seconds = self._execution.timeout_of(run.checked.function)
        if takes(getattr(function, "method", None), TIME_PARAMETER):
            _put_time(arguments, min((s for s in (seconds, time_left()) if s is not None), default=None))
        tab, kernel = current_tab(), self._kernel
        if tab is not None and self._wrap is not None and run.prepared.asks_model:
            kernel = view_of(kernel, tab, self._wrap)
        invocation = run.target.invoke(kernel, arguments, metadata={"id": run.call.id})
        return await (invocation if seconds is None else _within(seconds, invocation))

    def _failed(self, run: _Run, error: BaseException) -> Finished:
        name = run.checked.function
        recorded = _described(error)
        if isinstance(error, _TimedOutError):
            seconds = self._execution.timeout_of(name)
            text = (
                f"The function {name} did not answer within {seconds:g} seconds; whether it took effect is not known."
            )
            return Finished(outcome="timed_out", text=text, error=recorded, exception=error)
        text = conversion_problem(error, run.prepared.parameters, run.checked.arguments)
        if isinstance(error, ApprovedArgumentsChangedError | NotRunAgainError):
            text = str(error)
        elif text is None and (refusal := refusal_in(error)) is not None:
            text = f"The function {name} could not do all of its work: {refusal}"
        elif text is None and self._execution.include_error_detail:
            text = f"The function {name} failed: {recorded[:_DETAIL_CHARACTERS]}"
        text = text or f"The function {name} failed."
        return Finished(outcome="failed", text=text, error=recorded, exception=error)


def _put_time(arguments: KernelArguments, left: float | None) -> None:
    """Give a function the seconds that it has; without a limit no argument, so that it gets its default, or None."""
    values = cast("dict[str, Any]", arguments)
    values.pop(TIME_PARAMETER, None)
    if left is not None:
        values[TIME_PARAMETER] = left


async def _within(seconds: float, invocation: Coroutine[Any, Any, FunctionResult | None]) -> FunctionResult | None:
    result = await in_time(invocation, seconds_from_now(seconds))
    if isinstance(result, OutOfTime):
        raise _TimedOutError(f"no result within {seconds:g} seconds")
    return result


def _unfiltered(ended: FunctionResult | Finished | None) -> Finished:
    """What the model reads where no auto-function-invocation filter is around the function."""
    if isinstance(ended, Finished):
        return ended
    return Finished(outcome="ok", text=NOT_RUN_BY_FILTER if ended is None else result_text(ended))


async def _filtered(
    stack: Callable[[AutoFunctionInvocationContext], Coroutine[Any, Any, None]], context: AutoFunctionInvocationContext
) -> None:
    """Run the filters; one that does not take ``(context, next)``, the names that Semantic Kernel uses, fails here."""
    await stack(context)


def _after_filters(result: FunctionResult | None, *, ran: bool, failure: Finished | None) -> Finished:
    """What the model reads after the filters: the function's result, or what one of them put in its place."""
    if failure is not None and result is not None and result.value is failure.text:
        return failure
    skipped = not ran and (result is None or result.value is None)
    return Finished(
        outcome="ok",
        text=NOT_RUN_BY_FILTER if skipped else result_text(result),
        error="" if failure is None else failure.error,
    )


def _call_content(run: _Run, function: KernelFunction) -> FunctionCallContent:
    return FunctionCallContent(
        id=run.call.id,
        name=run.checked.function,
        function_name=function.name,
        plugin_name=function.plugin_name or None,
        arguments=run.call.arguments,
    )


@cache
def _complete_context_class() -> None:
    """Resolve the names in the context's annotations, as Semantic Kernel does before it makes one."""
    types: tuple[type, ...] = (
        ChatHistory,
        FunctionCallContent,
        FunctionResult,
        Kernel,
        KernelArguments,
        KernelFunction,
        PromptExecutionSettings,
    )
    AutoFunctionInvocationContext.model_rebuild(_types_namespace={one.__name__: one for one in types})


class _TimedOutError(TimeoutError):
    """The timeout of the execution options, as opposed to one that a function raised itself."""


def _described(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    return sendable(f"{type(error).__name__}: {text}" if text else type(error).__name__)
