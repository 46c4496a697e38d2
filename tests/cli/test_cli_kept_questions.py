"""Questions of the model in kept runs: listed and shown as questions, answered by ``approvals supply``."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_ext.testing import ScriptedOpenAIServer, call, calls, say
from support.command_line import Command
from support.durable_shop import STORE

QUESTION = "Which article?"
ASK = call("UserInteraction-AskUser", {"question": QUESTION}, id="ask")
PRICE = call("shop-price", {"article": "lamp"}, id="price")
ROW = "price-7/0/ask"
RUN = (
    "run",
    "What does it cost?",
    "--kernel",
    "shop:make",
    "--no-plan",
    "--run-id",
    "price-7",
    *STORE,
)
RESUME = ("runs", "resume", "price-7", "--kernel", "shop:make", *STORE)


@pytest.fixture
def server() -> Iterator[ScriptedOpenAIServer]:
    """A model that asks, calls, asks again and answers."""
    with ScriptedOpenAIServer([ASK, PRICE, ASK, say("It is 42.")]) as scripted:
        yield scripted
        assert scripted.refused == []


@pytest.fixture
def at(server: ScriptedOpenAIServer) -> tuple[str, ...]:
    """The options for the scripted endpoint."""
    return ("--base-url", server.url, "--model", "scripted")


@pytest.fixture
def asked(command: Command, here: Path, at: tuple[str, ...]) -> str:
    """What a run says that waits for an answer."""
    begun = command(*RUN, "--questions", "2", *at)
    assert (begun.code, begun.out) == (4, "")
    return begun.err


def test_a_run_that_asks_says_how_it_is_answered(asked: str, command: Command) -> None:
    """The question, the command that answers it, and the one that resumes the run; also when the run is shown."""
    for shown in (asked, command("runs", "show", "price-7", *STORE).err):
        assert "The model asks you" in shown
        assert f"planner-ext approvals supply {ROW} ANSWER --store runs.db" in shown
    assert "planner-ext runs resume price-7 --kernel shop:make" in asked


FORGED = (
    "Which?\nbill-9/0/call_1\n  waits since yesterday\n"
    + "so " * 26
    + "status approved"
)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_question_cannot_look_like_a_line_of_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """What follows a line end in it, and what a terminal would wrap, is indented more than any line of the command."""
    with ScriptedOpenAIServer(
        [call("UserInteraction-AskUser", {"question": FORGED}, id="ask")]
    ) as server:
        command(
            *RUN, "--questions", "1", "--base-url", server.url, "--model", "scripted"
        )
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
    for words, first in (("list",), 1), (("show", ROW), 0):
        own, *other = command("approvals", *words, *STORE).out.splitlines()[first:]
        forged = other[: 3 + terminal]
        assert "The model asks: Which?" in own
        assert [line.strip() for line in forged[:2]] == [
            "bill-9/0/call_1",
            "waits since yesterday",
        ]
        assert forged[-1].endswith("status approved")
        assert all(line.startswith(" " * (8 if first else 4)) for line in forged)
        assert max(map(len, forged)) <= 80 or not terminal


@pytest.mark.usefixtures("asked")
def test_a_question_is_shown_as_one(command: Command) -> None:
    """List and show say what the model asks, and of no function that would run; the document has the kind."""
    assert command("approvals", "list", *STORE).out.startswith(
        f"{ROW}\n    The model asks: {QUESTION}\n    waits since"
    )
    shown = command("approvals", "show", ROW, *STORE)
    assert shown.out.startswith(f"The model asks: {QUESTION}\n")
    assert "AskUser" not in shown.out
    assert "function" not in shown.out
    assert (
        command("approvals", "show", ROW, *STORE, "--json").document["kind"]
        == "question"
    )


@pytest.mark.usefixtures("asked")
def test_an_answer_is_text_and_the_next_question_waits_under_its_own_id(
    command: Command, server: ScriptedOpenAIServer, at: tuple[str, ...]
) -> None:
    """What looks like a number stays as it was written; the run keeps its questions when it is resumed."""
    answered = command("approvals", "supply", ROW, "007", "--by", "ann", *STORE)
    assert (answered.code, answered.out, answered.err) == (
        0,
        f"{ROW} is answered: 007\n",
        "",
    )
    again = command(*RESUME, *at, "--json")
    assert (again.code, again.document["status"]) == (4, "asked")
    assert server.requests[1].messages[-1]["content"] == "007"
    assert "UserInteraction-AskUser" in server.requests[1].tools
    assert "planner-ext approvals supply price-7/2/ask ANSWER" in again.err

    denied = command("approvals", "deny", "price-7/2/ask", "--reason", "Guess.", *STORE)
    assert denied.out == "price-7/2/ask is left without an answer\n"
    done = command(*RESUME, *at)
    assert (done.code, done.out) == (0, "It is 42.\n")
    assert command("approvals", "list", *STORE).err == "Nothing waits in runs.db.\n"
    assert "Nobody answers this. Guess." in str(
        server.requests[3].messages[-1]["content"]
    )


@pytest.mark.parametrize("words", [("approve", ROW), ("edit", ROW, "question=What?")])
@pytest.mark.usefixtures("asked")
def test_a_question_cannot_be_approved(
    words: tuple[str, ...], command: Command
) -> None:
    """Exit code 2, with the way to answer it; it still waits."""
    refused = command("approvals", *words, *STORE)
    assert (refused.code, refused.out) == (2, "")
    assert (
        "is a question of the model: there is nothing in it to approve. Answer it with supply"
        in refused.err
    )
    assert (
        command("approvals", "show", ROW, *STORE, "--json").document["status"] == "open"
    )


@pytest.mark.usefixtures("asked")
def test_an_answer_that_a_worker_refuses_is_asked_for_again(
    command: Command, at: tuple[str, ...]
) -> None:
    """A blank answer: the list says why it was not taken."""
    assert command("approvals", "supply", ROW, " ", *STORE).code == 0
    assert command(*RESUME, *at).code == 4
    assert (
        f"not taken: The answer to the question '{QUESTION}' is blank"
        in command("approvals", "list", *STORE).out
    )


def test_a_call_beside_a_question_is_named_with_its_own_command(
    command: Command, here: Path, server: ScriptedOpenAIServer
) -> None:
    """Paused, both wait; each is named with the command that decides it."""
    with ScriptedOpenAIServer([calls(ASK, PRICE)]) as beside:
        begun = command(
            *RUN,
            "--questions",
            "1",
            "--ask-all",
            "--base-url",
            beside.url,
            "--model",
            "scripted",
        )
    assert begun.code == 4
    assert f"planner-ext approvals supply {ROW} ANSWER --store runs.db" in begun.err
    assert "planner-ext approvals approve price-7/0/price --store runs.db" in begun.err


@pytest.mark.usefixtures("here")
def test_an_empty_goal_is_refused_before_anything_is_kept(
    command: Command, at: tuple[str, ...]
) -> None:
    """Exit code 2, by name; no run of the name is there afterwards."""
    refused = command("run", "  ", *RUN[2:], *at)
    assert refused.code == 2
    assert "The goal must be a text that is not empty" in refused.err
    assert command("runs", "list", *STORE).err == "No run in runs.db.\n"
