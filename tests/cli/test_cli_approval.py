"""Calls that wait: asked about in the terminal, or kept in a file and decided in another process."""

import getpass
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_ext.events import CallDecided
from planner_ext.hitl_manager import Checkpoint
from planner_ext.testing import Script, ScriptedFault, ScriptedOpenAIServer, call, calls, say
from support.command_line import Command
from support.terminal import QUESTION, Session

LAMP = call("shop-price", {"article": "lamp"})
LAMB = call("shop-price", {"article": "lamb"}, id="lamb")
ASK = ("--kernel", "shop:make", "--no-plan", "--ask-all")
RESUME = ("resume", "run.json", "--kernel", "shop:make", "--ask-all")


def at(server: ScriptedOpenAIServer) -> tuple[str, ...]:
    """The options for a scripted endpoint."""
    return ("--base-url", server.url, "--model", "scripted")


def tool_messages(server: ScriptedOpenAIServer) -> list[str]:
    """What the model read of its calls in the last request."""
    return [str(message["content"]) for message in server.requests[-1].messages if message["role"] == "tool"]


def decided(file: Path) -> list[CallDecided]:
    """What people decided, as a checkpoint has it."""
    facts = Checkpoint.from_json(file.read_text()).facts
    return [fact for fact in facts if isinstance(fact, CallDecided) and fact.person]


@pytest.fixture
def server() -> Iterator[ScriptedOpenAIServer]:
    """A model that calls once, with a mistake, and answers."""
    with ScriptedOpenAIServer([LAMB, say("It is 42.")]) as scripted:
        yield scripted


@pytest.fixture
def kept(command: Command, server: ScriptedOpenAIServer, here: Path) -> Path:
    """A run that waits in a file."""
    assert command("run", "What is a lamp?", *ASK, *at(server), "--checkpoint", "run.json").code == 4
    return here / "run.json"


# In a pseudo terminal.


def test_a_person_approves_denies_and_edits_in_the_terminal(here: Path) -> None:
    """Each call is shown as it will run; the answers become its results, and exit code 0 comes with the answer."""
    script: Script = [calls(LAMP, call("shop-wait")), LAMB, say("It is 42.")]
    with ScriptedOpenAIServer(script) as server:
        session = Session(here, "run", "What is a lamp?", *ASK, *at(server))
        session.type("approve", after=QUESTION)
        session.type("deny", after=QUESTION)
        session.type("no time", after="(may be empty): ")
        session.type("edit", after=QUESTION)
        session.type("{half", after="(empty: back): ")
        session.type('{"piece": 1}', after="(empty: back): ")
        session.type('{"article": "lamp"}', after="(empty: back): ")
        assert session.end() == 0
        assert tool_messages(server) == [
            '{"price":42}',
            "The call was refused and did not run: no time",
            '{"price":42}',
        ]
    assert "A call waits for your decision, and 1 more" in session.shown
    assert "arguments  {" in session.shown
    assert "Not taken: The arguments are not valid JSON" in session.shown
    assert "The edited arguments cannot be used." in " ".join(session.shown.split())
    assert "It is 42." in session.shown
    assert {len(line) for line in session.shown.splitlines() if line[:1] in "╭│╰" and line} == {80}


# In this process.


def test_a_person_quits(command: Command, typed: list[str], server: ScriptedOpenAIServer) -> None:
    """Exit code 4, nothing runs, nothing more is asked of the model, and stderr says how to keep a run."""
    typed.append("quit")
    outcome = command("run", "What is a lamp?", *ASK, *at(server))
    assert (outcome.code, outcome.out, len(server.requests)) == (4, "", 1)
    assert "looked up" not in outcome.err
    assert "With --checkpoint FILE a run waits" in " ".join(outcome.err.split())


