"""A paused turn of an agent: the thread shows that it waits, and continues when it is decided or cancelled."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelPlugin, kernel_function

from planner_ext import (
    ApprovalSettings,
    Approve,
    Budget,
    Deny,
    FunctionInvokingChatCompletion,
)
from planner_ext.agent import cancel_agent, resume_agent, resume_agent_stream
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidCheckpointError,
    InvalidHistoryError,
    InvalidOptionError,
    LimitReachedError,
    PlannerExtError,
    RunEndedError,
    ServiceCallError,
)
from planner_ext.hitl_manager import Checkpoint, Defer, ToolCall
from planner_ext.testing import ScriptedFault, call, calls, say
from support.served import Served
from support.stock import first_result

Serve = Callable[..., Served]
Resend = Callable[[ChatHistory], Awaitable[None]]

LOOK = call("shop-look", {"order": 7})
PAY = call("shop-pay", {"order": 7})
DONE = say("Order 7 is paid.")
WAITS = "This run waits for a decision."
each_way = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])


class Shop:
    """Two functions, one of which needs a person; `paid` is all that happened."""

    def __init__(self) -> None:
        self.paid: list[Any] = []
        self.begun = asyncio.Event()
        self.hangs = False

    @kernel_function
    async def look(self, order: int) -> str:
        return f"order {order}: 128 euros"

    @kernel_function
    async def pay(self, order: int, account: str = "none") -> str:
        self.begun.set()
        if self.hangs:
            await asyncio.Event().wait()
        self.paid.append((order, account))
        return f"paid {order}"


async def asks(tool: ToolCall) -> Defer | None:
    return Defer() if tool.function_name == "pay" else None


def agent_at(served: Served, shop: Shop, **options: Any) -> ChatCompletionAgent:
    """Make an agent with instructions, whose payments need a person."""
    options.setdefault("interceptors", [asks])
    service = FunctionInvokingChatCompletion(served.connector, **options)
    plugins: list[KernelPlugin | object] = [KernelPlugin.from_object("shop", shop)]
    return ChatCompletionAgent(
        service=service,
        name="Clerk",
        instructions="You pay {{$what}}.",
        plugins=plugins,
    )


async def ask(
    agent: ChatCompletionAgent, question: str, thread: Any = None, *, streamed: bool
) -> Any:
    """Begin a turn; return its last response."""
    arguments = KernelArguments(what="orders")
    if not streamed:
        return await agent.get_response(question, thread=thread, arguments=arguments)
    return [
        one
        async for one in agent.invoke_stream(
            question, thread=thread, arguments=arguments
        )
    ][-1]


async def resume(
    agent: Any,
    thread: Any,
    checkpoint: Any,
    decisions: Any,
    *,
    streamed: bool,
    **options: Any,
) -> Any:
    """Resume a turn; return its last response."""
    if not streamed:
        return await resume_agent(agent, thread, checkpoint, decisions, **options)
    return [
        one
        async for one in resume_agent_stream(
            agent, thread, checkpoint, decisions, **options
        )
    ][-1]


async def messages_of(thread: Any) -> list[ChatMessageContent]:
    return [message async for message in thread.get_messages()]


async def shown(thread: Any) -> list[tuple[str, str]]:
    """List role and text of a thread's messages; of results what the model reads."""
    listed: list[tuple[str, str]] = []
    for message in await messages_of(thread):
        text = (
            str(first_result(message).result)
            if message.role == AuthorRole.TOOL
            else message.content
        )
        listed.append((message.role.value, text))
    return listed


PAID = [
    ("user", "Pay order 7."),
    ("assistant", ""),
    ("tool", "paid 7"),
    ("assistant", "Order 7 is paid."),
]


