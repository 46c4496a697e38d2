"""What the adapters of the peers share: the trial that they read, the functions at the desk, and what they report.

An adapter is one program. It reads a trial as JSON from its input (see `Trial`) and prints the outcome as the last line
of its output, as ``planner_ext.compare.life`` does for this package. What it reports of round trips, functions or time
is not believed: the endpoint, the desk and the clock are asked.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx


class Trial:
    """What a run is given.

    Attributes:
        goal: What to ask.
        model_url: The base URL of the OpenAI-compatible endpoint; any model, any key.
        names: The functions to offer, by name at the desk; the model calls them ``desk-NAME``.
        limits: ``max_iterations``, and perhaps ``max_tool_calls``, ``max_total_tokens`` or ``max_active_seconds``.
        streaming: Whether to stream.
        vetoed, gated: The full name of the function that may not run, that waits for a person; "" for none.
        stops_at: The full name of the function during which the caller cancels the run by `stop`; "" for none.
        stop: Cancels the task of the run; an adapter puts its framework's own cancellation here, if there is one.
        life: 1, or 2 in the process that continues; a person has agreed by then.
        folder: Where the first process leaves what the second one needs.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.goal: str = given["goal"]
        self.model_url: str = given["model_url"]
        self.names: list[str] = given["functions"]
        self.limits: dict[str, Any] = given["limits"]
        self.streaming: bool = given["streaming"]
        self.vetoed: str = given["vetoed"]
        self.gated: str = given["gated"]
        self.life: int = given["life"]
        self.folder: str = given["folder"] or ""
        self.delegates: bool = given["delegates"]
        self._desk_url: str = given["desk_url"]
        self.stops_at: str = given["stops_at"]
        self.stop: Callable[[], object] = lambda: None

    @property
    def is_judged(self) -> bool:
        """Whether a desk notes what happens; else the cost of the loop is measured."""
        return bool(self._desk_url)

    @property
    def max_iterations(self) -> int:
        """Round trips allowed."""
        return self.limits["max_iterations"]

    def save(self, value: object) -> None:
        """Keep a JSON value for the second process."""
        Path(self.folder, "kept.json").write_text(json.dumps(value), "utf-8")

    def saved(self) -> Any:
        """Read what the first process kept."""
        return json.loads(Path(self.folder, "kept.json").read_text("utf-8"))

    def functions(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """Make the functions, by the name under which the model calls them."""
        return {f"desk-{name}": self._function(name) for name in self.names}

    def _function(self, name: str) -> Callable[..., Awaitable[Any]]:
        parameter = PARAMETERS[name]

        async def function(**arguments: str) -> Any:
            signature.bind(**arguments)  # as Python does
            return await self._at_desk(name, arguments)

        function.__name__ = function.__qualname__ = f"desk_{name}"
        function.__doc__ = DESCRIPTIONS[name]
        function.__annotations__ = {parameter: str, "return": str}
        one = inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, annotation=str)
        signature = inspect.Signature([one], return_annotation=str)
        vars(function)["__signature__"] = signature
        return function

    async def ended(self) -> None:
        """Tell the desk that what is asked from now on is no part of the run."""
        if self.is_judged:
            async with httpx.AsyncClient() as client:
                await client.post(f"{self._desk_url}/ended", json={})

    async def _at_desk(self, name: str, arguments: dict[str, str]) -> Any:
        if not self.is_judged:
            return "E-7 is still running."
        async with httpx.AsyncClient(timeout=30) as client:
            if self.stops_at == f"desk-{name}":
                asyncio.get_running_loop().call_later(0.5, self.stop)  # the caller cancels while the function runs
            answer = (await client.post(f"{self._desk_url}/{name}", json=arguments)).json()
            if answer["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if "error" in answer:
                raise LookupError(answer["error"])
            if name == "opinion":  # a function with a prompt of its own
                asked = [{"role": "user", "content": f"Judge {arguments['order']} in one word."}]
                await client.post(f"{self.model_url}/chat/completions", json={"model": "scripted", "messages": asked})
            return str(answer["result"])


PARAMETERS = {"export_status": "export", "stock": "site", "customer": "name", "order": "customer"} | dict.fromkeys(
    ("parcel", "audit", "refund", "delete", "opinion"), "order"
)
DESCRIPTIONS = {
    "export_status": "Tell how far an export is.",
    "stock": "Count the lamps in a warehouse.",
    "customer": "Find a customer's number by name.",
    "order": "Find the newest order of a customer.",
    "parcel": "Tell where the parcel of an order is.",
    "audit": "Audit an order; takes seconds.",
    "refund": "Refund an order.",
    "delete": "Delete an order for good.",
    "opinion": "Let another model judge an order.",
}


class Report:
    """What a run reports, and how its conversation goes on.

    Attributes:
        follow_up: Sends one more message of the user after the history that is left; None if nothing is left.
    """

    def __init__(self) -> None:
        self.follow_up: Callable[[str], Awaitable[object]] | None = None
        self.status = "limit_reached"
        self.answer = ""
        self.charged = 0
        self.tokens: int | None = None
        self.messages: list[dict[str, Any]] = []

    def user(self, text: str) -> None:
        """Add a message of the user."""
        self.messages.append({"role": "user", "text": text})

    def reply(self, text: str, calls: list[tuple[str, str, str]]) -> None:
        """Add a reply with its calls: id, function, arguments as JSON text."""
        listed = [{"id": call, "name": name, "arguments": arguments} for call, name, arguments in calls]
        trip = 1 + sum(message["role"] == "assistant" for message in self.messages)
        self.messages.append({"role": "assistant", "text": text, "calls": listed, "trip": trip})

    def result(self, call: str, name: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "results": [{"call_id": call, "name": name, "text": text}]})


