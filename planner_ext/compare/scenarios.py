"""The situations in which every option runs: a goal, a scripted model, and what a user is entitled to.

A model calls functions only if they are offered and allowed, and knows only their
results: so one script fits every option, with any number of round trips. If the removed
planner's final-answer function is offered, a model that has called functions passes its
answer to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, TypeAlias

from planner_ext.compare.report import ScriptInfo
from planner_ext.compare.trial import Ability
from planner_ext.core.values import frozen
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from planner_ext.testing.script import results_of

FINAL_ANSWER = "UserInteraction-SendFinalAnswer"
"""The function that takes the removed planner's answer."""

Model: TypeAlias = Callable[[ScriptedRequest], ScriptedReply]
"""Replies to a request; it remembers nothing."""


@frozen
class Scenario:
    """A situation.

    Attributes:
        functions: Those of the desk that are offered.
        streaming: Whether replies are streamed.
        reports: Whether replies carry metadata: the number of round trips, and of
            tokens.
        needs: What a loop must offer to run here, beyond a budget of round trips.
        limits: Those beside ``max_iterations``: fields of a `Budget`.
        vetoed: The function that must not run, or "".
        gated: The function that needs consent, given once, when the first process has
            ended, or "".
        kills_at: The function after whose effect the first process is killed, or
            ``request``: it is killed before it gets the second reply; or "".
        kills_before: Whether it is killed before that function's effect instead.
        stops_at: The function whose start makes the caller cancel the run, or "".
        cut: Whether the reply breaks off, and so is not an answer.
        delegates: Whether the model may hand a goal to a second run:
            ``helper-reach_goal``.
    """

    info: ScriptInfo
    model: Model
    functions: tuple[str, ...] = (
        "export_status",
        "stock",
        "customer",
        "order",
        "parcel",
    )
    streaming: bool = False
    reports: bool = True
    needs: Ability | None = None
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    vetoed: str = ""
    gated: str = ""
    kills_at: str = ""
    kills_before: bool = False
    stops_at: str = ""
    cut: bool = False
    delegates: bool = False

    @property
    def lives(self) -> int:
        """The number of processes that the run takes; in two, each function starts once."""
        return 2 if self.gated or self.kills_at else 1


def scenario(
    name: str,
    *,
    goal: str,
    entitled: str,
    source: str,
    short: str = "",
    about: str = "",
    answers: bool = True,
    **special: Any,
) -> Callable[[Model], Scenario]:
    """Make a situation of a scripted model.

    Args:
        name: Its name in tables; with hyphens for spaces, its key on the command line.
        goal: The goal given to the model.
        entitled: What a user is entitled to here, in a sentence.
        source: The promise's source: a title and an address.
        short: The head of a narrow column, in one or two lines.
        about: The behaviour of the model. Default: its docstring.
        answers: Whether a user is entitled to an answer.
        **special: Fields of `Scenario`.
    """

    def make(model: Model) -> Scenario:
        key = name.replace(" ", "-")
        info = ScriptInfo(
            key=key,
            name=name,
            short=short or name.replace(" ", "\n", 1),
            about=about or " ".join((model.__doc__ or "").split()),
            goal=goal,
            entitled=entitled,
            source=source,
            answers=answers,
        )
        return Scenario(info=info, model=model, **special)

    return make


_BUDGET = (
    "The run makes no more round trips than were allowed, and ends with an answer."
)
_ADR = "Semantic Kernel's ADR, Automatic Tool Calling Controls: https://github.com/microsoft/semantic-kernel/issues/4300"
_SK_ANSWER = "an answer after the last attempt: https://github.com/microsoft/semantic-kernel/issues/7175"
_SK_STREAM = (
    "the same for streams: https://github.com/microsoft/semantic-kernel/issues/13006"
)
_OPENAI = "OpenAI's API reference: https://platform.openai.com/docs/api-reference/chat"
_EXPORT = "Wait until the export E-7 is finished, then say so."
_SITES = ("Hamburg", "Lyon", "Turin")


