"""How one function runs: the options, a copy that Semantic Kernel can run, a guard behind the filters, and its result.

A function that nothing watches is called past Semantic Kernel's ``invoke``: see
`invoked`. The kernel's own function objects are not changed. Must not know the run, nor
who decided.
"""

import asyncio
import inspect
import json
import logging
import sys
from collections import UserString
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

from opentelemetry.trace import INVALID_SPAN
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from semantic_kernel import Kernel
from semantic_kernel.contents import (
    ChatMessageContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.contents.kernel_content import KernelContent
from semantic_kernel.filters import FunctionInvocationContext
from semantic_kernel.functions import (
    FunctionResult,
    KernelArguments,
    KernelFunction,
    KernelFunctionFromMethod,
)
from semantic_kernel.utils.telemetry.model_diagnostics import function_tracer

from planner_ext.core.errors import require, suggests_names
from planner_ext.core.limits import is_count, is_positive_number
from planner_ext.core.values import frozen
from planner_ext.engine.concurrency import contained, in_thread
from planner_ext.engine.log import is_listening, is_set
from planner_ext.sk.errors import PlannerException
from planner_ext.sk.functions.toolset import Tool, unconverted_parameter

NOT_WRITABLE = "The function returned a result that could not be written as JSON."
"""The model reads this for a result that has no text, such as one that contains itself."""

_ABSENT: Final = object()
_ATTACHED: Final = "_planner_ext_guard"

_WRITTEN: Final = (str, int, float, dict, list, tuple, BaseModel)
"""Types that are compared by value; writing another object may use it up, as a generator."""

_T = TypeVar("_T")

_Unchanged: TypeAlias = Callable[[Mapping[str, Any]], bool]
"""Says whether arguments are still those that were approved."""

Next: TypeAlias = Callable[[Any], Awaitable[None]]
"""Runs the rest of a stack of filters on a context."""

_logger = logging.getLogger(__name__)


@suggests_names
@frozen
class ToolExecution:
    """How the functions of a run are executed. Each option is checked when it is given.

    Attributes:
        max_concurrency: Functions of one batch that run at the same time. Checked
            before each start; over it, a function waits for another one to end. 1 runs
            them in call order, None all at once.
        timeout: Seconds of one call, for every function or by fully qualified name
            (others have none; an unknown name is refused when a run begins): the
            function and its function-invocation filters, but not the
            auto-function-invocation filters, which may wait for a person. Then it is
            cancelled, the model reads that it did not answer in time and that its
            effect is not known, and the run continues. One that does not end within a
            second of its cancellation is left behind. None leaves only the run's own
            (``deadline``, ``max_active_seconds``).
        on_error: What follows when a function raises: ``"report"`` tells the model,
            ``"raise"`` ends the run with ``ToolExecutionError`` when all calls of the
            batch have ended. ``SystemExit`` and any exception in a thread count. An
            interrupt on the event loop itself passes, and leaves the call in doubt.
        include_error_detail: Whether the model also reads type and message of a
            function's exception, which may hold paths, hosts or keys.
        stop_on_unknown_function: Whether a call of a function that was not offered ends
            the run, once its batch is answered. Otherwise the model reads which there
            are.
        threads: Whether synchronous functions run in threads, so that they do not block
            the event loop. On cancellation or timeout the thread is abandoned, not
            stopped. Without threads, nothing can interrupt them.
        max_threads: Synchronous functions of one run in threads at the same time,
            without abandoned ones. Checked before each start; over it, a function waits
            for another one to end. None means no limit.

    Raises:
        InvalidOptionError: On an invalid value.
    """

    max_concurrency: int | None = None
    timeout: float | Mapping[str, float] | None = None
    on_error: Literal["report", "raise"] = "report"
    include_error_detail: bool = False
    stop_on_unknown_function: bool = False
    threads: bool = True
    max_threads: int | None = 64

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "max_threads"):
            count = getattr(self, name)
            fits = count is None or is_count(count, least=1)
            expected = "a whole number, 1 or more, or None for all at once"
            require(f"ToolExecution.{name}", fits, expected, count)
        known = self.on_error in ("report", "raise")
        require("ToolExecution.on_error", known, '"report" or "raise"', self.on_error)
        for name in ("include_error_detail", "stop_on_unknown_function", "threads"):
            value = getattr(self, name)
            fits = isinstance(value, bool)
            require(f"ToolExecution.{name}", fits, "True or False", value)
        if not isinstance(self.timeout, Mapping):
            fits = self.timeout is None or is_positive_number(self.timeout)
            expected = "a number of seconds above 0, a mapping of function names to such, or None for none"
            require("ToolExecution.timeout", fits, expected, self.timeout)
            return
        for key, seconds in cast("Mapping[object, object]", self.timeout).items():
            expected = (
                "fully qualified function names as keys, such as 'plugin-function'"
            )
            require("ToolExecution.timeout", isinstance(key, str), expected, key)
            name = f"ToolExecution.timeout[{key!r}]"
            expected = (
                "a number of seconds above 0 (leave the function out for no timeout)"
            )
            require(name, is_positive_number(seconds), expected, seconds)

    def timeout_of(self, function: str) -> float | None:
        """@private Return the seconds that a fully qualified function has; or None."""
        return (
            self.timeout.get(function)
            if isinstance(self.timeout, Mapping)
            else self.timeout
        )