Adapter = Callable[[Trial, Report], Awaitable[None]]


def main(adapter: Adapter) -> None:
    """Run an adapter on the trial that is given, and print what it reports."""
    given = json.load(sys.stdin)
    print(json.dumps(asyncio.run(_cost(adapter, given) if given["round_trips"] else _run(adapter, given))))


async def _follow_up(trial: Trial, report: Report) -> None:
    """Let the endpoint see whether the history that is left can be sent again; what follows does not matter."""
    if not trial.is_judged or report.follow_up is None or report.status == "paused":
        return
    await trial.ended()
    with contextlib.suppress(Exception):
        await report.follow_up("Thank you.")


async def _run(adapter: Adapter, given: dict[str, Any]) -> dict[str, Any]:
    trial, report, error = Trial(given), Report(), ""
    task = asyncio.ensure_future(adapter(trial, report))
    trial.stop = task.cancel
    try:
        await task
    except asyncio.CancelledError:
        report.status, report.answer = "cancelled", ""
    except Exception as raised:  # a finding, not a fault of the adapter
        report.status, report.answer, error = "failed", "", f"{type(raised).__name__}: {raised}"
    await _follow_up(trial, report)
    return {name: value for name, value in vars(report).items() if name != "follow_up"} | {"error": error}


async def _cost(adapter: Adapter, given: dict[str, Any]) -> dict[str, Any]:
    """Measure the processor time of a round trip, after a run that is not counted."""
    seconds: list[float] = []
    for trips in (given["round_trips"][0], *given["round_trips"]):
        goal = given["goal"].format(trips)
        began = time.process_time()
        ended = await _run(adapter, {**given, "goal": goal, "limits": {"max_iterations": 2 * trips + 10}})
        seconds.append((time.process_time() - began) / (trips + 1))
        if ended["status"] != "answered":
            return {"status": "failed", "error": ended["error"] or f"it ended {ended['status']}"}
    return {"status": "answered", "cpu_seconds": seconds[1:]}
