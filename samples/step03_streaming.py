"""Step 3: watch a run.

``invoke_stream`` yields the model's text as it arrives, and the facts of the run as they happen. The last event holds
the result that ``invoke`` would have returned.

Run it:

    python samples/step03_streaming.py

Output:

    I look into the catalogue.
      library-search ...
      library-search: ["The Dispossessed","The Lathe of Heaven"]
    There are 2. I ask for all of them at once.
      library-status ...
      library-status ...
      library-status: on the shelf
      library-status: out until 2 June
    The Dispossessed is on the shelf; The Lathe of Heaven is out until 2 June.
    answered, 3 round trips, 16 facts in the journal
"""

import asyncio
import json
from typing import Annotated

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.events import CallFinished, CallStarted, ModelReplied, ResultReady, TextDelta
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say


class Library:
    """The catalogue of a small library, and which books are out until when."""

    def __init__(self) -> None:
        self.books = {"The Dispossessed": "Le Guin", "The Lathe of Heaven": "Le Guin", "Solaris": "Lem"}
        self.out_until = {"The Lathe of Heaven": "2 June"}

    @kernel_function(description="The titles that the library has by an author.")
    async def search(self, author: Annotated[str, "The family name"]) -> list[str]:
        """Look the author up, whatever the case."""
        return [title for title, name in self.books.items() if name.lower() == author.lower()]

    @kernel_function(description="Whether a book is on the shelf, or until when it is out.")
    async def status(self, title: str) -> str:
        """Look into the loans; a title that the library has not is an error, which the model reads."""
        if title not in self.books:
            raise ValueError(f"The library has no book {title}.")
        await asyncio.sleep(0.05)  # the loans are in another system
        return f"out until {self.out_until[title]}" if title in self.out_until else "on the shelf"


async def main() -> None:
    kernel = Kernel()
    kernel.add_service(chat_service(script))
    kernel.add_plugin(Library(), "library")

    planner = FunctionCallingStepwisePlanner("chat", FunctionCallingStepwisePlannerOptions(plan=False))
    async for event in planner.invoke_stream(kernel, "Which books by Ursula Le Guin can I borrow today?"):
        match event:
            case TextDelta(text=text):
                print(text, end="", flush=True)
            case ModelReplied(text=text) if text:
                print()  # the end of the text that came in pieces
            case CallStarted(function=function):
                print(f"  {function} ...")
            case CallFinished(function=function, result=found):
                print(f"  {function}: {found}")
            case ResultReady(result=result):
                print(f"{result.status}, {result.iterations} round trips, {len(result.facts)} facts in the journal")
            case _:  # what was decided of each call, that a batch is complete, and more
                pass


# The replies of the scripted model. The second one asks for all the books that the first call found.


def ask_for_each(request: ScriptedRequest) -> ScriptedReply:
    titles = json.loads(results(request)[0])
    asked = [call("library-status", {"title": title}) for title in titles]
    return calls(*asked, text=f"There are {len(titles)}. I ask for all of them at once.")


def answer(request: ScriptedRequest) -> ScriptedReply:
    found, *states = results(request)
    return say("; ".join(f"{title} is {state}" for title, state in zip(json.loads(found), states, strict=True)) + ".")


script = [calls(call("library-search", {"author": "Le Guin"}), text="I look into the catalogue."), ask_for_each, answer]

if __name__ == "__main__":
    asyncio.run(main())