@scenario(
    "never-ending",
    short="never-\nending",
    goal=_EXPORT,
    entitled=_BUDGET,
    source=f"{_ADR}; {_SK_ANSWER}",
)
def _never_ending(request: ScriptedRequest) -> ScriptedReply:
    """The model calls a function in every reply, as long as it is offered any."""
    if request.tools:
        return call("desk-export_status", {"export": "E-7"})
    return say("E-7 is not finished: it was still running when I last looked.")


@scenario(
    "batch of 3",
    short="batch\nof 3",
    goal="Count the lamps in Hamburg, Lyon and Turin until the count stays the same.",
    entitled=_BUDGET,
    source=_ADR,
)
def _batches(request: ScriptedRequest) -> ScriptedReply:
    """The model calls three functions in every reply, as long as it is offered any."""
    if request.tools:
        return calls(*(call("desk-stock", {"site": site}) for site in _SITES))
    return say("There were 11 lamps when I last counted.")


@scenario(
    "chain",
    goal="Where is Ann's parcel?",
    entitled="Four round trips are enough: three calls, and the answer.",
    source=f"{_ADR}, option 2: calls are chained rather than having a chat response in between each one",
)
def _chain(request: ScriptedRequest) -> ScriptedReply:
    """Three calls, each of which needs the result of the one before, then the answer: four round trips."""
    known = results_of(request)
    if "desk-parcel" in known:
        return finish(request, f"Ann's parcel is in {known['desk-parcel']}.")
    if not request.tools:
        return say(f"So far I know: {', '.join(known.values()) or 'nothing'}.")
    if "desk-order" in known:
        return call("desk-parcel", {"order": known["desk-order"]})
    if "desk-customer" in known:
        return call("desk-order", {"customer": known["desk-customer"]})
    return call("desk-customer", {"name": "Ann"})


@scenario(
    "direct answer",
    short="direct\nanswer",
    goal="Good morning!",
    entitled=_BUDGET,
    source=_ADR,
)
def _direct(_: ScriptedRequest) -> ScriptedReply:
    """The model answers at once and calls nothing."""
    return say("Good morning! What may I look up for you?")


@scenario(
    "function error",
    short="func.\nerror",
    goal="Where is the parcel of the order A-3070 (or so)?",
    entitled="The model reads the error and recovers from it within the budget.",
    source=_ADR,
)
def _mistaken(request: ScriptedRequest) -> ScriptedReply:
    """The first call fails; the model reads the error, calls again with another argument, and answers."""
    known = results_of(request)
    if known.get("desk-parcel") == "Lyon":
        return finish(request, "The parcel is in Lyon.")
    if not request.tools:
        return say("That order is not known; I would look for another number.")
    return call(
        "desk-parcel", {"order": "A-3007" if "desk-parcel" in known else "A-3070"}
    )


@scenario(
    "refusal",
    goal="Write me something that you may not write.",
    entitled="The caller gets the refusal as the answer, after one round trip.",
    source=_OPENAI,
)
def _refusing(_: ScriptedRequest) -> ScriptedReply:
    """The model refuses, in plain text."""
    return ScriptedReply(refusal="I can't help with that.")


_streaming = scenario(
    "streaming",
    short="stream-\ning",
    goal=_EXPORT,
    entitled=_BUDGET,
    source=f"{_ADR}; {_SK_STREAM}",
    streaming=True,
    about="The never-ending model, with every reply streamed.",
)(_never_ending.model)


_unreported = scenario(
    "absent metadata",
    short="absent\nmeta.",
    goal=_EXPORT,
    entitled=_BUDGET,
    source=_ADR,
    reports=False,
    about="The never-ending model behind a service that reports neither round trips nor tokens.",
)(_never_ending.model)


@scenario(
    "clarifying question",
    short="question",
    goal="Where is the parcel of my order?",
    entitled=_BUDGET,
    source=_ADR,
)
def _asking(_: ScriptedRequest) -> ScriptedReply:
    """Instead of calling a function the model asks the user something, in plain text."""
    return say("Which of the two orders do you mean: A-3007 or A-3008?")


