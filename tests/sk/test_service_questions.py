"""A service whose model asks: the clarifier answers, the history is kept up to date, and a person may answer later.

Also where the caller knows nothing of questions: streams, agents, prompt functions and sessions over the service.
"""

from dataclasses import replace
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.errors import RunNotAnsweredError
from planner_ext.hitl_manager import ModelClarifier, Question, Supply
from planner_ext.plugin import PlannerPlugin
from planner_ext.session import ToolUseSession
from planner_ext.testing import Script, ScriptedChatCompletion, ScriptedReply, call, say
from planner_ext.testing.rules import find_violation
from support.narrow import as_type

WHERE = "In which country?"
ASK = call("UserInteraction-AskUser", {"question": WHERE})
both_questions = pytest.mark.parametrize(
    "asks", [ASK, say(WHERE)], ids=["call", "plain"]
)
both_ways = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)


async def norway(question: Question) -> str | None:
    """Answer questions, and nothing else."""
    return "Norway." if question.text == WHERE else None


def settings(behavior: Any = None) -> PromptExecutionSettings:
    """Offer the kernel's functions."""
    return PromptExecutionSettings(
        function_choice_behavior=behavior or BoundedFunctionChoiceBehavior.Auto()
    )


async def ask(
    service: FunctionInvokingChatCompletion,
    history: ChatHistory,
    *,
    streamed: bool,
    behavior: Any = None,
) -> ChatMessageContent:
    """Answer a history, plain or streamed."""
    if not streamed:
        answered = await service.get_chat_message_content(
            history, settings(behavior), kernel=Kernel()
        )
        assert answered is not None
        return answered
    stream = service.get_streaming_chat_message_content(
        history, settings(behavior), kernel=Kernel()
    )
    chunks = [chunk async for chunk in stream if chunk is not None]
    return ChatMessageContent(
        role=AuthorRole.ASSISTANT,
        content="".join(map(str, chunks)),
        metadata=chunks[-1].metadata,
    )


def served(
    script: Script, **options: Any
) -> tuple[FunctionInvokingChatCompletion, ScriptedChatCompletion, ChatHistory]:
    """Wrap a scripted model; give the history of one question, too."""
    inner = ScriptedChatCompletion(script)
    history = ChatHistory()
    history.add_user_message("What is the capital?")
    return FunctionInvokingChatCompletion(inner, **options), inner, history


def check_sendable(history: ChatHistory) -> None:
    """Fail where OpenAI would refuse a history."""
    body = {
        "model": "any",
        "messages": [message.to_dict() for message in history.messages],
    }
    assert find_violation(body) is None


@both_ways
@both_questions
async def test_a_service_puts_questions_to_its_clarifier(
    asks: Any, streamed: bool
) -> None:
    """Question and answer are in the caller's history before the final message, which says what it took."""
    service, inner, history = served([asks, say("Oslo.")], clarifier=norway)
    message = await ask(service, history, streamed=streamed)

    assert str(message).endswith("Oslo.")
    assert (message.metadata["status"], message.metadata["iterations"]) == (
        "answered",
        2,
    )
    assert len(inner.requests) == 2
    assert str(history.messages[-1]) == "Norway." or "Norway." in str(
        history.messages[-1].to_dict()
    )
    check_sendable(history)


@both_ways
async def test_an_unanswered_question_waits_in_the_metadata(streamed: bool) -> None:
    """Status ``asked``, the question as text and as a pending call; Supply answers it, and the history keeps up."""
    service, _, history = served([ASK, say("Oslo.")], max_clarifications=1)
    message = await ask(service, history, streamed=streamed)
    (pending,) = message.metadata["pending"]
    assert (message.metadata["status"], pending["arguments"]) == (
        "asked",
        {"question": WHERE},
    )
    assert str(message).endswith(WHERE)

    history.add_message(ChatMessageContent(role=AuthorRole.ASSISTANT, content=WHERE))
    done = await service.resume(
        history,
        message.metadata["checkpoint"],
        {pending["id"]: Supply("Norway.")},
        settings(),
        kernel=Kernel(),
    )
    assert str(done) == "Oslo."
    assert done.metadata["status"] == "answered"
    assert len(history.messages) == 3
    check_sendable(history)


@both_ways
async def test_a_service_offers_the_question_only_where_it_may_be_asked(
    streamed: bool,
) -> None:
    """AskUser goes with a clarifier or a cap, and never with a behaviour that offers nothing."""
    none = BoundedFunctionChoiceBehavior.NoneInvoke()
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"clarifier": norway}, None),
        ({"clarifier": norway}, none),
    ]
    offered: list[bool] = []
    for options, behavior in cases:
        service, inner, history = served([say("Oslo.")], **options)
        await ask(service, history, streamed=streamed, behavior=behavior)
        offered.append("UserInteraction-AskUser" in inner.requests[0].tools)
    assert offered == [False, True, False]


