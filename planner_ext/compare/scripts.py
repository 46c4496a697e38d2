"""The situations that every option is put in: a goal, what the scripted model does about it, and what is special.

A scripted model reads what it is sent: it calls functions only where they are offered, and takes what it knows from
their results. So one script fits every option, however many round trips that makes. Where the final-answer function of
the removed planner is offered, a model that has worked hands its answer over with it; one that only talks, talks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from planner_ext.compare.comparison import ScriptInfo
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say

__all__ = ["FINAL_ANSWER", "SCRIPTS", "Model", "Script"]

FINAL_ANSWER = "UserInteraction-SendFinalAnswer"
"""The function by which the removed planner takes its answer."""

Model: TypeAlias = Callable[[ScriptedRequest], ScriptedReply]
"""What the model says to a request; it remembers nothing but what the request tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A situation.

    Attributes:
        info: What it is called, and what the model is asked.
        model: What it says.
        streaming: Whether replies are streamed.
        reports: Whether replies carry metadata: how many round trips they took, and how many tokens.
    """

    info: ScriptInfo
    model: Model
    streaming: bool = False
    reports: bool = True


def _never_ending(request: ScriptedRequest) -> ScriptedReply:
    if request.tools:
        return call("desk-export_status", {"export": "E-7"})
    return say("E-7 is not finished: it was still running when I last looked.")


def _batches(request: ScriptedRequest) -> ScriptedReply:
    if request.tools:
        return calls(*(call("desk-stock", {"site": site}) for site in ("Hamburg", "Lyon", "Turin")))
    return say("There were 11 lamps when I last counted.")


def _chain(request: ScriptedRequest) -> ScriptedReply:
    known = _results(request)
    if "desk-parcel" in known:
        return _finish(request, f"Ann's parcel is in {known['desk-parcel']}.")
    if not request.tools:
        return say(f"So far I know: {', '.join(known.values()) or 'nothing'}.")
    if "desk-order" in known:
        return call("desk-parcel", {"order": known["desk-order"]})
    if "desk-customer" in known:
        return call("desk-order", {"customer": known["desk-customer"]})
    return call("desk-customer", {"name": "Ann"})


def _mistaken(request: ScriptedRequest) -> ScriptedReply:
    known = _results(request)
    if known.get("desk-parcel") == "Lyon":
        return _finish(request, "The parcel is in Lyon.")
    if not request.tools:
        return say("That order is not known; I would look for another number.")
    return call("desk-parcel", {"order": "A-3007" if "desk-parcel" in known else "A-3070"})


def _direct(_: ScriptedRequest) -> ScriptedReply:
    return say("Good morning! What may I look up for you?")


def _refusing(_: ScriptedRequest) -> ScriptedReply:
    return ScriptedReply(refusal="I can't help with that.")


def _asking(_: ScriptedRequest) -> ScriptedReply:
    return say("Which of the two orders do you mean: A-3007 or A-3008?")


def _finish(request: ScriptedRequest, answer: str) -> ScriptedReply:
    return call(FINAL_ANSWER, {"answer": answer}) if FINAL_ANSWER in request.tools else say(answer)


def _results(request: ScriptedRequest) -> dict[str, str]:
    """Read the functions' results out of the messages, by function; of two, the later one."""
    names: dict[str, str] = {}
    results: dict[str, str] = {}
    for message in cast("list[dict[str, Any]]", request.messages):
        for made in message.get("tool_calls") or ():
            names[made["id"]] = made["function"]["name"]
        if message["role"] == "tool":
            results[names[message["tool_call_id"]]] = str(message["content"])
    return results


def _script(name: str, short: str, model: Model, goal: str, about: str, **special: bool) -> Script:
    info = ScriptInfo(key=name.replace(" ", "-"), name=name, short=short, about=about, goal=goal)
    return Script(info=info, model=model, **special)


_EXPORT = "Wait until the export E-7 is finished, then say so."

_ALL: Iterable[Script] = (
    _script(
        "never-ending",
        "never-\nending",
        _never_ending,
        _EXPORT,
        "The model calls a function in every reply, as long as it is offered any.",
    ),
    _script(
        "batch of 3",
        "batch\nof 3",
        _batches,
        "Count the lamps in Hamburg, Lyon and Turin until the count stays the same.",
        "The model calls three functions in every reply, as long as it is offered any.",
    ),
    _script(
        "chain",
        "chain",
        _chain,
        "Where is Ann's parcel?",
        "Three calls, each of which needs the result of the one before, then the answer: four round trips.",
    ),
    _script(
        "direct answer", "direct\nanswer", _direct, "Good morning!", "The model answers at once and calls nothing."
    ),
    _script(
        "function error",
        "func.\nerror",
        _mistaken,
        "Where is the parcel of the order A-3070 (or so)?",
        "The first call fails; the model reads the error, calls again with another argument, and answers.",
    ),
    _script(
        "refusal",
        "refusal",
        _refusing,
        "Write me something that you may not write.",
        "The model refuses, in plain text.",
    ),
    _script(
        "streaming",
        "stream-\ning",
        _never_ending,
        _EXPORT,
        "The never-ending model, with every reply streamed.",
        streaming=True,
    ),
    _script(
        "absent metadata",
        "absent\nmeta.",
        _never_ending,
        _EXPORT,
        "The never-ending model behind a service that reports neither round trips nor tokens.",
        reports=False,
    ),
    _script(
        "clarifying question",
        "question",
        _asking,
        "Where is the parcel of my order?",
        "Instead of calling a function the model asks the user something, in plain text.",
    ),
)

SCRIPTS: dict[str, Script] = {script.info.key: script for script in _ALL}
"""By key, in the order in which they are shown."""
