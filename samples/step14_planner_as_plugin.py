"""Step 14: a planner as a function of another one, and a structured answer.

The researcher is a planner with its own functions. The host calls it as a function, twice at once. All three runs spend
one budget, so that together they never make more than ten requests. The host's answer is a pydantic model: after an
answer in prose, the model is asked for that format again, without functions.

Run it:

    python samples/step14_planner_as_plugin.py

Output:

    answered: Trip(city='Lisbon', degrees=19.0)
    7 of 10 round trips, 4 calls: 2 of the host's, 2 inside them.
"""

import asyncio

from model import chat_service, results
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.events import CallStarted
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say


class Weather:
    """What the researcher works with."""

    @kernel_function(description="Tells today's temperature in a city, in degrees Celsius.")
    def temperature(self, city: str) -> float:
        """Tell the temperature."""
        return {"Oslo": 4.5, "Lisbon": 19.0}[city]


class Trip(BaseModel):
    """What the host answers."""

    city: str
    degrees: float


async def main() -> None:
    library = Kernel()
    library.add_service(chat_service(research, service_id="researcher"))
    library.add_plugin(Weather(), "weather")
    researcher = FunctionCallingStepwisePlanner("researcher", FunctionCallingStepwisePlannerOptions(plan=False))

    kernel = Kernel()
    kernel.add_service(chat_service(host, service_id="host"))
    kernel.add_plugin(PlannerPlugin(researcher, kernel=library, description="Finds something out."), "researcher")
    options = FunctionCallingStepwisePlannerOptions(plan=False, max_iterations=10, response_format=Trip)
    result = await FunctionCallingStepwisePlanner("host", options).invoke(kernel, "Where is it warmer, Oslo or Lisbon?")

    print(f"{result.status}: {result.value!r}")
    own = sum(isinstance(fact, CallStarted) for fact in result.facts)
    print(f"{result.iterations} of 10 round trips, {result.tool_calls} calls: {own} of the host's, ", end="")
    print(f"{result.tool_calls - own} inside them.")


# The replies of the scripted models.


def host(request: ScriptedRequest) -> ScriptedReply:
    if not request.tools:
        return say('{"city": "Lisbon", "degrees": 19.0}')
    if not results(request):
        goals = [f"How warm is it in {city}?" for city in ("Oslo", "Lisbon")]
        return calls(*[call("researcher-reach_goal", {"goal": goal}) for goal in goals])
    return say("It is warmer in Lisbon.")


def research(request: ScriptedRequest) -> ScriptedReply:
    city = str(request.messages[-1]["content"]).removesuffix("?").rpartition(" ")[2]
    return say(f"{results(request)[0]} degrees.") if results(request) else call("weather-temperature", {"city": city})


if __name__ == "__main__":
    asyncio.run(main())
