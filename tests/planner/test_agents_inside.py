"""An agent as a function of a kernel: charged to the run that calls it, and under its gate, with the kernel it has."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import PrivateAttr
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Budget, FunctionInvokingChatCompletion, ToolUseSession
from planner_ext.core.facts import CallStarted, HappenedInside, ModelReplied, unwrapped
from planner_ext.durable import Runs
from planner_ext.errors import RunNotAnsweredError
from planner_ext.testing import Script, ScriptedChatCompletion, call, calls, say
from support.approval import (
    DONE,
    LOOK,
    WIPE,
    Door,
    Shop,
    World,
    every_door,
    planner_with,
    results,
    world,
)
from support.stock import stock

ASK = call("team-helper", {"messages": "Help."})


pytestmark = pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)
"""Semantic Kernel looks at every attribute of an agent that is added as a plugin, deprecated ones among them."""


def kernel_with(service: Any, **plugins: object) -> Kernel:
    kernel = Kernel(services=service)
    for name, plugin in plugins.items():
        kernel.add_plugin(plugin, name)
    return kernel


def helper(
    service: Any, name: str = "helper", **plugins: object
) -> ChatCompletionAgent:
    """Make a stock agent with a kernel of its own."""
    kernel = kernel_with(service, **plugins)
    return ChatCompletionAgent(
        kernel=kernel,
        name=name,
        instructions="Be kind.",
        function_choice_behavior=stock.Auto(),
    )


class Team:
    """A world whose kernel has an agent, and what the agent's own kernel did."""

    def __init__(self, script: Script, *outer: Any, wrapped: bool = False) -> None:
        self.shop = Shop()
        self.service = ScriptedChatCompletion(script, service_id="own")
        self.given = (
            FunctionInvokingChatCompletion(self.service) if wrapped else self.service
        )
        self.agent = helper(self.given, shop=self.shop)
        self.here: World = world([*(outer or (ASK,)), DONE], team=self.agent)


@every_door
async def test_a_marked_function_of_an_agent_does_not_run_unasked(door: Door) -> None:
    """The mark counts in the agent's own kernel: the run around waits, and the agent goes on with the decision."""
    team = Team([WIPE, say("Gone.")])
    outcome = await door.ask(team.here)
    assert (team.shop.ran, outcome.status) == ([], "paused")
    (waiting,) = outcome.waiting
    done = await door.resume(team.here, outcome.checkpoint, {waiting: Approve()})
    assert (team.shop.ran, done.status, results(done.history)) == (
        [("wipe",)],
        "answered",
        ["Gone."],
    )
    assert done.iterations == 4


@every_door
async def test_an_agents_requests_are_charged_to_the_run(door: Door) -> None:
    """The run counts its own two requests and the agent's two, and the function that the agent called."""
    team = Team([LOOK, say("Seen.")])
    outcome = await door.ask(team.here)
    assert outcome.iterations == 4
    assert outcome.tool_calls == 2
    assert team.shop.ran == [("look", "7")]


@pytest.mark.parametrize("wrapped", [False, True], ids=["stock", "bounded"])
async def test_an_agent_is_charged_once_with_every_service(wrapped: bool) -> None:
    """A service that finds the call by itself is not charged twice."""
    team = Team([LOOK, say("Seen.")], wrapped=wrapped)
    outcome = await Door("service", True).ask(team.here)
    assert (outcome.iterations, outcome.tool_calls) == (4, 2)


async def test_a_budget_holds_for_an_agent() -> None:
    """An agent that never stops asks no more often than the run has requests left, less the one for its answer."""
    team = Team(lambda request: LOOK if request.tools else say("That is all."))
    outcome = await Door("planner", False).ask(
        team.here, budget=Budget(max_iterations=5)
    )
    assert outcome.iterations == 5
    assert len(team.service.requests) == 3
    assert team.here.requests == 2


async def test_a_call_of_an_agents_function_is_asked_about() -> None:
    """The run's approver decides the calls of the agent, too."""
    asked: list[str] = []

    def approver(call: Any) -> Approve:
        asked.append(call.fully_qualified_name)
        return Approve()

    team = Team([WIPE, say("Gone.")])
    await Door("planner", False).ask(team.here, approver=approver)
    assert (asked, team.shop.ran) == (["shop-wipe"], [("wipe",)])


async def test_an_agent_is_not_changed() -> None:
    """The application's agent keeps its kernel, which keeps its services and filters."""
    team = Team([LOOK, say("Seen.")])
    kernel = team.agent.kernel
    await Door("planner", False).ask(team.here)
    assert team.agent.kernel is kernel
    assert kernel.services == {"own": team.service}
    assert kernel.function_invocation_filters == []


@pytest.mark.parametrize("reply", [WIPE, LOOK], ids=["marked", "free"])
async def test_an_agent_of_an_agent_is_charged_and_asks_for_approval(
    reply: Any,
) -> None:
    """An agent whose kernel holds an agent: both are the run's, to any depth."""
    shop, deep = (
        Shop(),
        ScriptedChatCompletion([reply, say("Deep.")], service_id="deep"),
    )
    middle = ScriptedChatCompletion(
        [call("inner-deep", {"messages": "You, then."}), say("Middle.")],
        service_id="mid",
    )
    agent = helper(middle, inner=helper(deep, "deep", shop=shop))
    here = world([ASK, DONE], team=agent)
    outcome = await Door("planner", False).ask(here)
    marked = reply is WIPE
    assert (outcome.status, outcome.iterations, shop.ran) == (
        "paused" if marked else "answered",
        3 if marked else 6,
        [] if marked else [("look", "7")],
    )