@scenario(
    "unknown function",
    short="unknown\nname",
    goal="Where is the parcel of the order A-3007?",
    entitled="The call is answered with an error, the model calls again, and the history stays valid.",
    source=_OPENAI,
)
def _inventing(request: ScriptedRequest) -> ScriptedReply:
    """The first call names a function that does not exist; the model then calls one that does, and answers."""
    known = results_of(request)
    if "desk-parcel" in known:
        return finish(request, f"The parcel is in {known['desk-parcel']}.")
    if not request.tools:
        return say("I do not know.")
    return call("desk-parcel" if known else "desk-track", {"order": "A-3007"})


@scenario(
    "malformed arguments",
    short="mal-\nformed",
    goal="Where is the parcel of the order A-3007?",
    entitled="The call is answered with an error, the model calls again, and the history stays valid.",
    source="openai-agents, its test_no_error_on_invalid_json: "
    "https://github.com/openai/openai-agents-python/blob/main/tests/test_function_tool_decorator.py",
)
def _scribbling(request: ScriptedRequest) -> ScriptedReply:
    """The arguments of the first call are no JSON; the model then calls again, and answers."""
    known = results_of(request)
    if known.get("desk-parcel") == "Lyon":
        return finish(request, "The parcel is in Lyon.")
    if not request.tools:
        return say("I do not know.")
    return call("desk-parcel", {"order": "A-3007"} if known else '{"order": A-3007')


@scenario(
    "keeps failing",
    short="keeps\nfailing",
    goal="Where is the parcel of the order A-3070?",
    entitled="However often a function fails, the run makes no more round trips than allowed, and ends with an answer.",
    source="agent-framework, its test_function_invocation_config_max_consecutive_errors: https://github.com/microsoft/"
    "agent-framework/blob/main/python/packages/core/tests/core/test_function_invocation_logic.py",
)
def _insisting(request: ScriptedRequest) -> ScriptedReply:
    """The model calls a function that fails, as long as it is offered any."""
    if request.tools:
        return call("desk-parcel", {"order": "A-3070"})
    return say("I could not find the order A-3070.")


@scenario(
    "cut short",
    short="cut\nshort",
    goal="Report on the order A-3007, at length.",
    entitled="The caller can tell an answer that was cut from a whole one.",
    source=f"{_OPENAI}, finish_reason length",
    answers=False,
    cut=True,
)
def _cut(_: ScriptedRequest) -> ScriptedReply:
    """The reply breaks off because it reached the length limit of a reply."""
    return ScriptedReply(text="The order A-3007 was placed in", finish_reason="length")


@scenario(
    "asks a model inside",
    short="asks\ninside",
    goal="Ask for opinions on A-3007 until two of them agree.",
    entitled=f"{_BUDGET} Requests that functions make themselves cost as much, so they count.",
    source=f"{_ADR}: MaxIterations is there to control cost and time",
    functions=("opinion",),
)
def _opinions(request: ScriptedRequest) -> ScriptedReply:
    """The model calls, as long as it can, a function that itself makes a request."""
    if any(
        str(message.get("content")).startswith("Judge ") for message in request.messages
    ):
        return say("Fine.")
    return (
        call("desk-opinion", {"order": "A-3007"})
        if request.tools
        else say("No two of them agreed.")
    )


@scenario(
    "nested run",
    short="nested\nrun",
    goal="Have the stock counted in each town.",
    entitled=f"{_BUDGET} The round trips of a run inside the run count.",
    source=f"{_ADR}: MaxIterations is there to control cost and time",
    functions=("stock",),
    delegates=True,
)
def _delegating(request: ScriptedRequest) -> ScriptedReply:
    """The model hands the goal to a second run, again and again; in that one it calls a function, then answers."""
    if any(
        message.get("content") == "Count the lamps in Lyon."
        for message in request.messages
    ):
        counted = results_of(request) or "desk-stock" not in request.tools
        if counted:
            return say("Nine.")
        return call("desk-stock", {"site": "Lyon"})
    if "helper-reach_goal" in request.tools:
        return call("helper-reach_goal", {"goal": "Count the lamps in Lyon."})
    return say("Nine lamps in Lyon; I counted no further.")


