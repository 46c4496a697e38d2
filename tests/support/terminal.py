"""The command on a pseudo terminal: what a person sees there, and what they type."""

import errno
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.command_line import COMMAND
from support.processes import Lives

__all__ = ["QUESTION", "Session"]

QUESTION = "quit (q)? "
"""How the question ends that a call is shown with."""


class Session:
    """One process on a pseudo terminal.

    Attributes:
        shown: Everything on the screen so far, without colours and cursor movements.
    """

    def __init__(
        self, lives: Lives, here: Path, *arguments: str, term: str = "dumb"
    ) -> None:
        self.shown = ""
        self._bytes = b""
        self._read = 0
        self._screen, terminal = pty.openpty()
        self._process = subprocess.Popen(
            [lives.python, *COMMAND, *arguments],
            cwd=here,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"COLUMNS": "80", "TERM": term},
            start_new_session=True,
        )
        os.close(terminal)

    def write(self, keys: str) -> None:
        """Press keys now, with anything on the screen."""
        os.write(self._screen, keys.encode())

    def type(self, answer: str, *, after: str) -> None:
        """Wait until the end of the screen is a question, and answer it."""
        self._until(lambda: self.shown[self._read :].endswith(after), after)
        self._read = len(self.shown)
        os.write(self._screen, f"{answer}\n".encode())

    def see(self, text: str) -> None:
        """Wait until a text is on the screen."""
        self._until(lambda: text in self.shown, text)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + 120
        while self._more(deadline):
            pass
        os.close(self._screen)
        return self._process.wait(timeout=120)

    def _until(self, met: Callable[[], bool], text: str) -> None:
        deadline = time.monotonic() + 120
        while not met():
            assert self._more(deadline), f"ended before {text!r}:\n{self.shown}"

    def _more(self, deadline: float) -> bool:
        ready, _, _ = select.select(
            [self._screen], [], [], max(deadline - time.monotonic(), 0)
        )
        if not ready:
            self._process.kill()
            raise AssertionError(f"nothing more came:\n{self.shown}")
        try:
            piece = os.read(self._screen, 4096)
        except OSError as error:
            if error.errno != errno.EIO:  # Linux raises it when the other end is closed
                raise
            return False
        self._bytes += piece  # a piece may end in the middle of a character
        self.shown = re.sub(
            r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._bytes.decode("utf-8", "replace")
        ).replace("\r", "")
        return bool(piece)
