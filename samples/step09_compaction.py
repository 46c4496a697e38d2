"""Step 9: a long run in a small context window.

The model reads a ledger page by page. ``at_token_fraction`` checks each reply's tokens once its calls have their
results. If they fill half of the window, the callback drops the pages that are already added up.

Run it:

    python samples/step09_compaction.py

Output:

    trip 3: 6 of 9 messages are dropped
    trip 6: 6 of 9 messages are dropped
    trip 9: 6 of 9 messages are dropped
    All sales come to 15606 euros.  [13 round trips]
    The ledger says 15606.
    The history has 8 messages.
"""

import asyncio
import re
from typing import Annotated

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import ToolCallHandler
from planner_ext.iteration import FunctionInvocationIterationContext, at_token_fraction
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say

CONTEXT_WINDOW = 1000
"""Tokens; a small model's, so that three pages are too much for half of it."""


class Ledger:
    """The sales of a shop, a day on each page."""

    def __init__(self) -> None:
        self.pages = 12

    def sales(self, page: int) -> list[int]:
        """The prices of what was sold that day, in euros."""
        return [(page * 37 + sale * 11) % 90 + 10 for sale in range(24)]

    @kernel_function(description="One page of the ledger.")
    def page(self, number: Annotated[int, "From 1"]) -> str:
        """Write the page as the shop does."""
        if not 1 <= number <= self.pages:
            raise ValueError(f"The ledger has pages 1 to {self.pages}.")
        lines = [f"sale {index}: {price} euros" for index, price in enumerate(self.sales(number), start=1)]
        return "\n".join([f"page {number} of {self.pages}", *lines])


def drop_old_pages(context: FunctionInvocationIterationContext) -> None:
    """Keep the question, and the newest reply with its results: calls and their results stay, or go, together."""
    assert context.response is not None
    newest = context.messages.index(context.response)
    print(f"trip {context.iteration}: {newest - 1} of {len(context.messages)} messages are dropped")
    del context.messages[1:newest]


async def main() -> None:
    ledger = Ledger()
    kernel = Kernel()
    kernel.add_service(chat_service(add_up))
    kernel.add_plugin(ledger, "ledger")

    compact = at_token_fraction(CONTEXT_WINDOW, 0.5, then=drop_old_pages)
    handler = ToolCallHandler(kernel, iteration_completed=compact)
    history = ChatHistory()
    history.add_user_message(
        "Add up all sales in the ledger. Read one page at a time, and always say the sum so far: old pages are removed."
    )
    async for message in handler.invoke(history):
        print(f"{message}  [{message.metadata['iterations']} round trips]")
    print(f"The ledger says {sum(price for page in range(1, ledger.pages + 1) for price in ledger.sales(page))}.")
    print(f"The history has {len(history)} messages.")


# The replies of the scripted model. It reads the sum so far from its own last message, and the rest from the page.


def add_up(request: ScriptedRequest) -> ScriptedReply:
    pages = results(request)
    if not pages:
        return calls(call("ledger-page", {"number": 1}), text="Sum so far: 0")
    said = [str(message["content"]) for message in request.messages if message["role"] == "assistant"]
    so_far = int(said[-1].rpartition(" ")[2])
    number, last = (int(found) for found in re.findall(r"\d+", pages[-1])[:2])
    total = so_far + sum(int(price) for price in re.findall(r": (\d+) euros", pages[-1]))
    if number == last:
        return say(f"All sales come to {total} euros.")
    return calls(call("ledger-page", {"number": number + 1}), text=f"Sum so far: {total}")


if __name__ == "__main__":
    asyncio.run(main())
