"""The functions of the scripts: a server on this machine runs them and notes each start.

So starts are counted, whichever process or environment the loop runs in.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from time import monotonic
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import httpx
from semantic_kernel import Kernel
from semantic_kernel.functions import (
    KernelFunction,
    KernelFunctionFromMethod,
    KernelPlugin,
    kernel_function,
)

from planner_ext.testing.server import (
    HttpRequest,
    HttpResponse,
    LoopbackServer,
    json_response,
)

_SLOW_SECONDS = 3.0
"""Longer than the deadline of any situation."""
_STOCK = {"Hamburg": 2, "Lyon": 9, "Turin": 0}


HiddenKernel: TypeAlias = Annotated[
    Kernel, "The kernel", {"include_in_function_choices": False}
]
"""A parameter that gets the kernel, and is not offered to the model."""


class Event(NamedTuple):
    """An answered request, with its tokens, or the start of a function.

    Attributes:
        life: The process in which it happened, from 1.
        at: In seconds of a monotonic clock.
        arguments: As JSON text.
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
        stops_at: The function whose start cancels the run, fully qualified, or "".
        kills_at: See `Scenario`.
        kills_before: See `Scenario`.
        life: The process that is running, from 1.
        kill: Kills the process that is running.
        is_over: Set when the first process has ended.
        refused: Why OpenAI would refuse requests.
        said: The texts of the model.
        ended_at: When the run says that it ended; later requests only show whether its
            history can be continued.
        continued: Whether one of these was accepted.
    """

    stops_at: str = ""
    kills_at: str = ""
    kills_before: bool = False
    life: int = 1
    kill: Callable[[], object] = lambda: None
    is_over: threading.Event = field(default_factory=threading.Event)
    events: list[Event] = field(default_factory=list[Event])
    refused: list[str] = field(default_factory=list[str])
    stop: Callable[[], object] = lambda: None
    said: list[str] = field(default_factory=list[str])
    ended_at: float | None = None
    continued: bool = False

    def answered(self, tokens: int) -> None:
        """Note an answered request."""
        self.events.append(Event(self.life, monotonic(), tokens=tokens))
        replies = sum(event.tokens is not None for event in self.events)
        if self.kills_at == "request" and (self.life, replies) == (1, 2):
            self.kill()
            self.is_over.wait()

    def started(self, function: str, arguments: str = "") -> None:
        """Note the start of a function."""
        self.events.append(
            Event(self.life, monotonic(), function=function, arguments=arguments)
        )


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
        """Return the address at which a run finds the functions."""
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
            return json_response({"result": "", "kill": False})
        kills = observed.kills_at == f"desk-{name}" and observed.life == 1
        if kills and observed.kills_before:
            return json_response({"kill": True})
        observed.started(f"desk-{name}", arguments)
        if observed.stops_at == f"desk-{name}":
            observed.stop()
        try:
            if name == "audit":
                self._closing.wait(_SLOW_SECONDS)
            answer: dict[str, object] = {
                "result": _FUNCTIONS[name].answer(*json.loads(arguments).values())
            }
        except LookupError as error:
            answer = {"error": str(error)}
        return json_response({**answer, "kill": kills})


@dataclass(frozen=True, slots=True)
class _Function:
    """A function at the desk, with one parameter."""

    about: str
    parameter: str
    meaning: str
    answer: Callable[[str], object]


def _parcel(order: str) -> str:
    if order != "A-3007":
        raise LookupError(f"There is no order {order}.")
    return "Lyon"


_NUMBER: tuple[str, str] = ("order", "The order's number")
_FUNCTIONS: dict[str, _Function] = {
    "export_status": _Function(
        "Tell how far an export is.",
        "export",
        "The export's name",
        lambda export: f"{export} is still running.",
    ),
    "stock": _Function(
        "Count the lamps in a warehouse.",
        "site",
        "Where the warehouse is",
        lambda site: _STOCK.get(site, 0),
    ),
    "customer": _Function(
        "Find a customer's number by name.",
        "name",
        "First name",
        lambda name: f"C-{len(name)}",
    ),
    "order": _Function(
        "Find the newest order of a customer.",
        "customer",
        "The customer's number",
        lambda customer: f"A-{customer.removeprefix('C-')}007",
    ),
    "parcel": _Function("Tell where the parcel of an order is.", *_NUMBER, _parcel),
    "audit": _Function(
        "Audit an order; takes seconds.",
        *_NUMBER,
        lambda order: f"{order} is in order.",
    ),
    "refund": _Function(
        "Refund an order.", *_NUMBER, lambda order: f"refund of {order}: done."
    ),
    "delete": _Function(
        "Delete an order for good.", *_NUMBER, lambda order: f"delete of {order}: done."
    ),
    "opinion": _Function(
        "Let another model judge an order.",
        *_NUMBER,
        lambda order: f"opinion of {order}: done.",
    ),
}


def desk_plugin(
    url: str, names: Collection[str], client: httpx.AsyncClient
) -> KernelPlugin:
    """Make the plugin ``desk`` with these functions; without a URL they cost nothing."""
    return KernelPlugin(
        "desk", functions=[_at_desk(url, name, client) for name in names]
    )


def _at_desk(url: str, name: str, client: httpx.AsyncClient) -> KernelFunction:
    """Make a function that runs at the desk; ``opinion`` then asks the model, as prompts do."""
    function = _FUNCTIONS[name]

    async def run(kernel: Kernel, **arguments: str) -> Any:
        if not url:
            return function.answer(*arguments.values())
        answer: dict[str, Any] = (
            await client.post(f"{url}/{name}", json=arguments)
        ).json()
        if answer["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if "error" in answer:
            raise LookupError(answer["error"])
        if name == "opinion":
            return str(
                await kernel.invoke_prompt(f"Judge {arguments['order']} in one word.")
            )
        return answer["result"]

    described = Annotated[str, function.meaning]
    parameters = [
        Parameter(function.parameter, Parameter.KEYWORD_ONLY, annotation=described),
        Parameter("kernel", Parameter.KEYWORD_ONLY, annotation=HiddenKernel),
    ]
    # Semantic Kernel describes the function by its signature.
    vars(run)["__signature__"] = Signature(parameters, return_annotation=str)
    return KernelFunctionFromMethod(
        kernel_function(name=name, description=function.about)(run), "desk"
    )
