"""Processes for tests, without the seconds that a fresh interpreter needs for its imports."""

import io
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from support import TESTS

__all__ = ["Lives", "run_program"]


class Lives:
    """Makes processes quickly: they are forked from one that has imported Semantic Kernel and the package already."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["support.durable", "planner_ext.planner.planner"])
        self._path = os.environ.get("PYTHONPATH")
        folders = (str(TESTS), str(TESTS / "durable"))  # what a life does is a function of a test module
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [self._path])])

    def close(self) -> None:
        """Put the environment back."""
        os.environ.pop("PYTHONPATH")
        if self._path is not None:
            os.environ["PYTHONPATH"] = self._path

    def begin(self, work: Callable[..., Any], *arguments: Any, **environment: str) -> ForkServerProcess:
        """Start a life that does some work, which is a function of a module; return its process."""
        process = self._context.Process(target=_live, args=(work, arguments, environment), daemon=True)
        process.start()
        return process

    def live(self, work: Callable[..., Any], *arguments: Any, **environment: str) -> int:
        """Let a life do some work; return its exit code, which is -9 where it was killed."""
        process = self.begin(work, *arguments, **environment)
        process.join(120)
        code = process.exitcode
        process.close()
        assert code is not None, "it does not end"
        return code


def _live(work: Callable[..., Any], arguments: Sequence[Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    work(*arguments)


def run_program(lives: Lives, file: Path, *, typed: str, cwd: Path, env: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program as ``python file`` does; return its exit code, what it complained of, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        out, complaint = Path(folder, "out"), Path(folder, "complaint")
        code = lives.live(_program, file, typed, cwd, dict(env), out, complaint)
        return code, complaint.read_text("utf-8"), out.read_text("utf-8").strip()


def _program(file: Path, typed: str, cwd: Path, env: Mapping[str, str], out: Path, complaint: Path) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = io.StringIO(typed)
    for number, target in ((1, out), (2, complaint)):
        os.dup2(os.open(target, os.O_CREAT | os.O_WRONLY), number)
    sys.argv = [str(file)]
    sys.path.insert(0, str(file.parent))
    runpy.run_path(str(file), run_name="__main__")
