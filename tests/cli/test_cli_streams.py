"""A command whose output has no reader, and one that is interrupted twice: separate processes with real pipes."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.command_line import COMMAND, Command
from support.processes import Lives

RUN = (
    "run",
    "What is a lamp?",
    "--kernel",
    "shop:with_service",
    "--no-plan",
    "--store",
    "runs.db",
)


def redirected(
    lives: Lives, here: Path, redirection: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the command with a shell's redirection."""
    command = (lives.python, *COMMAND, *arguments)
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    return subprocess.run(
        shell, cwd=here, capture_output=True, text=True, encoding="utf-8", timeout=120
    )


def test_a_run_whose_reader_leaves_reaches_its_end(lives: Lives, here: Path) -> None:
    """With a broken pipe on stderr, functions finish, and the answer is on stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [lives.python, *COMMAND, *RUN],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=writer,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"It is 42.\n")
    assert (here / "runs.db").exists()


@pytest.mark.parametrize(
    ("redirection", "out"), [("2>&-", "It is 42.\n"), ("<&- >&- 2>&-", "")]
)
def test_a_closed_stream_ends_no_run(
    lives: Lives, here: Path, command: Command, redirection: str, out: str
) -> None:
    """What would go to a closed stream goes nowhere: not into a file that the run opened, nor to the other stream."""
    done = redirected(lives, here, redirection, *RUN)
    assert (done.returncode, done.stdout) == (0, out)
    assert "Traceback" not in done.stderr
    assert (
        json.loads(command("runs", "stats", "--store", "runs.db", "--json").out)[
            "by_status"
        ]["answered"]
        == 1
    )


def test_a_full_disk_is_an_error_after_the_run(
    lives: Lives, here: Path, command: Command
) -> None:
    """Exit code 2, with the reason on stderr; the run is in its store."""
    done = redirected(lives, here, ">/dev/full", *RUN)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "Error: The output cannot be written to stdout: No space left on device.\n"
    )
    assert "Traceback" not in done.stderr
    assert (
        json.loads(command("runs", "list", "--store", "runs.db", "--json").out)[0][
            "status"
        ]
        == "answered"
    )


def test_help_reports_a_full_disk(lives: Lives, here: Path) -> None:
    """Exit code 2 and a line on stderr."""
    done = redirected(lives, here, ">/dev/full", "--help")
    problem = (
        "Error: The output cannot be written to stdout: No space left on device.\n"
    )
    assert (done.returncode, done.stderr) == (2, problem)


STUBBORN = '''
import asyncio

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.testing import ScriptedChatCompletion, call


class Stubborn:
    @kernel_function
    async def wait(self) -> None:
        """Wait, whoever cancels."""
        print("waits")
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                print("waits on")


def make():
    kernel = Kernel()
    kernel.add_plugin(Stubborn(), "stubborn")
    kernel.add_service(ScriptedChatCompletion([call("stubborn-wait")]))
    return kernel
'''


@pytest.mark.parametrize(
    "keeps", [(), ("--store", "runs.db")], ids=["not kept", "kept"]
)
def test_a_second_ctrl_c_ends_a_run_whose_function_cannot_be_cancelled(
    lives: Lives, here: Path, keeps: tuple[str, ...]
) -> None:
    """Exit code 130; a run with a store is kept."""
    (here / "stubborn.py").write_text(STUBBORN)
    words = ("run", "Wait", "--kernel", "stubborn:make", "--no-plan", *keeps)
    with lives.program(*COMMAND, *words, cwd=here) as running:
        for signalled in ("waits\n", "waits on\n"):
            assert signalled in iter(running.stderr.readline, "")
            running.send_signal(signal.SIGINT)
        err = running.stderr.read()
        assert running.wait() == 130
    assert "Traceback" not in err
    assert ("The run is kept." if keeps else "Interrupted from the keyboard.") in err
    assert (here / "runs.db").exists() == bool(keeps)
