"""What a round trip costs the client: processor time of each loop for the same work, each in a process of its own."""

import json
import sys
from collections.abc import Sequence

from planner_ext.compare.report import Cost
from planner_ext.compare.runner import run_program
from planner_ext.compare.scenarios import finish
from planner_ext.compare.trial import Option
from planner_ext.testing import ScriptedOpenAIServer, ScriptedReply, ScriptedRequest, call

ROUND_TRIPS = (1, 10, 50, 200)
_PATIENCE_SECONDS = 600.0
"""How long all runs of one option may take, on a machine that has other work."""


async def measure_costs(options: Sequence[Option]) -> tuple[Cost, ...]:
    """Measure each option: a model asks for one function in each reply, and then answers; functions cost nothing.

    The endpoint is the same for all. A first run of each is not counted.
    """
    return tuple([await _cost_of(option) for option in options])


async def _cost_of(option: Option) -> Cost:
    command = option.command or (sys.executable, "-m", "planner_ext.compare.life", option.info.key)
    with ScriptedOpenAIServer(_looking) as server:
        given = {
            "goal": "Look {} times how far the export E-7 is.",
            "model_url": server.url,
            "desk_url": "",
            "functions": ["export_status"],
            "round_trips": ROUND_TRIPS,
            **dict.fromkeys(("vetoed", "gated", "stops_at", "folder"), ""),
            **dict.fromkeys(("streaming", "delegates"), False),
            "life": 1,
        }
        outcome = await run_program(command, json.dumps(given), patience=_PATIENCE_SECONDS)
    milliseconds = tuple(1000 * seconds for seconds in outcome.cpu_seconds)
    return Cost(option=option.info.key, round_trips=ROUND_TRIPS, milliseconds=milliseconds, error=outcome.error)


def _looking(request: ScriptedRequest) -> ScriptedReply:
    """Call a function until it was called as often as the goal says; the round trip of the answer comes on top."""
    goal = next(str(message["content"]) for message in request.messages if "Look " in str(message.get("content")))
    wanted = int(goal.partition("Look ")[2].partition(" ")[0])
    made = sum(message["role"] == "tool" for message in request.messages)
    if made < wanted and request.tools:
        return call("desk-export_status", {"export": "E-7"})
    return finish(request, "It runs.")
