"""Calls that wait: asked about in the terminal, in a run that is kept and in one that is not."""

import asyncio
import getpass
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_ext.durable import Approvals
from planner_ext.hitl_manager import Deny
from planner_ext.testing import Script, ScriptedOpenAIServer, call, calls, say
from support.command_line import Command
from support.durable_shop import STORE
from support.processes import Lives
from support.terminal import QUESTION, Session

LAMP = call("shop-price", {"article": "lamp"})
LAMB = call("shop-price", {"article": "lamb"}, id="lamb")
ASK = ("--kernel", "shop:make", "--no-plan", "--ask-all")
KEPT = (*STORE, "--run-id", "lamp-7")
RESUME = ("runs", "resume", "lamp-7", *STORE, "--kernel", "shop:make", "--ask-all")

kept_or_not = pytest.mark.parametrize("keeps", [(), KEPT], ids=["not kept", "kept"])
"""Of both kinds of run the terminal asks."""


def at(server: ScriptedOpenAIServer) -> tuple[str, ...]:
    """The options for a scripted endpoint."""
    return ("--base-url", server.url, "--model", "scripted")


def tool_messages(server: ScriptedOpenAIServer) -> list[str]:
    """What the model read of its calls in the last request."""
    return [
        str(message["content"])
        for message in server.requests[-1].messages
        if message["role"] == "tool"
    ]


def decided(command: Command) -> list[tuple[str, str]]:
    """Who decided what, as the store has it."""
    shown = command("runs", "show", "lamp-7", *STORE, "--json").document
    return [(decision["by"], decision["kind"]) for decision in shown["decisions"]]


@pytest.fixture
def server() -> Iterator[ScriptedOpenAIServer]:
    """A model that calls once, with a mistake, and answers."""
    with ScriptedOpenAIServer([LAMB, say("It is 42.")]) as scripted:
        yield scripted


@pytest.fixture
def kept(command: Command, server: ScriptedOpenAIServer, here: Path) -> Path:
    """A run that waits in a store."""
    assert command("run", "What is a lamp?", *ASK, *at(server), *KEPT).code == 4
    return here / "runs.db"


# In a pseudo terminal.


@kept_or_not
def test_a_person_approves_denies_and_edits_in_the_terminal(
    lives: Lives, here: Path, keeps: tuple[str, ...]
) -> None:
    """Each call is shown as it will run; the answers become its results, and exit code 0 comes with the answer."""
    script: Script = [calls(LAMP, call("shop-wait")), LAMB, say("It is 42.")]
    with ScriptedOpenAIServer(script) as server:
        session = Session(
            lives, here, "run", "What is a lamp?", *ASK, *at(server), *keeps
        )
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
    assert "article: lamp" in session.shown
    assert "Not taken: The arguments are not valid JSON" in session.shown
    assert "The edited arguments cannot be used." in " ".join(session.shown.split())
    assert "It is 42." in session.shown
    assert {
        len(line) for line in session.shown.splitlines() if line[:1] in "╭│╰" and line
    } == {80}


# In this process.


def test_a_person_quits(
    command: Command, typed: list[str], server: ScriptedOpenAIServer
) -> None:
    """Exit code 4, nothing runs, nothing more is asked of the model, and stderr says how to keep a run."""
    typed.append("quit")
    outcome = command("run", "What is a lamp?", *ASK, *at(server))
    assert (outcome.code, outcome.out, len(server.requests)) == (4, "", 1)
    assert "looked up" not in outcome.err
    assert "With --store FILE a run waits" in " ".join(outcome.err.split())


def test_a_run_waits_in_a_store_and_is_resumed_by_another_command(
    command: Command, here: Path, server: ScriptedOpenAIServer
) -> None:
    """The file is its owner's alone; an edited approval is what runs, and who gave it is on the record."""
    begun = command("run", "What is a lamp?", *ASK, *at(server), *KEPT)
    assert (begun.code, begun.out) == (4, "")
    assert (
        "planner-ext runs resume lamp-7 --ask-all --kernel shop:make --base-url http"
        in begun.err
    )
    assert stat.S_IMODE((here / "runs.db").stat().st_mode) == 0o600
    assert (
        command(
            "approvals", "edit", "lamp-7/0/lamb", "article=lamp", "--by", "ann", *STORE
        ).code
        == 0
    )
    resumed = command(*RESUME, *at(server))
    assert (resumed.code, resumed.out) == (0, "It is 42.\n")
    assert "looked up" in resumed.err
    assert (
        'ann: approve shop-price(article="lamp") in place of article="lamb"'
        in resumed.err
    )
    assert "Round trip 1 " not in resumed.err
    assert decided(command) == [("ann", "approve")]


