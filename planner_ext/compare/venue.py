"""Where runs take place: before a scripted model behind real HTTP on this machine, or before a real one."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import KernelArguments

from planner_ext.compare.desk import Desk
from planner_ext.compare.endpoint import ForgivingServer
from planner_ext.compare.kernels import copy_of
from planner_ext.compare.meter import MeteredChatCompletion, ToolMeter, TripMeter
from planner_ext.compare.scripts import Script
from planner_ext.compare.stage import Stage
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.connectors import select_service
from planner_ext.sk.errors import PlannerInvalidConfigurationError

__all__ = ["Live", "LiveVenue", "Scene", "ScriptedVenue", "Venue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A real model in place of the scripted one. Functions are run for real, by each option anew.

    Attributes:
        kernel: The user's own, with its service; None takes the scripts' functions, for which ``service`` is needed.
        service: The connector; None takes the one that the kernel selects.
        goal: What is asked, once for each option; None asks the goals of the scripts.
    """

    kernel: Kernel | None = None
    service: ChatCompletionClientBase | None = None
    goal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One run's stage, and those who count what happens on it.

    Attributes:
        refused: Lists why the endpoint's rules refuse requests.
    """

    stage: Stage
    trips: TripMeter
    tools: ToolMeter
    refused: Callable[[], Sequence[str]]


class Venue(Protocol):
    """Opens a scene for each run.

    Attributes:
        name: Who answers there, in words.
    """

    name: str

    def open(self, script: Script, max_iterations: int) -> AbstractAsyncContextManager[Scene]:
        """Open a scene for one run, of its own."""
        ...


class ScriptedVenue:
    """A new server for each run, asked by OpenAI's own client."""

    def __init__(self, client: AsyncOpenAI) -> None:
        """Ask with this client; it is pointed at each server in turn."""
        self.name = "a scripted model behind real HTTP on this machine"
        self._client = client

    @asynccontextmanager
    async def open(self, script: Script, max_iterations: int) -> AsyncGenerator[Scene]:
        """Start a server that plays the script."""
        trips = TripMeter()
        with ForgivingServer(script.model, trips=trips) as server:
            client = self._client.with_options(base_url=server.url)
            connector = OpenAIChatCompletion(ai_model_id="scripted", service_id="scripted", async_client=client)
            service = MeteredChatCompletion(connector, trips=None, reports=script.reports)
            counters = _Counters(trips, max_iterations, lambda: server.refused)
            yield _scene(_desk_kernel(), service, script, counters)


class LiveVenue:
    """A real model, whose round trips are counted at its connector."""

    def __init__(self, live: Live) -> None:
        """Find the service.

        Raises:
            PlannerInvalidConfigurationError: If there is none.
        """
        self._kernel = _desk_kernel() if live.kernel is None else live.kernel
        if live.service is None:
            service, _ = select_service(self._kernel, None, KernelArguments())
        else:
            service = live.service
        while isinstance(service, FunctionInvokingChatCompletion):
            service = service.inner  # what is compared are loops, so no service brings one of its own
        self._service = service
        self.name = f"{service.ai_model_id} at {service.service_url() or type(service).__name__}"

    @asynccontextmanager
    async def open(self, script: Script, max_iterations: int) -> AsyncGenerator[Scene]:
        """Put a meter on the connector."""
        trips = TripMeter()
        service = MeteredChatCompletion(self._service, trips=trips, reports=script.reports)
        yield _scene(self._kernel, service, script, _Counters(trips, max_iterations, tuple))


def _desk_kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Desk(), "desk")
    return kernel


class _Counters(NamedTuple):
    trips: TripMeter
    budget: int
    refused: Callable[[], Sequence[str]]


def _scene(source: Kernel, service: ChatCompletionClientBase, script: Script, counters: _Counters) -> Scene:
    tools = ToolMeter(counters.trips, counters.budget)
    kernel = copy_of(source, services={service.service_id: service}, function_filters=(tools,))
    selected, settings = select_service(kernel, service.service_id, KernelArguments())
    if selected is not service:
        raise PlannerInvalidConfigurationError(
            f"The kernel's own service selector takes {selected.service_id!r} whatever it is asked for; expected "
            f"{service.service_id!r}. Compare with a kernel whose selector takes the service that it is asked for."
        )
    stage = Stage(
        kernel=kernel,
        service=service,
        settings=service.get_prompt_execution_settings_from_settings(settings),
        goal=script.info.goal,
        max_iterations=counters.budget,
        streaming=script.streaming,
        reports=script.reports,
    )
    return Scene(stage=stage, trips=counters.trips, tools=tools, refused=counters.refused)
