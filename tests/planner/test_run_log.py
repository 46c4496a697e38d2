"""The log lines of runs that no store keeps: one for each event, at every door, with the run's name and no payload."""

import logging
from typing import Any

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    Defer,
    Deny,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.errors import ServiceCallError
from planner_ext.testing import ScriptedReply, call, say
from support.planner import (
    ADD,
    both_ways,
    invoke,
    never_stops,
    planner_with,
    resume,
    scripted,
)

SECRET = "swordfish"
GOAL = f"Keep {SECRET} to yourself."


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name == "planner_ext.runs"]
    assert all(record.levelno in (logging.INFO, logging.DEBUG) for record in found)
    assert SECRET not in caplog.text
    return [record.getMessage() for record in found]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "planner_ext.runs")


async def deferring(_: object) -> Defer:
    return Defer(f"Add for {SECRET}?")


async def by_planner(kernel: Any, streamed: bool) -> str:
    result = await invoke(planner_with(plan=False), kernel, GOAL, streamed=streamed)
    return result.checkpoint.run_id


def asked() -> tuple[ChatHistory, PromptExecutionSettings]:
    history = ChatHistory()
    history.add_user_message(GOAL)
    return history, PromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )


async def by_service(kernel: Any, streamed: bool) -> str:
    history, settings = asked()
    service: Any = FunctionInvokingChatCompletion(kernel.get_service())
    if streamed:
        async for _ in service.get_streaming_chat_message_content(
            history, settings, kernel=kernel
        ):
            pass
    else:
        await service.get_chat_message_content(history, settings, kernel=kernel)
    return ""


async def by_handler(kernel: Any, streamed: bool) -> str:
    handler = ToolCallHandler(kernel)
    history, _ = asked()
    async for _ in (handler.invoke_stream if streamed else handler.invoke)(history):
        pass
    return ""


async def by_session(kernel: Any, streamed: bool) -> str:
    session = ToolUseSession(kernel)
    if streamed:
        async for _ in session.prompt_streaming(GOAL):
            pass
    else:
        await session.prompt(GOAL)
    return ""


@both_ways
@pytest.mark.parametrize("door", [by_planner, by_service, by_handler, by_session])
async def test_start_and_end_are_one_line_each(
    door: Any, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At every door, plain and streamed, with what was spent; an undecided call is not logged as an event."""
    run_id = await door(scripted([ADD, say(f"{SECRET}.")])[0], streamed)
    started, ended = lines(caplog)
    assert started.endswith(" started")
    assert " answered: 2 iterations, 1 call, " in ended
    assert started.split()[1] == ended.split()[1]
    assert run_id in started


@both_ways
@pytest.mark.parametrize("door", [by_planner, by_service, by_handler, by_session])
async def test_an_error_that_ends_a_run_is_one_line(
    door: Any, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With the class of the error alone: what it says may be a payload."""
    with pytest.raises(ServiceCallError):
        await door(scripted([ConnectionError(SECRET)])[0], streamed)
    started, ended = lines(caplog)
    assert started.endswith(" started")
    assert ended.endswith(" broke off: ServiceCallError")


@both_ways
async def test_a_limit_is_one_line(
    streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With its name, before the end."""
    planner = planner_with(plan=False, budget=Budget(max_iterations=2))
    await invoke(planner, scripted(never_stops)[0], GOAL, streamed=streamed)
    _, limit, ended = lines(caplog)
    assert limit.endswith(" limit max_iterations reached")
    assert " limit_reached: 2 iterations" in ended


@both_ways
@pytest.mark.parametrize("decision", [Approve(by="ann"), Deny(SECRET, by="ann")])
async def test_pause_and_decision_are_one_line_each(
    decision: Any, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The decision with the function and who decided; no question, no argument, no reason."""
    planner = planner_with(plan=False, interceptors=[deferring])
    script = [call("math-add", {"a": 1, "b": 2}), say("3.")]
    kernel = scripted(script)[0]
    paused = await invoke(planner, kernel, GOAL, streamed=streamed)
    decisions = {paused.pending[0].id: decision}
    await resume(
        planner, kernel, paused.checkpoint, streamed=streamed, decisions=decisions
    )
    started, waits, resumed, decided, ended = lines(caplog)
    assert waits.endswith(" paused: 1 call waits")
    assert resumed.endswith(" resumed")
    said = "approved" if isinstance(decision, Approve) else "denied"
    assert decided.endswith(f" call math-add {said} by ann")
    assert (
        len({line.split()[1] for line in (started, waits, resumed, decided, ended)})
        == 1
    )


async def test_an_approver_at_hand_decides_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A decision that is made while the run is open is a decision, too."""

    async def approver(_: object) -> Approve:
        return Approve(by="ann")

    planner = planner_with(plan=False, interceptors=[deferring], approver=approver)
    await planner.invoke(scripted([ADD, say("3.")])[0], GOAL)
    _, decided, _ = lines(caplog)
    assert decided.endswith(" call math-add approved by ann")


async def test_a_cancelled_pause_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """``cancel`` drives nothing, and is still logged."""
    planner = planner_with(plan=False, interceptors=[deferring])
    paused = await planner.invoke(scripted([ADD])[0], GOAL)
    planner.cancel(paused.checkpoint, by="ann")
    assert " stopped: 1 iteration, 0 calls" in lines(caplog)[-1]


async def test_a_refusal_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    """How the run ended is said; the model's text is not."""
    refused = ScriptedReply(refusal=f"Not with {SECRET}.")
    form = {"type": "object", "properties": {"total": {"type": "integer"}}}
    await planner_with(plan=False, response_format=form).invoke(
        scripted([refused])[0], GOAL
    )
    assert " incomplete: 1 iteration" in lines(caplog)[-1]