@pytest.mark.parametrize("reply", [WIPE, LOOK], ids=["marked", "free"])
async def test_an_agent_that_a_function_calls_is_charged_and_asks_for_approval(
    reply: Any,
) -> None:
    """``kernel.invoke`` of an agent within a function is charged and reviewed, too."""

    class Outer:
        @kernel_function
        async def ask(self, kernel: Kernel) -> str:
            return str(
                await kernel.invoke(
                    plugin_name="team", function_name="helper", messages="Help."
                )
            )

    team = Team([reply, say("Done.")], call("outer-ask"))
    team.here.kernel.add_plugin(Outer(), "outer")
    outcome = await Door("planner", False).ask(team.here)
    assert (outcome.iterations, team.shop.ran) == (
        4,
        [] if reply is WIPE else [("look", "7")],
    )


async def test_two_calls_of_an_agent_at_once_are_charged_apart() -> None:
    """Each call has a view of its own."""
    team = Team(lambda request: say("Fine."), calls(ASK, ASK))
    outcome = await Door("service", False).ask(team.here)
    assert (outcome.iterations, results(outcome.history)) == (4, ["Fine.", "Fine."])


async def test_what_an_agents_instructions_call_is_decided() -> None:
    """A template in its instructions is rendered with the view, too."""
    shop, service = Shop(), ScriptedChatCompletion([say("Fine.")], service_id="own")
    kernel = kernel_with(service, shop=shop)
    agent = ChatCompletionAgent(
        kernel=kernel, name="helper", instructions="Be kind. {{shop.wipe}}"
    )
    await Door("planner", False).ask(world([ASK, DONE], team=agent))
    assert shop.ran == []


async def test_a_function_that_a_class_of_agents_declares_is_charged() -> None:
    """A method of the agent itself finds the view as ``self.kernel``."""

    class Asking(ChatCompletionAgent):
        @kernel_function
        async def brief(self) -> str:
            return str(await self.get_response(messages="Be brief."))

    shop, service = Shop(), ScriptedChatCompletion([WIPE, say("No.")], service_id="own")
    kernel = kernel_with(service, shop=shop)
    agent = Asking(kernel=kernel, name="helper", function_choice_behavior=stock.Auto())
    here = world([call("team-brief"), DONE], team=agent)
    outcome = await Door("planner", False).ask(here)
    assert outcome.iterations == 4
    assert shop.ran == []
    assert results(outcome.history) == ["No."]


async def test_what_an_agent_remembers_stays_its_own() -> None:
    """A class of agents that keeps its thread continues it from call to call."""

    class Remembering(ChatCompletionAgent):
        _thread: ChatHistoryAgentThread | None = PrivateAttr(None)

        @kernel_function
        async def go_on(self) -> str:
            self._thread = self._thread or ChatHistoryAgentThread()
            return str(await self.get_response(messages="Go on.", thread=self._thread))

    service = ScriptedChatCompletion([say("One."), say("Two.")], service_id="own")
    agent = Remembering(kernel=Kernel(services=service), name="helper")
    here = world([call("team-go_on"), call("team-go_on"), DONE], team=agent)
    outcome = await Door("planner", False).ask(here)
    assert results(outcome.history) == ["One.", "Two."]
    assert [message["content"] for message in service.requests[1].messages] == [
        "Go on.",
        "One.",
        "Go on.",
    ]


async def test_a_function_that_holds_nothing_yet_runs() -> None:
    """A function of a closure whose ``self`` has no value when it is described runs as ever."""

    def make() -> Any:
        @kernel_function
        async def late() -> str:
            return f"held {'nothing' if late else self}"

        if not late:
            self = None
        return late

    here = world([DONE])
    here.kernel.add_function("some", make())
    here.service = ScriptedChatCompletion(
        [call("some-late"), DONE], service_id=here.service.service_id
    )
    here.kernel.add_service(here.service, overwrite=True)
    outcome = await Door("planner", False).ask(here)
    assert results(outcome.history) == ["held nothing"]


async def test_an_agent_of_a_session_is_charged() -> None:
    """A session is another door to the same call; it does not wait, and says so."""
    team = Team([WIPE, say("I could not.")])
    with pytest.raises(RunNotAnsweredError, match="a session does not wait"):
        await ToolUseSession(team.here.kernel).prompt("Go.")
    assert team.shop.ran == []


async def test_an_agent_of_a_kept_run_is_in_its_journal(tmp_path: Path) -> None:
    """The agent's requests and calls are recorded before they happen."""
    team = Team([LOOK, say("Seen.")])
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        handle = await runs.start(planner_with(), team.here.kernel, "Go.", run_id="r")
        result = await handle.result()
    inside = [
        unwrapped(fact) for fact in result.facts if isinstance(fact, HappenedInside)
    ]
    replies = [fact for fact in inside if isinstance(fact, ModelReplied)]
    started = [fact.function for fact in inside if isinstance(fact, CallStarted)]
    assert (result.iterations, len(replies), started) == (4, 2, ["shop-look"])