def runnable(function: KernelFunction, tool: Tool, *, threads: bool) -> KernelFunction:
    """Return the function to invoke for a kernel's own: the same one, or a copy of the same class, name and metadata.

    It is a copy where Semantic Kernel would

    - run a synchronous method on the event loop,
    - fail to convert ``Annotated[Optional[X], ...]`` or ``Literal["x"]``,
    - omit an argument ``p: X | None`` that the model omitted and Python requires,
    - fill in a parameter that only a schema names so: kernel, service, arguments,
    - or fail to pass a keyword that has the name of a bound parameter (MCP tools).
    """
    if not isinstance(function, KernelFunctionFromMethod):
        return function
    threaded = threads and tool.blocks
    update = dict[str, Any]()
    method: Callable[..., Any] = (
        _taking_keywords(function.method, tool.loose) if tool.loose else function.method
    )
    if threaded or tool.absent:
        method = partial(_run_in_thread if threaded else _run, method, tool.absent)
    if method is not function.method:
        update["method"] = method
    declared = list(zip(function.parameters, tool.kinds, strict=True))
    if any(own.type_object is not kind for own, kind in declared):
        parameters = [
            own.model_copy(update={"type_object": kind}) for own, kind in declared
        ]
        update["metadata"] = function.metadata.model_copy(
            update={"parameters": parameters}
        )
    copied = function.model_copy(update=update) if update else function
    return _passing(copied, tool) if tool.unasked else copied


def _passing(function: KernelFunctionFromMethod, tool: Tool) -> KernelFunction:
    """Copy a function that takes `Tool.unasked` from its arguments, which Semantic Kernel does not gather."""
    names = tool.unasked & tool.parameters.keys()
    others = [one for one in function.parameters if one.name not in tool.unasked]
    gathering = function.model_copy(
        update={"metadata": function.metadata.model_copy(update={"parameters": others})}
    )

    def given(arguments: Mapping[str, Any]) -> KernelFunctionFromMethod:
        values = {name: arguments[name] for name in names if name in arguments}
        return gathering.model_copy(
            update={"method": partial(gathering.method, **values)}
        )

    async def invoke_internal(context: FunctionInvocationContext) -> None:
        await given(context.arguments)._invoke_internal(context)  # pyright: ignore[reportPrivateUsage]

    async def invoke_internal_stream(context: FunctionInvocationContext) -> None:
        await given(context.arguments)._invoke_internal_stream(context)  # pyright: ignore[reportPrivateUsage]

    copied = function.model_copy()
    vars(copied).update(
        _invoke_internal=invoke_internal, _invoke_internal_stream=invoke_internal_stream
    )
    return copied


def _taking_keywords(method: Callable[..., Any], names: Set[str]) -> Callable[..., Any]:
    called: Any = getattr(method, "func", method)  # of a partial
    given: tuple[Any, ...] = getattr(method, "args", ())
    keywords: dict[str, Any] = getattr(method, "keywords", {})
    if inspect.ismethod(called):
        given = (called.__self__, *given)
    target = getattr(called, "__func__", called)
    if not isinstance(target, FunctionType):
        return method
    code = target.__code__
    taken = min(len(given), code.co_argcount)
    if names.isdisjoint(code.co_varnames[:taken]):
        return method
    code = code.replace(co_posonlyargcount=taken)
    copied = FunctionType(
        code,
        target.__globals__,
        target.__name__,
        target.__defaults__,
        target.__closure__,
    )
    copied.__kwdefaults__ = target.__kwdefaults__
    return partial(copied, *given, **keywords)


def _run(
    method: Callable[..., Any], absent: Mapping[str, None], /, **arguments: Any
) -> Any:
    return method(**{**absent, **arguments})


