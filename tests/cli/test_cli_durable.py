"""Runs kept in a store, as whole stories in real processes: decided elsewhere, killed, finished by a living worker."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from planner_ext.cli import health
from planner_ext.cli.health import answering_probes
from support.command_line import COMMAND, Command
from support.durable_shop import APP, CALL, GOAL, RUN, STORE, refunds, till
from support.processes import Forked, Lives

__all__ = ["till"]

LIMIT_SECONDS = 120
WORKER = ("worker", *STORE, *APP, "--worker-id", "w1")


@contextmanager
def living(
    lives: Lives, here: Path, *words: str
) -> Iterator[tuple[Forked, Iterator[str]]]:
    """A process that a test tells to end, and the lines that it prints; killed where that takes too long."""
    with lives.program(*COMMAND, *words, cwd=here) as process:
        guard = threading.Timer(LIMIT_SECONDS, process.kill)
        guard.start()
        try:
            yield process, iter(process.stderr.readline, "")
        finally:
            guard.cancel()


@pytest.mark.usefixtures("till")
def test_a_run_is_decided_elsewhere_killed_midway_and_finished(
    command: Command, process: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker lives while a person edits; the next one is killed in the refund, and the one after makes no second."""
    begun = command(*RUN)
    assert (begun.code, begun.out) == (4, "")
    assert f"planner-ext approvals approve {CALL} --store runs.db" in begun.err
    assert (
        "planner-ext runs resume order-7 --kernel till:kernel --store runs.db"
        in begun.err
    )
    edited = command("approvals", "edit", CALL, "amount=24.5", "--by", "ann", *STORE)
    assert (edited.code, edited.err) == (0, "")
    assert '{"order": "A-1007", "amount": 24.5}' in edited.out
    assert refunds(here) == []

    monkeypatch.setenv("PLANNER_EXT_CRASH_AT", "after_tool")
    assert process("worker", *STORE, *APP).code == -9
    monkeypatch.delenv("PLANNER_EXT_CRASH_AT")
    assert refunds(here) == [24.5]
    finished = command("worker", *STORE, *APP, "--once")
    assert (finished.code, finished.out) == (0, "")
    assert "run order-7 answered: 3 iterations, 2 calls, " in finished.err
    assert refunds(here) == [24.5]
    shown = command("runs", "show", "order-7", *STORE, "--json").document
    assert (shown["status"], shown["iterations"], shown["tool_calls"]) == (
        "answered",
        3,
        2,
    )
    assert (
        shown["final_answer"]
        == "Dear customer, we are sorry: 24.50 dollars refunded for A-1007."
    )


@pytest.mark.usefixtures("till")
def test_workers_are_listed(command: Command, lives: Lives, here: Path) -> None:
    """Who works, where, on what and on how much; one that was killed is listed as dead, one that left is not."""
    assert command("workers", *STORE).code == 2
    assert command(*RUN).code == 4
    assert command("workers", *STORE, "--json").document == []
    with living(lives, here, *WORKER, "--max-concurrency", "3") as (w1, _):
        while (
            not (listed := command("workers", *STORE, "--json").document)
            or listed[0]["status"] != "working"
        ):
            assert w1.returncode is None
        (one,) = listed
        assert (one["worker_id"], one["name"], one["pid"], one["alive"]) == (
            "w1",
            "w1",
            w1.pid,
            True,
        )
        assert (one["concurrency"], one["runs"]) == (3, [])
        assert command("workers", *STORE).out.startswith("w1  working  drives 0 of 3")
        w1.kill()
        w1.wait()
        assert command("workers", *STORE, "--json").document[0]["alive"] is False
        assert command("workers", *STORE).out.startswith("w1  dead")
    with living(lives, here, *WORKER) as (again, lines):
        next(line for line in lines if line.startswith("Worker"))
        again.terminate()
        assert again.wait() == 0
    assert command("workers", *STORE, "--json").document == []


@pytest.mark.usefixtures("till")
def test_a_worker_takes_decisions_until_its_sigterm(
    command: Command, lives: Lives, here: Path
) -> None:
    """A living worker continues as soon as another process decides; SIGTERM ends it with 0; its name is unique."""
    assert command(*RUN).code == 4
    with living(lives, here, *WORKER) as (worker, lines):
        assert (
            next(line for line in lines if line.startswith("Worker"))
            == "Worker w1 of runs.db\n"
        )
        second = command("worker", *STORE, *APP, "--worker-id", "w1")
        assert second.code == 2
        assert "is in use by a process that lives" in second.err
        assert (
            command("approvals", "deny", CALL, "--reason", "too much", *STORE).code == 0
        )
        assert next(lines) == "run order-7 resumed\n"
        assert next(lines).startswith("run order-7 call shop-refund denied")
        assert next(lines).startswith("run order-7 answered: 3 iterations, 1 call, ")
        worker.terminate()
        assert worker.wait() == 0
    assert refunds(here) == []


@pytest.mark.usefixtures("till")
def test_a_worker_answers_probes(lives: Lives, here: Path) -> None:
    """A supervisor reads 200 while the worker's event loop works, at the address that the worker prints."""
    with living(lives, here, *WORKER, "--health", "127.0.0.1:0") as (worker, lines):
        address = next(line for line in lines if line.startswith("Probes")).split()[-1]
        next(line for line in lines if line.startswith("Worker"))
        with urlopen(f"http://{address}/healthz", timeout=LIMIT_SECONDS) as response:
            assert response.status == 200
        worker.terminate()
        assert worker.wait() == 0


