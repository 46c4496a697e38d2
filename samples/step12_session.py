"""Step 12: a conversation, with the functions run for you, or by you.

``ToolUseSession`` keeps the messages. In closed loop it runs the functions and returns the answer. In open loop it
returns the calls, and continues once you have appended their results. Both leave the same messages in the session.

Run it:

    python samples/step12_session.py

Output:

    closed loop: In Oslo it is 4.5 degrees, in Lisbon 19.0.
    you run weather-temperature {'city': 'Oslo'}
    you run weather-temperature {'city': 'Lisbon'}
    open loop: In Oslo it is 4.5 degrees, in Lisbon 19.0.
    system: You know the weather.
    user: How warm is it in Oslo and in Lisbon?
    assistant: weather-temperature, weather-temperature
    tool: 4.5
    tool: 19.0
    assistant: In Oslo it is 4.5 degrees, in Lisbon 19.0.
"""

import asyncio

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionCallContent, FunctionResultContent
from semantic_kernel.functions import kernel_function

from planner_ext.session import AutomaticToolUseConfig, ToolUseSession
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say

QUESTION = "How warm is it in Oslo and in Lisbon?"


class Weather:
    """Today's temperatures."""

    @kernel_function(description="Today's temperature in a city, in degrees Celsius.")
    def temperature(self, city: str) -> float:
        """Look it up; an unknown city is an error, which the model reads."""
        return {"Oslo": 4.5, "Lisbon": 19.0}[city]


async def main() -> None:
    start = [ChatMessageContent(role=AuthorRole.SYSTEM, content="You know the weather.")]

    automatic = AutomaticToolUseConfig(enabled=True, max_tool_calls=4)  # a prompt that needs more raises
    session = ToolUseSession(make_kernel(), initial_prompts=start, tool_use_config=automatic)
    print(f"closed loop: {await session.prompt(QUESTION)}")

    weather = Weather()
    by_hand = AutomaticToolUseConfig(enabled=False)
    session = ToolUseSession(make_kernel(), initial_prompts=start, tool_use_config=by_hand)
    answer = await session.prompt(QUESTION)
    while session.pending:
        for waits in session.pending:
            print(f"you run {waits.fully_qualified_name} {dict(waits.arguments)}")
            session.append(waits.result(weather.temperature(**waits.arguments)))
        answer = await session.prompt()
    print(f"open loop: {answer}")

    for message in session.history():
        print(f"{message.role.value}: {in_short(message)}")


def make_kernel() -> Kernel:
    kernel = Kernel(services=chat_service(script))
    kernel.add_plugin(Weather(), "weather")
    return kernel


def in_short(message: ChatMessageContent) -> str:
    called = [str(item.name) for item in message.items if isinstance(item, FunctionCallContent)]
    returned = [str(item.result) for item in message.items if isinstance(item, FunctionResultContent)]
    return ", ".join(called or returned) or message.content


# The replies of the scripted model.


def compare(request: ScriptedRequest) -> ScriptedReply:
    oslo, lisbon = results(request)
    return say(f"In Oslo it is {oslo} degrees, in Lisbon {lisbon}.")


script = [
    calls(call("weather-temperature", {"city": "Oslo"}), call("weather-temperature", {"city": "Lisbon"})),
    compare,
]

if __name__ == "__main__":
    asyncio.run(main())