@each_way
@pytest.mark.parametrize(
    "began_streamed", [False, True], ids=["from-plain", "from-streamed"]
)
async def test_a_paused_turn_continues(
    serve: Serve, resend: Resend, streamed: bool, began_streamed: bool
) -> None:
    """Approved, the call runs once; the thread is that of a turn that never waited, and can be sent."""
    served, shop = serve([LOOK, PAY, DONE]), Shop()
    agent = agent_at(served, shop)
    paused = await ask(agent, "Pay order 7.", streamed=began_streamed)
    assert (await shown(paused.thread))[-1] == ("assistant", WAITS)
    last = await resume(
        agent,
        paused.thread,
        paused.metadata["checkpoint"],
        {"call_2": Approve()},
        streamed=streamed,
    )
    assert (last.metadata["status"], shop.paid) == ("answered", [(7, "none")])
    looked = [PAID[0], ("assistant", ""), ("tool", "order 7: 128 euros")]
    assert await shown(paused.thread) == looked + PAID[1:]
    assert {message.name for message in (await messages_of(paused.thread))[1:]} == {
        "Clerk"
    }
    assert all(WAITS not in str(request.messages) for request in served.server.requests)
    await resend(ChatHistory(messages=await messages_of(paused.thread)))


@each_way
async def test_texts_of_several_trips_are_taken_out(
    serve: Serve, streamed: bool
) -> None:
    """An agent's stream keeps all texts of a turn as one message: no part of it stays beside the texts themselves."""
    served, shop = (
        serve([calls(LOOK, text="I look."), calls(PAY, text="I pay."), DONE]),
        Shop(),
    )
    agent = agent_at(served, shop)
    paused = await ask(agent, "Pay order 7.", streamed=True)
    assert (await shown(paused.thread))[-1] == ("assistant", "I look.I pay." + WAITS)
    await resume(
        agent,
        paused.thread,
        paused.metadata["checkpoint"],
        {"call_2": Approve()},
        streamed=streamed,
    )
    texts = [text for role, text in await shown(paused.thread) if role == "assistant"]
    assert texts == ["I look.", "I pay.", "Order 7 is paid."]


@each_way
async def test_a_denied_turn_continues(serve: Serve, streamed: bool) -> None:
    """The model reads the denial, and the thread has it."""
    agent = agent_at(serve([PAY, say("Then not.")]), shop := Shop())
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    await resume(
        agent,
        paused.thread,
        paused.metadata["checkpoint"],
        {"call_1": Deny("No.")},
        streamed=streamed,
    )
    assert shop.paid == []
    assert "No." in (await shown(paused.thread))[2][1]
    assert (await shown(paused.thread))[-1] == ("assistant", "Then not.")


@each_way
@pytest.mark.parametrize(
    "reloaded", [False, True], ids=["the-thread", "a-stored-thread"]
)
async def test_a_further_turn_is_refused_until_it_is_decided(
    serve: Serve, streamed: bool, reloaded: bool
) -> None:
    """Refused by name with the way out, nothing is sent; decided, the turn continues, and the new message is kept."""
    served, shop = serve([PAY, DONE, say("You are welcome.")]), Shop()
    agent = agent_at(served, shop)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    thread = paused.thread
    if reloaded:
        text = ChatHistory(messages=await messages_of(thread)).serialize()
        thread = ChatHistoryAgentThread(
            chat_history=ChatHistory.restore_chat_history(text)
        )
    with pytest.raises(
        InvalidHistoryError,
        match=r"'Clerk' waits for a decision.*resume_agent.*cancel_agent",
    ):
        await ask(agent, "Hello?", thread, streamed=streamed)
    assert len(served.server.requests) == 1
    await resume(
        agent,
        thread,
        paused.metadata["checkpoint"],
        {"call_1": Approve()},
        streamed=streamed,
    )
    assert await shown(thread) == [*PAID, ("user", "Hello?")]
    again = await ask(agent, "Thank you.", thread, streamed=streamed)
    assert shop.paid == [(7, "none")]
    assert again.metadata["status"] == "answered"
    assert served.server.refused == []


@each_way
async def test_an_agent_without_calls_to_run_is_refused(
    serve: Serve, streamed: bool
) -> None:
    """A turn whose behaviour runs no functions passes through, and is refused as well."""
    served = serve([PAY])
    agent = agent_at(served, Shop())
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    behavior = agent.function_choice_behavior
    assert behavior is not None
    behavior.auto_invoke_kernel_functions = False
    with pytest.raises(InvalidHistoryError, match="waits for a decision"):
        await ask(agent, "Hello?", paused.thread, streamed=streamed)
    assert len(served.server.requests) == 1


