"""A run on Semantic Kernel, until a call waits for a person. `moves.py` runs this."""

import asyncio
import sys

from openai import AsyncOpenAI
from orders import find, refund
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    Runs,
    requires_approval,
)


async def main(url: str) -> None:
    client = AsyncOpenAI(api_key="none", base_url=url, max_retries=0)
    kernel = Kernel()
    kernel.add_service(OpenAIChatCompletion("scripted", async_client=client))
    functions = {"find": kernel_function(find), "refund": requires_approval(kernel_function(refund))}
    kernel.add_plugin(KernelPlugin.from_object("orders", functions))
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False, max_iterations=4)
    )
    async with Runs.sqlite("runs.db") as runs:
        handle = await runs.start(planner, kernel, "Refund order 7.", run_id="order-7")
        result = await handle.result()
    waits = [call.fully_qualified_name for call in result.pending]
    print(f"Semantic Kernel: {result.status} after {result.iterations} requests; waits: {', '.join(waits)}")
    await client.close()


asyncio.run(main(sys.argv[1]))
