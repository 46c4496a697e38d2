"""What a paused run waits for, as the stores and the doors list it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.filters.filter_types import FilterTypes

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    BoundedFunctionChoiceBehavior,
    FunctionInvokingChatCompletion,
    Runs,
    ToolUseSession,
)
from planner_ext.approval.waiting import (
    IN_DOUBT_PROMPT,
    pending_calls,
    waiting_calls,
)
from planner_ext.core.facts import Panel
from planner_ext.core.fold import fold
from planner_ext.core.state import ASK_USER
from planner_ext.durable import Approvals
from planner_ext.hitl_manager import Defer, ToolCall
from planner_ext.session import AutomaticToolUseConfig
from planner_ext.testing import call
from support.core import (
    PAUSED,
    RESUMED,
    began,
    calls,
    clarified,
    decided,
    replied,
    run_started,
    says,
)
from support.planner import ADD, GOAL, planner_with, scripted


def test_a_question_about_a_call_in_doubt_does_not_expire() -> None:
    """The expiry was of the question whether it may run; the question whether it ran stays open until answered."""
    deferred = decided(0, verdict="defer", expires_at=5.0)
    approved = replace(deferred, verdict="run", person=True)
    facts = [
        run_started(),
        replied(calls("f")),
        deferred,
        PAUSED,
        RESUMED,
        approved,
        began(0),
        PAUSED,
    ]
    (waiting,) = waiting_calls(fold(facts)).values()
    fact = waiting.decided_fact
    assert waiting.started is True
    assert fact.expires_at is None
    assert fact.prompt == IN_DOUBT_PROMPT


def test_a_question_about_a_call_in_doubt_has_its_quorum() -> None:
    """As many persons decide as did before it ran; the question does not escalate."""
    panel = Panel(quorum=2, escalates_in=5.0, escalates_to=("boss",))
    run = decided(0, panel=panel)
    facts = [run_started(), replied(calls("f")), run, began(0), PAUSED]
    (waiting,) = waiting_calls(fold(facts)).values()
    assert waiting.decided_fact.panel == Panel(quorum=2)


def test_a_reply_that_asks_waits_as_a_call_that_asks_the_user() -> None:
    """Its text is the prompt, and the argument ``question``."""
    asked = replied(says("where?"))
    facts = [run_started(), asked, clarified(None, None), PAUSED]
    (question,) = pending_calls(fold(facts))
    assert (question.fully_qualified_name, question.kind) == (ASK_USER, "question")
    assert (question.prompt, question.arguments) == (asked.text, {"question": "where?"})


async def deferring(call: ToolCall) -> Defer:
    return Defer(f"Call {call['function_name']} with {call['arguments']}?")


ASKS = ApprovalPolicy.from_dict({"default": "ask", "rules": []})


def asked() -> tuple[ChatHistory, PromptExecutionSettings]:
    history = ChatHistory()
    history.add_user_message(GOAL)
    return history, PromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )


async def of_planner(_: Path) -> Any:
    result = await planner_with(plan=False, interceptors=[deferring]).invoke(
        scripted([ADD])[0], GOAL
    )
    return result.pending


async def of_service(_: Path) -> Any:
    kernel, service = scripted([ADD])
    history, settings = asked()
    wrapped = FunctionInvokingChatCompletion(service, interceptors=[deferring])
    message = await wrapped.get_chat_message_content(history, settings, kernel=kernel)
    assert message is not None
    return message.metadata["pending"]


async def of_store(folder: Path) -> Any:
    store = folder / "runs.db"
    async with Runs.sqlite(store) as runs:
        handle = await runs.start(
            planner_with(plan=False, interceptors=[deferring]), scripted([ADD])[0], GOAL
        )
        await handle.result()
    async with Approvals.connect(str(store)) as approvals:
        return await approvals.pending()


async def of_filter(_: Path) -> Any:
    kernel, service = scripted([ADD])
    waits = ApprovalFilter(ASKS)
    kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, waits)
    history, settings = asked()
    await service.get_chat_message_content(history, settings, kernel=kernel)
    return waits.pending(history)


async def of_session(_: Path) -> Any:
    session = ToolUseSession(
        scripted([ADD])[0], tool_use_config=AutomaticToolUseConfig(enabled=False)
    )
    await session.prompt(GOAL)
    return session.pending


@pytest.mark.parametrize(
    "door", [of_planner, of_service, of_store, of_filter, of_session]
)
async def test_what_waits_is_read_by_key(door: Any, tmp_path: Path) -> None:
    """The same line of code reads a waiting call of every door; a wrong key names the right ones."""
    (call,) = await door(tmp_path)
    assert call["id"]
    assert call["fully_qualified_name"] == "math-add"
    assert call.get("nothing", "none") == "none"
    if door is not of_session:
        assert call["arguments"] == {"a": 1, "b": 2}
    assert "id" in call
    assert set(call) == dict(call).keys() >= {"id", "fully_qualified_name"}
    with pytest.raises(KeyError, match="nothing"):
        call["nothing"]


async def test_an_interceptor_and_the_waiting_call_have_one_path() -> None:
    """A call has its path when it is decided, and the same one while it waits; characters that part it are escaped."""
    seen: list[str] = []

    async def defer(call: ToolCall) -> Defer:
        seen.append(call.path)
        return Defer()

    kernel, _ = scripted([call("math-add", {"a": 1, "b": 2}, id="a/b%c")])
    result = await planner_with(plan=False, interceptors=[defer]).invoke(kernel, GOAL)
    assert [waiting.path for waiting in result.pending] == ["a%2Fb%25c"]
    assert seen == ["a%2Fb%25c"]
