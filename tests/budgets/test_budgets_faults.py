"""Shared budgets where something is not as it should be: two objects for one store, requests that fail half way."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.connectors.ai.text_completion_client_base import TextCompletionClientBase
from semantic_kernel.contents import StreamingTextContent
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionInvokingChatCompletion, PlannerPlugin
from planner_ext.budgets import BudgetStore, BudgetUsage
from planner_ext.errors import StoreError
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.budgets import opened, shared, used
from support.planner import planner_with, scripted


async def test_two_objects_of_one_place_are_one_store(where: str) -> None:
    """A run inside a function, and a wrapped service, are charged once, whichever module opened the store."""
    async with opened(where) as one, opened(where) as other:
        assert one == other and len({one, other}) == 1
        kernel, service = scripted([call("desk-reach_goal", {"goal": "Part."}), say("Done.")])
        kernel.add_service(ScriptedChatCompletion([say("Part.")], service_id="inner"))
        inner = planner_with("inner", plan=False, shared_budgets=[shared(other, max_iterations=9)])
        kernel.add_plugin(PlannerPlugin(inner), "desk")
        wrapped = FunctionInvokingChatCompletion(service, shared_budgets=[shared(other, max_iterations=9)])
        kernel.add_service(wrapped, overwrite=True)
        result = await planner_with(plan=False, shared_budgets=[shared(one, max_iterations=9)]).invoke(kernel, "Go.")
        assert (result.status, result.iterations, await used(one)) == ("answered", 3, [3])


def test_stores_in_memory_are_different() -> None:
    """Each is one that no other object reaches."""
    assert BudgetStore.memory() != BudgetStore.memory()


class BreakingText(TextCompletionClientBase):
    """Streams a text, reports its tokens, and fails."""

    async def get_streaming_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> AsyncGenerator[list[StreamingTextContent], Any]:
        usage = {"prompt_tokens": 30, "completion_tokens": 12}
        yield [StreamingTextContent(choice_index=0, text="Once upon", metadata={"usage": usage})]
        raise ConnectionResetError("gone")


class Writer:
    """Reads a stream of text as far as it comes."""

    @kernel_function
    async def write(self, kernel: Kernel) -> str:
        """Write."""
        service = kernel.get_service("text", TextCompletionClientBase)
        text = ""
        with pytest.raises(ConnectionResetError):
            async for chunks in service.get_streaming_text_contents("Write.", PromptExecutionSettings()):
                text += chunks[0].text
        return text


async def test_a_stream_of_text_that_breaks_is_charged_what_came(memory: BudgetStore) -> None:
    """The budgets of the run and of all runs count the same tokens."""
    kernel, _ = scripted([call("writer-write", {}), say("Done.")])
    kernel.add_service(BreakingText(ai_model_id="text", service_id="text"))
    kernel.add_plugin(Writer(), "writer")
    planner = planner_with(plan=False, shared_budgets=[shared(memory, max_total_tokens=10_000)])
    result = await planner.invoke(kernel, "Go.")
    assert (result.status, result.iterations) == ("answered", 3)
    assert result.usage.total_tokens > 42
    assert (await used(memory), await used(memory, "tokens")) == ([3], [result.usage.total_tokens])


class Closer:
    """Closes a store while a run uses it."""

    def __init__(self, store: BudgetStore) -> None:
        self.store = store

    @kernel_function
    async def close(self) -> str:
        """Close."""
        await self.store.aclose()
        return "closed"


@pytest.mark.parametrize("first", [True, False])
async def test_a_store_that_fails_leaves_nothing_reserved_in_another(memory: BudgetStore, *, first: bool) -> None:
    """Of two stores one is closed: the run fails, and the other has the one request that was sent."""
    closing = BudgetStore.memory()
    kernel, service = scripted([call("closer-close", {}), say("Done.")])
    kernel.add_plugin(Closer(closing), "closer")
    budgets = [shared(closing, "closing", max_iterations=9), shared(memory, max_iterations=9, max_tool_calls=9)]
    planner = planner_with(plan=False, shared_budgets=budgets if first else budgets[::-1])
    with pytest.raises(StoreError, match="was closed"):
        await planner.invoke(kernel, "Go.")
    assert len(service.requests) == 1
    assert (await used(memory), await used(memory, "tool_calls")) == ([1], [1])


async def test_a_callback_that_hangs_does_not_hold_the_run(
    memory: BudgetStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cancelled after its time, and logged; the run ends with its answer."""
    monkeypatch.setattr("planner_ext.budgets.charges._PATIENCE", 0.01)

    async def hangs(usage: BudgetUsage) -> None:
        await asyncio.Event().wait()

    budget = shared(memory, max_iterations=1, on_limit_reached=hangs)
    result = await planner_with(plan=False, shared_budgets=[budget]).invoke(scripted([say("Enough.")])[0], "Go.")
    assert (result.status, result.final_answer) == ("limit_reached", "Enough.")
    assert "on_limit_reached of the shared budget 'app' failed" in caplog.text