def test_a_run_waits_in_a_file_and_is_resumed_by_another_command(
    command: Command, here: Path, server: ScriptedOpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is signed and its owner's alone; an edited approval is what runs, and who gave it is on the record."""
    monkeypatch.setenv("PLANNER_EXT_KEY", "secret")
    begun = command("run", "What is a lamp?", *ASK, *at(server), "--checkpoint", "run.json")
    assert (begun.code, begun.out) == (4, "")
    assert "planner-ext resume run.json --ask-all --kernel shop:make --base-url http" in begun.err
    file = here / "run.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["signature"]
    resumed = command(*RESUME, *at(server), "--edit", 'lamb={"article": "lamp"}', "--by", "ann")
    assert (resumed.code, resumed.out) == (0, "It is 42.\n")
    assert "looked up" in resumed.err
    assert [(fact.by, fact.edited) for fact in decided(file)] == [("ann", '{"article":"lamp"}')]
    assert [path.name for path in here.iterdir() if path.name.startswith(".run")] == []


def test_without_a_terminal_what_waits_is_printed_and_the_way_on(
    command: Command, server: ScriptedOpenAIServer
) -> None:
    """Exit code 4; the document has the call, stderr shows it with the ways to decide."""
    outcome = command("run", "What is a lamp?", *ASK, *at(server), "--json")
    assert outcome.code == 4
    assert outcome.document["status"] == "paused"
    assert outcome.document["pending"][0]["arguments"] == {"article": "lamb"}
    assert outcome.document["pending"][0]["fingerprint"][:12] in outcome.err
    assert "--checkpoint FILE, which keeps the run for planner-ext resume FILE." in outcome.err


@pytest.mark.parametrize("way", ["--stream", "--no-stream"])
@pytest.mark.parametrize(("answer", "asked"), [("function", 2), ("arguments", 3)])
def test_always_is_asked_once(command: Command, typed: list[str], way: str, answer: str, asked: int) -> None:
    """For a function or for its arguments: what began to wait before and what comes later runs without a question."""
    bed = call("shop-price", {"article": "bed"})
    script: Script = [calls(LAMP, LAMP), bed, LAMP, say("Fine.")]
    typed += ["perhaps", "always", "", "w", answer] + ["a"] * (asked - 2)
    with ScriptedOpenAIServer(script) as server:
        outcome = command("run", "Prices?", *ASK, *at(server), way)
    assert (outcome.code, outcome.out, typed) == (0, "Fine.\n", [])
    assert "shop-price: approved, as you said always." in outcome.err
    assert outcome.err.count("A call waits for your decision") == asked - 1


def test_a_person_who_leaves_the_terminal_leaves_the_run_in_its_file(
    command: Command, kept: Path, typed: list[str], server: ScriptedOpenAIServer
) -> None:
    """Ctrl-D is quit; the file still holds the run, and the next person decides."""
    before = kept.read_text()
    assert command(*RESUME, *at(server)).code == 4
    assert kept.read_text() == before
    typed += ["d", "no"]
    outcome = command(*RESUME, *at(server))
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")
    assert tool_messages(server) == ["The call was refused and did not run: no"]
    assert [fact.by for fact in decided(kept)] == [getpass.getuser()]


def test_what_is_decided_in_part_waits_on(command: Command, here: Path) -> None:
    """Exit code 4 and the new checkpoint in the file, until every call is decided."""
    with ScriptedOpenAIServer([calls(LAMP, LAMB), say("Fine.")]) as server:
        begun = command("run", "Prices?", *ASK, *at(server), "--checkpoint", "run.json", "--json")
        first = begun.document["pending"][0]["id"]
        assert command(*RESUME, *at(server), "--approve", first).code == 4
        assert len(server.requests) == 1
        outcome = command(*RESUME, *at(server), "--deny", "lamb=a=b")
        assert (outcome.code, outcome.out) == (0, "Fine.\n")
        assert tool_messages(server) == ['{"price":42}', "The call was refused and did not run: a=b"]
        again = command(*RESUME, *at(server), "--approve", first)
        assert (again.code, len(server.requests)) == (2, 2)
    assert "Error: " in again.err


def test_a_spent_run_continues_with_more_round_trips(command: Command, here: Path) -> None:
    """Exit code 1 at the limit, 0 with a larger one; what was spent stays spent."""
    with ScriptedOpenAIServer([LAMP, say("I do not know."), say("It is 42.")]) as server:
        options = ("--kernel", "shop:make", *at(server))
        arguments = ("--no-plan", "--max-iterations", "2", "--checkpoint", "run.json")
        assert command("run", "What is a lamp?", *options, *arguments).code == 1
        outcome = command("resume", "run.json", *options, "--max-iterations", "5", "--json")
    assert (outcome.code, outcome.document["status"], outcome.document["iterations"]) == (0, "answered", 3)
    assert "Round trip 3 of 5" in outcome.err


def test_a_run_is_cancelled_for_good(command: Command, kept: Path, server: ScriptedOpenAIServer) -> None:
    """Exit code 1, without a kernel; nothing ran, and who cancelled why is the reason."""
    outcome = command("resume", "run.json", "--cancel", "too late", "--by", "ann", "--json")
    assert (outcome.code, outcome.document["status"]) == (1, "stopped")
    assert outcome.document["reason"] == "Cancelled by ann: too late"
    assert len(server.requests) == 1


def test_a_fault_leaves_the_run_in_its_file(command: Command, here: Path) -> None:
    """Exit code 3, and resume continues where the request failed."""
    with ScriptedOpenAIServer([LAMP, ScriptedFault(status=400), say("It is 42.")]) as server:
        options = ("--kernel", "shop:make", *at(server))
        assert command("run", "What?", *options, "--no-plan", "--checkpoint", "run.json").code == 3
        outcome = command("resume", "run.json", *options)
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")


def test_a_policy_says_what_waits(command: Command, here: Path) -> None:
    """Its rules decide; one for no function of the kernel is named."""
    (here / "policy.yaml").write_text(
        "default: deny\nrules:\n  - {function: price, action: ask, reason: Look first.}\n"
        "  - {plugin: shoe, action: deny}"
    )
    with ScriptedOpenAIServer([calls(LAMB, call("shop-wait"))]) as server:
        options = ("--kernel", "shop:make", "--no-plan", *at(server))
        outcome = command("run", "Go", *options, "--policy", "policy.yaml", "--json")
    assert outcome.code == 4
    assert [(each["id"], each["prompt"]) for each in outcome.document["pending"]] == [("lamb", "Look first.")]
    assert "Rule 2 of the policy is for no function of this kernel." in outcome.err


@pytest.mark.parametrize(
    ("policy", "more", "complaint"),
    [
        ("rules: []", [], "The policy lacks default."),
        ("default: ask\ndefault: deny", [], "the key 'default' stands twice"),
        (None, [], "--policy policy.yaml cannot be read: No such policy file"),
        ("default: ask", ["--ask-all"], "--ask-all and --policy contradict each other"),
        ("default: ask", ["--checkpoint", "no/run.json"], "The checkpoint cannot be written to no/run.json: "),
    ],
)
def test_a_bad_policy_or_place_is_reported_before_anything_is_asked(
    command: Command, here: Path, server: ScriptedOpenAIServer, policy: str | None, more: list[str], complaint: str
) -> None:
    """Exit code 2 and one paragraph."""
    if policy is not None:
        (here / "policy.yaml").write_text(policy)
    outcome = command("run", "Go", "--kernel", "shop:make", *at(server), "--policy", "policy.yaml", *more)
    assert (outcome.code, outcome.out, len(server.requests)) == (2, "", 0)
    assert complaint in outcome.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--approve", "c"], "A decision was given for the call 'c', which does not wait for one; waiting: lamb."),
        (["--approve", "lamb", "--deny", "lamb=no"], "The call 'lamb' is decided twice."),
        (["--edit", "lamb={"], "--edit lamb=JSON: the arguments are not valid JSON"),
        (["--edit", "lamb"], "--edit lamb=JSON: the arguments are missing."),
        (["--edit", "lamb=[1]"], "--edit lamb=JSON: the arguments must be one JSON object"),
        (["--edit", 'lamb={"piece": 1}'], "The edited arguments cannot be used."),
        (
            ["--approve", "lamb", "--cancel", "no"],
            "--cancel ends the run; leave --approve, --deny, --edit and --answer out.",
        ),
        (["--max-iterations", "0"], "max_iterations must be a whole number, 1 or more"),
    ],
)
def test_a_decision_that_cannot_be_taken_changes_nothing(
    command: Command, kept: Path, server: ScriptedOpenAIServer, arguments: list[str], complaint: str
) -> None:
    """Exit code 2 and one paragraph; nothing runs, and the file is as it was."""
    before = kept.read_bytes()
    outcome = command(*RESUME, *at(server), *arguments)
    assert (outcome.code, outcome.out, len(server.requests)) == (2, "", 1)
    assert outcome.err.count("Error: ") == 1
    assert complaint in outcome.err
    assert kept.read_bytes() == before


