"""Step 2: spend no more than this.

A model that never stops calling a function gets a budget of five round trips. The caller chooses with ``on_limit`` what
happens then; a sixth request is never made. The program prints what each run spent, and the last message of its
history. A run that a limit ended can be resumed with a larger budget; its consumption so far still counts.

Run it:

    python samples/step02_budget.py

Output:

    answer: 5 round trips, 4 weighings. Between 625.0 and 687.5 grams.
    stop: 5 round trips, 4 weighings. Not executed: The limit max_iterations=5 was reached.
    return_calls: 5 round trips, 4 weighings. balance-weigh({"grams":656.25})
    raise: The limit max_iterations=5 was reached.
    resumed: 12 round trips, 10 weighings. Between 686.5 and 687.5 grams.
"""

import asyncio
from typing import Annotated

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.errors import LimitReachedError
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Balance:
    """A pair of scales with a parcel in one pan; it tells heavier from lighter, and nothing else."""

    @kernel_function(description="Compare the parcel with a weight.")
    def weigh(self, grams: Annotated[float, "The weight to put into the other pan"]) -> str:
        """Say on which side of the weight the parcel is."""
        return f"{'heavier' if grams < 687.31 else 'lighter'} than {grams} g"


async def main() -> None:
    kernel = Kernel()
    kernel.add_service(chat_service(weigh_for_ever))
    kernel.add_plugin(Balance(), "balance")

    # The default: the last round trip offers no functions, so that five of them give an answer, `final_answer`.
    answered = await weigh(kernel, Budget(max_iterations=5, on_limit="answer"))
    show("answer", answered)

    # The call of the fifth reply is answered "not executed", and the run ends there.
    show("stop", await weigh(kernel, Budget(max_iterations=5, on_limit="stop")))

    # The history ends with the unanswered call of the fifth reply, for the caller to run.
    show("return_calls", await weigh(kernel, Budget(max_iterations=5, on_limit="return_calls")))

    try:
        await weigh(kernel, Budget(max_iterations=5, on_limit="raise"))
    except LimitReachedError as error:  # it carries the history, the usage and a checkpoint
        print(f"raise: {error}")

    # Not exact enough? Resume the first run. Twelve is its new total, of which five are spent.
    planner = FunctionCallingStepwisePlanner("chat")
    show("resumed", await planner.resume(kernel, answered.checkpoint, budget=Budget(max_iterations=12)))


async def weigh(kernel: Kernel, budget: Budget) -> FunctionCallingStepwisePlannerResult:
    # No plan: a plan is a round trip, too, and this task needs none.
    planner = FunctionCallingStepwisePlanner("chat", FunctionCallingStepwisePlannerOptions(budget=budget, plan=False))
    return await planner.invoke(kernel, "The parcel has up to 1000 grams. How many, as exactly as you can tell?")


def show(name: str, result: FunctionCallingStepwisePlannerResult) -> None:
    assert result.chat_history is not None
    last = result.chat_history.messages[-1].items[0]
    print(f"{name}: {result.iterations} round trips, {result.tool_calls} weighings. {last}")


# The replies of the scripted model. It halves the range for ever, and answers only when no function is offered.


def weigh_for_ever(request: ScriptedRequest) -> ScriptedReply:
    low, high = 0.0, 1000.0
    for result in results(request):
        match result.split():
            case ["heavier", "than", grams, "g"]:
                low = float(grams)
            case ["lighter", "than", grams, "g"]:
                high = float(grams)
            case _:  # a weighing that the budget did not allow
                pass
    if request.tools:
        return call("balance-weigh", {"grams": (low + high) / 2})
    return say(f"Between {low:.1f} and {high:.1f} grams.")


if __name__ == "__main__":
    asyncio.run(main())