@each_way
async def test_a_cancelled_turn_is_over(serve: Serve, streamed: bool) -> None:
    """Nothing runs, the model reads who cancelled and why, the next turn is sent, and no approval is taken any more."""
    served, shop = serve([PAY, say("As you like.")]), Shop()
    agent = agent_at(served, shop)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    thread, checkpoint = paused.thread, paused.metadata["checkpoint"]
    stopped = await cancel_agent(
        agent, thread, checkpoint, by="ann", reason="Not today."
    )
    assert (stopped.metadata["status"], len(served.server.requests)) == ("stopped", 1)
    assert "Cancelled by ann: Not today." in (await shown(thread))[-1][1]
    await ask(agent, "Leave it.", thread, streamed=streamed)
    for other in (agent, agent_at(served, shop)):
        with pytest.raises(PlannerExtError):
            await resume(
                other, thread, checkpoint, {"call_1": Approve()}, streamed=streamed
            )
    assert (shop.paid, served.server.refused) == ([], [])


async def test_a_turn_that_has_ended_cannot_be_cancelled(serve: Serve) -> None:
    """A turn that its limit ended does not wait; the thread stays as it is."""
    agent = agent_at(
        serve([LOOK, say("So far.")]), Shop(), budget=Budget(max_iterations=2)
    )
    limited = await ask(agent, "Pay order 7.", streamed=False)
    before = await shown(limited.thread)
    with pytest.raises(RunEndedError):
        await cancel_agent(agent, limited.thread, limited.metadata["checkpoint"])
    assert await shown(limited.thread) == before


@each_way
async def test_who_approves_twice_pays_once(serve: Serve, streamed: bool) -> None:
    """A second approval is refused, by the same agent and by one of another process with the thread as it is now."""
    served, shop = serve([PAY, DONE]), Shop()
    agent = agent_at(served, shop)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    checkpoint, approve = paused.metadata["checkpoint"], {"call_1": Approve()}
    await resume(agent, paused.thread, checkpoint, approve, streamed=streamed)
    before = await shown(paused.thread)
    for other in (agent, agent_at(served, shop)):
        with pytest.raises(PlannerExtError):
            await resume(other, paused.thread, checkpoint, approve, streamed=streamed)
    assert (shop.paid, await shown(paused.thread)) == ([(7, "none")], before)


async def test_two_approvals_at_once_pay_once(serve: Serve) -> None:
    """An application that makes its agent for each request: the second click on one thread is refused."""
    served, shop = serve([PAY, DONE]), Shop()
    paused = await ask(agent_at(served, shop), "Pay order 7.", streamed=False)
    given: Any = (paused.thread, paused.metadata["checkpoint"], {"call_1": Approve()})
    clicks = [resume_agent(agent_at(served, shop), *given) for _ in range(2)]
    first, second = await asyncio.gather(*clicks, return_exceptions=True)
    assert isinstance(second, DecisionRefusedError), first
    assert (shop.paid, await shown(paused.thread)) == ([(7, "none")], PAID)


@each_way
async def test_an_approval_after_a_later_turn_is_refused(
    serve: Serve, streamed: bool
) -> None:
    """The application let the thread continue by itself: the old approval pays only if the caller lets it."""
    agent = agent_at(serve([PAY, DONE]), shop := Shop())
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    for role, text in (("user", "Forget it."), ("assistant", "Good.")):
        await paused.thread.on_new_message(
            ChatMessageContent(role=AuthorRole(role), content=text)
        )
    before, given = (
        await shown(paused.thread),
        (paused.metadata["checkpoint"], {"call_1": Approve()}),
    )
    with pytest.raises(DecisionRefusedError, match=r"Forget it.*late='allow'"):
        await resume(agent, paused.thread, *given, streamed=streamed)
    assert (shop.paid, await shown(paused.thread)) == ([], before)
    await resume(agent, paused.thread, *given, streamed=streamed, late="allow")
    assert shop.paid == [(7, "none")]
    assert await shown(paused.thread) == [
        PAID[0],
        ("user", "Forget it."),
        ("assistant", "Good."),
        *PAID[1:],
    ]


