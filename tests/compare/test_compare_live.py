"""The comparison before a real model: a strict endpoint, the user's own kernel, and faults."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import Budget, FunctionInvokingChatCompletion
from planner_ext.compare import Comparison, Live, run_comparison
from planner_ext.compare.scenarios import SCRIPTS
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedRequest,
    call,
    say,
)
from support.stock import add_filter
from support.values import each_of

CORRECTED = ("option-1-corrected", "option-2-corrected", "option-3-corrected")


class Lights:
    """The user's own functions; one of them calls another through the kernel."""

    def __init__(self) -> None:
        self.switched = 0

    @kernel_function(description="Switch the light.")
    async def switch(self, kernel: Kernel) -> str:
        self.switched += 1
        return str(await kernel.invoke(kernel.get_function("lights", "state")))

    @kernel_function(description="Tell the state.")
    def state(self) -> str:
        return "on"


def restless(request: ScriptedRequest) -> Any:
    """A model that switches whenever it can."""
    return (
        call("lights-switch") if "lights-switch" in request.tools else say("It is on.")
    )


def own_kernel(script: Script = restless) -> tuple[Kernel, Lights]:
    """A user's kernel with its service."""
    kernel, lights = Kernel(), Lights()
    kernel.add_plugin(lights, "lights")
    kernel.add_service(ScriptedChatCompletion(script, service_id="mine"))
    return kernel, lights


def compared(live: Live, **wanted: Any) -> Comparison:
    """Compare with a scripted service in the place of a real model."""
    return asyncio.run(run_comparison(live=live, **wanted))


async def at_endpoint(
    script: Script, scripts: Sequence[str]
) -> tuple[Comparison, ScriptedOpenAIServer]:
    """Compare at an endpoint that refuses what OpenAI refuses."""
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="none", max_retries=0
        ) as client:
            service = OpenAIChatCompletion(
                ai_model_id="m", service_id="s", async_client=client
            )
            return await run_comparison(
                live=Live(service=service), scripts=scripts
            ), server


def test_the_connector_counts_what_the_endpoint_counts() -> None:
    """Round trips and tokens of a real model are counted at the connector, plain and streamed, to the last one."""
    comparison, server = asyncio.run(
        at_endpoint(SCRIPTS["never-ending"].model, ["never-ending", "streaming"])
    )
    assert sum(run.trips for run in comparison.runs) == len(server.requests)
    assert sum(run.tokens_summed for run in comparison.runs) == server.total_tokens
    assert comparison.live
    assert comparison.holds


def test_an_endpoint_that_is_strict_ends_option_3() -> None:
    """Where calls without results are refused the option fails with the endpoint's words; its history is judged."""
    comparison, server = asyncio.run(
        at_endpoint(SCRIPTS["never-ending"].model, ["never-ending"])
    )
    run = comparison.of_option("option-3")[0]
    assert (run.status, run.trips, run.answer) == ("failed", 5, "")
    assert "must be followed by tool messages" in run.error
    assert "did not have response messages" in run.first_violation
    assert len(server.refused) == 1


def test_your_own_kernel_is_asked_your_own_goal() -> None:
    """One run for each option, functions run for real; what a function calls in turn is not the model's call."""
    kernel, lights = own_kernel()
    comparison = compared(
        Live(kernel=kernel, goal="Switch on the light."), max_iterations=3
    )
    assert [script.goal for script in comparison.scripts] == ["Switch on the light."]
    assert len(comparison.runs) == len(comparison.options) == 12
    assert lights.switched == sum(run.tools_run for run in comparison.runs)
    trips = {run.option: run.trips for run in comparison.runs}
    assert (trips["option-2"], trips["option-2-corrected"]) == (4, 3)
    assert comparison.holds


def test_your_own_kernel_is_left_as_it_is() -> None:
    """Plugins, services and filters of the kernel are what they were."""
    kernel, _ = own_kernel()
    before = (
        dict(kernel.plugins),
        dict(kernel.services),
        list(kernel.function_invocation_filters),
    )
    compared(Live(kernel=kernel, goal="Switch."), max_iterations=2)
    assert before == (
        dict(kernel.plugins),
        dict(kernel.services),
        list(kernel.function_invocation_filters),
    )


def test_a_filter_that_refuses_a_function_keeps_it_from_being_counted() -> None:
    """A function that the user's own filter holds back was not run."""
    kernel, lights = own_kernel()

    async def refuse(context: Any, next: Any) -> None:
        """Let nothing through."""

    add_filter(kernel, "function_invocation", refuse)
    comparison = compared(
        Live(kernel=kernel, goal="Switch."),
        max_iterations=2,
        options=["stock-loop", "option-3-corrected"],
    )
    assert [run.tools_run for run in comparison.runs] == [0, 0]
    assert lights.switched == 0


def test_a_service_with_its_own_loop_is_unwrapped() -> None:
    """The comparison unwraps a service that has its own loop, and uses its connector."""
    kernel, _ = own_kernel()
    inner = kernel.get_service("mine")
    kernel.add_service(
        FunctionInvokingChatCompletion(inner, budget=Budget(max_iterations=1)),
        overwrite=True,
    )
    comparison = compared(
        Live(kernel=kernel, goal="Switch."),
        max_iterations=3,
        options=["option-2", "option-3-corrected"],
    )
    assert [run.trips for run in comparison.runs] == [4, 3]


@each_of(
    "option",
    [*CORRECTED, "option-1", "option-2", "option-3", "stock-loop", "removed-planner"],
)
def test_a_fault_in_the_middle_is_a_finding(option: str) -> None:
    """A request that fails ends one run, with what was spent and said so far, and never the comparison."""

    def second_fails(request: ScriptedRequest) -> Any:
        return (
            ScriptedFault(status=400)
            if request.index % 2
            else SCRIPTS["never-ending"].model(request)
        )

    async def compare() -> Comparison:
        with ScriptedOpenAIServer(second_fails) as server:
            async with AsyncOpenAI(
                base_url=server.url, api_key="none", max_retries=0
            ) as client:
                service = OpenAIChatCompletion(
                    ai_model_id="m", service_id="s", async_client=client
                )
                live = Live(service=service)
                return await run_comparison(
                    live=live,
                    options=[option],
                    scripts=["never-ending"],
                    max_iterations=9,
                )

    run = asyncio.run(compare()).runs[0]
    assert (run.status, run.trips, run.tools_run) == ("failed", 1, 1)
    assert "Scripted fault with status 400" in run.error
    assert len(run.messages) >= 3
    assert run.violation is None


def test_an_endpoint_that_never_answers_ends_the_comparison() -> None:
    """The same fault in every run says nothing: the first one is raised, with its cause."""
    service = OpenAIChatCompletion(
        ai_model_id="m",
        service_id="s",
        async_client=AsyncOpenAI(
            base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0
        ),
    )
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="did not answer the first request: ConnectError",
    ):
        compared(Live(service=service))


def test_a_kernel_without_a_service_is_refused() -> None:
    """The error is raised before the first run."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match="chat completion service"
    ):
        compared(Live(kernel=Kernel(), goal="Switch."))


def test_a_goal_replaces_the_scripts() -> None:
    """A goal together with scripts is refused."""
    kernel, _ = own_kernel()
    with pytest.raises(PlannerInvalidConfigurationError, match="chain"):
        compared(Live(kernel=kernel, goal="Switch."), scripts=["chain"])
