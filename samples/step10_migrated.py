"""Step 10: a program that was written for the planner that Semantic Kernel removed.

One line of it was changed, the one marked below. It used to be

    from semantic_kernel.planners import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions

Options, result and errors keep their names. All defaults are the same, except ``min_iteration_time_ms``, which is 0.
The imports from ``model`` and ``planner_ext.testing``, and the code after ``main``, only make it run offline.

Run it:

    python samples/step10_migrated.py

Output:

    Q: I had 1240 euros, earned 2310 and spent 1875. How much is left?
    A: 1675.0 euros are left.
    4 iterations
"""

import asyncio

from model import openai_endpoint, results
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.core_plugins import MathPlugin, TimePlugin

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions  # the changed line
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


async def main() -> None:
    service_id = "planner"
    kernel = Kernel()
    kernel.add_service(OpenAIChatCompletion(service_id=service_id))
    kernel.add_plugin(MathPlugin(), "math")
    kernel.add_plugin(TimePlugin(), "time")

    options = FunctionCallingStepwisePlannerOptions(max_iterations=10, max_tokens=4000, excluded_plugins={"time"})
    planner = FunctionCallingStepwisePlanner(service_id=service_id, options=options)

    question = "I had 1240 euros, earned 2310 and spent 1875. How much is left?"
    result = await planner.invoke(kernel, question)
    print(f"Q: {question}")
    print(f"A: {result.final_answer}")
    print(f"{result.iterations} iterations")


# The replies of the scripted endpoint, which is used if no real one is configured.


def subtract(request: ScriptedRequest) -> ScriptedReply:
    return call("math-Subtract", {"input": results(request)[-1], "amount": 1875})


def answer(request: ScriptedRequest) -> ScriptedReply:
    return call("UserInteraction-SendFinalAnswer", {"answer": f"{results(request)[-1]} euros are left."})


script = [
    say("1. Add what was earned.\n2. Subtract what was spent.\n3. Hand over the answer."),
    call("math-Add", {"input": 1240, "amount": 2310}),
    subtract,
    answer,
]

if __name__ == "__main__":
    with openai_endpoint(script):
        asyncio.run(main())
