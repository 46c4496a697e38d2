"""One process of a trial: ``python -m planner_ext.compare.life OPTION`` reads a trial as JSON, and prints its outcome.

The option is a key, or ``module:name`` of one of your own. A loop in another environment speaks the same protocol; the
adapters in ``samples/peers`` do.
"""

import asyncio
import json
import sys
from pathlib import Path

from httpx import AsyncClient
from openai import AsyncOpenAI
from pydantic import TypeAdapter
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings

from planner_ext.compare.desk import desk_plugin
from planner_ext.compare.runner import Outcome, run_trial
from planner_ext.compare.strategies import load_option
from planner_ext.compare.trial import Trial
from planner_ext.core.limits import Budget

__all__ = ["main"]


async def main() -> None:
    """Run the trial."""
    given = json.load(sys.stdin)
    strategy = load_option(sys.argv[1]).strategy
    assert strategy is not None, "an option in another environment has a program of its own"
    async with AsyncOpenAI(base_url=given["model_url"], api_key="none", max_retries=0) as client, AsyncClient() as http:
        service = OpenAIChatCompletion(ai_model_id="scripted", service_id="scripted", async_client=client)
        kernel = Kernel(services=service)
        kernel.add_plugin(desk_plugin(given["desk_url"], given["functions"], http))
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
            folder=Path(given["folder"]),
        )
        outcome = await run_trial(trial, strategy)
    print(TypeAdapter(Outcome).dump_json(outcome).decode())  # noqa: T201  (the protocol: the last line of the output)


if __name__ == "__main__":
    asyncio.run(main())