@each_way
async def test_a_turn_may_wait_again(serve: Serve, streamed: bool) -> None:
    """The thread then ends with the new pause, whose checkpoint continues; the old one does not."""
    served, shop = (
        serve([PAY, call("shop-pay", {"order": 8}), say("Both are paid.")]),
        Shop(),
    )
    agent = agent_at(served, shop)
    first = await ask(agent, "Pay orders 7 and 8.", streamed=streamed)
    thread, old = first.thread, first.metadata["checkpoint"]
    second = await resume(agent, thread, old, {"call_1": Approve()}, streamed=streamed)
    assert (second.metadata["status"], (await shown(thread))[-1][1]) == (
        "paused",
        WAITS,
    )
    with pytest.raises(InvalidHistoryError, match="waits for a decision"):
        await ask(agent, "Hello?", thread, streamed=streamed)
    with pytest.raises(PlannerExtError):
        await resume(
            agent_at(served, shop),
            thread,
            old,
            {"call_1": Approve()},
            streamed=streamed,
        )
    await resume(
        agent,
        thread,
        second.metadata["checkpoint"],
        {"call_2": Approve()},
        streamed=streamed,
    )
    assert (shop.paid, len(await shown(thread))) == ([(7, "none"), (8, "none")], 7)


@each_way
async def test_another_process_continues(
    serve: Serve, resend: Resend, streamed: bool
) -> None:
    """A new agent, whose instructions read otherwise by now, and a thread read from JSON, or an empty one."""
    for empty in (False, True):
        served, shop = serve([LOOK, PAY, DONE]), Shop()
        paused = await ask(agent_at(served, shop), "Pay order 7.", streamed=streamed)
        kept = (
            ChatHistory()
            if empty
            else ChatHistory(messages=await messages_of(paused.thread))
        )
        thread = ChatHistoryAgentThread(
            chat_history=ChatHistory.restore_chat_history(kept.serialize())
        )
        agent = agent_at(served, shop)
        agent.name = "Another"
        given: Any = {"call_2": Approve()}
        await resume(
            agent, thread, paused.metadata["checkpoint"], given, streamed=streamed
        )
        assert shop.paid == [(7, "none")]
        roles = [role for role, _ in await shown(thread)]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert served.server.requests[-1].messages[0]["content"] == "You pay orders."
        await resend(ChatHistory(messages=await messages_of(thread)))


@each_way
async def test_a_threads_own_system_message_stays(serve: Serve, streamed: bool) -> None:
    """An agent puts its instructions before it; the thread gets no second one."""
    served = serve([PAY, DONE])
    agent, thread = (
        agent_at(served, Shop()),
        ChatHistoryAgentThread(ChatHistory(system_message="Be kind.")),
    )
    paused = await ask(agent, "Pay order 7.", thread, streamed=streamed)
    await resume(
        agent,
        thread,
        paused.metadata["checkpoint"],
        {"call_1": Approve()},
        streamed=streamed,
    )
    assert await shown(thread) == [("system", "Be kind."), *PAID]
    sent = [message["content"] for message in served.server.requests[-1].messages[:2]]
    assert sent == ["You pay orders.", "Be kind."]


@each_way
async def test_the_applications_arguments_are_given_again(
    serve: Serve, streamed: bool
) -> None:
    """They go over the agent's own, which stay as they were."""

    class Till:
        @kernel_function
        async def pay(self, arguments: KernelArguments) -> str:
            seen.append((arguments.get("account"), arguments.get("shop")))
            return "paid"

    seen: list[Any] = []
    agent = agent_at(serve([call("till-pay"), DONE]), Shop())
    agent.kernel.add_plugin(Till(), "till")
    agent.arguments = KernelArguments(account="agent", shop="agent")
    paused = await ask(agent, "Pay.", streamed=streamed)
    own = KernelArguments(account="caller")
    given: Any = (paused.thread, paused.metadata["checkpoint"], {"call_1": Approve()})
    await resume(agent, *given, streamed=streamed, arguments=own)
    assert seen == [("caller", "agent")]
    assert (dict(own), dict(agent.arguments)) == (
        {"account": "caller"},
        {"account": "agent", "shop": "agent"},
    )


