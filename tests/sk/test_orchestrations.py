"""A call that needs a person inside an orchestration of Semantic Kernel: what the guide on agents says of it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import (
    AgentGroupChat,
    ChatCompletionAgent,
    ChatHistoryAgentThread,
    ConcurrentOrchestration,
    GroupChatOrchestration,
    HandoffOrchestration,
    MagenticOrchestration,
    OrchestrationHandoffs,
    RoundRobinGroupChatManager,
    SequentialOrchestration,
)
from semantic_kernel.agents.orchestration.magentic import (
    MagenticContext,
    MagenticManagerBase,
    ProgressLedger,
    ProgressLedgerItem,
)
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.contents import AuthorRole, ChatMessageContent
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import Approve, Checkpoint, FunctionInvokingChatCompletion
from planner_ext.agent import resume_agent
from planner_ext.durable import effect
from planner_ext.errors import TurnPausedError
from planner_ext.hitl_manager import Defer, ToolCall
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.planner import planner_with
from support.served import Served

Serve = Callable[..., Served]

PAY = call("shop-pay", {"order": 7})


class Shop:
    def __init__(self) -> None:
        self.paid: list[int] = []

    @kernel_function
    async def pay(self, order: int) -> str:
        self.paid.append(order)
        return f"paid {order}"


async def asks(tool: ToolCall) -> Defer:
    return Defer()


async def pays_wait(tool: ToolCall) -> Defer | None:
    return Defer() if tool.function_name == "pay" else None


def agent_at(
    served: Served, shop: Shop, name: str, **options: Any
) -> ChatCompletionAgent:
    service = FunctionInvokingChatCompletion(served.connector, **options)
    plugins: list[KernelPlugin | object] = [KernelPlugin.from_object("shop", shop)]
    return ChatCompletionAgent(
        service=service, name=name, instructions=f"I am {name}.", plugins=plugins
    )


@asynccontextmanager
async def runtime() -> AsyncGenerator[InProcessRuntime]:
    one = InProcessRuntime()
    one.start()
    yield one
    await one.stop()


async def result_of(orchestration: Any) -> Any:
    async with runtime() as one:
        running = await orchestration.invoke("Pay order 7.", one)
        return await running.get(timeout=60)


async def test_an_approver_holds_the_call(serve: Serve) -> None:
    """Asked in place, the person decides while the orchestration waits; the next agent reads the answer."""

    async def approver(tool: ToolCall) -> Approve:
        return Approve(by="ann")

    served, shop = (
        serve([PAY, say("Order 7 is paid."), say("Thank you for your payment.")]),
        Shop(),
    )
    clerk = agent_at(served, shop, "Clerk", interceptors=[asks], approver=approver)
    writer = agent_at(served, shop, "Writer")
    result = await result_of(SequentialOrchestration(members=[clerk, writer]))
    assert str(result) == "Thank you for your payment."
    assert shop.paid == [7]
    assert served.server.refused == []


class Manager(MagenticManagerBase):
    """Hands the task to the clerk, then reports what the clerk said."""

    async def plan(self, magentic_context: MagenticContext) -> ChatMessageContent:
        return ChatMessageContent(role=AuthorRole.ASSISTANT, content="Let Clerk pay.")

    async def replan(self, magentic_context: MagenticContext) -> ChatMessageContent:
        return await self.plan(magentic_context)

    async def create_progress_ledger(
        self, magentic_context: MagenticContext
    ) -> ProgressLedger:
        done = ProgressLedgerItem(reason="", answer=magentic_context.round_count > 1)
        return ProgressLedger(
            is_request_satisfied=done,
            is_in_loop=ProgressLedgerItem(reason="", answer=False),
            is_progress_being_made=ProgressLedgerItem(reason="", answer=True),
            next_speaker=ProgressLedgerItem(reason="", answer="Clerk"),
            instruction_or_question=ProgressLedgerItem(reason="", answer="Pay."),
        )

    async def prepare_final_answer(
        self, magentic_context: MagenticContext
    ) -> ChatMessageContent:
        return magentic_context.chat_history.messages[-1]


def sequential(clerk: ChatCompletionAgent, writer: ChatCompletionAgent) -> Any:
    members: Any = [clerk, writer]
    return SequentialOrchestration(members=members)


def concurrent(clerk: ChatCompletionAgent, writer: ChatCompletionAgent) -> Any:
    members: Any = [clerk, writer]
    return ConcurrentOrchestration(members=members)


def group_chat(clerk: ChatCompletionAgent, writer: ChatCompletionAgent) -> Any:
    members: Any = [clerk, writer]
    manager = RoundRobinGroupChatManager(max_rounds=2)
    return GroupChatOrchestration(members=members, manager=manager)


def handoff(clerk: ChatCompletionAgent, writer: ChatCompletionAgent) -> Any:
    members: Any = [clerk, writer]
    handoffs = OrchestrationHandoffs().add(clerk, writer, "Thanks the customer")
    return HandoffOrchestration(members=members, handoffs=handoffs)


def magentic(clerk: ChatCompletionAgent, writer: ChatCompletionAgent) -> Any:
    members: Any = [clerk, writer]
    return MagenticOrchestration(members=members, manager=Manager())


@pytest.mark.parametrize(
    "orchestration", [sequential, concurrent, group_chat, handoff, magentic]
)
async def test_a_pause_ends_the_orchestration_and_the_turn_is_resumed(
    serve: Serve, orchestration: Callable[..., Any]
) -> None:
    """No other agent takes it for an answer: the result raises it, with what resumes the agent's turn."""
    served, writing = serve([PAY, say("Order 7 is paid.")]), serve([say("Thanks.")] * 3)
    shop = Shop()
    clerk = agent_at(served, shop, "Clerk", interceptors=[asks])
    clerk.description = "pays"
    writer = agent_at(writing, shop, "Writer")
    writer.description = "writes"
    with pytest.raises(TurnPausedError, match=r"'Clerk' waits .* shop-pay") as raised:
        await result_of(orchestration(clerk, writer))
    paused = raised.value
    assert (paused.agent, paused.status, paused.iterations) == ("Clerk", "paused", 1)
    assert [call["id"] for call in paused.pending] == ["call_1"]
    assert (len(served.server.requests), shop.paid) == (1, [])
    assert paused.checkpoint is not None
    thread = ChatHistoryAgentThread()
    text = paused.checkpoint.to_json()
    done = await resume_agent(clerk, thread, text, {"call_1": Approve(by="ann")})
    assert (str(done), shop.paid) == ("Order 7 is paid.", [7])
    said = [str(one) async for one in thread.get_messages() if str(one)]
    assert said[-1] == "Order 7 is paid."


