"""Work that blocks, in a thread that nobody has to wait for."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

__all__ = ["in_thread"]

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run something in a daemon thread of its own, with the caller's context variables.

    ``asyncio.to_thread`` is no choice here: its few threads are shared, so abandoned ones would starve the others, and
    they are waited for when the loop and the interpreter end.

    Args:
        work: What to run. If the wait for it is cancelled, it goes on, and its outcome is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[_T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: _T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="planner_ext tool", daemon=True).start()
    result, error = await done
    if error is not None:
        # Not through the future, which takes no StopIteration; here that becomes the RuntimeError of PEP 479.
        raise error
    return cast("_T", result)