def test_without_a_terminal_what_waits_is_printed_and_the_way_on(
    command: Command, server: ScriptedOpenAIServer
) -> None:
    """Exit code 4; the document has the call, stderr shows it with the ways to decide."""
    outcome = command("run", "What is a lamp?", *ASK, *at(server), "--json")
    assert outcome.code == 4
    assert outcome.document["status"] == "paused"
    assert outcome.document["pending"][0]["arguments"] == {"article": "lamb"}
    assert outcome.document["pending"][0]["fingerprint"][:12] in outcome.err
    assert "--store FILE, which keeps the run for planner-ext approvals." in " ".join(
        outcome.err.split()
    )


@pytest.mark.parametrize("way", [("--stream",), ("--no-stream",), KEPT])
@pytest.mark.parametrize(("answer", "asked"), [("function", 2), ("arguments", 3)])
def test_always_is_asked_once(
    command: Command, typed: list[str], way: tuple[str, ...], answer: str, asked: int
) -> None:
    """For a function or for its arguments: what began to wait before and what comes later runs without a question."""
    bed = call("shop-price", {"article": "bed"})
    script: Script = [calls(LAMP, LAMP), bed, LAMP, say("Fine.")]
    typed += ["perhaps", "always", "", "w", answer] + ["a"] * (asked - 2)
    with ScriptedOpenAIServer(script) as server:
        outcome = command("run", "Prices?", *ASK, *at(server), *way)
    assert (outcome.code, outcome.out, typed) == (0, "Fine.\n", [])
    assert "shop-price: approved, as you said always." in outcome.err
    assert outcome.err.count("A call waits for your decision") == asked - 1


def test_a_person_who_leaves_the_terminal_leaves_the_run_in_its_store(
    command: Command, kept: Path, typed: list[str], server: ScriptedOpenAIServer
) -> None:
    """Ctrl-D is quit; the store still holds the run, under the id that was shown, and the next person decides."""
    left = command(*RESUME, *at(server))
    assert left.code == 4
    assert "planner-ext approvals approve lamp-7/0/lamb --store runs.db" in left.err
    assert left.err.count("A call waits for your decision") == 1
    assert "call        lamp-7/0/lamb, fingerprint" in left.err
    typed += ["d", "no"]
    outcome = command(*RESUME, *at(server))
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")
    assert tool_messages(server) == ["The call was refused and did not run: no"]
    assert decided(command) == [(getpass.getuser(), "deny")]


def test_what_is_decided_in_part_waits_on(command: Command, typed: list[str]) -> None:
    """Exit code 4, and the store has the rest, until every call is decided."""
    with ScriptedOpenAIServer([calls(LAMP, LAMB), say("Fine.")]) as server:
        typed += ["a", "q"]
        assert command("run", "Prices?", *ASK, *at(server), *KEPT).code == 4
        assert len(server.requests) == 1
        typed += ["d", "a=b"]
        outcome = command(*RESUME, *at(server))
        assert (outcome.code, outcome.out) == (0, "Fine.\n")
        assert tool_messages(server) == [
            '{"price":42}',
            "The call was refused and did not run: a=b",
        ]


