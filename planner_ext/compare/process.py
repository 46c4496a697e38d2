"""A trial in a process of its own, and the processor time of a round trip."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from planner_ext.compare.report import Cost, ShownMessage
from planner_ext.compare.scenarios import finish
from planner_ext.compare.trial import Option
from planner_ext.core.values import frozen
from planner_ext.testing import (
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
)

ROUND_TRIPS = (1, 10, 50, 200)
"""The lengths of the runs whose processor time is measured."""
_PATIENCE_SECONDS = 600.0
"""How long a process may take, on a busy machine."""


@frozen
class Given:
    """What the program reads, as JSON; see `Trial` and `Scenario`.

    Attributes:
        goal: Has ``{}`` for the number of round trips, where these are given.
        desk_url: "" where functions cost nothing.
        is_made: Whether the call during which the first process was killed took effect,
            as a person would look up.
        limits: Fields of a `Budget`.
        round_trips: The lengths of runs whose processor time is measured; empty is one
            run.
    """

    goal: str
    model_url: str
    desk_url: str = ""
    functions: tuple[str, ...]
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    streaming: bool = False
    vetoed: str = ""
    gated: str = ""
    stops_at: str = ""
    delegates: bool = False
    life: int = 1
    is_made: bool = False
    folder: str | None = None
    round_trips: tuple[int, ...] = ()


@frozen
class Outcome:
    """What a run reports; see `Run`.

    Attributes:
        tokens: Those that it reports to its caller, if any.
        cpu_seconds: Processor time of a round trip, for each of the given lengths.
    """

    status: str
    answer: str = ""
    charged: int = 0
    tokens: int | None = None
    messages: tuple[ShownMessage, ...] = ()
    error: str = ""
    cpu_seconds: tuple[float, ...] = ()


GIVEN = TypeAdapter(Given)
OUTCOME = TypeAdapter(Outcome)


async def run_program(
    option: Option,
    given: Given,
    *,
    began: Callable[[int], object] = lambda _: None,
) -> Outcome:
    """Run one process of a trial, which prints an `Outcome` as its last line of output.

    After ten minutes it is killed. ``began`` gets its number.
    """
    command = option.command or (
        sys.executable,
        "-m",
        "planner_ext.compare.life",
        option.info.key,
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe
    )
    began(process.pid)
    try:
        out, err = await asyncio.wait_for(
            process.communicate(GIVEN.dump_json(given)), _PATIENCE_SECONDS
        )
    except TimeoutError:
        return Outcome(
            status="failed", error=f"no outcome within {_PATIENCE_SECONDS:g} seconds"
        )
    finally:  # also when the comparison is interrupted
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return OUTCOME.validate_json(out.decode().strip().rpartition("\n")[2])
    except ValidationError:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        return Outcome(status="failed", error=f"exit code {process.returncode}: {last}")


async def measure_costs(options: Sequence[Option]) -> tuple[Cost, ...]:
    """Measure each option's processor time of a round trip, for the same work.

    A first run of each is not counted.
    """
    return tuple([await _cost_of(option) for option in options])


async def _cost_of(option: Option) -> Cost:
    goal = "Look {} times how far the export E-7 is."
    with ScriptedOpenAIServer(_looking) as server:
        given = Given(
            goal=goal,
            model_url=server.url,
            functions=("export_status",),
            round_trips=ROUND_TRIPS,
        )
        outcome = await run_program(option, given)
    milliseconds = tuple(1000 * seconds for seconds in outcome.cpu_seconds)
    return Cost(
        option=option.info.key,
        round_trips=ROUND_TRIPS,
        milliseconds=milliseconds,
        error=outcome.error,
    )


def _looking(request: ScriptedRequest) -> ScriptedReply:
    """Call a function as often as the goal says, then answer."""
    goal = next(
        str(message["content"])
        for message in request.messages
        if "Look " in str(message.get("content"))
    )
    wanted = int(goal.partition("Look ")[2].partition(" ")[0])
    made = sum(message["role"] == "tool" for message in request.messages)
    if made < wanted and request.tools:
        return call("desk-export_status", {"export": "E-7"})
    return finish(request, "It runs.")
