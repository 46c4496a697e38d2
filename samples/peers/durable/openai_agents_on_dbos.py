# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0", "dbos-openai-agents==0.3.0", "dbos==3.4.0", "httpx>=0.27"]
# [tool.planner-ext]
# name = "openai-agents on DBOS"
# short = "oai DBOS"
# package = "openai-agents"
# offers = ["recovery"]
# ///
"""openai-agents on DBOS: the run is a workflow, its requests and its functions are steps, kept in one SQLite file.

https://pypi.org/project/dbos-openai-agents: functions are steps. The process that continues starts DBOS, which goes
on with what the first one left.
"""

import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, function_tool, set_tracing_disabled
from dbos import DBOS, DBOSConfig, SetWorkflowID
from dbos_openai_agents import DBOSRunner
from openai import AsyncOpenAI

sys.path.append(str(Path(__file__).parents[1]))
from common import Report, Trial, main

set_tracing_disabled(True)


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
        function_tool(DBOS.step(name=name)(function), name_override=name)
        for name, function in trial.functions().items()
    ]
    agent = Agent(name="clerk", model=OpenAIChatCompletionsModel("scripted", client), tools=tools)

    @DBOS.workflow(name="clerk")
    async def clerk(goal: str, max_turns: int) -> tuple[str, int]:
        result = await DBOSRunner.run(agent, goal, max_turns=max_turns)
        return str(result.final_output), len(result.raw_responses)

    DBOS.launch()
    try:
        if trial.life > 1:
            handle = await DBOS.retrieve_workflow_async("run")
            report.answer, report.charged = await handle.get_result()
        else:
            with SetWorkflowID("run"):
                report.answer, report.charged = await clerk(trial.goal, trial.max_iterations)
        report.status = "answered"
    finally:
        DBOS.destroy()


main(run)
