"""One process of a trial: ``python -m planner_ext.compare.life OPTION`` reads a trial as JSON, and prints its outcome.

The option is a key, or ``module:name``. ``samples/peers`` speak the same protocol.
"""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

from httpx import AsyncClient
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)

from planner_ext.compare.desk import desk_plugin
from planner_ext.compare.process import GIVEN, OUTCOME, Given, Outcome
from planner_ext.compare.runner import run_trial
from planner_ext.compare.strategies import load_option
from planner_ext.compare.trial import Trial
from planner_ext.core.limits import Budget


async def main() -> None:
    """Run the trial."""
    given = GIVEN.validate_json(sys.stdin.buffer.read())
    outcome = await (_cost(given) if given.round_trips else _run(given))
    print(OUTCOME.dump_json(outcome).decode())  # noqa: T201  (the protocol: the last line of the output)


async def _run(given: Given) -> Outcome:
    strategy = load_option(sys.argv[1]).strategy
    assert strategy is not None, (
        "an option in another environment has a program of its own"
    )
    async with (
        AsyncOpenAI(base_url=given.model_url, api_key="none", max_retries=0) as client,
        AsyncClient() as http,
    ):
        service = OpenAIChatCompletion(
            ai_model_id="scripted", service_id="scripted", async_client=client
        )
        kernel = Kernel(services=service)
        kernel.add_plugin(desk_plugin(given.desk_url, given.functions, http))
        trial = Trial(
            kernel=kernel,
            service=service,
            settings=OpenAIChatPromptExecutionSettings(service_id="scripted"),
            goal=given.goal,
            budget=Budget(**given.limits),
            streaming=given.streaming,
            vetoed=given.vetoed,
            gated=given.gated,
            life=given.life,
            is_made=given.is_made,
            folder=Path(given.folder) if given.folder else None,
        )
        return await run_trial(trial, strategy)


async def _cost(given: Given) -> Outcome:
    """Measure the processor time of a round trip, after a run that is not counted."""
    seconds: list[float] = []
    for trips in (given.round_trips[0], *given.round_trips):
        began = time.process_time()
        limits = {"max_iterations": 2 * trips + 10}
        ended = await _run(replace(given, goal=given.goal.format(trips), limits=limits))
        seconds.append((time.process_time() - began) / (trips + 1))
        if ended.status != "answered":
            return Outcome(
                status="failed", error=ended.error or f"it ended {ended.status}"
            )
    return Outcome(status="answered", cpu_seconds=tuple(seconds[1:]))


if __name__ == "__main__":
    asyncio.run(main())
