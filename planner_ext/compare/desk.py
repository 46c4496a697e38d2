"""The functions that the scripts call: they run at a desk, a server on this machine that notes each start.

So every start is counted, of a loop in this process, or in another process or environment.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import httpx
from semantic_kernel import Kernel
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext.testing.server import HttpRequest, HttpResponse, LoopbackServer

_SLOW_SECONDS = 3.0
"""How long the slow function takes: longer than the deadline of any situation."""
_STOCK = {"Hamburg": 2, "Lyon": 9, "Turin": 0}


HiddenKernel: TypeAlias = Annotated[Kernel, "The kernel", {"include_in_function_choices": False}]
"""A parameter that gets the kernel, which Semantic Kernel would otherwise offer to the model."""


class Event(NamedTuple):
    """An answered request, with its tokens, or the start of a function, with its arguments as JSON text.

    Attributes:
        life: The process in which it happened, from 1.
        at: When, in seconds of a clock that only goes forward.
    """

    life: int
    at: float
    tokens: int | None = None
    function: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Observed:
    """What one run really does, as endpoint, desk and clock see it.

    Attributes:
        stops_at: The fully qualified name of the function whose start cancels the run, or "".
        kills_at: The one during which the first process is killed, after it took effect, or "".
        life: The process that is running, from 1.
        events: The answered requests and the started functions, in order.
        refused: Why OpenAI would refuse requests.
        stop: Cancels the run.
        said: The texts of the model: replies, refusals, and arguments of calls.
        ended_at: When the run ended, by the clock of its events, if it says so; what is asked after that only shows
            whether its history can be continued.
        continued: Whether a request after the end was accepted.
    """

    stops_at: str = ""
    kills_at: str = ""
    life: int = 1
    events: list[Event] = field(default_factory=list[Event])
    refused: list[str] = field(default_factory=list[str])
    stop: Callable[[], object] = lambda: None
    said: list[str] = field(default_factory=list[str])
    ended_at: float | None = None
    continued: bool = False

    def answered(self, tokens: int) -> None:
        """Note an answered request."""
        self.events.append(Event(self.life, monotonic(), tokens=tokens))

    def started(self, function: str, arguments: str = "") -> None:
        """Note the start of a function."""
        self.events.append(Event(self.life, monotonic(), function=function, arguments=arguments))


class Desk:
    """Serves the functions to all runs of a comparison; used in a with statement."""

    def __init__(self) -> None:
        self._runs: list[Observed] = []
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        self._server = LoopbackServer(self._respond)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._server.stop()

    def address_for(self, observed: Observed) -> str:
        """Return the address at which a run finds the functions; each start is noted in ``observed``."""
        self._runs.append(observed)
        return f"http://127.0.0.1:{self._server.port}/{len(self._runs) - 1}"

    def _respond(self, request: HttpRequest) -> HttpResponse:
        """Run a function: ``POST /{run}/{function}`` with its arguments as JSON."""
        _, run, name = request.path.split("/")
        observed = self._runs[int(run)]
        arguments = request.body.decode()
        if name == "ended":
            observed.ended_at = observed.ended_at or monotonic()
        if observed.ended_at:
            return HttpResponse(status=200, content_type="application/json", parts=(b'{"result": "", "kill": false}',))
        observed.started(f"desk-{name}", arguments)
        if observed.stops_at == f"desk-{name}":
            observed.stop()
        try:
            answer: dict[str, object] = {"result": self._run(name, json.loads(arguments))}
        except LookupError as error:
            answer = {"error": str(error)}
        answer["kill"] = observed.kills_at == f"desk-{name}" and observed.life == 1
        return HttpResponse(status=200, content_type="application/json", parts=(json.dumps(answer).encode(),))

    def _run(self, name: str, given: Mapping[str, str]) -> object:
        """Run a function; each always gives the same answer.

        Raises:
            LookupError: If there is no such order.
        """
        match name:
            case "export_status":
                return f"{given['export']} is still running."  # none of them ever finishes
            case "stock":
                return _STOCK.get(given["site"], 0)
            case "customer":
                return f"C-{len(given['name'])}"
            case "order":
                return f"A-{given['customer'].removeprefix('C-')}007"
            case "parcel" if given["order"] != "A-3007":
                raise LookupError(f"There is no order {given['order']}.")
            case "parcel":
                return "Lyon"
            case "audit":
                self._closing.wait(_SLOW_SECONDS)
                return f"{given['order']} is in order."
            case _:
                return f"{name} of {given['order']}: done."


class _DeskFunctions:
    """The functions as those of a kernel."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self._client = client

    async def _at_desk(self, function: str, /, **arguments: str) -> Any:
        answer: dict[str, Any] = (await self._client.post(f"{self._url}/{function}", json=arguments)).json()
        if answer["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if "error" in answer:
            raise LookupError(answer["error"])
        return answer["result"]

    @kernel_function(description="Tell how far an export is.")
    async def export_status(self, export: Annotated[str, "The export's name"]) -> str:
        return await self._at_desk("export_status", export=export)

    @kernel_function(description="Count the lamps in a warehouse.")
    async def stock(self, site: Annotated[str, "Where the warehouse is"]) -> int:
        return await self._at_desk("stock", site=site)

    @kernel_function(description="Find a customer's number by name.")
    async def customer(self, name: Annotated[str, "First name"]) -> str:
        return await self._at_desk("customer", name=name)

    @kernel_function(description="Find the newest order of a customer.")
    async def order(self, customer: Annotated[str, "The customer's number"]) -> str:
        return await self._at_desk("order", customer=customer)

    @kernel_function(description="Tell where the parcel of an order is.")
    async def parcel(self, order: Annotated[str, "The order's number"]) -> str:
        return await self._at_desk("parcel", order=order)

    @kernel_function(description="Audit an order; takes seconds.")
    async def audit(self, order: Annotated[str, "The order's number"]) -> str:
        return await self._at_desk("audit", order=order)

    @kernel_function(description="Refund an order.")
    async def refund(self, order: Annotated[str, "The order's number"]) -> str:
        return await self._at_desk("refund", order=order)

    @kernel_function(description="Delete an order for good.")
    async def delete(self, order: Annotated[str, "The order's number"]) -> str:
        return await self._at_desk("delete", order=order)

    @kernel_function(description="Let another model judge an order.")
    async def opinion(self, order: Annotated[str, "The order's number"], kernel: HiddenKernel) -> str:
        """Request the model, as a prompt function does."""
        await self._at_desk("opinion", order=order)
        return str(await kernel.invoke_prompt(f"Judge {order} in one word."))


def desk_plugin(url: str, names: Collection[str], client: httpx.AsyncClient) -> KernelPlugin:
    """Make the plugin ``desk`` with these functions, which run at the desk with this address."""
    whole = KernelPlugin.from_object("desk", _DeskFunctions(url, client))
    return KernelPlugin("desk", functions=[whole[name] for name in names])
