"""One process of a trial: ``python -m planner_ext.compare.life OPTION`` reads a trial as JSON, and prints its outcome.

The option is a key, or ``module:name`` of one of your own. A loop in another environment speaks the same protocol; the
adapters in ``samples/peers`` do.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from httpx import AsyncClient
from openai import AsyncOpenAI
from pydantic import TypeAdapter
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext.compare.desk import desk_plugin
from planner_ext.compare.runner import Outcome, run_trial
from planner_ext.compare.strategies import load_option
from planner_ext.compare.trial import Trial
from planner_ext.core.limits import Budget


async def main() -> None:
    """Run the trial."""
    given = json.load(sys.stdin)
    outcome = await (_cost(given) if "round_trips" in given else _run(given))
    print(TypeAdapter(Outcome).dump_json(outcome).decode())  # noqa: T201  (the protocol: the last line of the output)


async def _run(given: Mapping[str, Any]) -> Outcome:
    strategy = load_option(sys.argv[1]).strategy
    assert strategy is not None, "an option in another environment has a program of its own"
    async with AsyncOpenAI(base_url=given["model_url"], api_key="none", max_retries=0) as client, AsyncClient() as http:
        service = OpenAIChatCompletion(ai_model_id="scripted", service_id="scripted", async_client=client)
        kernel = Kernel(services=service)
        measured = KernelPlugin.from_object("desk", _Free())
        kernel.add_plugin(desk_plugin(given["desk_url"], given["functions"], http) if given["desk_url"] else measured)
        trial = Trial(
            kernel=kernel,
            service=service,
            settings=OpenAIChatPromptExecutionSettings(service_id="scripted"),
            goal=given["goal"],
            budget=Budget(**given["limits"]),
            streaming=given["streaming"],
            vetoed=given["vetoed"],
            gated=given["gated"],
            life=given["life"],
            folder=Path(given["folder"]) if given["folder"] else None,
        )
        return await run_trial(trial, strategy)


class _Free:
    """A function that costs nothing."""

    @kernel_function(description="Tell how far an export is.")
    async def export_status(self, export: Annotated[str, "The export's name"]) -> str:
        return f"{export} is still running."


async def _cost(given: Mapping[str, Any]) -> Outcome:
    """Measure the processor time of a round trip, after a run that is not counted."""
    seconds: list[float] = []
    for trips in (given["round_trips"][0], *given["round_trips"]):
        began = time.process_time()
        limits = {"max_iterations": 2 * trips + 10}
        ended = await _run({**given, "goal": given["goal"].format(trips), "limits": limits})
        seconds.append((time.process_time() - began) / (trips + 1))
        if ended.status != "answered":
            return Outcome(status="failed", error=ended.error or f"it ended {ended.status}")
    return Outcome(status="answered", cpu_seconds=tuple(seconds[1:]))


if __name__ == "__main__":
    asyncio.run(main())
