"""Processes for tests, without the seconds that a fresh interpreter needs for its imports."""

import marshal
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support import TESTS

__all__ = ["Forked", "Lives"]

_LIMIT_SECONDS = 120

_CLIENT = """#!{python} -IS
import marshal, os, signal, socket, sys

closed = []
while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
    closed.append(lowest)
os.close(lowest)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
given = marshal.dumps((sys.argv, os.getcwd(), dict(os.environ), closed))
socket.send_fds(server, [len(given).to_bytes(8, "big")], [0, 1, 2])
server.sendall(given)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
code = int(server.recv(8))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""A program that does what ``python`` does with its arguments, in a process that is forked for it."""


class Lives:
    """Makes processes quickly: they are forked from one that has imported Semantic Kernel and the package already."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["support.warm"])
        self._folder = Path(tempfile.mkdtemp(prefix="lives-"))
        self._alive, self._ends = socket.socketpair()
        self._path = os.environ.get("PYTHONPATH")
        folders = (
            str(TESTS),
            str(TESTS / "durable"),
        )  # what a life does is a function of a test module
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [*folders, *filter(None, [self._path])]
        )

    @cached_property
    def python(self) -> str:
        """A program to start in the place of `sys.executable`, with ``-m`` and a module, or a file.

        It passes on its streams, open or closed, SIGINT and SIGTERM, and ends as the forked process does; if it is
        killed, so is that.
        Each program that is forked has it as its `sys.executable`, for those that it starts in turn.
        """
        address = self._folder / "socket"
        program = self._folder / "python"
        program.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
        program.chmod(0o700)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen()
        self._context.Process(target=_serve, args=(listener, self._ends)).start()
        listener.close()
        return str(program)

    def close(self) -> None:
        """Put the environment back, and end what serves the programs."""
        self._alive.close()
        self._ends.close()
        shutil.rmtree(self._folder)
        os.environ.pop("PYTHONPATH")
        if self._path is not None:
            os.environ["PYTHONPATH"] = self._path

    def begin(
        self, work: Callable[..., Any], *arguments: Any, **environment: str
    ) -> ForkServerProcess:
        """Start a life that does some work, which is a function of a module; return its process."""
        process = self._context.Process(
            target=_live, args=(work, arguments, environment), daemon=True
        )
        process.start()
        return process

    def live(
        self, work: Callable[..., Any], *arguments: Any, **environment: str
    ) -> int:
        """Let a life do some work; return its exit code, which is -9 where it was killed."""
        process = self.begin(work, *arguments, **environment)
        process.join(_LIMIT_SECONDS)
        code = process.exitcode
        process.close()
        assert code is not None, "it does not end"
        return code

    def program(
        self, *words: str, cwd: Path, env: Mapping[str, str] | None = None
    ) -> "Forked":
        """Start a program as ``python`` does, with pipes for its output.

        Args:
            *words: ``-m`` and a module, or a file; then the arguments.
            cwd: Its working directory.
            env: Its environment; None for this process's own.
        """
        command = (self.python, *words)
        return Forked(self._context, command, cwd, os.environ if env is None else env)

    def run(
        self,
        *words: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        typed: str = "",
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program as `program` starts it, with a text as its input; wait for its end."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("in", "out", "err")]
            files[0].write_text(typed, "utf-8")
            streams = [
                _Descriptor(os.open(file, os.O_CREAT | flag))
                for file, flag in zip(
                    files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True
                )
            ]
            command = (self.python, *words)
            process = _begun(
                self._context, command, cwd, os.environ if env is None else env, streams
            )
            process.join(_LIMIT_SECONDS)
            code = process.exitcode
            if code is None:
                process.kill()
                raise subprocess.TimeoutExpired(list(words), _LIMIT_SECONDS)
            process.close()
            return subprocess.CompletedProcess(
                words, code, files[1].read_text("utf-8"), files[2].read_text("utf-8")
            )


class Forked:
    """A program that runs in a forked process; what tests ask of `subprocess.Popen`.

    Attributes:
        pid: The number of the process.
        stdout: Reads what it prints.
        stderr: Reads what it complains of.
    """

    def __init__(
        self, context: Any, words: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        from_stdout, to_stdout = os.pipe()
        from_stderr, to_stderr = os.pipe()
        self.stdout = os.fdopen(from_stdout, encoding="utf-8")
        self.stderr = os.fdopen(from_stderr, encoding="utf-8")
        streams = [_Descriptor(null), _Descriptor(to_stdout), _Descriptor(to_stderr)]
        self._process: ForkServerProcess = _begun(context, words, cwd, env, streams)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = _LIMIT_SECONDS) -> int:
        """Wait for its end; return the exit code."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


class _Descriptor:
    """A file descriptor that a forked process is given; this process closes its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _taken, (reduction.DupFd(self.number),)


def _taken(given: Any) -> int:
    return given.detach()


def _begun(
    context: Any,
    words: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    streams: Sequence[_Descriptor],
) -> ForkServerProcess:
    process = context.Process(
        target=_program, args=(words, cwd, dict(env), streams), daemon=True
    )
    process.start()
    for stream in streams:
        os.close(stream.number)
    return process


def _serve(listener: socket.socket, alive: socket.socket) -> None:
    """Fork a process for each program that connects, and send it the exit code, until the tests have ended."""
    programs: dict[socket.socket | int, tuple[ForkProcess, socket.socket]] = {}
    while alive not in (ready := wait([alive, listener, *programs])):
        if listener in ready:
            client, _ = listener.accept()
            process = _forked_for(client)
            programs[client] = programs[process.sentinel] = process, client
        for one in programs.keys() & ready:
            if one not in programs:  # both its client and its process are ready
                continue
            process, client = programs[one]
            if one is client and (signals := client.recv(1)):
                os.kill(process.pid or 0, signals[0])
                continue
            process.kill()  # which has ended, or whose client was killed
            process.join()
            with suppress(BrokenPipeError):
                client.sendall(str(process.exitcode).encode())
            del programs[client], programs[process.sentinel]
            client.close()
            process.close()


def _forked_for(client: socket.socket) -> ForkProcess:
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    given = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    words, cwd, env, closed = marshal.loads(given)
    process = multiprocessing.get_context("fork").Process(
        target=_program, args=(words, Path(cwd), env, streams, closed), daemon=True
    )
    process.start()
    for stream in streams:
        os.close(stream)
    return process


def _live(
    work: Callable[..., Any], arguments: Sequence[Any], environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    work(*arguments)


def _program(
    words: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    streams: Sequence[int],
    closed: Sequence[int] = (),
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    for number in closed:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    sys.executable, *words = words
    path = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:0] = ["", *path]
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = [*words[1:]]
        sys.path[:0] = [str(cwd), *path]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*words]
        sys.path[:0] = [str(Path(words[0]).parent), *path]
        runpy.run_path(words[0], run_name="__main__")
