"""Step 1: a goal in, an answer out.

The planner asks the model for a plan, lets it call the kernel's functions until the goal is reached, and returns a
result with the answer and the consumption. This program contains no function call of its own.

Run it:

    python samples/step01_first_run.py

Output:

    1. Work out the interest of both loans.
    2. Hand over which one costs less.
    answered: The loan over 48 months costs 358.02 euros less (2766.35 against 3124.37 of interest).
    It took 3 round trips and 2 function calls.
"""

import asyncio
from typing import Annotated

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say


class Loans:
    """Loans that are repaid in equal monthly payments."""

    @kernel_function(description="What a loan costs in interest, from first to last payment, in euros.")
    def interest(
        self,
        amount: Annotated[float, "The amount borrowed, in euros"],
        yearly_rate: Annotated[float, "Percent per year"],
        months: Annotated[int, "The number of payments"],
    ) -> float:
        """Work out the payment by the annuity formula, and what all payments come to above the amount."""
        rate = yearly_rate / 100 / 12
        payment = amount * rate / (1 - (1 + rate) ** -months)
        return round(payment * months - amount, 2)


async def main() -> None:
    kernel = Kernel()
    kernel.add_service(chat_service(script))
    kernel.add_plugin(Loans(), "loans")

    planner = FunctionCallingStepwisePlanner("chat")
    result = await planner.invoke(
        kernel, "I borrow 20000 euros. What costs less: 6.5 percent over 48 months, or 4.9 percent over 72?"
    )

    print(result.plan)
    print(f"{result.status}: {result.final_answer}")
    print(f"It took {result.iterations} round trips and {result.tool_calls} function calls.")


# The replies of the scripted model: a plan, both calls in one reply, and an answer made from their results.


def compare(request: ScriptedRequest) -> ScriptedReply:
    short, long = (float(text) for text in results(request))
    term, saved = ("48", long - short) if short < long else ("72", short - long)
    answer = f"The loan over {term} months costs {saved:.2f} euros less ({short:.2f} against {long:.2f} of interest)."
    return call("UserInteraction-SendFinalAnswer", {"answer": answer})


script = [
    say("1. Work out the interest of both loans.\n2. Hand over which one costs less."),
    calls(
        call("loans-interest", {"amount": 20000, "yearly_rate": 6.5, "months": 48}),
        call("loans-interest", {"amount": 20000, "yearly_rate": 4.9, "months": 72}),
    ),
    compare,
]

if __name__ == "__main__":
    asyncio.run(main())