async def _run_in_thread(
    method: Callable[..., Any], absent: Mapping[str, None], /, **arguments: Any
) -> Any:
    """Await what a synchronous method returns: Semantic Kernel does not look behind a coroutine's result."""

    def called() -> Any:
        result = method(**{**absent, **arguments})
        return (
            list(cast("Generator[Any, None, None]", result))
            if inspect.isgenerator(result)
            else result
        )

    result = await in_thread(called)
    if inspect.isasyncgen(result):
        return [item async for item in cast("AsyncGenerator[Any, None]", result)]
    return await result if inspect.isawaitable(result) else result


INVOKING: Mapping[str, str] = {
    "invoke": "01c8b6fdcd2df636",
    "_handle_exception": "092246fe63fe667c",
    "_invoke_internal": "2b83f8df5b4eb857",
    "gather_function_parameters": "7cefdcde887e46e0",
}
"""Methods of a function that `invoked` replaces or calls, with the digests of their sources."""

STACKING: Mapping[str, str] = {"construct_call_stack": "7fd44785b4cfd866"}
"""The method of a kernel that `invoked` replaces, likewise."""

_INVOKING_MODULE: Final[Any] = sys.modules[KernelFunction.__module__]
"""Where ``invoke`` has its logger and tracer; the package has the decorator under the module's name."""


@dataclass(slots=True)
class _Unwatched:
    kernel: Kernel
    arguments: KernelArguments
    result: FunctionResult | None = None


def is_observed(kernel: Kernel) -> bool:
    """Whether something may see invocations: a log, a tracer, a meter, another method."""
    return bool(
        _INVOKING_MODULE.logger.isEnabledFor(logging.INFO)
        or is_listening()
        or is_set(_INVOKING_MODULE.tracer)
        or function_tracer.are_sensitive_events_enabled()
        or not _is_stock(KernelFunctionFromMethod, INVOKING)
        or not _is_stock(type(kernel), STACKING)
    )


def invoked(
    function: KernelFunction,
    kernel: Kernel,
    arguments: KernelArguments,
    call_id: str,
    *,
    observed: bool,
) -> Coroutine[Any, Any, FunctionResult | None]:
    """Invoke a function: directly where nobody could tell, else by its ``invoke``.

    ``invoke`` adds a context, the filters, a span, a metric and lines of a log.
    ``observed`` is what `is_observed` returned for this batch.
    """
    if observed or _is_watched(function, kernel):
        return function.invoke(kernel, arguments, metadata={"id": call_id})
    return _invoked_directly(function, _Unwatched(kernel, arguments))


def _is_watched(function: KernelFunction, kernel: Kernel) -> bool:
    listed: Any = kernel  # its lists of filters are typed in part only
    return bool(
        listed.function_invocation_filters
        or type(function) is not KernelFunctionFromMethod
        or is_set(function.invocation_duration_histogram)
        or not INVOKING.keys().isdisjoint(vars(function))
        or not STACKING.keys().isdisjoint(vars(kernel))
    )


def _is_stock(kind: type, members: Mapping[str, str]) -> bool:
    methods = [getattr(kind, name, None) for name in members]
    return _are_own(tuple(methods), tuple(members.values()))


@lru_cache(maxsize=16)
def _are_own(methods: tuple[Any, ...], digests: tuple[str, ...]) -> bool:
    from planner_ext.sk.members import is_own  # noqa: PLC0415  (loaded by the first call of a function)

    return all(map(is_own, methods, digests))


async def _invoked_directly(
    function: Any, context: _Unwatched
) -> FunctionResult | None:
    try:
        await function._invoke_internal(context)
    except Exception as error:
        function._handle_exception(INVALID_SPAN, error, {})  # which logs it
        raise
    return context.result


def result_text(value: Any) -> str:
    """Write a function's result for the model, as text that UTF-8 can encode, or `NOT_WRITABLE`.

    A string is itself and None is "". Messages and contents are their text, a list of
    them one below the other. Everything else is compact JSON as pydantic writes it:
    not-a-number and infinities are null, bytes are text or base64, any mapping is an
    object and any sequence a list, and an unknown object is its ``str``.
    """
    try:
        return sendable(_text(value))
    except (
        Exception,
        SystemExit,
    ):
        # A result may be any object, and its methods may raise anything.
        _logger.warning(
            "A result of type %s could not be written as JSON.", type(value).__name__
        )
        return NOT_WRITABLE


