"""The sample that drives agent-framework's chat client: the core's promises hold there, and runs move both ways."""

import importlib
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import (
    Approve,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.core.limits import Budget
from planner_ext.durable import Runs
from planner_ext.errors import PlannerExtError
from planner_ext.testing import Script, ScriptedOpenAIServer, ScriptedRequest, call, say
from samples.test_samples import environment, runs_of

pytest.importorskip("agent_framework")
FOLDER = Path(__file__).parents[2] / "samples" / "agent_framework"
ASKS = call("orders-refund", {"order": 7, "amount": 128.0})


@pytest.fixture(autouse=True)
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sample's folder, from which its programs import."""
    monkeypatch.syspath_prepend(str(FOLDER))  # pyright: ignore[reportUnknownMemberType]
    yield


def planner_class() -> Any:
    """The sample's planner."""
    return importlib.import_module("adapter").AgentFrameworkPlanner


@asynccontextmanager
async def planner(
    url: str, refunds: list[float], **options: Any
) -> AsyncGenerator[Any]:
    """A planner on agent-framework with the functions of a shop."""
    from agent_framework import tool
    from agent_framework.openai import OpenAIChatCompletionClient

    def find(order: int) -> str:
        """What was paid."""
        return {7: "128.00"}[order]

    def refund(order: int, amount: float) -> str:
        """Pay back."""
        refunds.append(amount)
        return "refunded"

    async with AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as openai:
        client = OpenAIChatCompletionClient(model="scripted", async_client=openai)
        client.function_invocation_configuration["enabled"] = False
        tools = [
            tool(find, name="orders-find"),
            tool(refund, name="orders-refund", approval_mode="always_require"),
        ]
        budget = options.pop("budget", Budget(max_iterations=4))
        yield planner_class()(client, tools, budget=budget, **options)


def test_the_sample_prints_what_its_header_says(tmp_path: Path) -> None:
    """A run begins on Semantic Kernel and ends in a process that does not import it."""
    program = FOLDER / "moves.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.strip() == runs_of(program)[0].printed


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streamed"])
async def test_the_budget_is_never_exceeded(tmp_path: Path, streaming: bool) -> None:
    """A model that never stops gets three requests, and the last one brings an answer."""

    def model(request: ScriptedRequest) -> Any:
        return call("orders-find", {"order": 7}) if request.tools else say("So far.")

    with ScriptedOpenAIServer(model) as server:
        budget = Budget(max_iterations=3)
        async with (
            planner(server.url, [], budget=budget) as driver,
            Runs.sqlite(tmp_path / "runs.db") as runs,
        ):
            handle = await runs.start(driver, None, "Look.", streaming=streaming)
            result = await handle.result()
        assert (result.status, result.final_answer) == ("limit_reached", "So far.")
        assert len(server.requests) == result.iterations == 3


@pytest.mark.parametrize(
    ("decision", "refunded", "said"),
    [(Approve(by="ann"), [128.0], "refunded"), (Deny("too late"), [], "too late")],
    ids=["approve", "deny"],
)
async def test_a_call_waits_for_a_person(
    tmp_path: Path, decision: Any, refunded: list[float], said: str
) -> None:
    """What a person decides in the store happens once, and the model reads what came of it."""
    script: Script = [ASKS, say("Done.")]
    refunds: list[float] = []
    with ScriptedOpenAIServer(script) as server:
        async with (
            planner(server.url, refunds) as driver,
            Runs.sqlite(tmp_path / "runs.db") as runs,
        ):
            handle = await runs.start(driver, None, "Refund order 7.", run_id="r")
            paused = await handle.result()
            assert (paused.status, refunds) == ("paused", [])
            (waits,) = await runs.approvals().pending()
            await runs.approvals().decide(waits.id, decision)
            (handle,) = await runs.recover(driver, None)
            result = await handle.result()
        told = str(server.requests[-1].messages[-1]["content"])
    assert (result.status, refunds) == ("answered", refunded)
    assert said in told


async def test_the_model_is_told_what_was_wrong_with_a_call(tmp_path: Path) -> None:
    """A call of no tool, and one whose arguments do not fit, are answered and not run."""
    script: Script = [
        call("orders-pay", {}),
        call("orders-find", {"order": "seven"}),
        say("Sorry."),
    ]
    with ScriptedOpenAIServer(script) as server:
        async with (
            planner(server.url, []) as driver,
            Runs.sqlite(tmp_path / "runs.db") as runs,
        ):
            handle = await runs.start(driver, None, "Look.")
            assert (await handle.result()).status == "answered"
        told = [str(request.messages[-1]["content"]) for request in server.requests[1:]]
    assert (
        told[0]
        == "There is no function orders-pay. Call one of orders-find, orders-refund."
    )
    assert "'seven' is not of type 'integer'" in told[1]


async def test_what_a_tool_raises_is_told(tmp_path: Path) -> None:
    """A tool that fails ends no run: the model reads of it, and answers."""
    script: Script = [call("orders-find", {"order": 8}), say("There is no order 8.")]
    with ScriptedOpenAIServer(script) as server:
        async with (
            planner(server.url, []) as driver,
            Runs.sqlite(tmp_path / "runs.db") as runs,
        ):
            handle = await runs.start(driver, None, "Look at order 8.")
            assert (await handle.result()).status == "answered"
        assert server.requests[-1].messages[-1]["content"] == "The function failed."


async def test_an_edit_is_refused_and_the_call_still_waits(tmp_path: Path) -> None:
    """The adapter takes no edits: the person's decision is refused by name, and nothing runs."""
    refunds: list[float] = []
    with ScriptedOpenAIServer([ASKS, say("Done.")]) as server:
        async with (
            planner(server.url, refunds) as driver,
            Runs.sqlite(tmp_path / "runs.db") as runs,
        ):
            handle = await runs.start(driver, None, "Refund order 7.", run_id="r")
            await handle.result()
            (waits,) = await runs.approvals().pending()
            edited = Approve(arguments={"order": 7, "amount": 1.0}, by="ann")
            await runs.approvals().decide(waits.id, edited)
            (handle,) = await runs.recover(driver, None)
            assert (await handle.result()).status == "paused"
            (refused,) = await runs.approvals().refused("r")
        assert "is edited" in refused.refused
    assert refunds == []


async def test_a_run_of_agent_framework_ends_on_semantic_kernel(tmp_path: Path) -> None:
    """The other direction: the messages and the decision are read by Semantic Kernel's adapter."""
    refunds: list[float] = []

    @requires_approval
    @kernel_function(name="refund")
    def refund(order: int, amount: float) -> str:
        refunds.append(amount)
        return "refunded"

    @kernel_function(name="find")
    def find(order: int) -> str:
        return "128.00"

    with ScriptedOpenAIServer([ASKS, say("Done.")]) as server:
        async with Runs.sqlite(tmp_path / "runs.db") as runs:
            async with planner(server.url, []) as driver:
                handle = await runs.start(driver, None, "Refund order 7.", run_id="r")
                await handle.result()
            (waits,) = await runs.approvals().pending()
            await runs.approvals().decide(waits.id, Approve(by="ann"))
            async with AsyncOpenAI(api_key="none", base_url=server.url) as openai:
                kernel = Kernel()
                kernel.add_service(OpenAIChatCompletion("s", async_client=openai))
                functions = {"find": find, "refund": refund}
                kernel.add_plugin(KernelPlugin.from_object("orders", functions))
                options = FunctionCallingStepwisePlannerOptions(plan=False)
                ours = FunctionCallingStepwisePlanner(options=options)
                (handle,) = await runs.recover(ours, kernel)
                result = await handle.result()
    assert (result.status, result.final_answer, refunds) == (
        "answered",
        "Done.",
        [128.0],
    )


async def test_a_process_without_the_rule_refuses_the_run(tmp_path: Path) -> None:
    """What a person had to approve on Semantic Kernel is not driven where nobody is asked."""
    from agent_framework import tool

    def refund(order: int, amount: float) -> str:
        return "refunded"

    with ScriptedOpenAIServer([ASKS, say("Done.")]) as server:
        async with Runs.sqlite(tmp_path / "runs.db") as runs:
            async with planner(server.url, []) as driver:
                handle = await runs.start(driver, None, "Refund order 7.", run_id="r")
                await handle.result()
                chat = driver.ports.chat
            free = tool(refund, name="orders-refund")
            careless = planner_class()(chat.client, [free], budget=Budget())
            with pytest.raises(
                PlannerExtError, match="@requires_approval of orders-refund"
            ):
                await (await runs.resume("r", careless, None)).result()
        assert len(server.requests) == 1