_many_calls = scenario(
    "limit of calls",
    short="limit of\ncalls",
    goal="Count the lamps in Hamburg, Lyon and Turin.",
    entitled="With two function calls allowed, at most two start, also of a reply with three; there is an answer.",
    source="pydantic-ai, https://github.com/pydantic/pydantic-ai/issues/2593: requests alone do not bound the calls",
    needs="tool calls",
    limits={"max_tool_calls": 2},
    about="The model calls three functions in each reply, as long as it can.",
)(_batches.model)


_many_tokens = scenario(
    "limit of tokens",
    short="limit of\ntokens",
    goal=_EXPORT,
    entitled="Once 500 tokens are used up, no more than one request follows, which brings an answer.",
    source="pydantic-ai, UsageLimits.total_tokens_limit: https://ai.pydantic.dev/api/usage",
    needs="tokens",
    limits={"max_total_tokens": 500},
    about="The never-ending model.",
)(_never_ending.model)


_unreported_tokens = scenario(
    "tokens unreported",
    short="tokens\nunrep.",
    goal=_EXPORT,
    entitled="A limit of tokens holds by an estimate, or is refused, where none are reported. It is not ignored.",
    source="this package; pydantic-ai, total_tokens_limit, leaves it open: https://ai.pydantic.dev/api/usage",
    answers=False,
    needs="tokens",
    limits={"max_total_tokens": 500},
    reports=False,
    about="The never-ending model behind a service that reports no tokens.",
)(_never_ending.model)


@scenario(
    "limit of time",
    short="limit of\ntime",
    goal="Is the order A-3007 in order?",
    entitled="With half a second allowed, the run ends within that and one second more, whatever a function does.",
    source=f"{_ADR}: MaxIterations is there to control cost and time",
    functions=("audit",),
    answers=False,
    needs="time",
    limits={"max_active_seconds": 0.5},
)
def _slow(request: ScriptedRequest) -> ScriptedReply:
    """The model calls a function that takes three seconds."""
    return (
        call("desk-audit", {"order": "A-3007"})
        if request.tools
        else say("The audit did not end in time.")
    )


_repeating = scenario(
    "repeats itself",
    short="repeats\nitself",
    goal=_EXPORT,
    entitled="With two equal calls allowed, the third does not start; there is an answer.",
    source="LangGraph, https://github.com/langchain-ai/langgraph/issues/6731: it ends at the recursion limit only",
    needs="repeats",
    limits={"max_repeated_calls": 2},
    about="The never-ending model, whose calls are all the same.",
)(_never_ending.model)


@scenario(
    "veto",
    goal="Find the order of C-3, and tidy up.",
    entitled="A function that the caller forbids does not start; the others do, and the history stays valid.",
    source=f"{_ADR}, option 3: the callback is told which function is called, with which arguments",
    functions=("order", "delete"),
    needs="veto",
    vetoed="desk-delete",
)
def _deleting(request: ScriptedRequest) -> ScriptedReply:
    """The model calls a harmless function and one that may not run, in one reply, then answers."""
    known = results_of(request)
    if not known and request.tools:
        return calls(
            call("desk-order", {"customer": "C-3"}),
            call("desk-delete", {"order": "A-3007"}),
        )
    return finish(request, f"The order is {known.get('desk-order', 'unknown')}.")


@scenario(
    "approval",
    goal="Refund the order A-3007.",
    entitled="The function does not start before a person agrees; another process then continues, and it starts once.",
    source="openai-agents, https://github.com/openai/openai-agents-python/issues/636: pause, save, decide, resume",
    functions=("order", "refund"),
    needs="approval",
    gated="desk-refund",
)
def _refunding(request: ScriptedRequest) -> ScriptedReply:
    """The model calls a function that needs a person's consent; the process ends before it is given."""
    known = results_of(request)
    if "desk-refund" in known:
        return finish(request, "The order A-3007 is refunded.")
    if not request.tools:
        return say("Nothing was refunded.")
    return (
        call("desk-refund", {"order": "A-3007"})
        if known
        else call("desk-order", {"customer": "C-3"})
    )


