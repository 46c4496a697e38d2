"""`Opening`: a store that ``async with`` opens."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

from planner_ext.durable.errors import StoreError

T = TypeVar("T")
P = ParamSpec("P")


class Opening(AbstractAsyncContextManager[T]):
    """A store that is not open yet; to use it without ``async with`` is an error that says so."""

    def __init__(self, context: AbstractAsyncContextManager[T], name: str) -> None:
        self._context = context
        self._name = name

    async def __aenter__(self) -> T:
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise StoreError(f"The store was not opened before .{name}. Write: async with {self._name}(...) as opened.")


def opens(function: Callable[P, AsyncGenerator[T, None]]) -> Callable[P, Opening[T]]:
    """Turn a generator that yields an open store into a function that returns its `Opening`."""
    context = asynccontextmanager(function)

    @wraps(function)
    def opening(*args: P.args, **kwargs: P.kwargs) -> Opening[T]:
        return Opening(context(*args, **kwargs), function.__qualname__)

    return opening
