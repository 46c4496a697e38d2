"""The rest of the run on agent-framework, with the decision that it finds in the store. `moves.py` runs this."""

import asyncio
import sys

from adapter import AgentFrameworkPlanner
from agent_framework import tool
from agent_framework.openai import OpenAIChatCompletionClient
from openai import AsyncOpenAI
from orders import find, refund

from planner_ext.core.limits import Budget
from planner_ext.durable import Runs


async def main(url: str) -> None:
    openai = AsyncOpenAI(api_key="none", base_url=url, max_retries=0)
    client = OpenAIChatCompletionClient(model="scripted", async_client=openai)
    client.function_invocation_configuration["enabled"] = False
    tools = [tool(find, name="orders-find"), tool(refund, name="orders-refund", approval_mode="always_require")]
    planner = AgentFrameworkPlanner(client, tools, budget=Budget(max_iterations=4))
    async with Runs.sqlite("runs.db") as runs:
        (handle,) = await runs.recover(planner, None)
        result = await handle.result()
    print(f"agent-framework: {result.status} after {result.iterations} requests: {result.final_answer}")
    print("Semantic Kernel imported here:", "semantic_kernel" in sys.modules)
    await openai.close()


asyncio.run(main(sys.argv[1]))
