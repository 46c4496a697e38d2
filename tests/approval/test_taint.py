"""What came from outside stays known: functions that others called inside outlive the run, the prompt and the pause."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
)
from semantic_kernel.contents import FunctionResultContent as Answered
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    Approve,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    PlannerPlugin,
    ToolUseSession,
)
from planner_ext.agent import resume_agent
from planner_ext.durable import Runs
from planner_ext.hitl_manager import Defer, ToolCall
from planner_ext.iteration import FunctionInvocationIterationContext
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.approval import (
    DONE,
    DOORS,
    LOOK,
    REFUND,
    Door,
    Shop,
    World,
    asked,
    every_door,
    only,
    planner_with,
    results,
    service_and_handler,
    settings_with,
    two_doors,
    world,
)
from support.approval_filter import chat
from support.planner import openai_kernel
from support.stock import add_filter, stock
from support.values import each_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)
"""Semantic Kernel looks at every attribute of an agent that is added as a plugin, deprecated ones among them."""

POLICY = ApprovalPolicy.from_dict(
    {
        "default": "allow",
        "rules": [{"function": "refund", "after": "shop-look", "action": "ask"}],
    }
)
"""Asks about a refund that comes after a look."""

LOOKED = ("look", "7")


@dataclass
class Errands:
    """A function that looks itself, and one that has a planner answer from a history in which a function looked."""

    given: ChatHistory | None = None

    @kernel_function
    async def look(self, kernel: Kernel) -> str:
        return str(
            await kernel.invoke(plugin_name="shop", function_name="look", order="7")
        )

    @kernel_function
    async def summarise(self, kernel: Kernel) -> str:
        options = FunctionCallingStepwisePlannerOptions(plan=False)
        planner = FunctionCallingStepwisePlanner("expert", options)
        return (
            await planner.invoke(kernel, "Summarise.", chat_history=self.given)
        ).final_answer


def inner(here: World, *replies: Any) -> None:
    """Add a model for what is asked inside a function."""
    here.kernel.add_service(ScriptedChatCompletion(replies, service_id="expert"))


def tainted() -> ChatHistory:
    """Make a history in which a function looked."""
    history = asked()
    look = FunctionCallContent(id="a", name="shop-look", arguments="{}")
    history.add_message(ChatMessageContent(role=AuthorRole.ASSISTANT, items=[look]))
    history.add_message(
        ChatMessageContent(
            role=AuthorRole.TOOL, items=[Answered(id="a", name="shop-look", result="x")]
        )
    )
    return history


def by_itself(here: World) -> None:
    here.kernel.add_plugin(Errands(), "errands")


def by_a_planner(here: World) -> None:
    inner(here, LOOK, say("Read this."))
    expert = FunctionCallingStepwisePlanner(
        "expert", FunctionCallingStepwisePlannerOptions(plan=False)
    )
    here.kernel.add_plugin(PlannerPlugin(expert), "expert")


def by_an_agent(here: World) -> None:
    kernel = Kernel(
        services=ScriptedChatCompletion([LOOK, say("Read this.")], service_id="own")
    )
    kernel.add_plugin(here.shop, "shop")
    agent = ChatCompletionAgent(
        kernel=kernel, name="helper", function_choice_behavior=stock.Auto()
    )
    here.kernel.add_plugin(agent, "team")


def by_a_history(here: World) -> None:
    """Look nowhere: the planner inside begins with a history that has read."""
    inner(here, say("Read this."))
    here.kernel.add_plugin(Errands(tainted()), "errands")


WAYS: dict[str, tuple[Callable[[World], None], Any]] = {
    "function": (by_itself, call("errands-look")),
    "planner": (by_a_planner, call("expert-reach_goal", {"goal": "Part."})),
    "agent": (by_an_agent, call("team-helper", {"messages": "Part."})),
    "history": (by_a_history, call("errands-summarise")),
}
every_way = each_of("way", WAYS)


def reading(way: str, *replies: Any) -> World:
    """Set up a model that calls a function that reads inside, answers, and continues with these replies."""
    add, ask = WAYS[way]
    here = world([ask, DONE, *replies])
    add(here)
    return here


def refusing(asked_about: list[str]) -> Callable[[ToolCall], Deny]:
    """Make an approver that says no, and notes what it was asked about."""

    def approver(call: ToolCall) -> Deny:
        asked_about.append(call.function_name)
        return Deny("no")

    return approver


def through_json(history: ChatHistory) -> ChatHistory:
    return ChatHistory.model_validate_json(history.model_dump_json())


@every_door
async def test_every_door_keeps_what_was_read_inside(door: Door) -> None:
    """The next request, whose history was JSON meanwhile, comes after what ran inside a call of this one."""
    await _is_asked_about_later(door, "planner", through_json)


@each_of("kept", [lambda history: history, through_json])
@every_way
@two_doors
async def test_the_next_request_comes_after_what_was_read_inside(
    door: Door, way: str, kept: Any
) -> None:
    """A history that is handed on says what ran inside its calls, also after it was JSON."""
    await _is_asked_about_later(door, way, kept)


async def _is_asked_about_later(door: Door, way: str, kept: Any) -> None:
    here = reading(way, REFUND, DONE)
    first = await door.ask(here, interceptors=[POLICY])
    history = kept(first.history)
    history.add_user_message("And now refund it.")
    then = await _again(door, here, history)
    assert first.status == "answered"
    assert then.status == "paused"


async def _again(door: Door, here: World, history: ChatHistory) -> Any:
    if door.kind != "planner":
        return await door.ask(here, history=history, interceptors=[POLICY])
    planner = planner_with(interceptors=[POLICY])
    if not door.streamed:
        return await planner.invoke(here.kernel, "Go on.", chat_history=history)
    events = [
        event
        async for event in planner.invoke_stream(
            here.kernel, "Go on.", chat_history=history
        )
    ]
    return events[-1].result  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]  # the last one


@every_way
async def test_the_next_prompt_of_a_session_comes_after_what_was_read_inside(
    way: str,
) -> None:
    """A session's second prompt knows what its first one read."""
    here, asked_about = reading(way, REFUND, DONE), list[str]()
    session = ToolUseSession(
        here.kernel, interceptors=[POLICY], approver=refusing(asked_about)
    )
    await session.prompt("Read it.")
    await session.prompt("Refund it.")
    assert asked_about == ["refund"]


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@every_way
async def test_the_next_turn_of_an_agents_thread_comes_after_what_was_read_inside(
    way: str, streamed: bool
) -> None:
    """The thread of an agent keeps it from turn to turn."""
    here, asked_about = reading(way, REFUND, DONE), list[str]()
    service = FunctionInvokingChatCompletion(
        here.service, interceptors=[POLICY], approver=refusing(asked_about)
    )
    agent = ChatCompletionAgent(
        kernel=here.kernel,
        service=service,
        name="Desk",
        function_choice_behavior=stock.Auto(),
    )
    thread = ChatHistoryAgentThread()
    for text in ("Read it.", "Refund it."):
        if streamed:
            assert [chunk async for chunk in agent.invoke_stream(text, thread=thread)]
        else:
            await agent.get_response(text, thread=thread)
    assert asked_about == ["refund"]