def test_a_file_that_is_not_what_was_written_is_refused(
    command: Command, here: Path, server: ScriptedOpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another key, without one, altered, cut short, or not there: exit code 2, and nothing runs."""
    monkeypatch.setenv("PLANNER_EXT_KEY", "secret")
    assert command("run", "What?", *ASK, *at(server), "--checkpoint", "run.json").code == 4
    file = here / "run.json"
    text = file.read_text()

    def refused(complaint: str) -> None:
        outcome = command(*RESUME, *at(server), "--approve", "lamb")
        assert (outcome.code, outcome.out, len(server.requests)) == (2, "", 1)
        assert complaint in outcome.err

    monkeypatch.setenv("PLANNER_EXT_KEY", "another")
    refused("Error: run.json cannot be used. Expected a checkpoint signed with this key;")
    monkeypatch.delenv("PLANNER_EXT_KEY")
    refused("Error: run.json is signed, and PLANNER_EXT_KEY is not set.")
    monkeypatch.setenv("PLANNER_EXT_KEY", "secret")
    file.write_text(text.replace("lamb", "lamp"))
    refused("it is unsigned, altered or signed with another one.")
    file.write_text(text[:100])
    refused("Expected a checkpoint as JSON text; this is not JSON")
    file.write_bytes(b"\xff")
    refused("run.json is no checkpoint: it is not text.")
    file.unlink()
    refused("Error: run.json cannot be read: No such file or directory.")


def test_a_call_that_expired_is_settled_without_a_question(command: Command, here: Path, typed: list[str]) -> None:
    """A call that expired is not asked about; the model reads that it was too late."""
    (here / "policy.yaml").write_text("default: deny\nrules: [{function: price, action: ask, expires_in: 0.000001}]")
    with ScriptedOpenAIServer([LAMB, say("Too late.")]) as server:
        options = ("--kernel", "shop:make", "--no-plan", "--policy", "policy.yaml", *at(server))
        outcome = command("run", "Go", *options)
        assert "nobody decided in time" in tool_messages(server)[0]
    assert (outcome.code, outcome.out) == (0, "Too late.\n")


def test_what_a_person_would_not_see_is_written_as_an_escape(command: Command) -> None:
    """Control and direction characters, and invisible blanks, in the arguments to approve."""
    with ScriptedOpenAIServer([call("shop-price", {"article": "la\u202emp\x1b[2J\u200b\u00a0"})]) as server:
        outcome = command("run", "Go", *ASK, *at(server))
    assert '"article": "la\\u202emp\\u001b[2J\\u200b\\u00a0"' in outcome.err
    assert "\x1b" not in outcome.err


def test_the_commands_are_listed(command: Command) -> None:
    """The help names each of them."""
    outcome = command("--help")
    assert all(f"\n  {name} " in outcome.out for name in ("run", "resume", "demo", "compare"))


BANK = """
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function


class Bank:
    @kernel_function(description="Pays.")
    def pay(self, account: TYPE) -> str:
        return f"paid {account!r}"


def make():
    kernel = Kernel()
    kernel.add_plugin(Bank(), "bank")
    return kernel
"""


def test_a_call_that_would_get_another_value_by_now_waits_again(command: Command, here: Path) -> None:
    """Its approval is refused; the file then holds the call as it would run, and the next decision is on that."""
    for name, kind in (("plain_texts", "str"), ("whole_numbers", "int")):
        (here / f"{name}.py").write_text(BANK.replace("TYPE", kind))
    with ScriptedOpenAIServer([call("bank-pay", {"account": "7"}, id="pay"), say("Paid.")]) as server:
        begin = ("run", "Pay.", "--kernel", "plain_texts:make", "--no-plan", "--ask-all", "--checkpoint", "run.json")
        assert command(*begin, *at(server)).code == 4
        approve = ("resume", "run.json", "--kernel", "whole_numbers:make", "--ask-all", "--approve", "pay", *at(server))
        refused = command(*approve)
        assert refused.code == 2
        assert 'would now get {"account": 7}' in " ".join(refused.err.split())
        waits = command("resume", "run.json", "--kernel", "whole_numbers:make", "--ask-all", *at(server))
        assert (waits.code, len(server.requests)) == (4, 1)
        assert '"account": 7' in waits.err
        assert command(*approve).code == 0
        assert tool_messages(server) == ["paid 7"]