async def test_the_handler_takes_a_clarifier() -> None:
    """The manual handler asks it, too, and stores the final answer."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion([ASK, say("Oslo.")]))
    history = ChatHistory()
    history.add_user_message("What is the capital?")
    handler = ToolCallHandler(kernel, clarifier=norway)
    messages = [message async for message in handler.invoke(history)]
    assert [str(message) for message in messages] == ["Oslo."]
    assert str(history.messages[-1]) == "Oslo."
    check_sendable(history)


async def no_answer(question: Question) -> None:
    """Answer nothing."""


def kernel_of(
    *script: ScriptedReply, clarifier: Any = norway
) -> tuple[Kernel, FunctionInvokingChatCompletion]:
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(list(script)), clarifier=clarifier
    )
    return Kernel(services=service), service


async def test_a_stream_says_the_answer_once() -> None:
    """After a plain question was answered, the chunks of the last round trip add up to the answer, said once."""
    kernel, service = kernel_of(say(WHERE), say("Oslo."))
    history = ChatHistory()
    history.add_user_message("What is the capital?")
    said: dict[int | None, str] = {}
    async for chunk in service.get_streaming_chat_message_content(
        history, settings(), kernel=kernel
    ):
        assert chunk is not None
        said[chunk.function_invoke_attempt] = said.get(
            chunk.function_invoke_attempt, ""
        ) + str(chunk)
    assert said == {0: WHERE, 1: "Oslo."}


@both_questions
async def test_a_prompt_function_gets_its_question_answered(
    asks: ScriptedReply,
) -> None:
    """``invoke_prompt`` knows nothing of questions and returns the answer."""
    kernel, _ = kernel_of(asks, say("Oslo."))
    result = await kernel.invoke_prompt(
        "What is the capital?", arguments=KernelArguments(settings=settings())
    )
    assert str(result) == "Oslo."


@both_questions
async def test_an_agents_thread_holds_question_and_answer(asks: ScriptedReply) -> None:
    """The agent's thread has what was asked and answered before the reply."""
    kernel, service = kernel_of(asks, say("Oslo."))
    response = await ChatCompletionAgent(
        service=service, kernel=kernel, name="guide"
    ).get_response("The capital?")
    assert (str(response.message), response.message.metadata["status"]) == (
        "Oslo.",
        "answered",
    )
    thread = as_type(ChatHistoryAgentThread, response.thread)
    told = [str(message.to_dict()) async for message in thread.get_messages()]
    assert [WHERE in message for message in told] == [False, True, False, False]
    assert ["Norway." in message for message in told] == [False, False, True, False]


async def test_an_agent_that_asks_is_answered_with_the_next_message() -> None:
    """Unanswered, the question is the agent's reply, and the person's next message follows it in the thread."""
    kernel, service = kernel_of(ASK, say("Oslo."), clarifier=no_answer)
    agent = ChatCompletionAgent(service=service, kernel=kernel, name="guide")
    asked = await agent.get_response("The capital?")
    assert (str(asked.message), asked.message.metadata["status"]) == (WHERE, "asked")
    answered = await agent.get_response("Norway.", thread=asked.thread)
    assert str(answered.message) == "Oslo."


@both_ways
async def test_a_session_does_not_take_an_open_question_for_an_answer(
    streamed: bool,
) -> None:
    """It raises, with the run that waits; what the model asked is not lost, and the session is as it was."""
    kernel, _ = kernel_of(ASK, say("Oslo."), clarifier=no_answer)
    session = ToolUseSession(kernel)
    with pytest.raises(RunNotAnsweredError, match="question left open") as caught:
        if streamed:
            async for _ in session.prompt_streaming("The capital?"):
                pass
        else:
            await session.prompt("The capital?")
    assert caught.value.status == "asked"
    assert caught.value.checkpoint is not None
    assert session.history().messages == []


@both_ways
async def test_the_usage_of_a_service_counts_clarifiers_and_nested_planners(
    streamed: bool,
) -> None:
    """Tokens of a clarifying model and of a nested planner are in ``usage``, as their trips are in ``iterations``."""
    tokens: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 1}
    mind = ScriptedChatCompletion(
        [replace(say("Norway."), **tokens), replace(say("PASS"), **tokens)],
        service_id="mind",
    )
    expert = ScriptedChatCompletion(
        [replace(say("Oslo."), **tokens)], service_id="expert"
    )
    script = [
        replace(asks, **tokens)
        for asks in (ASK, call("expert-reach_goal", {"goal": "go"}), say("Oslo."))
    ]
    inner = ScriptedChatCompletion(script, service_id="chat")
    kernel = Kernel(services=[mind, expert, inner])
    options = FunctionCallingStepwisePlannerOptions(plan=False)
    kernel.add_plugin(
        PlannerPlugin(FunctionCallingStepwisePlanner("expert", options)), "expert"
    )
    service = FunctionInvokingChatCompletion(
        inner, clarifier=ModelClarifier(kernel, service_id="mind")
    )
    answer = await _asked(service, kernel, streamed=streamed)
    usage = answer.metadata["usage"]
    assert answer.metadata["iterations"] == 6
    assert usage.prompt_tokens == 60
    assert usage.completion_tokens == 6


async def _asked(
    service: FunctionInvokingChatCompletion, kernel: Kernel, *, streamed: bool
) -> Any:
    """Ask plain or streamed; give what carries the metadata."""
    history = ChatHistory()
    history.add_user_message("What is the capital?")
    if not streamed:
        return await service.get_chat_message_content(
            history, settings(), kernel=kernel
        )
    stream = service.get_streaming_chat_message_content(
        history, settings(), kernel=kernel
    )
    return [chunk async for chunk in stream][-1]
