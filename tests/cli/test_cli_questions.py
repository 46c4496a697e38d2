"""Questions of the model, asked in the terminal."""

from collections.abc import Iterator

import pytest

from planner_ext.testing import ScriptedOpenAIServer, call, say
from support.command_line import Command
from support.durable_shop import STORE

ASK = call("UserInteraction-AskUser", {"question": "Which article?"}, id="ask")
RUN = (
    "run",
    "What does it cost?",
    "--kernel",
    "shop:make",
    "--no-plan",
    "--questions",
    "2",
)


def at(server: ScriptedOpenAIServer) -> tuple[str, ...]:
    """The options for a scripted endpoint."""
    return ("--base-url", server.url, "--model", "scripted")


@pytest.fixture
def server() -> Iterator[ScriptedOpenAIServer]:
    """A model that asks, calls and answers."""
    script = [ASK, call("shop-price", {"article": "lamp"}), say("It is 42.")]
    with ScriptedOpenAIServer(script) as scripted:
        yield scripted


@pytest.mark.parametrize("kept", [(), STORE], ids=["not kept", "kept"])
def test_a_person_answers_in_the_terminal(
    command: Command,
    typed: list[str],
    server: ScriptedOpenAIServer,
    kept: tuple[str, ...],
) -> None:
    """The question is shown, the answer is the result that the model reads, and the run continues to its end."""
    typed.append("The lamp.")
    outcome = command(*RUN, *at(server), *kept)
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")
    assert outcome.err.index("The model asks you") < outcome.err.index(
        "(empty: leave it open): "
    )
    assert server.requests[1].messages[-1]["content"] == "The lamp."
