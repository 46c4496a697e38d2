"""A shop's chat in the terminal: a kernel with functions and filters, and answers that stream.

Ask until "exit"; the calls are logged in chat.log.
"""

# Semantic Kernel leaves some of its signatures open.
# pyright: reportUnknownMemberType=false

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from planner_ext import Approve, Budget, Deny, FunctionInvokingChatCompletion, ToolExecution, requires_approval
from planner_ext.hitl_manager import ToolCall
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.filters import AutoFunctionInvocationContext, FilterTypes, FunctionInvocationContext
from semantic_kernel.functions import kernel_function

logging.basicConfig(filename="chat.log", level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
logger = logging.getLogger("shop")
logger.setLevel(logging.INFO)

SYSTEM_MESSAGE = """
You are the assistant of a tea shop. Recommend teas from the catalog only, name the price of each, and place an order
when the customer has said what they want and how much of it.
"""

PRICES = {"Sencha": 9.50, "Darjeeling": 11.00, "Lapsang Souchong": 12.50, "Rooibos": 7.00}
STOCK = {"Sencha": 40, "Darjeeling": 3, "Lapsang Souchong": 12, "Rooibos": 25}


class CatalogPlugin:
    """What the shop sells."""

    @kernel_function
    async def list_teas(self) -> dict[str, float]:
        """Lists the teas and their prices in euros per 100 g."""
        return PRICES

    @kernel_function
    async def stock(self, tea: Annotated[str, "The name of the tea, as in the catalog"]) -> int:
        """Says how many bags of 100 g of a tea are in stock."""
        return STOCK[tea]


class OrderPlugin:
    """What the shop charges for."""

    @requires_approval(prompt="Charge your card?")
    @kernel_function
    async def place_order(
        self,
        tea: Annotated[str, "The name of the tea, as in the catalog"],
        bags: Annotated[int, "How many bags of 100 g"],
    ) -> str:
        """Places an order, charges the customer's card and returns the total in euros."""
        if bags > STOCK[tea]:
            raise ValueError(f"only {STOCK[tea]} bags of {tea} are in stock")
        STOCK[tea] -= bags
        return f"{bags} x {tea}: {PRICES[tea] * bags:.2f} euros charged"


async def log_calls(
    context: FunctionInvocationContext, next: Callable[[FunctionInvocationContext], Awaitable[None]]
) -> None:
    """Log each call, its arguments and how long it took."""
    started = time.perf_counter()
    try:
        await next(context)
    finally:
        took = time.perf_counter() - started
        logger.info("%s(%s) took %.3f s", context.function.fully_qualified_name, context.arguments, took)


async def show_progress(
    context: AutoFunctionInvocationContext, next: Callable[[AutoFunctionInvocationContext], Awaitable[None]]
) -> None:
    """Show the customer what the assistant is doing, and take over when it has done enough."""
    print(f"[{context.function.name} ...] ", end="", flush=True)
    await next(context)
    if context.request_sequence_index >= 4:
        context.terminate = True


def ask(call: ToolCall) -> Approve | Deny:
    """Ask the customer before the card is charged."""
    yes = input(f"{call.prompt} {dict(call.arguments)} [y/n] ") == "y"
    return Approve() if yes else Deny("The customer said no.")


async def main() -> None:
    """Chat in the terminal, until "exit"."""
    kernel = Kernel()
    connector = OpenAIChatCompletion(service_id="chat", ai_model_id="gpt-4.1-mini")
    budget, execution = Budget(max_iterations=5), ToolExecution(include_error_detail=True)
    kernel.add_service(FunctionInvokingChatCompletion(connector, budget=budget, execution=execution, approver=ask))
    kernel.add_plugin(CatalogPlugin(), plugin_name="catalog")
    kernel.add_plugin(OrderPlugin(), plugin_name="orders")
    kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, log_calls)
    kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, show_progress)
    chat_completion = kernel.get_service(type=FunctionInvokingChatCompletion)
    settings = OpenAIChatPromptExecutionSettings(
        temperature=0.2,
        max_tokens=800,
        function_choice_behavior=FunctionChoiceBehavior.Auto(),
    )
    history = ChatHistory(system_message=SYSTEM_MESSAGE)

    while True:
        try:
            user_input = await asyncio.to_thread(input, "Customer: ")
        except (KeyboardInterrupt, EOFError):
            break
        if user_input.strip().lower() == "exit":
            break
        history.add_user_message(user_input)

        print("Shop: ", end="", flush=True)
        answer = ""
        async for chunk in chat_completion.get_streaming_chat_message_content(history, settings, kernel=kernel):
            if chunk is not None:
                answer += str(chunk)
                print(chunk, end="", flush=True)
        print()
        history.add_assistant_message(answer)


if __name__ == "__main__":
    asyncio.run(main())
