"""``planner-ext resume FILE`` and processes that die: FILE is locked and says what was started."""

import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner_ext.events import CallFinished, CallStarted
from planner_ext.hitl_manager import Checkpoint
from planner_ext.sk.history import render
from planner_ext.testing import ScriptedOpenAIServer, ScriptedReply, ScriptedRequest, call, say
from support.command_line import Command, command_line

TILL = """
import os
import shutil

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.durable import effect


def pays(amount):
    with open("paid.txt", "a") as paid:
        paid.write(f"{amount}\\n")
    shutil.copy("run.json", "cut_short.json")
    if os.path.exists("started"):
        with open("started", "w") as started:  # a pipe: waits until the test reads
            started.write("x")
        with open("gate") as gate:  # a pipe: waits until the test lets it go
            gate.read()
    return f"paid {amount}"


class Till:
    @kernel_function(description="Pays.")
    def pay(self, amount: int) -> str:
        return pays(amount)

    @effect("idempotent")
    @kernel_function(description="Pays, if it has not been paid.")
    def pay_once(self, amount: int) -> str:
        return pays(amount)


def make():
    kernel = Kernel()
    kernel.add_plugin(Till(), "till")
    return kernel


def make_without_a_file():
    os.remove("run.json")
    os.mkdir("run.json")
    return make()
"""


class Till:
    """The directory of a run that waits in ``run.json``, and processes that resume it."""

    def __init__(self, here: Path, server: ScriptedOpenAIServer) -> None:
        self.here, self.file = here, here / "run.json"
        self.options = ("--kernel", "shop:make", "--base-url", server.url, "--model", "any")
        (here / "shop.py").write_text(TILL)

    @property
    def paid(self) -> list[str]:
        return (self.here / "paid.txt").read_text().split()

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.from_json(self.file.read_text())

    def started(self, *arguments: str) -> "subprocess.Popen[str]":
        """Resume in a separate process, and return once its function runs."""
        for name in ("started", "gate"):
            os.mkfifo(self.here / name)
        command = command_line("resume", "run.json", *self.options, *arguments)
        process = subprocess.Popen(command, cwd=self.here, stdout=-1, stderr=-1, text=True, encoding="utf-8")
        assert (self.here / "started").read_text() == "x"
        return process

    def let_go(self) -> None:
        """Let the function that runs end."""
        (self.here / "gate").write_text("")

    def cut_short(self, command: Command) -> None:
        """Approve the call, and put back the file as it is while the function runs: as a kill leaves it."""
        assert command("resume", "run.json", *self.options, "--approve", "pay").code == 0
        (self.here / "cut_short.json").replace(self.file)


def pays_once(function: str) -> Callable[[ScriptedRequest], ScriptedReply]:
    """A model that calls the function, and answers once it has a result."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        paid = any(message["role"] == "tool" for message in request.messages)
        return say("Paid.") if paid else call(function, {"amount": 7}, id="pay")

    return reply


@pytest.fixture
def function() -> str:
    return "till-pay"


@pytest.fixture
def till(here: Path, command: Command, function: str) -> Iterator[Till]:
    with ScriptedOpenAIServer(pays_once(function)) as server:
        till = Till(here, server)
        assert command("run", "Pay 7.", *till.options, "--ask-all", "--no-plan", "--checkpoint", "run.json").code == 4
        yield till


def test_a_call_whose_process_was_killed_is_in_doubt(till: Till, command: Command) -> None:
    """Killed in the function, FILE says that it was started; resumed, it is shown as in doubt, and nothing runs."""
    process = till.started("--approve", "pay")
    process.kill()
    process.communicate(timeout=120)
    assert till.file.read_text() == (till.here / "cut_short.json").read_text()
    facts = till.checkpoint.facts
    assert isinstance(facts[-1], CallStarted)
    assert stat.S_IMODE(till.file.stat().st_mode) == 0o600
    shown = command("resume", "run.json", *till.options)
    assert shown.code == 4
    assert "in doubt" in shown.err
    document = command("resume", "run.json", *till.options, "--json").document
    assert [(each["id"], each["in_doubt"]) for each in document["pending"]] == [("pay", True)]
    assert till.paid == ["7"]


@pytest.mark.parametrize(
    ("decision", "result", "paid"),
    [
        (["--approve", "pay"], "paid 7", ["7", "7"]),
        (["--answer", "pay=It was paid."], "It was paid.", ["7"]),
        (["--deny", "pay=Better not."], "It was not run again. Better not.", ["7"]),
    ],
    ids=["approve", "answer", "deny"],
)
def test_a_call_in_doubt_is_decided(
    till: Till, command: Command, decision: list[str], result: str, paid: list[str]
) -> None:
    """Approve runs it again, Supply tells the model its result, Deny leaves the model with the doubt."""
    till.cut_short(command)
    assert command("resume", "run.json", *till.options).code == 4
    done = command("resume", "run.json", *till.options, *decision)
    assert (done.out, done.code) == ("Paid.\n", 0)
    (message,) = [each for each in _messages(till.checkpoint) if each["role"] == "tool"]
    assert message["content"].endswith(result)
    assert till.paid == paid


def _messages(checkpoint: Checkpoint) -> list[dict[str, str]]:
    return [message.to_dict() for message in render(checkpoint.state().transcript)]


def test_the_same_command_again_does_not_run_the_call_again(till: Till, command: Command) -> None:
    """An approval that was typed before the doubt was shown is not taken; the next one is."""
    till.cut_short(command)
    again = command("resume", "run.json", *till.options, "--approve", "pay")
    assert again.code == 4
    assert "nothing that was decided now was taken" in " ".join(again.err.split())
    assert "in doubt" in again.err
    assert till.paid == ["7"]


def test_a_run_with_a_call_in_doubt_is_cancelled(till: Till, command: Command) -> None:
    """``--cancel`` ends it as it is: the model would read that the call's effect is not known."""
    till.cut_short(command)
    cancelled = command("resume", "run.json", "--cancel", "too late", "--json")
    assert (cancelled.code, cancelled.document["status"]) == (1, "stopped")
    assert isinstance(till.checkpoint.facts[-3], CallFinished)
    assert "not known" in next(fact.result for fact in till.checkpoint.facts if isinstance(fact, CallFinished))
    assert till.paid == ["7"]


