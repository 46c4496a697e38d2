"""What a planner, a worker, a service and a session say at their start: unguarded functions, limits out of reach."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    ApprovalSettings,
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
    ToolUseSession,
)
from planner_ext.session import AutomaticToolUseConfig
from planner_ext.testing import say
from support.approval import (
    DONE,
    Shop,
    World,
    asked,
    planner_with,
    settings_with,
    world,
)
from support.durable import open_runs

UNASKED = "Every function runs unasked"
UNREACHABLE = "cannot be reached"


class Plain:
    @kernel_function
    async def look(self) -> str:
        return "sent"


def said(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if what in record.getMessage()
    ]


def plain() -> World:
    """A kernel without a marked function."""
    return world(lambda _: say("Done."), Plain())


async def test_a_planner_without_a_guard_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At its first run, plain or streamed, at the level INFO: which functions run unasked, and the ways out."""
    caplog.set_level("INFO", "planner_ext")
    here, planner = plain(), planner_with()
    await planner.invoke(here.kernel, "Look.")
    async for _ in planner.invoke_stream(here.kernel, "Look."):
        pass
    (text,) = said(caplog, UNASKED)
    assert "The kernel has shop-look." in text
    assert (
        "@requires_approval" in text
        and "ApprovalPolicy" in text
        and "--policy or --ask-all" in text
    )


POLICY = ApprovalPolicy.from_dict({"default": "allow", "rules": []})
GUARDS: dict[str, dict[str, Any]] = {
    "policy": {"interceptors": [POLICY]},
    "unmatched": {"approval": ApprovalSettings(unmatched="deny")},
    "callback": {"pre_invoke": lambda *_: True},
    "check": {"check_for_intervention": lambda _: False},
}


@pytest.mark.parametrize("guard", GUARDS)
async def test_a_planner_with_a_guard_says_nothing(
    guard: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Anything that may decide a call is the application's own word on it."""
    caplog.set_level("INFO", "planner_ext")
    await planner_with(**GUARDS[guard]).invoke(plain().kernel, "Look.")
    assert said(caplog, UNASKED) == []


async def test_a_kernel_with_a_guard_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A marked function, a filter, and a service that has interceptors; and a kernel has nothing to guard."""
    caplog.set_level("INFO", "planner_ext")
    filtered, serviced = plain(), plain()
    filtered.kernel.add_filter(
        FilterTypes.AUTO_FUNCTION_INVOCATION, ApprovalFilter(POLICY)
    )
    service = FunctionInvokingChatCompletion(serviced.service, interceptors=[POLICY])
    serviced.kernel.add_service(service, overwrite=True)
    empty = plain()
    empty.kernel.plugins.clear()
    for here in (world([DONE], Shop()), filtered, serviced, empty):
        await planner_with().invoke(here.kernel, "Look.")
    assert said(caplog, UNASKED) == []


async def test_a_worker_says_so_before_it_has_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start of its work, as a warning; a run that it then begins does not say it again."""
    caplog.set_level("INFO", "planner_ext")
    here, planner = plain(), planner_with()
    async with open_runs(tmp_path / "runs.db", poll_seconds=0.01) as runs:
        working = asyncio.create_task(runs.work(planner, here.kernel))
        submitted = await runs.submit("Look.")
        assert (await submitted.result(60)).status == "answered"
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
    (record,) = [one for one in caplog.records if UNASKED in one.getMessage()]
    assert (record.name, record.levelname) == ("planner_ext.durable.runs", "WARNING")


# A budget that another limit keeps from being reached.


async def answer(
    service: FunctionInvokingChatCompletion, here: World, behavior: Any
) -> None:
    await service.get_chat_message_content(
        asked(), settings_with(behavior), kernel=here.kernel
    )


@pytest.mark.parametrize(
    ("behavior", "limit"),
    [
        (FunctionChoiceBehavior.Auto(), "maximum_auto_invoke_attempts=5"),
        (BoundedFunctionChoiceBehavior.Auto(), "maximum_use_attempts=5"),
        (
            BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2),
            "maximum_use_attempts=2",
        ),
    ],
    ids=["stock", "bounded", "explicit"],
)
async def test_a_budget_beyond_the_attempts_is_logged_once(
    behavior: Any, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With both numbers and the way out, for a service and its copies, however often it is asked."""
    here = plain()
    service = FunctionInvokingChatCompletion(
        here.service, budget=Budget(max_iterations=20)
    )
    for _ in range(2):
        await answer(service, here, behavior)
    (text,) = said(caplog, UNREACHABLE)
    assert (
        "max_iterations=20" in text
        and limit in text
        and "maximum_use_attempts=19" in text
    )


async def test_an_agents_budget_beyond_its_attempts_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An agent brings Semantic Kernel's own behavior, with its five attempts."""
    here = plain()
    service = FunctionInvokingChatCompletion(
        here.service, budget=Budget(max_iterations=20)
    )
    agent = ChatCompletionAgent(kernel=here.kernel, service=service, name="Shop")
    await agent.get_response("Look.")
    assert len(said(caplog, UNREACHABLE)) == 1


@pytest.mark.parametrize(
    ("budget", "behavior"),
    [
        (Budget(max_iterations=6), FunctionChoiceBehavior.Auto()),
        (Budget(max_tool_calls=20), FunctionChoiceBehavior.Auto()),
        (
            Budget(max_iterations=20),
            BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None),
        ),
    ],
    ids=["reachable", "no-iterations", "unlimited"],
)
async def test_a_budget_that_can_be_reached_is_not_logged(
    budget: Budget, behavior: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Five attempts and the answer are six requests."""
    here = plain()
    await answer(
        FunctionInvokingChatCompletion(here.service, budget=budget), here, behavior
    )
    await planner_with().invoke(here.kernel, "Look.")
    assert said(caplog, UNREACHABLE) == []


def test_a_sessions_budget_beyond_its_own_limit_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two limits on tool calls the tighter holds, and the other is never reached."""
    ToolUseSession(plain().kernel, budget=Budget(max_tool_calls=20))
    (text,) = said(caplog, UNREACHABLE)
    assert (
        "max_tool_calls=20" in text
        and "AutomaticToolUseConfig(max_tool_calls=20)" in text
    )
    wide = AutomaticToolUseConfig(max_tool_calls=20)
    ToolUseSession(
        plain().kernel, budget=Budget(max_tool_calls=20), tool_use_config=wide
    )
    assert len(said(caplog, UNREACHABLE)) == 1