def sendable(text: str) -> str:
    """Join surrogate pairs, and replace lone surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case str():
            return str.__str__(value)
        case FunctionResult():
            return _text(value.value)
        case ChatMessageContent():
            return "".join(
                item.text for item in value.items if isinstance(item, TextContent)
            )
        case FunctionResultContent():
            return _text(value.result)
        case KernelContent():
            return str(value)
        case [KernelContent(), *rest] if all(
            isinstance(item, KernelContent) for item in rest
        ):
            return "\n".join(map(_text, cast("list[KernelContent]", value)))
        case _:
            return _json(value)


def _json(value: Any) -> str:
    try:
        return to_json(value, inf_nan_mode="null", fallback=_plain).decode()
    except PydanticSerializationError:
        # Bytes or surrogates that are not UTF-8; the slower way accepts both.
        keyed = _with_sendable_keys(value)
        plain = to_jsonable_python(
            keyed, inf_nan_mode="null", bytes_mode="base64", fallback=_plain
        )
        return json.dumps(
            plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )


def _plain(value: Any) -> Any:
    """Write what pydantic does not know, such as a ``MappingProxyType`` or a ``deque``."""
    match value:
        case Mapping():
            return dict(cast("Mapping[Any, Any]", value))
        case Sequence() if not isinstance(value, UserString):
            return list(cast("Sequence[Any]", value))
        case _:
            return str(value)


def _with_sendable_keys(value: Any) -> Any:
    match value:
        case dict():
            items = cast("dict[Any, Any]", value).items()
            return {
                sendable(k) if isinstance(k, str) else k: _with_sendable_keys(v)
                for k, v in items
            }
        case list():
            return [_with_sendable_keys(item) for item in cast("list[Any]", value)]
        case _:
            return value


class ApprovedArgumentsChangedError(PlannerException):
    """A filter changed a function or arguments that an approval binds; nothing ran."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"The function {function} was not run: a filter of the application changed what had been approved."
        )


class NotRunAgainError(PlannerException):
    """A filter asked for another run of a call that is in doubt or has ended; nothing ran."""