@every_way
async def test_a_paused_turn_of_an_agent_keeps_what_was_read_inside(way: str) -> None:
    """Also into a thread that is filled from a checkpoint, in another process."""
    here = reading(way)
    charge = call("shop-charge", {"amount": 1}, id="c")
    here.service = ScriptedChatCompletion([WAYS[way][1], charge, DONE, REFUND, DONE])
    guards = [only("charge", Defer()), POLICY]
    service = FunctionInvokingChatCompletion(here.service, interceptors=guards)
    agent = ChatCompletionAgent(
        kernel=here.kernel,
        service=service,
        name="Desk",
        function_choice_behavior=stock.Auto(),
    )
    paused = await agent.get_response("Read it, and charge it.")
    thread = ChatHistoryAgentThread()
    await resume_agent(agent, thread, paused.metadata["checkpoint"], {"c": Approve()})
    then = await agent.get_response("Refund it.", thread=thread)
    assert [one["fully_qualified_name"] for one in then.metadata["pending"]] == [
        "shop-refund"
    ]


@every_door
async def test_a_resumed_run_keeps_what_was_read_inside(door: Door) -> None:
    """A run that read, paused, and was resumed from its checkpoint's text alone."""
    here = world(
        [
            call("errands-look"),
            call("shop-charge", {"amount": 1}, id="c"),
            DONE,
            REFUND,
            DONE,
        ]
    )
    by_itself(here)
    guards = [only("charge", Defer()), POLICY]
    paused = await door.ask(here, interceptors=guards)
    ended = await door.resume(
        here, paused.checkpoint, {"c": Approve()}, interceptors=guards
    )
    history = ended.history
    history.add_user_message("And now refund it.")
    assert (await _again(door, here, history)).status == "paused"


@every_way
async def test_a_filter_on_a_stock_loop_reads_it_in_a_history(way: str) -> None:
    """``ApprovalFilter`` decides a call of the stock loop by the history of a service, too."""
    here = reading(way, REFUND, DONE)
    history = (await DOORS[2].ask(here, interceptors=[POLICY])).history
    add_filter(here.kernel, "auto_function_invocation", ApprovalFilter(POLICY))
    history.add_user_message("And now refund it.")
    await chat(here, history)
    assert "waits for a person's approval" in results(history)[-1]


@every_way
async def test_a_stored_run_keeps_what_was_read_inside(
    way: str, tmp_path: Path
) -> None:
    """Of a run in a store, also as another process reads it."""
    here = reading(way, REFUND, DONE)
    store = tmp_path / f"{way}.db"
    async with Runs.sqlite(store) as runs:
        handle = await runs.start(planner_with(), here.kernel, "Read it.", run_id="r")
        await handle.result()
    async with Runs.sqlite(store) as runs:
        handle = await runs.start(planner_with(), here.kernel, "Read it.", run_id="r")
        history = (await handle.result()).chat_history
    then = await planner_with(interceptors=[POLICY]).invoke(
        here.kernel, "Go on.", chat_history=history
    )
    assert then.status == "paused"


