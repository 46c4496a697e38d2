"""Step 18: a run with a model, recorded once, then replayed in tests and CI without model and key.

    python samples/step18_record_replay.py

Output:

    as recorded: The lamp costs 12 EUR.
    another price: request 1, the result of shop-price: expected 'lamp: 12 EUR', got 'lamp: 13 EUR'
    forked: The desk costs 80 EUR.

``python samples/step18_record_replay.py --record`` rewrites step18_cassette.json. In pytest a fixture does all of
this: see ``planner_ext.pytest_plugin``.
"""

import asyncio
import sys
from pathlib import Path

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Budget, FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.testing import ReplayDifferenceError, ScriptedReply, ScriptedRequest, call, fork, record, replay, say

CASSETTE = Path(__file__).with_name("step18_cassette.json")
GOAL = "What does a lamp cost?"


class Shop:
    """Knows what things cost."""

    def __init__(self, **prices: int) -> None:
        self._prices = {"lamp": 12, "desk": 80, **prices}

    @kernel_function(description="The price of an article.")
    def price(self, article: str) -> str:
        """Look the price up."""
        return f"{article}: {self._prices[article]} EUR"


def shop_kernel(**prices: int) -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Shop(**prices), "shop")
    return kernel


async def main() -> None:
    planner = FunctionCallingStepwisePlanner(options=FunctionCallingStepwisePlannerOptions(plan=False))

    if "--record" in sys.argv:
        kernel = shop_kernel()
        kernel.add_service(chat_service(model))
        with record(CASSETTE) as tape:  # asks the model; keys do not enter the file
            await planner.invoke(tape.kernel(kernel), GOAL)

    with replay(CASSETTE) as tape:  # needs neither model nor service
        result = await planner.invoke(tape.kernel(shop_kernel()), GOAL)
        print(f"as recorded: {result.final_answer}")

    try:
        with replay(CASSETTE) as tape:
            await planner.invoke(tape.kernel(shop_kernel(lamp=13)), GOAL)
    except ReplayDifferenceError as error:
        print(f"another price: {error.differences[0]}")

    kernel = shop_kernel()
    kernel.add_service(chat_service(model))  # from here on the model is asked again
    forked = fork(CASSETTE, at=-1, instruction="I meant a desk.")
    result = await planner.resume(kernel, forked, budget=Budget(max_iterations=5))
    print(f"forked: {result.final_answer}")


# The model: a script that reads its numbers from the functions' results.


def model(request: ScriptedRequest) -> ScriptedReply:
    article = "desk" if "desk" in str(request.messages) else "lamp"
    if not (prices := results(request)):
        return call("shop-price", {"article": article})
    price = prices[-1].partition(": ")[2]
    return say(f"The {article} costs {price}.")


if __name__ == "__main__":
    asyncio.run(main())