@each_way
async def test_a_kernel_of_the_caller_is_used(serve: Serve, streamed: bool) -> None:
    """Its functions run, and its service is asked, as of the agent's own methods."""
    paused = await ask(
        agent_at(serve([PAY]), Shop()), "Pay order 7.", streamed=streamed
    )
    kernel, shop, elsewhere = Kernel(), Shop(), serve([DONE])
    kernel.add_plugin(shop, "shop")
    kernel.add_service(
        FunctionInvokingChatCompletion(elsewhere.connector, interceptors=[asks])
    )
    agent = agent_at(serve([]), Shop())
    given: Any = (paused.thread, paused.metadata["checkpoint"], {"call_1": Approve()})
    await resume(agent, *given, streamed=streamed, kernel=kernel)
    assert (shop.paid, await shown(paused.thread)) == ([(7, "none")], PAID)


@each_way
async def test_a_turn_without_a_decision_still_waits(
    serve: Serve, streamed: bool
) -> None:
    """Nothing is sent, and the thread shows it as before; the next resume takes the decision."""
    served, shop = serve([PAY, DONE]), Shop()
    agent = agent_at(served, shop)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    again = await resume(
        agent, paused.thread, paused.metadata["checkpoint"], {}, streamed=streamed
    )
    assert (again.metadata["status"], len(served.server.requests)) == ("paused", 1)
    assert await shown(paused.thread) == [PAID[0], ("assistant", WAITS)]
    await resume(
        agent,
        paused.thread,
        again.metadata["checkpoint"],
        {"call_1": Approve()},
        streamed=streamed,
    )
    assert await shown(paused.thread) == PAID


@each_way
async def test_a_request_that_fails_leaves_the_results(
    serve: Serve, streamed: bool
) -> None:
    """The payment is made and the model unreachable: the thread has the result, and nothing waits."""
    served, shop = serve([PAY, ScriptedFault(status=500), say("It is paid.")]), Shop()
    agent = agent_at(served, shop)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    given: Any = (paused.thread, paused.metadata["checkpoint"], {"call_1": Approve()})
    with pytest.raises(ServiceCallError):
        await resume(agent, *given, streamed=streamed)
    assert await shown(paused.thread) == PAID[:3]
    last = await ask(agent, "And?", paused.thread, streamed=streamed)
    assert (last.metadata["status"], shop.paid) == ("answered", [(7, "none")])


@each_way
async def test_a_call_that_is_cut_off_is_in_doubt(serve: Serve, streamed: bool) -> None:
    """Cancelled in the function: the thread says that its effect is not known, and a second approval pays nothing."""
    shop = Shop()
    shop.hangs = True
    agent = agent_at(served := serve([PAY, say("It is in doubt.")]), shop)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    given: Any = (paused.thread, paused.metadata["checkpoint"], {"call_1": Approve()})
    going = asyncio.create_task(resume(agent, *given, streamed=streamed))
    await shop.begun.wait()
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert [role for role, _ in await shown(paused.thread)] == [
        "user",
        "assistant",
        "tool",
    ]
    assert "not known" in (await shown(paused.thread))[-1][1]
    shop.hangs = False
    for other in (agent, agent_at(served, shop)):
        with pytest.raises(PlannerExtError):
            await resume(other, *given, streamed=streamed)
    assert shop.paid == []


@each_way
async def test_a_limit_that_raises_leaves_the_results(
    serve: Serve, streamed: bool
) -> None:
    """``on_limit="raise"``: what ran is in the thread, and what was withheld."""
    budget = Budget(max_tool_calls=1, on_limit="raise")
    agent = agent_at(serve([PAY, LOOK]), Shop(), budget=budget)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    given: Any = (paused.thread, paused.metadata["checkpoint"], {"call_1": Approve()})
    with pytest.raises(LimitReachedError):
        await resume(agent, *given, streamed=streamed)
    assert [role for role, _ in await shown(paused.thread)] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]


@each_way
async def test_a_larger_budget_continues_the_turn(serve: Serve, streamed: bool) -> None:
    """A turn that its limit ended is resumed with a larger budget; the forced answer is taken out of the thread."""
    script = [
        calls(LOOK, text="I look."),
        say("So far."),
        calls(LOOK, text="Once more."),
        DONE,
    ]
    agent = agent_at(serve(script), Shop(), budget=Budget(max_iterations=2))
    limited = await ask(agent, "Look.", streamed=streamed)
    given: Any = (limited.thread, limited.metadata["checkpoint"], {})
    await resume(agent, *given, streamed=streamed, budget=Budget(max_iterations=9))
    texts = [text for role, text in await shown(limited.thread) if role == "assistant"]
    assert texts == ["I look.", "Once more.", "Order 7 is paid."]


