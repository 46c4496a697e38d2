"""Step 4: add a budget to an existing application.

``FunctionInvokingChatCompletion`` is a chat completion service that wraps another one. The application below is plain
Semantic Kernel. The one line that adds the service gives it a budget, and its message reports what was spent.

Run it:

    python samples/step04_existing_app.py

Output:

    No, 3 chairs are missing.
    iterations: 2
    tool_calls: 2
    status: answered
    limit: None
"""

import asyncio
from typing import Annotated

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatMessageContent
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import Budget, FunctionInvokingChatCompletion
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say


class Stock:
    """What lies in the warehouse."""

    def __init__(self) -> None:
        self.pieces = {"desk": 14, "chair": 9}

    @kernel_function(description="How many pieces of an article are in stock.")
    def count(self, article: Annotated[str, "The article, in the singular"]) -> int:
        """Look into the warehouse; unknown goods count as 0."""
        return self.pieces.get(article, 0)


async def main() -> None:
    kernel = Kernel()
    kernel.add_plugin(Stock(), "stock")

    # Before: kernel.add_service(chat_service(script))
    kernel.add_service(
        FunctionInvokingChatCompletion(chat_service(script), budget=Budget(max_iterations=6, max_tool_calls=10))
    )

    message = await can_we_ship(kernel, "12 desks and 12 chairs")
    print(message)
    for name in ("iterations", "tool_calls", "status", "limit"):
        print(f"{name}: {message.metadata[name]}")


async def can_we_ship(kernel: Kernel, order: str) -> ChatMessageContent:
    """Ask the model; this function does not know about the wrapper."""
    settings = PromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())  # pyright: ignore[reportUnknownMemberType]
    result = await kernel.invoke_prompt(
        "Can we ship {{$order}} today? Say what is missing.", arguments=KernelArguments(settings, order=order)
    )
    assert result is not None
    return result.value[0]


# The replies of the scripted model.


def answer(request: ScriptedRequest) -> ScriptedReply:
    missing = {name: 12 - int(count) for name, count in zip(("desks", "chairs"), results(request), strict=True)}
    listed = ", ".join(f"{number} {name}" for name, number in missing.items() if number > 0)
    return say(f"No, {listed} are missing." if listed else "Yes, all of it.")


script = [calls(call("stock-count", {"article": "desk"}), call("stock-count", {"article": "chair"})), answer]

if __name__ == "__main__":
    asyncio.run(main())