@service_and_handler
async def test_what_was_read_inside_counts_for_later_requests(door: Door) -> None:
    """A third request knows it, too, though its calls were made in the first."""
    here = reading("planner", say("Fine."), REFUND, DONE)
    history = (await door.ask(here, interceptors=[POLICY])).history
    for status in ("answered", "paused"):
        history.add_user_message("Go on.")
        outcome = await door.ask(here, history=history, interceptors=[POLICY])
        assert outcome.status == status


async def test_a_history_that_was_read_inside_makes_what_follows_ask() -> None:
    """In one run, too: a planner inside that began with a history that has read gives a result that has read."""
    add, ask = WAYS["history"]
    here = world([ask, REFUND, DONE])
    add(here)
    outcome = await DOORS[0].ask(here, interceptors=[POLICY])
    assert (outcome.status, here.ran) == ("paused", [])


@service_and_handler
async def test_a_history_that_was_compacted_keeps_what_was_read(door: Door) -> None:
    """A callback that drops calls leaves their names in a message that stays, from request to request."""

    def forget(context: FunctionInvocationIterationContext) -> None:
        context.messages[:] = [
            one for one in context.messages if one.role == AuthorRole.USER
        ]

    here = world([LOOK, DONE, call("shop-charge", {"amount": 1}), DONE, REFUND, DONE])
    history = asked()
    for status in ("answered", "answered", "paused"):
        options = {"interceptors": [POLICY], "iteration_completed": forget}
        outcome = await door.ask(here, history=history, **options)
        assert outcome.status == status
        history = through_json(outcome.history)
        history.add_user_message("Go on.")


async def test_a_compacted_history_is_not_changed_but_for_a_copy() -> None:
    """The messages that a callback leaves are its own; the one that says what was read is a copy."""
    own = ChatMessageContent(role=AuthorRole.USER, content="Short.")

    def forget(context: FunctionInvocationIterationContext) -> None:
        context.messages[:] = [own]

    outcome = await DOORS[0].ask(world([LOOK, DONE]), iteration_completed=forget)
    assert own.metadata == {}
    assert outcome.history.messages[0].metadata == {"planner_ext.inside": ["shop-look"]}


@pytest.mark.parametrize("functions", [False, True], ids=["plain", "invoking"])
async def test_a_request_inside_that_sends_such_a_history_has_read(
    functions: bool,
) -> None:
    """Also one request without functions, outside a run, gives a result that has read."""

    class Asking:
        @kernel_function
        async def ask(self, kernel: Kernel) -> str:
            service: Any = kernel.get_service("expert")
            settings = settings_with() if functions else PromptExecutionSettings()
            return str(
                await service.get_chat_message_content(
                    tainted(), settings, kernel=kernel
                )
            )

    here = world([call("asking-ask"), REFUND, DONE], asking=Asking())
    inner(here, say("Read this."))
    outcome = await DOORS[0].ask(here, interceptors=[POLICY])
    assert (outcome.status, here.ran) == ("paused", [])


async def test_a_session_that_begins_with_a_stored_history_knows_what_it_read() -> None:
    """A session's history, as JSON, is another session's first prompts."""
    here, asked_about = reading("planner", REFUND, DONE), list[str]()
    session = ToolUseSession(here.kernel)
    await session.prompt("Read it.")
    stored = through_json(session.history()).messages
    again = ToolUseSession(
        here.kernel,
        initial_prompts=stored,
        interceptors=[POLICY],
        approver=refusing(asked_about),
    )
    await again.prompt("Refund it.")
    assert asked_about == ["refund"]


async def test_what_ran_beside_does_not_count() -> None:
    """Only the call's own inside is in its result: a sibling's is in that one's."""
    here = world(
        [calls(call("errands-look"), call("shop-charge", {"amount": 1})), DONE]
    )
    by_itself(here)
    history = (await DOORS[2].ask(here)).history
    inside = [
        item.metadata
        for message in history.messages
        for item in message.items
        if isinstance(item, Answered)
    ]
    assert inside == [{"planner_ext.inside": ["shop-look"]}, {}]


async def test_a_result_that_nothing_ran_inside_of_is_as_it_was() -> None:
    """Most results have no such metadata."""
    here = world([LOOK, DONE])
    history = (await DOORS[2].ask(here)).history
    assert history.messages[2].items[0].metadata == {}


async def test_no_server_reads_it() -> None:
    """What a request sends of a result is its call's id and its text."""
    async with openai_kernel(
        [call("errands-look"), DONE], errands=Errands(), shop=Shop()
    ) as (kernel, server):
        planner = FunctionCallingStepwisePlanner(
            "chat", FunctionCallingStepwisePlannerOptions(plan=False)
        )
        await planner.invoke(kernel, "Go.")
        sent = server.requests[-1].messages[-1]
        assert sent == {"role": "tool", "tool_call_id": "call_1", "content": "sent"}
