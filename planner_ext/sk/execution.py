"""What a function takes, as a text to compare: one of the same name that takes something else is another function."""

import asyncio
import inspect
import json
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Literal, TypeVar, cast

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from semantic_kernel.contents import ChatMessageContent, FunctionResultContent, TextContent
from semantic_kernel.contents.kernel_content import KernelContent
from semantic_kernel.functions import FunctionResult, KernelFunction
from semantic_kernel.functions.kernel_function_from_method import KernelFunctionFromMethod

from planner_ext.core.errors import shown
from planner_ext.engine.concurrency import in_thread
from planner_ext.sk.arguments import convertible_type
from planner_ext.sk.errors import PlannerInvalidConfigurationError

__all__ = [
    "NOT_WRITABLE",
    "Raised",
    "ToolExecution",
    "caught",
    "result_text",
    "runnable",
    "runs_in_thread",
    "sendable",
    "signature_of",
]

# How functions are run: the options, and what is done so that Semantic Kernel can run a function as they say.
#
# Promises that a synchronous function never blocks the event loop (where ``threads`` is on), and that the kernel's own
# function objects are never changed: what is run is a copy. Must not know the call, its arguments or the run.

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExecution:
    """How the functions of a run are executed. Each option is checked when it is given.

    Attributes:
        max_concurrency: Counts the functions of one batch that run at the same time. Checked before each function of
            the batch is started; over it, a function waits for another one of its batch to end. 1 runs them one after
            the other in call order, None all at once.
        timeout: Counts seconds of one call, for every function or by fully qualified name (a function that is not
            named has no timeout; a name that the kernel does not have is refused when a run begins): the function,
            and the application's function-invocation filters around it. Its auto-function-invocation filters are not
            counted, since they may wait for a person. Checked while the function runs; then it is cancelled, the
            model reads that it did not answer in time and that its effect is not known, and the run goes on. One that
            does not end within a second of its cancellation is left behind. None is no timeout but the run's own
            (``deadline``, ``max_active_seconds``).
        on_error: What becomes of a function that raises: ``"report"`` tells the model that it failed and the run goes
            on, ``"raise"`` ends the run with ``ToolExecutionError``. Checked when every call of the batch has ended.
        include_error_detail: Whether the model also reads type and message of a function's exception. Off by default:
            they are written for developers, and may hold paths, hosts or keys.
        stop_on_unknown_function: Whether a call of a function that was not offered ends the run, once its batch is
            answered. Off by default: the model reads which functions there are, and may correct itself.
        threads: Whether synchronous functions run in a thread of their own, so that they do not block the event loop.
            On cancellation or timeout the thread is abandoned, not stopped: whether its function took effect is not
            known. Off, they run on the event loop: a timeout cannot interrupt them, nor can cancellation.

        max_threads: Counts the synchronous functions of one run that run in threads at the same time. Checked before
            each is started; over it, a function waits for another one to end, and does not count as started. One
            whose thread was abandoned does not count. None is no limit.

    Raises:
        PlannerInvalidConfigurationError: A value that means nothing; names the field, what it takes and what it got.
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
            if (count := getattr(self, name)) is not None and not _is_count(count):
                _refuse(name, "a whole number, 1 or more, or None for all at once", count)
        _check_timeout(self.timeout)
        if self.on_error not in ("report", "raise"):
            _refuse("on_error", '"report" or "raise"', self.on_error)
        for name in ("include_error_detail", "stop_on_unknown_function", "threads"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "True or False", getattr(self, name))

    def timeout_of(self, function: str) -> float | None:
        """Seconds that one call of a function may take, by its fully qualified name; None is no timeout."""
        if isinstance(self.timeout, Mapping):
            return self.timeout.get(function)
        return self.timeout


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _check_timeout(value: object) -> None:
    if isinstance(value, Mapping):
        for name, seconds in cast("Mapping[object, object]", value).items():
            if not isinstance(name, str):
                _refuse("timeout", "fully qualified function names as keys, such as 'plugin-function'", name)
            if not _is_duration(seconds):
                expected = "a number of seconds above 0 (leave the function out for no timeout)"
                _refuse(f"timeout[{name!r}]", expected, seconds)
    elif value is not None and not _is_duration(value):
        _refuse("timeout", "a number of seconds above 0, a mapping of function names to such, or None for none", value)


def _refuse(field: str, expected: str, seen: object) -> None:
    raise PlannerInvalidConfigurationError(f"ToolExecution.{field} must be {expected}; got {shown(seen)}.")


def runnable(function: KernelFunction, *, threads: bool) -> KernelFunction:
    """The function to invoke in place of a kernel's own: the same one, unless that cannot be run as it should.

    Semantic Kernel runs a synchronous method on the event loop. It cannot convert an argument of a parameter annotated
    ``Annotated[Optional[X], ...]`` or ``Literal["x"]``, and calls a method without its parameter ``p: X | None`` where
    the model sent none, though the signature asks for one. A shallow copy whose method and parameters are replaced
    has none of this, and is still what filters expect to see: a function of the same class, name and metadata.

    Args:
        function: One of the kernel's functions; it is not changed.
        threads: Whether synchronous methods run in a thread.
    """
    if not isinstance(function, KernelFunctionFromMethod):
        return function
    method = function.method
    threaded = threads and runs_in_thread(function)
    absent = _optional_without_default(function)
    update: dict[str, Any] = {}
    if threaded or absent:
        update["method"] = partial(_run_in_thread if threaded else _run, method, absent)
    types = [convertible_type(parameter.type_object) for parameter in function.parameters]
    if any(own.type_object is not kind for own, kind in zip(function.parameters, types, strict=True)):
        parameters = [
            own.model_copy(update={"type_object": kind}) for own, kind in zip(function.parameters, types, strict=True)
        ]
        update["metadata"] = function.metadata.model_copy(update={"parameters": parameters})
    return function.model_copy(update=update) if update else function


def runs_in_thread(function: KernelFunction) -> bool:
    """Whether a function does its work when it is called, so that it would block the event loop."""
    return isinstance(function, KernelFunctionFromMethod) and _is_synchronous(function.method)


def _run(method: Callable[..., Any], absent: Mapping[str, None], /, **arguments: Any) -> Any:
    return method(**{**absent, **arguments})


async def _run_in_thread(method: Callable[..., Any], absent: Mapping[str, None], /, **arguments: Any) -> Any:
    """Await what a synchronous method returns: Semantic Kernel does not look behind the result of a coroutine."""
    result = await in_thread(lambda: method(**{**absent, **arguments}))
    if inspect.isasyncgen(result):
        return [item async for item in cast("AsyncGenerator[Any, None]", result)]
    if inspect.isawaitable(result):
        return await result
    return list(cast("Generator[Any, None, None]", result)) if inspect.isgenerator(result) else result


def _is_synchronous(method: Callable[..., Any]) -> bool:
    """Whether a method does its work when it is called: it is no coroutine or generator function, nor wraps one."""
    target = inspect.unwrap(method)
    called = getattr(target, "__call__", None)  # noqa: B004  (the method of an object that is called, async or not)
    lazy = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return not any(is_lazy(target) or is_lazy(called) for is_lazy in lazy)


def _optional_without_default(function: KernelFunctionFromMethod) -> dict[str, None]:
    """Parameters that Semantic Kernel tells the model it may leave out, and Python demands."""
    optional = {
        parameter.name
        for parameter in function.parameters
        if not parameter.is_required and parameter.default_value is None and parameter.include_in_function_choices
    }
    if not optional:
        return {}
    signature = inspect.signature(function.method)
    return {name: None for name, own in signature.parameters.items() if name in optional and _is_demanded(own)}


def _is_demanded(parameter: inspect.Parameter) -> bool:
    keyword = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return keyword and parameter.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Raised:
    """What a piece of work raised, as a value."""

    error: BaseException


async def caught(work: Coroutine[Any, Any, _T]) -> _T | Raised:
    """Return what work raises, but for the cancellation of this task and what ends the program.

    A function may also raise ``CancelledError`` by itself, after waiting for something that was cancelled: that is
    an error like another. And it may hide the cancellation of this task, which goes on all the same.
    """
    task = asyncio.current_task()
    cancelling = task.cancelling() if task else 0
    ended: _T | Raised
    try:
        ended = await work
    except (Exception, asyncio.CancelledError) as error:
        ended = Raised(error)
    if task is not None and task.cancelling() > cancelling:
        error = ended.error if isinstance(ended, Raised) else None
        if isinstance(error, asyncio.CancelledError):
            raise error
        raise asyncio.CancelledError from error
    return ended


# What the model reads as a function's result.
#
# Promises a text that can be sent, for every value and without raising: plain text as it is, everything else as JSON,
# never as Python writes it. Must not know functions, calls or runs.

NOT_WRITABLE = "The function returned a result that could not be written as JSON."
"""What the model reads of a result that has no text: one that contains itself, for instance."""

_logger = logging.getLogger(__name__)


def result_text(value: Any) -> str:
    """Write a function's result for the model.

    A string is itself and None is "". Messages and contents are their text, a list of them one below the other.
    Everything else is compact JSON, non-ASCII characters kept: models, dataclasses, dates, decimals, enumerations and
    sets as pydantic writes them, not-a-number and the infinities as null, bytes as text or base64, objects unknown to
    it as the string that ``str`` gives.

    Args:
        value: Anything.

    Returns:
        Text that can be encoded as UTF-8; `NOT_WRITABLE` where there is no other.
    """
    try:
        return sendable(_text(value))
    except Exception:  # a result may be any object, and its methods may raise anything
        _logger.warning("A result of type %s could not be written as JSON.", type(value).__name__)
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
        case KernelContent():
            return _content_text(value)
        case [KernelContent(), *rest] if all(isinstance(item, KernelContent) for item in rest):
            return "\n".join(_content_text(item) for item in cast("list[KernelContent]", value))
        case _:
            return _json(value)


def _content_text(content: KernelContent) -> str:
    match content:
        case ChatMessageContent():
            return "".join(item.text for item in content.items if isinstance(item, TextContent))
        case FunctionResultContent():
            return _text(content.result)
        case _:
            return str(content)


def _json(value: Any) -> str:
    try:
        return to_json(value, inf_nan_mode="null", fallback=str).decode()
    except PydanticSerializationError:
        # Bytes or surrogates that are no UTF-8; the slower way accepts both.
        keyed = _with_sendable_keys(value)
        plain = to_jsonable_python(keyed, inf_nan_mode="null", bytes_mode="base64", fallback=str)
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _with_sendable_keys(value: Any) -> Any:
    match value:
        case dict():
            items = cast("dict[Any, Any]", value).items()
            return {sendable(k) if isinstance(k, str) else k: _with_sendable_keys(v) for k, v in items}
        case list():
            return [_with_sendable_keys(item) for item in cast("list[Any]", value)]
        case _:
            return value


def signature_of(function: KernelFunction) -> str:
    """Write ``name=digest`` of each parameter, joined by commas; of type, schema and default, without descriptions."""
    return ",".join(
        f"{one.name}="
        + _digest(
            [
                one.type_,
                one.is_required,
                one.include_in_function_choices,
                _undescribed(one.schema_data),
                one.default_value,
            ]
        )
        for one in function.parameters
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_named)
    return sha256(text.encode()).hexdigest()[:16]


def _undescribed(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        items = cast("Mapping[str, Any]", schema).items()
        return {key: _undescribed(value) for key, value in items if key != "description" or not isinstance(value, str)}
    if isinstance(schema, list):
        return [_undescribed(one) for one in cast("list[Any]", schema)]
    return schema


def _named(value: object) -> str:
    """Write a default that is not JSON by its type: its ``repr`` may hold an address, which differs in each process."""
    return type(value).__qualname__