def test_a_decision_made_elsewhere_while_the_terminal_asks_counts(
    command: Command,
    kept: Path,
    typed: list[str],
    server: ScriptedOpenAIServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is typed afterwards is refused with the reason, and the run continues with the first decision."""

    async def deny() -> bool:
        async with Approvals.connect(kept) as approvals:
            return await approvals.decide("lamp-7/0/lamb", Deny("not today", by="bo"))

    def answer() -> str:
        assert asyncio.run(deny())
        return "a"

    monkeypatch.setattr("builtins.input", answer)
    outcome = command(*RESUME, *at(server))
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")
    assert "the first decision counts" in outcome.words
    assert tool_messages(server) == ["The call was refused and did not run: not today"]


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
    assert [(each["id"], each["prompt"]) for each in outcome.document["pending"]] == [
        ("lamb", "Look first.")
    ]
    assert "Rule 2 of the policy is for no function of this kernel." in outcome.err


@pytest.mark.parametrize(
    ("policy", "more", "complaint"),
    [
        ("rules: []", [], "The policy lacks default."),
        ("default: ask\ndefault: deny", [], "the key 'default' stands twice"),
        (None, [], "--policy policy.yaml cannot be read: No such policy file"),
        ("default: ask", ["--ask-all"], "--ask-all and --policy contradict each other"),
        ("default: ask", ["--store", "no/runs.db"], "its folder does not exist"),
    ],
)
def test_a_bad_policy_or_place_is_reported_before_anything_is_asked(
    command: Command,
    here: Path,
    server: ScriptedOpenAIServer,
    policy: str | None,
    more: list[str],
    complaint: str,
) -> None:
    """Exit code 2 and one paragraph."""
    if policy is not None:
        (here / "policy.yaml").write_text(policy)
    outcome = command(
        "run",
        "Go",
        "--kernel",
        "shop:make",
        *at(server),
        "--policy",
        "policy.yaml",
        *more,
    )
    assert (outcome.code, outcome.out, len(server.requests)) == (2, "", 0)
    assert complaint in outcome.err


@kept_or_not
def test_a_call_that_expired_is_settled_without_a_question(
    command: Command, here: Path, typed: list[str], keeps: tuple[str, ...]
) -> None:
    """A call that expired is not asked about; the model reads that it was too late."""
    (here / "policy.yaml").write_text(
        "default: deny\nrules: [{function: price, action: ask, expires_in: 0.000001}]"
    )
    with ScriptedOpenAIServer([LAMB, say("Too late.")]) as server:
        options = (
            "--kernel",
            "shop:make",
            "--no-plan",
            "--policy",
            "policy.yaml",
            *at(server),
        )
        outcome = command("run", "Go", *options, *keeps)
        assert "nobody decided in time" in tool_messages(server)[0]
    assert (outcome.code, outcome.out) == (0, "Too late.\n")


def test_what_a_person_would_not_see_is_written_as_an_escape(command: Command) -> None:
    """Control and direction characters, and invisible blanks, in the arguments to approve."""
    with ScriptedOpenAIServer(
        [call("shop-price", {"article": "la\u202emp\x1b[2J\u200b\u00a0"})]
    ) as server:
        outcome = command("run", "Go", *ASK, *at(server))
    assert 'article: "la\\u202emp\\u001b[2J\\u200b\\u00a0"' in outcome.err
    assert "\x1b" not in outcome.err


def test_the_commands_are_listed(command: Command) -> None:
    """The help names each of them."""
    outcome = command("--help")
    assert all(
        f"\n  {name} " in outcome.out for name in ("run", "runs", "demo", "compare")
    )


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


def test_a_call_that_would_get_another_value_by_now_waits_again(
    command: Command, here: Path
) -> None:
    """Its approval is refused; the store then holds the call as it would run, and the next decision is on that."""
    for name, kind in (("plain_texts", "str"), ("whole_numbers", "int")):
        (here / f"{name}.py").write_text(BANK.replace("TYPE", kind))
    with ScriptedOpenAIServer(
        [call("bank-pay", {"account": "7"}, id="pay"), say("Paid.")]
    ) as server:
        assert (
            command(
                "run",
                "Pay.",
                "--kernel",
                "plain_texts:make",
                *ASK[2:],
                *KEPT,
                *at(server),
            ).code
            == 4
        )
        approve = ("approvals", "approve", "lamp-7/0/pay", *STORE)
        resume = (
            "runs",
            "resume",
            "lamp-7",
            *STORE,
            "--kernel",
            "whole_numbers:make",
            "--ask-all",
            *at(server),
        )
        assert command(*approve).code == 0
        waits = command(*resume)
        assert (waits.code, len(server.requests)) == (4, 1)
        assert "account: 7 " in waits.err
        assert (
            'would now get {"account": 7}' in command("approvals", "list", *STORE).out
        )
        assert command(*approve).code == 0
        assert command(*resume).code == 0
        assert tool_messages(server) == ["paid 7"]