@dataclass(eq=False, repr=False)
class CallGuard:
    """Lets the function of one call run: once, and again only where ``restart`` allows it.

    A filter may change its context, and call ``next`` several times, even after the
    call has ended. So the guard stands behind the last filter. A further ``next`` that
    may not run the function gets the outcome of the last run.

    Attributes:
        unchanged: Whether arguments are those that were decided on; None if they may
            change.
        binds: Whether nothing runs with other arguments.
        restart: Records another start, and returns whether it may happen; None allows
            one.
        decided: The approval filters that do not decide the call again.
        each_once: Whether such a filter decides again where its call passes again.
    """

    name: str
    _: KW_ONLY
    unchanged: _Unchanged | None
    binds: bool = True
    restart: Callable[[], Awaitable[bool]] | None
    decided: Iterable[object] = ()
    each_once: bool = False
    _outcome: "asyncio.Future[FunctionResult | BaseException | None] | None" = field(
        default=None, init=False
    )
    _ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._bound = (
            [self.unchanged] if self.binds and self.unchanged is not None else []
        )
        self._decided = list(self.decided)

    def end(self) -> None:
        """Let nothing run from now on."""
        self._ended = True

    def guarding(self, function: KernelFunction) -> KernelFunction:
        """Copy a function so that it runs through this guard: Semantic Kernel calls ``_invoke_internal`` last."""
        guarded = function.model_copy()

        async def invoke_internal(context: FunctionInvocationContext) -> None:
            await self.run_for(guarded, context, function._invoke_internal)  # pyright: ignore[reportPrivateUsage]

        vars(guarded)["_invoke_internal"] = invoke_internal
        self.attach(guarded)
        return guarded

    def join(self, other: "CallGuard") -> None:
        """Also bind the call to what a filter approved meanwhile."""
        self._bound += other._bound
        self._decided += other._decided

    def attach(self, to: object) -> None:
        """Attach this guard to a function or a filter's context, for `guard_of`."""
        vars(to)[_ATTACHED] = self

    def decided_by(
        self, decides: Callable[[object], bool], arguments: Mapping[str, Any]
    ) -> bool:
        """Whether such a filter has decided the call with these arguments."""
        found = next((one for one in self._decided if decides(one)), None)
        if found is not None and self.each_once:
            self._decided.remove(found)
        return found is not None and (
            self.unchanged is None or self.unchanged(arguments)
        )

    async def run_for(
        self,
        function: KernelFunction,
        context: FunctionInvocationContext,
        work: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Run the work, which invokes this function, on a context, or put the last outcome in it.

        Raises:
            ApprovedArgumentsChangedError: If the context is another function's, or the
                approved arguments changed.
            NotRunAgainError: If the call has ended, or was cancelled while it ran.
        """
        if context.function is not function:
            raise ApprovedArgumentsChangedError(self.name)
        self._check(context)
        last = self._outcome
        if self._ended or (last is not None and not await self._may_run_again()):
            await self._repeat(last, context)
            return
        self._check(context)  # once more: to record another start takes its time
        outcome = self._outcome = asyncio.get_running_loop().create_future()
        try:
            await contained(work(context))
        except Exception as error:
            outcome.set_result(error)
            if unconverted_parameter(error) is not None and self._outcome is outcome:
                self._outcome = last  # the function was not reached: a filter may correct its arguments
            raise
        except BaseException:
            text = f"The function {self.name} was cancelled while it ran, and not run again; its effect is not known."
            outcome.set_result(NotRunAgainError(text))
            raise
        outcome.set_result(
            None if context.result is None else context.result.model_copy()
        )

    def _check(self, context: Any) -> None:
        if not all(unchanged(context.arguments) for unchanged in self._bound):
            raise ApprovedArgumentsChangedError(self.name)

    @property
    def _once(self) -> str:
        if self.restart is None:
            return (
                "A filter called next again for %s, and the function was not run again: one decision is one start. The "
                'filter got the last outcome. If a second run does no harm, declare the function @effect("idempotent").'
            )
        return (
            "A filter called next again for %s, and the function was not run again: the run is ending, or its budget "
            "allows no further start. The filter got the last outcome."
        )

    async def _may_run_again(self) -> bool:
        return self.restart is not None and await self.restart() and not self._ended

    async def _repeat(
        self,
        last: "asyncio.Future[FunctionResult | BaseException | None] | None",
        context: Any,
    ) -> None:
        if self._ended or last is None:
            raise NotRunAgainError(
                f"The function {self.name} was not run: its call has ended."
            )
        _logger.warning(self._once, self.name)
        outcome = await asyncio.shield(last)
        if isinstance(outcome, BaseException):
            raise outcome
        context.result = None if outcome is None else outcome.model_copy()


def guard_of(value: object) -> CallGuard | None:
    """Find the guard of a function, or of a filter's context; or None."""
    return vars(value).get(_ATTACHED)


def in_place(
    next: Next, function: KernelFunction, target: KernelFunction, *, streaming: bool
) -> Next:
    """Run another copy of the function behind the last filter."""
    private: Any = target
    run: Next = (
        private._invoke_internal_stream if streaming else private._invoke_internal
    )
    guard = guard_of(function)
    if guard is not None:
        run = partial(guard.run_for, function, work=run)
    return behind_filters(next, lambda _: run)


def behind_filters(next: Next, last: Callable[[Next], Next]) -> Next:
    """Wrap the innermost of a stack of filters, which Semantic Kernel makes of partials of ``(context, next)``."""
    outer: Any = next
    if not isinstance(outer, partial) or "next" not in outer.keywords:
        return last(next)
    outer = cast("partial[Awaitable[None]]", outer)
    inner = behind_filters(outer.keywords["next"], last)
    return partial(outer.func, *outer.args, **{**outer.keywords, "next": inner})


def watch(arguments: Mapping[str, Any], names: Iterable[str]) -> _Unchanged:
    """Remember arguments by value, absent ones included; a filter may change a value in place."""
    before = {name: _snapshot(arguments.get(name, _ABSENT)) for name in names}

    def unchanged(now: Mapping[str, Any]) -> bool:
        return all(
            _is_same(snapshot, _snapshot(now.get(name, _ABSENT)))
            for name, snapshot in before.items()
        )

    return unchanged


def _snapshot(value: object) -> tuple[object, object]:
    """Write a value so that a change is detected; what cannot be written is compared by identity."""
    kind: object = type(value)
    written: object = value
    if isinstance(value, _WRITTEN):
        with suppress(
            PydanticSerializationError, ValueError, TypeError, RecursionError
        ):
            written = to_json(value, inf_nan_mode="constants")
    return kind, written


def _is_same(one: tuple[object, object], other: tuple[object, object]) -> bool:
    written = (
        isinstance(one[1], bytes) and isinstance(other[1], bytes) and one[1] == other[1]
    )
    return one[0] is other[0] and (written or one[1] is other[1])
