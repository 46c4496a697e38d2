"""What a run leaves in memory: nothing that has to be looked for by the collector, which walks through all there is."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
)
from planner_ext.events import Fact, ModelReplied
from planner_ext.testing import call, calls, say
from support.served import Served

Serve = Callable[..., Served]

ADD = call("t-add", {"a": 1, "b": 2})


class Replies:
    """Watches the replies of runs without keeping them."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []

    def __call__(self, fact: Fact) -> None:
        if isinstance(fact, ModelReplied):
            self._seen.append(weakref.ref(fact.message))

    @property
    def kept(self) -> list[bool]:
        return [seen() is not None for seen in self._seen]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Leave everything to reference counting."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
async def test_a_run_of_a_service_is_freed_when_it_is_over(
    serve: Serve, ask: Callable[..., Any]
) -> None:
    """Once its history and answer are let go of, nothing of a run is left."""
    replies = Replies()
    service = FunctionInvokingChatCompletion(
        serve([calls(ADD, ADD), ADD, say("Three.")]).connector,
        observers=[replies],
        clarifier=lambda _: None,
    )
    await ask(service, to=ChatHistory(system_message="Add."))
    assert replies.kept == [False, False, False]


@pytest.mark.usefixtures("uncollected")
async def test_a_run_of_a_planner_is_freed_when_it_is_over(
    serve: Serve, kernel: Kernel, streamed: bool
) -> None:
    """Once its result is let go of, nothing of a run is left."""
    replies = Replies()
    kernel.add_service(
        serve([say("Add them."), calls(ADD, ADD), say("Three.")]).connector
    )
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(observers=[replies])
    )
    if streamed:
        assert [
            event async for event in planner.invoke_stream(kernel, "What is 1 + 2?")
        ]
    else:
        assert await planner.invoke(kernel, "What is 1 + 2?")
    assert replies.kept and not any(replies.kept)