def test_a_blocked_loop_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that turns no more is told with 503, from a thread that it does not block."""
    monkeypatch.setattr(health, "_PATIENCE_SECONDS", 0.01)
    with (
        closing(asyncio.new_event_loop()) as never_run,
        answering_probes("127.0.0.1:0", never_run) as address,
        pytest.raises(HTTPError, match="503"),
    ):
        urlopen(f"http://{address}/")


def test_a_client_that_sends_nothing_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is closed, and others are answered meanwhile."""
    monkeypatch.setattr(health, "_PATIENCE_SECONDS", 0.05)
    with (
        closing(asyncio.new_event_loop()) as never_run,
        answering_probes("127.0.0.1:0", never_run) as address,
    ):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), LIMIT_SECONDS) as silent:
            assert silent.recv(1) == b""


@pytest.mark.usefixtures("till")
@pytest.mark.parametrize("address", ["nonsense", "99999", "no.such.host.invalid:80"])
def test_a_worker_refuses_an_address_for_probes_that_it_cannot_use(
    command: Command, address: str
) -> None:
    """Nothing is driven, and the option is named."""
    refused = command(*WORKER, "--once", "--health", address)
    assert refused.code == 2
    assert "--health" in refused.err
    assert address in refused.err


@pytest.mark.usefixtures("till")
def test_an_interrupted_run_is_kept(command: Command, lives: Lives, here: Path) -> None:
    """A process killed before anything was decided leaves a run that the same command continues.

    The request that it may have made counts.
    """
    environment = {**os.environ, "PLANNER_EXT_CRASH_AT": "after_outcome"}
    assert lives.run(*COMMAND, *RUN, cwd=here, env=environment).returncode == -9
    assert (
        command("runs", "list", *STORE, "--status", "running", "--json").document[0][
            "run_id"
        ]
        == "order-7"
    )
    again = command(*RUN)
    assert again.code == 4
    assert "Round trip 3 of 15" in again.err
    assert "shop-find" not in again.err


@pytest.mark.usefixtures("till")
def test_a_call_that_was_cut_short_is_in_doubt(
    command: Command, lives: Lives, here: Path
) -> None:
    """Ctrl-C keeps the run; the call that ran then does not run again unasked: a person reports its outcome."""
    words = (
        "run",
        GOAL,
        "--kernel",
        "till:slow",
        "--no-plan",
        "--run-id",
        "order-7",
        *STORE,
    )
    with living(lives, here, *words) as (running, lines):
        assert next(line for line in lines if "slow-pay()" in line)
        running.send_signal(signal.SIGINT)
        shown = "".join(lines)
        assert running.wait() == 130
    assert "planner-ext runs resume order-7 --kernel till:slow --store runs.db" in shown
    resume = ("runs", "resume", "order-7", "--kernel", "till:slow", *STORE)
    assert command(*resume).code == 4
    assert command("approvals", "list", *STORE).out.startswith(
        "order-7/0/call_1  IN DOUBT: it may have run already\n"
    )
    assert command("approvals", "supply", "order-7/0/call_1", "paid", *STORE).code == 0
    assert command(*resume).out == "Result: paid\n"


@pytest.mark.usefixtures("till")
def test_an_approver_needs_no_semantic_kernel(command: Command, here: Path) -> None:
    """Listing runs, and listing, showing and deciding calls, import neither Semantic Kernel nor OpenAI's client.

    The commands and their help need no store either.
    """
    assert command(*RUN).code == 4
    commands = [
        ["runs", "list", *STORE],
        ["approvals", "list", *STORE],
        ["approvals", "show", CALL, *STORE],
        ["approvals", "approve", CALL, *STORE],
    ]
    program = f"""
import sys
from planner_ext.cli.__main__ import main
import planner_ext.cli.app
assert not sys.modules.keys() & {{"planner_ext.durable", "pydantic"}}
for words in {commands!r}:
    sys.argv = ["planner-ext", *words]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, words
assert not sys.modules.keys() & {{"semantic_kernel", "openai", "planner_ext.planner"}}
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "shop-refund will run with" in done.stdout


@pytest.mark.usefixtures("till")
def test_a_worker_drives_what_its_factory_gives(command: Command, here: Path) -> None:
    """A factory may be async and give the arguments that no store keeps; a kernel alone gets a planner."""
    assert command(*RUN).code == 4
    assert command("approvals", "approve", CALL, *STORE).code == 0
    done = command("worker", *STORE, "--app", "till:app_with_arguments", "--once")
    assert done.code == 0
    assert "arguments for order-7" in done.err
    assert refunds(here) == [98.0]
    assert (
        command(
            "run", GOAL, *STORE, "--kernel", "till:kernel", "--no-plan", "--run-id", "b"
        ).code
        == 4
    )
    assert command("approvals", "approve", "b/1/call_2", *STORE).code == 0
    assert command("worker", *STORE, "--app", "till:kernel", "--once").code == 0
    assert refunds(here) == [98.0, 98.0]
