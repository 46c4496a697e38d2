"""What the filters around a decided call may make of it: it runs as it was decided, and once for each start recorded.

A filter of Semantic Kernel may change what it is shown, call ``next`` several times, at once or when the call has long
ended. The function is therefore guarded behind the last filter. Must not know the run, nor who decided.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json
from semantic_kernel.filters.functions.function_invocation_context import FunctionInvocationContext
from semantic_kernel.functions import FunctionResult, KernelFunction

from planner_ext.sk.arguments import unconverted_parameter
from planner_ext.sk.errors import PlannerException

__all__ = [
    "ApprovedArgumentsChangedError",
    "NotRunAgainError",
    "Starts",
    "Unchanged",
    "behind_filters",
    "starts_of",
    "watch",
]

Unchanged: TypeAlias = Callable[[Mapping[str, Any]], bool]
"""Says whether arguments are still those that were approved."""

_Next: TypeAlias = Callable[[Any], Awaitable[None]]

_ABSENT: Final = object()

_ATTACHED: Final = "_planner_ext_starts"

_WRITTEN: Final = (str, int, float, dict, list, tuple, BaseModel)
"""What is compared by value; to write an object of the application, such as a generator, may use it up."""


class ApprovedArgumentsChangedError(PlannerException):
    """A filter changed the function of a call, or the arguments that an approval binds to; the function did not run."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"The function {function} was not run: a filter of the application changed what had been approved."
        )


class NotRunAgainError(PlannerException):
    """A filter asked for another run of a call that is in doubt or has ended; the function did not run."""


