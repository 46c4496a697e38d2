# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai,dbos]==2.68.0", "dbos==3.4.0", "httpx>=0.27"]
# [tool.planner-ext]
# name = "pydantic-ai on DBOS"
# short = "pyd. ai DBOS"
# package = "pydantic-ai-slim"
# offers = ["recovery"]
# ///
"""pydantic-ai on DBOS: the run is a workflow, its requests and its functions are steps, kept in one SQLite file.

https://ai.pydantic.dev/durable_execution/dbos: functions with side effects are steps, which the documentation asks for.
The process that continues starts DBOS, which goes on with what the first one left.
"""

import sys
from pathlib import Path

from dbos import DBOS, DBOSConfig, SetWorkflowID
from openai import AsyncOpenAI
from pydantic_ai import Agent, Tool
from pydantic_ai.durable_exec.dbos import DBOSDurability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

sys.path.append(str(Path(__file__).parents[1]))
from common import Report, Trial, main


async def run(trial: Trial, report: Report) -> None:
    """Run the agent as a workflow, or wait for the one that a killed process left."""
    kept = Path(trial.folder or ".", "dbos.sqlite")
    DBOS(
        config=DBOSConfig(
            name="clerk", system_database_url=f"sqlite:///{kept}", application_version="1", executor_id="1"
        )
    )
    client = AsyncOpenAI(base_url=trial.model_url, api_key="none", max_retries=0)
    tools = [
        Tool(DBOS.step(name=name)(function), name=name, description=function.__doc__)
        for name, function in trial.functions().items()
    ]
    model = OpenAIChatModel("scripted", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, name="clerk", tools=tools, capabilities=[DBOSDurability()])

    @DBOS.workflow(name="clerk")
    async def clerk(goal: str, request_limit: int) -> tuple[str, int, int]:
        result = await agent.run(goal, usage_limits=UsageLimits(request_limit=request_limit))
        return result.output, result.usage.requests, result.usage.total_tokens

    DBOS.launch()
    try:
        if trial.life > 1:
            handle = await DBOS.retrieve_workflow_async("run")
            report.answer, report.charged, report.tokens = await handle.get_result()
        else:
            with SetWorkflowID("run"):
                report.answer, report.charged, report.tokens = await clerk(trial.goal, trial.max_iterations)
        report.status = "answered"
    finally:
        DBOS.destroy()


main(run)
