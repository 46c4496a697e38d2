"""Questions of the model: asked in the terminal, or kept in a file and answered in another process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_ext.events import Clarified
from planner_ext.hitl_manager import Checkpoint
from planner_ext.testing import ScriptedOpenAIServer, call, say
from support.command_line import Command

ASK = call("UserInteraction-AskUser", {"question": "Which article?"}, id="ask")
RUN = ("run", "What does it cost?", "--kernel", "shop:make", "--no-plan", "--questions", "2")
RESUME = ("resume", "run.json", "--kernel", "shop:make")


def at(server: ScriptedOpenAIServer) -> tuple[str, ...]:
    """The options for a scripted endpoint."""
    return ("--base-url", server.url, "--model", "scripted")


@pytest.fixture
def server() -> Iterator[ScriptedOpenAIServer]:
    """A model that asks, calls and answers."""
    script = [ASK, call("shop-price", {"article": "lamp"}), say("It is 42.")]
    with ScriptedOpenAIServer(script) as scripted:
        yield scripted


def test_a_person_answers_in_the_terminal(command: Command, typed: list[str], server: ScriptedOpenAIServer) -> None:
    """The question is shown, the answer is the result that the model reads, and the run continues to its end."""
    typed.append("The lamp.")
    outcome = command(*RUN, *at(server))
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")
    assert outcome.err.index("The model asks you") < outcome.err.index("(empty: leave it open): ")
    assert server.requests[1].messages[-1]["content"] == "The lamp."


def test_a_question_waits_in_a_file_and_is_answered_from_the_command_line(
    command: Command, here: Path, server: ScriptedOpenAIServer
) -> None:
    """Exit code 4 and the question in the document; --answer resumes the run and records who answered."""
    waits = command(*RUN, *at(server), "--checkpoint", "run.json", "--json")
    assert (waits.code, waits.document["status"]) == (4, "asked")
    assert [one["arguments"] for one in waits.document["pending"]] == [{"question": "Which article?"}]
    assert "--answer ID=TEXT" in waits.err

    refused = command(*RESUME, *at(server), "--approve", "ask")
    assert refused.code == 2
    assert "Which article?" in refused.err

    done = command(*RESUME, *at(server), "--answer", "ask=The lamp.", "--by", "ann")
    assert (done.code, done.out) == (0, "It is 42.\n")
    assert "ann: The lamp." in done.err
    facts = Checkpoint.from_json((here / "run.json").read_text()).facts
    assert [(fact.answer, fact.by) for fact in facts if isinstance(fact, Clarified)] == [("The lamp.", "ann")]
