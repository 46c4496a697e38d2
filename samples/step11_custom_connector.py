"""Step 11: a connector of your own.

The wrapper works around any ``ChatCompletionClientBase``. This one asks a second service if the first one fails, so one
request to it may take two round trips. If it reports that, as ``iterations`` in its reply's metadata, the run is
charged two. If it reports nothing, the wrapper can only count its own requests, and charges one for each.

Run it:

    python samples/step11_custom_connector.py

Output:

    It is 3550.0. The connector reports iterations.
      4 round trips were made, 4 are charged.
    It is 3550.0. The connector reports nothing.
      4 round trips were made, 2 are charged.
"""

import asyncio
from typing import Any, ClassVar

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent
from semantic_kernel.core_plugins import MathPlugin
from semantic_kernel.exceptions import ServiceResponseException

from planner_ext import BoundedFunctionChoiceBehavior, Budget, FunctionInvokingChatCompletion
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Failover(ChatCompletionClientBase):
    """Asks its services in order, until one answers."""

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True  # without it no functions are offered

    services: list[ChatCompletionClientBase]
    reports_iterations: bool
    requests: int = 0

    async def get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, **kwargs: Any
    ) -> list[ChatMessageContent]:
        """Pass the request on; for streams, ``get_streaming_chat_message_contents`` would do the same."""
        failure = ServiceResponseException("There is no service to ask.")
        for asked, service in enumerate(self.services, start=1):
            self.requests += 1
            try:
                messages = await service.get_chat_message_contents(chat_history, settings, **kwargs)
            except ServiceResponseException as error:
                failure = error
            else:
                if self.reports_iterations:
                    messages[0].metadata["iterations"] = asked
                return messages
        raise failure


async def main() -> None:
    for reports_iterations in (True, False):
        connector = Failover(
            ai_model_id="failover",
            services=[chat_service(overloaded), chat_service(script)],
            reports_iterations=reports_iterations,
        )
        kernel = Kernel()
        kernel.add_plugin(MathPlugin(), "math")
        service = FunctionInvokingChatCompletion(connector, budget=Budget(max_iterations=6))

        history = ChatHistory()
        history.add_user_message("How much is 1240 and 2310?")
        settings = PromptExecutionSettings(function_choice_behavior=BoundedFunctionChoiceBehavior.Auto())
        message = await service.get_chat_message_content(history, settings, kernel=kernel)
        assert message is not None
        spoken = "reports iterations" if reports_iterations else "reports nothing"
        print(f"{message} The connector {spoken}.")
        print(f"  {connector.requests} round trips were made, {message.metadata['iterations']} are charged.")


# The replies of the scripted models. The first one is always overloaded.


def overloaded(_: ScriptedRequest) -> Exception:
    return ServiceResponseException("Overloaded, try again later.")


def answer(request: ScriptedRequest) -> ScriptedReply:
    return say(f"It is {results(request)[-1]}.")


script = [call("math-Add", {"input": 1240, "amount": 2310}), answer]

if __name__ == "__main__":
    asyncio.run(main())