async def test_each_of_several_agents_that_pause_is_resumed(serve: Serve) -> None:
    """A concurrent orchestration raises one of the pauses; it lists those of the other agents."""
    shop = Shop()
    first = agent_at(serve([PAY, say("First.")]), shop, "First", interceptors=[asks])
    second = agent_at(serve([PAY, say("Second.")]), shop, "Second", interceptors=[asks])
    team = {"First": first, "Second": second}
    async with runtime() as one:
        running = await concurrent(first, second).invoke("Pay order 7.", one)
        with pytest.raises(TurnPausedError) as raised:
            await running.get(timeout=60)
        async with asyncio.timeout(60):
            while len(raised.value.turns) < len(team):  # noqa: ASYNC110  (nothing tells of it)
                await asyncio.sleep(0)
    answers: set[str] = set()
    for turn in raised.value.turns:
        thread = ChatHistoryAgentThread()
        decisions = {"call_1": Approve(by="ann")}
        assert turn.checkpoint is not None
        done = await resume_agent(team[turn.agent], thread, turn.checkpoint, decisions)
        answers.add(str(done))
    assert answers == {"First.", "Second."}
    assert shop.paid == [7, 7]


async def test_the_pauses_of_two_orchestrations_are_apart(serve: Serve) -> None:
    """A pause lists the turns of its own orchestration's run alone, also in one runtime."""
    shop = Shop()
    writer = agent_at(serve([say("Thanks.")]), shop, "Writer")
    clerk = agent_at(serve([PAY, PAY]), shop, "Clerk", interceptors=[asks])
    pauses: list[TurnPausedError] = []
    async with runtime() as one:
        for _ in range(2):
            running = await sequential(clerk, writer).invoke("Pay order 7.", one)
            with pytest.raises(TurnPausedError) as raised:
                await running.get(timeout=60)
            pauses.append(raised.value)
    assert [list(paused.turns) for paused in pauses] == [[one] for one in pauses]