async def test_a_thread_that_keeps_its_own_records_sees_each_message_once(
    serve: Serve,
) -> None:
    """A thread of the application's own, which stores its messages, gets each new message once."""
    told: list[str] = []

    class Stored(ChatHistoryAgentThread):
        async def on_new_message(self, new_message: ChatMessageContent) -> None:
            told.append(new_message.role.value)
            await super().on_new_message(new_message)

    agent, thread = agent_at(serve([PAY, DONE]), Shop()), Stored()
    paused = await ask(agent, "Pay order 7.", thread, streamed=False)
    with pytest.raises(InvalidHistoryError):
        await ask(agent, "Hello?", thread, streamed=False)
    told.clear()
    await resume_agent(
        agent, thread, paused.metadata["checkpoint"], {"call_1": Approve()}
    )
    assert told == ["assistant", "tool", "assistant"]


@each_way
async def test_a_model_cannot_make_a_thread_wait(serve: Serve, streamed: bool) -> None:
    """A model that says the words of a pause has answered: the next turn is sent."""
    served = serve([say(WAITS), say("Hello.")])
    agent = agent_at(served, Shop())
    said = await ask(agent, "Say it.", streamed=streamed)
    await ask(agent, "Hello?", said.thread, streamed=streamed)
    assert len(served.server.requests) == 2


@each_way
async def test_the_callers_own_history_may_continue(
    serve: Serve, streamed: bool
) -> None:
    """Who uses the service without an agent keeps the history: the paused message is safe to add and to send."""
    served, shop = serve([PAY, say("Hello.")]), Shop()
    agent = agent_at(served, shop)
    service, history = agent.service, ChatHistory()
    assert service is not None
    history.add_user_message("Pay order 7.")
    settings = service.get_prompt_execution_settings_class()(
        function_choice_behavior=agent.function_choice_behavior
    )
    message = await service.get_chat_message_content(
        history, settings, kernel=agent.kernel
    )
    assert message is not None
    history.add_message(message)
    history.add_user_message("Hello?")
    answer = await service.get_chat_message_content(
        history, settings, kernel=agent.kernel
    )
    assert str(answer) == "Hello."


async def refused(
    error: type[Exception], match: str, *given: Any, **options: Any
) -> None:
    for streamed in (False, True):
        with pytest.raises(error, match=match):
            await resume(*given, streamed=streamed, **options)


async def test_what_cannot_be_resumed_is_named(serve: Serve) -> None:
    """Another agent, no thread, a stock service, a damaged checkpoint, another thread: each has its own sentence."""
    shop = Shop()
    agent = agent_at(serve([PAY, say("Hello.")]), shop)
    paused = await ask(agent, "Pay order 7.", streamed=False)
    thread, checkpoint, approve = (
        paused.thread,
        paused.metadata["checkpoint"],
        {"call_1": Approve()},
    )
    stock = ChatCompletionAgent(service=serve([]).connector, name="Stock")
    other = await ask(agent, "Hello", streamed=False)
    await refused(
        InvalidOptionError,
        "agent must be a ChatCompletionAgent",
        object(),
        thread,
        checkpoint,
        approve,
    )
    await refused(
        InvalidOptionError,
        "thread must be the ChatHistoryAgentThread",
        agent,
        None,
        checkpoint,
        approve,
    )
    await refused(
        InvalidOptionError,
        "must be the FunctionInvokingChatCompletion",
        stock,
        thread,
        checkpoint,
        approve,
    )
    await refused(InvalidCheckpointError, "checkpoint", agent, thread, "{}", approve)
    await refused(
        InvalidHistoryError,
        "history of this checkpoint's run",
        agent,
        other.thread,
        checkpoint,
        approve,
    )
    await refused(
        DecisionRefusedError, "call_9", agent, thread, checkpoint, {"call_9": Approve()}
    )
    await refused(
        InvalidOptionError,
        "kernel",
        agent,
        thread,
        checkpoint,
        approve,
        kernel="kernel",
    )
    assert (shop.paid, (await shown(thread))[-1]) == ([], ("assistant", WAITS))


