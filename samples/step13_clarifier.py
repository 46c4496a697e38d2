"""Step 13: the model asks, you answer.

There is a San Jose in California, and one in Costa Rica. A model that has to know which may ask in plain text, or call
the function for questions. The clarifier gets both, and also every plain reply before it counts as the answer. Here the
clarifier is a person at the terminal; it may be another model (``ModelClarifier``). Without one the run ends ``asked``,
and waits.

Run it:

    python samples/step13_clarifier.py

Output, if you answer California:

    The model: Which San Jose, California or Costa Rica? You:
    answered: It is 18 degrees in San Jose, California.
    3 round trips.
"""

import asyncio

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.hitl_manager import Question
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Weather:
    """Tells the weather of a place, once it is known which."""

    @kernel_function(description="Tells the weather of a city. Ask where the region is not clear; do not guess.")
    def now(self, city: str, region: str) -> str:
        """Tell the weather."""
        return f"18 degrees in {city}, {region}"


def at_the_terminal(question: Question) -> str | None:
    """Answer a question; return None to accept a reply that asks nothing. A sync function is called in a thread."""
    if "?" not in question.text:
        return None
    print(f"The model: {question.text} You:")
    return input()


async def main() -> None:
    kernel = Kernel()
    kernel.add_service(chat_service(script))
    kernel.add_plugin(Weather(), "weather")
    options = FunctionCallingStepwisePlannerOptions(plan=False, clarifier=at_the_terminal, max_clarifications=3)
    planner = FunctionCallingStepwisePlanner(options=options)

    result = await planner.invoke(kernel, "What is the weather in San Jose?")
    print(f"{result.status}: {result.final_answer}")
    print(f"{result.iterations} round trips.")


# The replies of the scripted model.


def look(request: ScriptedRequest) -> ScriptedReply:
    return call("weather-now", {"city": "San Jose", "region": request.messages[-1]["content"]})


def answer(request: ScriptedRequest) -> ScriptedReply:
    return say(f"It is {results(request)[-1]}.")


script = [say("Which San Jose, California or Costa Rica?"), look, answer]

if __name__ == "__main__":
    asyncio.run(main())