async def test_a_pause_outside_an_orchestration_is_a_message(serve: Serve) -> None:
    """With Semantic Kernel's runtime loaded, an agent on its own still answers that it waits."""
    served, shop = serve([PAY]), Shop()
    clerk = agent_at(served, shop, "Clerk", interceptors=[asks])
    async with runtime():
        response = await clerk.get_response("Pay order 7.")
    assert response.metadata["status"] == "paused"


@dataclass
class Team:
    """A function of a run that asks an orchestration of agents."""

    make: Callable[[], Any]
    runtime: InProcessRuntime | None = None
    entered: int = 0

    @effect("idempotent")
    @kernel_function
    async def work(self) -> str:
        self.entered += 1
        if self.runtime is not None:
            running = await self.make().invoke("Pay order 7.", self.runtime)
            return str(await running.get(timeout=60))
        return str(await result_of(self.make()))

    def kernel(self) -> Kernel:
        service = ScriptedChatCompletion(
            lambda request: (
                say(f"The team: {request.messages[-1]['content']}")
                if request.messages[-1]["role"] == "tool"
                else call("team-work")
            )
        )
        kernel = Kernel(services=[service])
        kernel.add_plugin(self, "team")
        return kernel


@pytest.mark.parametrize(
    "orchestration", [sequential, concurrent, group_chat, handoff, magentic]
)
async def test_a_pause_in_an_orchestration_inside_a_function_pauses_the_run_around(
    serve: Serve, orchestration: Callable[..., Any]
) -> None:
    """Where the function starts the runtime: called again, turns that have ended return at once, the other goes on."""
    served, writing = serve([PAY, say("Order 7 is paid.")]), serve([say("Thanks.")] * 3)
    shop = Shop()

    def new_team() -> Any:
        clerk = agent_at(served, shop, "Clerk", interceptors=[asks])
        clerk.description = "pays"
        writer = agent_at(writing, shop, "Writer")
        writer.description = "writes"
        return orchestration(clerk, writer)

    team = Team(new_team)
    planner = planner_with(plan=False)
    paused = await planner.invoke(team.kernel(), "Go.")
    (waiting,) = paused.pending
    assert waiting.fully_qualified_name == "shop-pay"
    checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
    decisions = {waiting.path: Approve(by="ann")}
    result = await planner.resume(team.kernel(), checkpoint, decisions)
    assert (result.status, shop.paid, team.entered) == ("answered", [7], 2)
    sent = len(served.server.requests) + len(writing.server.requests)
    assert result.iterations == 2 + sent


def pays_and_says(name: str) -> Callable[[ScriptedRequest], ScriptedReply]:
    def script(request: ScriptedRequest) -> ScriptedReply:
        read = any(one["role"] == "tool" for one in request.messages)
        return say(f"{name} has paid.") if read else PAY

    return script


async def test_both_agents_of_a_concurrent_orchestration_inside_wait(
    serve: Serve,
) -> None:
    """Each is decided by its path, in whatever order the runtime begins their turns."""
    shop = Shop()
    served = {name: serve(pays_and_says(name)) for name in ("First", "Second")}

    def new_team() -> Any:
        return concurrent(
            *(
                agent_at(served[name], shop, name, interceptors=[asks])
                for name in served
            )
        )

    team = Team(new_team)
    planner = planner_with(plan=False)
    result = await planner.invoke(team.kernel(), "Go.")
    assert result.pending
    while result.status == "paused":
        checkpoint = Checkpoint.from_json(result.checkpoint.to_json())
        decisions = {result.pending[-1].path: Approve(by="ann")}
        result = await planner.resume(team.kernel(), checkpoint, decisions)
    assert "First has paid." in result.final_answer
    assert "Second has paid." in result.final_answer
    assert shop.paid == [7, 7]


