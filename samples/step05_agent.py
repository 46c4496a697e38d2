"""Step 5: an agent on the wrapper.

Semantic Kernel's ``ChatCompletionAgent`` takes the wrapper as its service. Each answer of the agent is a separate run
with a usage of its own; the thread carries the conversation from one to the next.

Run it:

    python samples/step05_agent.py

Output:

    > Is there a room for six people at ten?
    Yes, Oak is free.  [2 round trips, 1 function calls]
    > Book it for Mira, please.
    Done: Oak is booked at 10:00 for Mira.  [2 round trips, 1 function calls]
"""

import asyncio
import json
from typing import Annotated

from model import chat_service, results
from semantic_kernel.agents import AgentThread, ChatCompletionAgent
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import Budget, FunctionInvokingChatCompletion
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Rooms:
    """The meeting rooms of one day."""

    def __init__(self) -> None:
        self.seats = {"Birch": 4, "Cedar": 8, "Oak": 12}
        self.booked = {("Cedar", 10): "Finance"}

    @kernel_function(description="The rooms that are free at an hour and have enough seats, the smallest first.")
    def free(self, hour: Annotated[int, "0 to 23"], people: int) -> list[str]:
        """Leave out what is too small or booked."""
        return [room for room, seats in self.seats.items() if seats >= people and (room, hour) not in self.booked]

    @kernel_function(description="Book a room for an hour.")
    def book(self, room: str, hour: int, name: Annotated[str, "For whom"]) -> str:
        """Write it into the book, once."""
        if (room, hour) in self.booked:
            raise ValueError(f"{room} is taken at {hour}.")
        self.booked[room, hour] = name
        return f"{room} is booked at {hour}:00 for {name}"


async def main() -> None:
    agent = ChatCompletionAgent(
        service=FunctionInvokingChatCompletion(chat_service(script), budget=Budget(max_iterations=4)),
        name="Porter",
        instructions="You look after the meeting rooms.",
        plugins=[KernelPlugin.from_object("rooms", Rooms())],
    )

    thread: AgentThread | None = None
    for question in ("Is there a room for six people at ten?", "Book it for Mira, please."):
        response = await agent.get_response(question, thread=thread)
        thread = response.thread
        spent = response.metadata
        print(f"> {question}")
        print(f"{response}  [{spent['iterations']} round trips, {spent['tool_calls']} function calls]")


# The replies of the scripted model. It books the room that it found earlier in the conversation.


def offer(request: ScriptedRequest) -> ScriptedReply:
    rooms = json.loads(results(request)[-1])
    return say(f"Yes, {rooms[0]} is free." if rooms else "No, all of them are taken.")


def book(request: ScriptedRequest) -> ScriptedReply:
    room = json.loads(results(request)[-1])[0]
    return call("rooms-book", {"room": room, "hour": 10, "name": "Mira"})


def confirm(request: ScriptedRequest) -> ScriptedReply:
    return say(f"Done: {results(request)[-1]}.")


script = [call("rooms-free", {"hour": 10, "people": 6}), offer, book, confirm]

if __name__ == "__main__":
    asyncio.run(main())
