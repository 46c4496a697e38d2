"""The command's streams, which outlive their readers, and its signals."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

from planner_ext.core.errors import PlannerExtError


class _Output(io.TextIOWrapper):
    """A standard stream that discards its output from the first ``error`` on."""

    error: OSError | None = None

    def write(self, text: str, /) -> int:
        with self._discarding():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            super().flush()

    @contextmanager
    def _discarding(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)


@contextmanager
def standard_streams() -> Generator[None]:
    """Replace stdout and stderr; a closed one discards its output.

    Raises:
        PlannerExtError: At the end, if stdout could not be written although its reader
            stayed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # This takes the number, which a store's file would take otherwise.
            os.open(os.devnull, os.O_RDWR)
    if isinstance(reader := cast("object", sys.stdin), io.TextIOWrapper):
        reader.reconfigure(errors="replace")
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = outputs = [
        _output(stream, number) for number, stream in enumerate(before, 1)
    ]
    try:
        yield
    finally:
        for output in outputs:
            output.flush()
            output.detach()
        sys.stdout, sys.stderr = before
        if (error := outputs[0].error) is not None and not isinstance(
            error, BrokenPipeError
        ):
            raise PlannerExtError(
                f"The output cannot be written to stdout: {error.strerror}."
            )


def _output(given: object, number: int) -> _Output:
    if not isinstance(given, io.TextIOWrapper):  # None, for a closed one
        return _Output(open(number, "wb", closefd=False), encoding="utf-8")
    stream = cast("io.TextIOWrapper", given)
    stream.flush()
    return _Output(
        stream.buffer,
        stream.encoding,
        "replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def on_signals(end: Callable[[], None]) -> None:
    """Call a function of the loop at SIGINT and SIGTERM; on Windows, Ctrl-C interrupts the command."""
    if sys.platform != "win32":  # its event loops have no signal handlers
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, end)
        loop.add_signal_handler(signal.SIGTERM, end)