async def test_a_runtime_from_outside_hides_the_function_that_asks(
    serve: Serve,
) -> None:
    """The run around cannot wait then: its model reads what waits, and what to do about it."""
    shop = Shop()
    clerk = agent_at(serve([PAY]), shop, "Clerk", interceptors=[asks])
    writer = agent_at(serve([]), shop, "Writer")
    async with runtime() as one:
        team = Team(lambda: sequential(clerk, writer), runtime=one)
        result = await planner_with(plan=False).invoke(team.kernel(), "Go.")
    assert result.status == "answered"
    assert "'Clerk' waits for a person to decide shop-pay" in result.final_answer
    assert "start its runtime in that function" in result.final_answer
    assert shop.paid == []


class Staffed:
    """A function whose orchestration runs outside, with agents that talk to the services of its own kernel."""

    def __init__(
        self, shop: Shop, runtime: InProcessRuntime, kind: Callable[..., Any]
    ) -> None:
        self.shop = shop
        self.runtime = runtime
        self.kind = kind

    @effect("idempotent")
    @kernel_function
    async def work(self, kernel: Kernel) -> str:
        service = kernel.get_service("desk")
        clerk, writer = (
            ChatCompletionAgent(
                service=service,
                name=name,
                description=name,
                instructions=f"I am {name}.",
                plugins=[KernelPlugin.from_object("shop", self.shop)],
            )
            for name in ("Clerk", "Writer")
        )
        running = await self.kind(clerk, writer).invoke("Pay order 7.", self.runtime)
        return str(await running.get(timeout=60))


@pytest.mark.parametrize(
    "orchestration", [sequential, concurrent, group_chat, handoff, magentic]
)
async def test_a_runtime_from_outside_knows_the_function_by_its_kernel(
    orchestration: Callable[..., Any],
) -> None:
    """The run around waits, pays for every request, and goes on."""
    shop = Shop()

    def desk(request: ScriptedRequest) -> ScriptedReply:
        if "I am Writer." in str(request.messages):
            return say("Thanks.")
        return pays_and_says("Clerk")(request)

    def top(request: ScriptedRequest) -> ScriptedReply:
        return say("Done.") if len(request.messages) > 1 else call("team-work")

    served = ScriptedChatCompletion(desk, service_id="desk")
    kernel = Kernel(services=[ScriptedChatCompletion(top, service_id="top"), served])
    planner = planner_with("top", plan=False, interceptors=[pays_wait])
    async with runtime() as one:
        kernel.add_plugin(Staffed(shop, one, orchestration), "team")
        paused = await planner.invoke(kernel, "Go.")
        assert [one.path for one in paused.pending] == ["call_1/call_1"]
        checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
        decisions = {"call_1/call_1": Approve(by="ann")}
        result = await planner.resume(kernel, checkpoint, decisions)
    assert (result.status, shop.paid) == ("answered", [7])
    assert result.iterations == 2 + len(served.requests)


async def test_an_agent_group_chat_goes_on_once_it_has_the_answer(serve: Serve) -> None:
    """Its own conversation ends with the pause: the resumed turn's answer, added to it, lets every agent speak."""
    served, shop = (
        serve([PAY, say("Order 7 is paid."), say("Thanks."), say("Bye.")]),
        Shop(),
    )
    clerk = agent_at(served, shop, "Clerk", interceptors=[pays_wait])
    writer = agent_at(served, shop, "Writer")
    chat = AgentGroupChat(agents=[clerk, writer])
    await chat.add_chat_message("Pay order 7.")
    (paused,) = [message async for message in chat.invoke(clerk)]
    decisions = {one["id"]: Approve(by="ann") for one in paused.metadata["pending"]}
    checkpoint = paused.metadata["checkpoint"]
    response = await resume_agent(
        clerk, ChatHistoryAgentThread(), checkpoint, decisions
    )
    await chat.add_chat_message(response.message)
    said = [
        str(message)
        for agent in (writer, clerk)
        async for message in chat.invoke(agent)
    ]
    assert (str(response), said) == ("Order 7 is paid.", ["Thanks.", "Bye."])
    assert shop.paid == [7]
    assert served.server.refused == []