@pytest.mark.parametrize("function", ["till-pay_once"])
def test_an_idempotent_call_runs_again_without_a_question(till: Till, command: Command) -> None:
    """A function that declares ``@effect("idempotent")`` is run again, as in a store."""
    till.cut_short(command)
    done = command("resume", "run.json", *till.options)
    assert (done.out, done.code) == ("Paid.\n", 0)
    assert till.paid == ["7", "7"]


def test_a_second_process_is_refused(till: Till, command: Command) -> None:
    """While one process resumes FILE another is refused, whatever it wants; the first one ends as it would.

    Named by a link, FILE is the same run.
    """
    (till.here / "link.json").symlink_to("run.json")
    first = till.started("--approve", "pay")
    before = till.file.read_bytes()
    for name, *arguments in (
        ("run.json", "--approve", "pay"),
        ("run.json", "--deny", "pay"),
        ("run.json", "--cancel", "no"),
        ("link.json", "--approve", "pay"),
    ):
        second = command("resume", name, *till.options, *arguments)
        assert (second.code, second.out) == (2, "")
        assert f"{name} is in use: another process works on this run." in " ".join(second.err.split())
    assert till.file.read_bytes() == before
    till.let_go()
    assert (first.communicate(timeout=60)[0], first.returncode) == ("Paid.\n", 0)
    assert till.paid == ["7"]
    assert not [path.name for path in till.here.iterdir() if path.name.startswith(".")]


def test_a_file_that_cannot_be_written_starts_nothing(till: Till, command: Command) -> None:
    """Before the function starts FILE is written: where that fails, the function does not run."""
    options = ["--kernel", "shop:make_without_a_file", *till.options[2:]]
    outcome = command("resume", "run.json", *options, "--approve", "pay")
    assert outcome.code == 2
    assert "The checkpoint cannot be written to run.json" in outcome.err
    assert not (till.here / "paid.txt").exists()


@pytest.mark.parametrize("name", ["PLANNER_EXT_CHECKPOINT_KEY", "PLANNER_EXT_KEY"])
def test_what_a_killed_process_left_is_signed(
    here: Path, command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the environment's key every state of FILE is signed, and an altered one is refused."""
    monkeypatch.setenv(name, "secret")
    with ScriptedOpenAIServer(pays_once("till-pay")) as server:
        till = Till(here, server)
        assert command("run", "Pay 7.", *till.options, "--ask-all", "--no-plan", "--checkpoint", "run.json").code == 4
        till.cut_short(command)
        text = till.file.read_text()
        assert Checkpoint.from_json(text, b"secret").facts
        assert "secret" not in text
        data = json.loads(text)
        del data["facts"][-1]
        till.file.write_text(json.dumps(data))
        refused = command("resume", "run.json", *till.options)
        assert refused.code == 2
        assert "signed with this key" in " ".join(refused.err.split())
        till.file.write_text(text)
        assert command("resume", "run.json", *till.options).code == 4
    assert till.paid == ["7"]