async def test_a_signed_checkpoint_is_needed_where_the_service_has_a_key(
    serve: Serve,
) -> None:
    """As at the service's own door: text with another signature is refused, also to cancel."""
    agent = agent_at(serve([PAY, DONE]), shop := Shop(), checkpoint_key=b"secret")
    paused = await ask(agent, "Pay order 7.", streamed=False)
    forged = Checkpoint.from_json(paused.metadata["checkpoint"], key=b"secret").to_json(
        key=b"other"
    )
    await refused(
        InvalidCheckpointError,
        "signed",
        agent,
        paused.thread,
        forged,
        {"call_1": Approve()},
    )
    with pytest.raises(InvalidCheckpointError):
        await cancel_agent(agent, paused.thread, forged)
    value = Checkpoint.from_json(paused.metadata["checkpoint"], key=b"secret")
    await resume_agent(agent, paused.thread, value, {"call_1": Approve()})
    assert shop.paid == [(7, "none")]


@each_way
async def test_the_services_hook_says_who_may_decide(
    serve: Serve, streamed: bool
) -> None:
    """Asked before a decision is taken and before a turn is cancelled; refused, the turn still waits."""
    seen: list[Any] = []

    def authorize(request: Any) -> bool:
        seen.append((request.action, request.by))
        return request.by == "boss"

    async def asks_boss(tool: ToolCall) -> Defer:
        return Defer(roles=("boss",))

    options: dict[str, Any] = {
        "interceptors": [asks_boss],
        "approval": ApprovalSettings(authorize=authorize),
    }
    agent = agent_at(serve([PAY, DONE]), shop := Shop(), **options)
    paused = await ask(agent, "Pay order 7.", streamed=streamed)
    thread, checkpoint = paused.thread, paused.metadata["checkpoint"]
    with pytest.raises(DecisionRefusedError, match="intern"):
        await resume(
            agent,
            thread,
            checkpoint,
            {"call_1": Approve(by="intern")},
            streamed=streamed,
        )
    with pytest.raises(DecisionRefusedError, match="intern"):
        await cancel_agent(agent, thread, checkpoint, by="intern")
    assert (shop.paid, (await shown(thread))[-1]) == ([], ("assistant", WAITS))
    await resume(
        agent, thread, checkpoint, {"call_1": Approve(by="boss")}, streamed=streamed
    )
    assert (shop.paid, seen) == (
        [(7, "none")],
        [("decide", "intern"), ("cancel", "intern"), ("decide", "boss")],
    )


@each_way
async def test_a_call_that_ran_beside_one_that_waits_does_not_run_again(
    serve: Serve, streamed: bool
) -> None:
    """Of two payments one was approved and made: an agent that knows nothing of it refuses the old checkpoint."""
    served, shop = (
        serve([calls(PAY, call("shop-pay", {"order": 8})), say("Both are paid.")]),
        Shop(),
    )
    settings = ApprovalSettings(on_deferred="run_safe_first")

    def agent() -> ChatCompletionAgent:
        return agent_at(served, shop, approval=settings)

    paused = await ask(agent(), "Pay orders 7 and 8.", streamed=streamed)
    thread, old = paused.thread, paused.metadata["checkpoint"]
    again = await resume(agent(), thread, old, {"call_1": Approve()}, streamed=streamed)
    assert (shop.paid, (await shown(thread))[-1]) == (
        [(7, "none")],
        ("assistant", WAITS),
    )
    both = {"call_1": Approve(), "call_2": Approve()}
    with pytest.raises(DecisionRefusedError, match="resumed before"):
        await resume(agent(), thread, old, both, streamed=streamed)
    with pytest.raises(DecisionRefusedError, match="resumed before"):
        await cancel_agent(agent(), thread, old)
    given: Any = (thread, again.metadata["checkpoint"], {"call_2": Approve()})
    await resume(agent(), *given, streamed=streamed)
    assert shop.paid == [(7, "none"), (8, "none")]
