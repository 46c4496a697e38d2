"""The situations in which every option runs: a goal, a scripted model, and the functions that it may call.

A scripted model reads the request: it calls functions only if they are offered, and takes its knowledge from their
results. So one script fits every option, whatever the number of round trips. If the final-answer function of the
removed planner is offered, a model that has called functions passes its answer to it; one that only talks, talks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from semantic_kernel.functions import kernel_function

from planner_ext.compare.report import ScriptInfo
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from planner_ext.testing.script import results_of

__all__ = ["FINAL_ANSWER", "SCRIPTS", "OrderDeskPlugin", "Scenario"]

FINAL_ANSWER = "UserInteraction-SendFinalAnswer"
"""The function by which the removed planner takes its answer."""

Model: TypeAlias = Callable[[ScriptedRequest], ScriptedReply]
"""The model's reply to a request; it remembers nothing but what is in the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A situation.

    Attributes:
        info: Its names, and the goal given to the model.
        model: The scripted model.
        streaming: Whether replies are streamed.
        reports: Whether replies carry metadata: the number of round trips, and of tokens.
    """

    info: ScriptInfo
    model: Model
    streaming: bool = False
    reports: bool = True


SCRIPTS: dict[str, Scenario] = {}
"""The scenarios by key, in the order in which they are shown."""

_EXPORT = "Wait until the export E-7 is finished, then say so."


def _scenario(name: str, short: str, goal: str, **special: bool) -> Callable[[Model], Model]:
    """Add a scripted model to `SCRIPTS`; its docstring becomes the description."""

    def add(model: Model) -> Model:
        key = name.replace(" ", "-")
        info = ScriptInfo(key=key, name=name, short=short, about=model.__doc__ or "", goal=goal)
        SCRIPTS[key] = Scenario(info=info, model=model, **special)
        return model

    return add


@_scenario("never-ending", "never-\nending", _EXPORT)
def _never_ending(request: ScriptedRequest) -> ScriptedReply:
    """The model calls a function in every reply, as long as it is offered any."""
    if request.tools:
        return call("desk-export_status", {"export": "E-7"})
    return say("E-7 is not finished: it was still running when I last looked.")


@_scenario("batch of 3", "batch\nof 3", "Count the lamps in Hamburg, Lyon and Turin until the count stays the same.")
def _batches(request: ScriptedRequest) -> ScriptedReply:
    """The model calls three functions in every reply, as long as it is offered any."""
    if request.tools:
        return calls(*(call("desk-stock", {"site": site}) for site in _STOCK))
    return say("There were 11 lamps when I last counted.")


@_scenario("chain", "chain", "Where is Ann's parcel?")
def _chain(request: ScriptedRequest) -> ScriptedReply:
    """Three calls, each of which needs the result of the one before, then the answer: four round trips."""
    known = results_of(request)
    if "desk-parcel" in known:
        return _finish(request, f"Ann's parcel is in {known['desk-parcel']}.")
    if not request.tools:
        return say(f"So far I know: {', '.join(known.values()) or 'nothing'}.")
    if "desk-order" in known:
        return call("desk-parcel", {"order": known["desk-order"]})
    if "desk-customer" in known:
        return call("desk-order", {"customer": known["desk-customer"]})
    return call("desk-customer", {"name": "Ann"})


@_scenario("direct answer", "direct\nanswer", "Good morning!")
def _direct(_: ScriptedRequest) -> ScriptedReply:
    """The model answers at once and calls nothing."""
    return say("Good morning! What may I look up for you?")


@_scenario("function error", "func.\nerror", "Where is the parcel of the order A-3070 (or so)?")
def _mistaken(request: ScriptedRequest) -> ScriptedReply:
    """The first call fails; the model reads the error, calls again with another argument, and answers."""
    known = results_of(request)
    if known.get("desk-parcel") == "Lyon":
        return _finish(request, "The parcel is in Lyon.")
    if not request.tools:
        return say("That order is not known; I would look for another number.")
    return call("desk-parcel", {"order": "A-3007" if "desk-parcel" in known else "A-3070"})


@_scenario("refusal", "refusal", "Write me something that you may not write.")
def _refusing(_: ScriptedRequest) -> ScriptedReply:
    """The model refuses, in plain text."""
    return ScriptedReply(refusal="I can't help with that.")


@_scenario("streaming", "stream-\ning", _EXPORT, streaming=True)
def _streaming(request: ScriptedRequest) -> ScriptedReply:
    """The never-ending model, with every reply streamed."""
    return _never_ending(request)


@_scenario("absent metadata", "absent\nmeta.", _EXPORT, reports=False)
def _unreported(request: ScriptedRequest) -> ScriptedReply:
    """The never-ending model behind a service that reports neither round trips nor tokens."""
    return _never_ending(request)


@_scenario("clarifying question", "question", "Where is the parcel of my order?")
def _asking(_: ScriptedRequest) -> ScriptedReply:
    """Instead of calling a function the model asks the user something, in plain text."""
    return say("Which of the two orders do you mean: A-3007 or A-3008?")


def _finish(request: ScriptedRequest, answer: str) -> ScriptedReply:
    return call(FINAL_ANSWER, {"answer": answer}) if FINAL_ANSWER in request.tools else say(answer)


_STOCK = {"Hamburg": 2, "Lyon": 9, "Turin": 0}


class OrderDeskPlugin:
    """The functions that the scripts call; each always gives the same answer."""

    @kernel_function(description="Tell how far an export is.")
    def export_status(self, export: Annotated[str, "The export's name"]) -> str:
        """Report an export as running: none of them ever finishes."""
        return f"{export} is still running."

    @kernel_function(description="Count the lamps in a warehouse.")
    def stock(self, site: Annotated[str, "Where the warehouse is"]) -> int:
        """Count the lamps."""
        return _STOCK.get(site, 0)

    @kernel_function(description="Find a customer's number by name.")
    def customer(self, name: Annotated[str, "First name"]) -> str:
        """Find the customer."""
        return f"C-{len(name)}"

    @kernel_function(description="Find the newest order of a customer.")
    def order(self, customer: Annotated[str, "The customer's number"]) -> str:
        """Find the order."""
        return f"A-{customer.removeprefix('C-')}007"

    @kernel_function(description="Tell where the parcel of an order is.")
    def parcel(self, order: Annotated[str, "The order's number"]) -> str:
        """Locate the parcel.

        Raises:
            LookupError: There is no such order.
        """
        if order != "A-3007":
            raise LookupError(f"There is no order {order}.")
        return "Lyon"