class Starts:
    """Lets the function of one call run: once, and again only where ``restart`` says so.

    A further ``next`` that may not run the function gives the outcome of the last run once more: its result, or its
    exception. After `end` nothing runs.

    Args:
        name: The function, for messages.
        unchanged: Whether arguments are still those that were decided on; None where a change of them is no concern.
        binds: Whether nothing runs with other ones.
        restart: Records another start before it happens, and gives why it may not, or None; None allows one start.
        decided: See below.
        each_once: Whether such a filter decides again where its call comes by again.

    Attributes:
        decided: The approval filters that need not decide the call, since they did.
    """

    def __init__(
        self,
        name: str,
        *,
        unchanged: Unchanged | None,
        binds: bool = True,
        restart: Callable[[], Awaitable[str | None]] | None,
        decided: Iterable[object] = (),
        each_once: bool = False,
    ) -> None:
        self._name = name
        self._unchanged = unchanged
        self._bound = [unchanged] if binds and unchanged is not None else []
        self._restart = restart
        self.decided = list(decided)
        self._each_once = each_once
        self._outcome: asyncio.Future[FunctionResult | BaseException | None] | None = None
        self._ended = False

    def end(self) -> None:
        """Let nothing run any more: the call has its result."""
        self._ended = True

    def guarding(self, function: KernelFunction) -> KernelFunction:
        """Copy a function so that it runs through this, whatever filters are around it.

        ``_invoke_internal`` is what Semantic Kernel calls behind the last filter, and what each kind of function
        overrides; an attribute of the instance overrides it for this call, and leaves class and metadata as filters
        expect them.
        """
        guarded = function.model_copy()

        async def invoke_internal(context: FunctionInvocationContext) -> None:
            await self.run_for(guarded, context, function._invoke_internal)  # pyright: ignore[reportPrivateUsage]

        vars(guarded)["_invoke_internal"] = invoke_internal
        self.attach(guarded)
        return guarded

    def join(self, other: "Starts") -> None:
        """Bind the call by what a filter approved while the call was on its way, too."""
        self._bound += other._bound
        self.decided += other.decided

    def attach(self, to: object) -> None:
        """Let `starts_of` find this by a function, or by the context of a filter."""
        vars(to)[_ATTACHED] = self

    def decided_by(self, decides: Callable[[object], bool], arguments: Mapping[str, Any]) -> bool:
        """Whether such a filter has decided the call with these arguments."""
        found = next((one for one in self.decided if decides(one)), None)
        if found is not None and self._each_once:
            self.decided.remove(found)
        return found is not None and (self._unchanged is None or self._unchanged(arguments))

    async def run_for(
        self, function: KernelFunction, context: FunctionInvocationContext, work: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Run the work, which invokes this function, on a context, or put the last outcome in it.

        Raises:
            ApprovedArgumentsChangedError: If it is the context of another function, or the arguments are no longer
                those that were approved.
            NotRunAgainError: If the call has ended, or was cancelled while it ran.
            BaseException: What the work raises.
        """
        if context.function is not function:
            raise ApprovedArgumentsChangedError(self._name)
        self._check(context)
        last = self._outcome
        if self._ended or (last is not None and not await self._may_run_again()):
            await self._give(last, context)
            return
        self._check(context)  # once more: to record another start takes its time
        outcome = self._outcome = asyncio.get_running_loop().create_future()
        try:
            await work(context)
        except Exception as error:
            outcome.set_result(error)
            if unconverted_parameter(error) is not None and self._outcome is outcome:
                self._outcome = last  # the function was not reached: a filter may correct its arguments
            raise
        except BaseException:
            text = f"The function {self._name} was cancelled while it ran, and not run again; its effect is not known."
            outcome.set_result(NotRunAgainError(text))
            raise
        outcome.set_result(_result_of(context))

    def _check(self, context: Any) -> None:
        if not all(unchanged(context.arguments) for unchanged in self._bound):
            raise ApprovedArgumentsChangedError(self._name)

    async def _may_run_again(self) -> bool:
        return self._restart is not None and await self._restart() is None and not self._ended

    async def _give(self, last: "asyncio.Future[FunctionResult | BaseException | None] | None", context: Any) -> None:
        if self._ended or last is None:
            raise NotRunAgainError(f"The function {self._name} was not run: its call has ended.")
        outcome = await asyncio.shield(last)
        if isinstance(outcome, BaseException):
            raise outcome
        context.result = None if outcome is None else outcome.model_copy()


def _result_of(context: Any) -> FunctionResult | None:
    result: FunctionResult | None = context.result
    return None if result is None else result.model_copy()


def starts_of(value: object) -> Starts | None:
    """Find what guards a function, or the call that a filter's context is of."""
    return vars(value).get(_ATTACHED)


def behind_filters(next: _Next, last: Callable[[_Next], _Next]) -> _Next:
    """Wrap the innermost step of a stack of filters, which Semantic Kernel makes of partials of ``(context, next)``."""
    outer: Any = next
    if not isinstance(outer, partial) or "next" not in outer.keywords:
        return last(next)
    outer = cast("partial[Awaitable[None]]", outer)
    inner = behind_filters(outer.keywords["next"], last)
    return partial(outer.func, *outer.args, **{**outer.keywords, "next": inner})


def watch(arguments: Mapping[str, Any], names: Iterable[str]) -> Unchanged:
    """Remember arguments by name and value, absent ones included, since a filter may change a value in place."""
    before = {name: _fixed(arguments.get(name, _ABSENT)) for name in names}

    def unchanged(now: Mapping[str, Any]) -> bool:
        return all(_same(fixed, _fixed(now.get(name, _ABSENT))) for name, fixed in before.items())

    return unchanged


def _fixed(value: object) -> tuple[object, object]:
    """Write a value so that a later change of it shows; an object that cannot be written stands for itself."""
    kind: object = type(value)
    written: object = value
    if isinstance(value, _WRITTEN):
        with suppress(PydanticSerializationError, ValueError, TypeError, RecursionError):
            written = to_json(value, inf_nan_mode="constants")
    return kind, written


def _same(one: tuple[object, object], other: tuple[object, object]) -> bool:
    written = isinstance(one[1], bytes) and isinstance(other[1], bytes) and one[1] == other[1]
    return one[0] is other[0] and (written or one[1] is other[1])
