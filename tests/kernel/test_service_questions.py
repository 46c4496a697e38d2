"""A service whose model asks: the clarifier answers, the history is kept up to date, and a person may answer later."""

from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent

from planner_ext import BoundedFunctionChoiceBehavior, FunctionInvokingChatCompletion, ToolCallHandler
from planner_ext.hitl_manager import Question, Supply
from planner_ext.testing import Script, ScriptedChatCompletion, call, say
from planner_ext.testing.rules import find_violation

WHERE = "In which country?"
ASK = call("UserInteraction-AskUser", {"question": WHERE})
both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])


async def norway(question: Question) -> str | None:
    """Answer questions, and nothing else."""
    return "Norway." if question.text == WHERE else None


def settings(behavior: Any = None) -> PromptExecutionSettings:
    """Offer the kernel's functions."""
    return PromptExecutionSettings(function_choice_behavior=behavior or BoundedFunctionChoiceBehavior.Auto())


async def ask(
    service: FunctionInvokingChatCompletion, history: ChatHistory, *, streamed: bool, behavior: Any = None
) -> ChatMessageContent:
    """Answer a history, plain or streamed."""
    if not streamed:
        answered = await service.get_chat_message_content(history, settings(behavior), kernel=Kernel())
        assert answered is not None
        return answered
    stream = service.get_streaming_chat_message_content(history, settings(behavior), kernel=Kernel())
    chunks = [chunk async for chunk in stream if chunk is not None]
    return ChatMessageContent(role="assistant", content="".join(map(str, chunks)), metadata=chunks[-1].metadata)  # type: ignore[arg-type]


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
    body = {"model": "any", "messages": [message.to_dict() for message in history.messages]}
    assert find_violation(body) is None


@both_ways
@pytest.mark.parametrize("asks", [ASK, say(WHERE)], ids=["call", "plain"])
async def test_a_service_puts_questions_to_its_clarifier(asks: Any, streamed: bool) -> None:
    """Question and answer are in the caller's history before the final message, which says what it took."""
    service, inner, history = served([asks, say("Oslo.")], clarifier=norway)
    message = await ask(service, history, streamed=streamed)

    assert str(message).endswith("Oslo.")
    assert (message.metadata["status"], message.metadata["iterations"]) == ("answered", 2)
    assert len(inner.requests) == 2
    assert str(history.messages[-1]) == "Norway." or "Norway." in str(history.messages[-1].to_dict())
    check_sendable(history)


@both_ways
async def test_a_question_nobody_answers_waits_in_the_metadata(streamed: bool) -> None:
    """Status ``asked``, the question as text and as a pending call; Supply answers it, and the history keeps up."""
    service, _, history = served([ASK, say("Oslo.")], max_clarifications=1)
    message = await ask(service, history, streamed=streamed)
    (pending,) = message.metadata["pending"]
    assert (message.metadata["status"], pending["arguments"]) == ("asked", {"question": WHERE})
    assert str(message).endswith(WHERE)

    history.add_message(ChatMessageContent(role="assistant", content=WHERE))  # type: ignore[arg-type]
    done = await service.resume(
        history, message.metadata["checkpoint"], {pending["id"]: Supply("Norway.")}, settings(), kernel=Kernel()
    )
    assert (str(done), done.metadata["status"], len(history.messages)) == ("Oslo.", "answered", 3)
    check_sendable(history)


@both_ways
async def test_a_service_offers_the_question_only_where_it_may_be_asked(streamed: bool) -> None:
    """AskUser goes with a clarifier or a cap, and never with a behaviour that offers nothing."""
    none = BoundedFunctionChoiceBehavior.NoneInvoke()
    cases: list[tuple[dict[str, Any], Any]] = [({}, None), ({"clarifier": norway}, None), ({"clarifier": norway}, none)]
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