@scenario(
    "approval in a batch",
    short="approval\nin batch",
    goal="Find the order of C-3, and refund A-3007.",
    entitled="Of two calls in a reply one needs consent: it does not start before, and both start once.",
    source="LangGraph, its test_react_agent_parallel_tool_calls: "
    "https://github.com/langchain-ai/langgraph/blob/main/libs/prebuilt/tests/test_react_agent.py",
    functions=("order", "refund"),
    needs="approval",
    gated="desk-refund",
)
def _mixing(request: ScriptedRequest) -> ScriptedReply:
    """The model makes two calls in one reply, of which one needs a person's consent, then answers."""
    known = results_of(request)
    if {"desk-order", "desk-refund"} <= known.keys():
        return finish(request, "The order A-3007 is refunded.")
    if not request.tools:
        return say("Nothing was refunded.")
    return calls(
        call("desk-order", {"customer": "C-3"}),
        call("desk-refund", {"order": "A-3007"}),
    )


@scenario(
    "approval of a misfit",
    short="approval\nmisfit",
    goal="Refund the order A-3007.",
    entitled="No person is asked about a call whose arguments do not fit: the model corrects it, and that call waits.",
    source="pydantic-ai, its test_unapproved_tool_invalid_args_retry: "
    "https://github.com/pydantic/pydantic-ai/blob/main/tests/test_tools.py",
    functions=("refund",),
    needs="approval",
    gated="desk-refund",
)
def _misfitting(request: ScriptedRequest) -> ScriptedReply:
    """The first call lacks an argument; the corrected one needs a person's consent, who is asked once."""
    known = results_of(request)
    if "done" in known.get("desk-refund", ""):
        return finish(request, "The order A-3007 is refunded.")
    if not request.tools:
        return say("Nothing was refunded.")
    return call("desk-refund", {"order" if known else "number": "A-3007"})


_crashing = scenario(
    "crash",
    goal="Refund the order A-3007.",
    entitled="The refund is made once, although the process was killed before its result was recorded; the run ends.",
    source="LangGraph, Durable execution, which asks functions to be idempotent for it: "
    "https://docs.langchain.com/oss/python/langgraph/durable-execution",
    functions=("order", "refund"),
    needs="recovery",
    kills_at="desk-refund",
    about="The process is killed after a function took effect, before its result is recorded; another one continues.",
)(_refunding.model)


_crashing_before = scenario(
    "crash before a call",
    short="crash\nbefore",
    goal="Refund the order A-3007.",
    entitled="The refund is made once: the process was killed as the call began, before it took effect; the run ends.",
    source="DBOS, Steps, which promises that a step runs at least once: "
    "https://docs.dbos.dev/python/tutorials/step-tutorial",
    functions=("order", "refund"),
    needs="recovery",
    kills_at="desk-refund",
    kills_before=True,
    about="The process is killed as a function begins, before it takes effect; another one continues.",
)(_refunding.model)


_crashing_asking = scenario(
    "crash in a request",
    short="crash in\nrequest",
    goal="Refund the order A-3007.",
    entitled="The request is made again, and no function that has run; the refund is made once, and the run ends.",
    source="Temporal, Activities, which are retried, while workflows continue: https://docs.temporal.io/activities",
    functions=("order", "refund"),
    needs="recovery",
    kills_at="request",
    about="The process is killed while it waits for the second reply; another one continues.",
)(_refunding.model)


_cancelled = scenario(
    "cancelled",
    short="can-\ncelled",
    goal="Is the order A-3007 in order?",
    entitled="After a cancellation nothing more is asked or started, and the history that is left can be continued.",
    source="openai-agents, https://github.com/openai/openai-agents-python/issues/1895: a cancelled turn is lost",
    functions=("audit",),
    answers=False,
    stops_at="desk-audit",
    about="The caller cancels the run while a function runs.",
)(_slow.model)


def finish(request: ScriptedRequest, answer: str) -> ScriptedReply:
    """Answer by the final-answer function if it is offered, else by text."""
    return (
        call(FINAL_ANSWER, {"answer": answer})
        if FINAL_ANSWER in request.tools
        else say(answer)
    )


SCRIPTS: dict[str, Scenario] = {
    one.info.key: one for one in tuple(vars().values()) if isinstance(one, Scenario)
}
"""The scenarios by key, as they are shown."""
