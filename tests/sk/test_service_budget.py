"""How far a run of the service goes: behaviours, budgets, and connectors that report round trips of their own."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
)
from semantic_kernel.exceptions import KernelException

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
)
from planner_ext.engine.concurrency import StopHandle
from planner_ext.errors import LimitReachedError, PlannerInvalidConfigurationError
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.served import Answer, Served, Tools, question
from support.stock import first_result, scripted_by
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]

ADD = call("t-add", {"a": 1, "b": 2})
AUTO = FunctionChoiceBehavior.Auto
BOUNDED = BoundedFunctionChoiceBehavior


def eager(request: ScriptedRequest) -> ScriptedReply:
    """A model that calls a function whenever it may."""
    return ADD if request.tools and request.tool_choice != "none" else say("Enough.")


def stubborn(request: ScriptedRequest) -> ScriptedReply:
    """A model that calls a function even when it may not."""
    return ADD


async def test_the_stock_behaviour_takes_five_rounds_and_answers(
    ask: Ask, serve: Serve
) -> None:
    """Stock ``Auto()``: 5 tool rounds, then one request without functions that answers, streamed too."""
    served = serve(eager)
    answer = await ask(FunctionInvokingChatCompletion(served.connector))
    assert [len(request.tools) for request in served.server.requests] == [
        4,
        4,
        4,
        4,
        4,
        0,
    ]
    told = {
        key: answer.metadata[key]
        for key in ("iterations", "tool_calls", "status", "limit")
    }
    assert told == {
        "iterations": 6,
        "tool_calls": 5,
        "status": "limit_reached",
        "limit": "maximum_auto_invoke_attempts",
    }
    assert (answer.text, served.server.refused) == ("Enough.", [])


@each_of("attempts", [1, 2, 7])
async def test_attempts_are_tool_rounds(ask: Ask, serve: Serve, attempts: int) -> None:
    """With k attempts there are k tool rounds and at most k + 1 round trips; the last has no functions."""
    served = serve(eager)
    answer = await ask(
        FunctionInvokingChatCompletion(served.connector),
        BOUNDED.Auto(maximum_use_attempts=attempts),
        to=question(),
    )
    offered = [bool(request.tools) for request in served.server.requests]
    assert offered == [True] * attempts + [False]
    assert answer.text == "Enough."
    assert answer.metadata["limit"] == "maximum_use_attempts"


async def test_attempts_that_were_not_needed_reach_no_limit(ask: Ask) -> None:
    """A model that answers within its attempts ends answered."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("Three.")])
    )
    answer = await ask(service, BOUNDED.Auto(maximum_use_attempts=2))
    assert answer.metadata["status"] == "answered"
    assert answer.metadata["limit"] is None


async def test_an_unbounded_behaviour_is_bounded_by_the_model_alone(ask: Ask) -> None:
    """``Auto(maximum_use_attempts=None)`` continues for as long as the model calls: more than the stock 5."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([*[ADD] * 9, say("Three.")])
    )
    answer = await ask(service, BOUNDED.Auto(maximum_use_attempts=None))
    assert answer.text == "Three."
    assert answer.metadata["iterations"] == 10
    assert answer.metadata["status"] == "answered"


@each_of(
    "required",
    [
        BOUNDED.Required(maximum_use_attempts=3),
        FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=3),
    ],
    ids=["bounded", "stock"],
)
async def test_required_forces_each_of_its_attempts(
    ask: Ask, serve: Serve, required: FunctionChoiceBehavior
) -> None:
    """``Required`` with k attempts forces a call in each of k rounds, then asks for the answer; that is not a limit."""
    served = serve(eager)
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service, required, to=question())
    assert [request.tool_choice for request in served.server.requests] == [
        "required"
    ] * 3 + [None]
    assert answer.text == "Enough."
    assert answer.metadata["status"] == "answered"
    assert answer.metadata["limit"] is None


@each_of("trips", [1, 2, 3])
async def test_the_last_trip_answers(ask: Ask, serve: Serve, trips: int) -> None:
    """N iterations are exactly N requests, of which the last offers no functions and gives the answer; N = 1 too."""
    tools = Tools()
    served = serve(eager)
    service = FunctionInvokingChatCompletion(
        served.connector, budget=Budget(max_iterations=trips)
    )
    answer = await ask(service, BOUNDED.Auto(), to=question(), kernel=tools.kernel())
    assert [bool(request.tools) for request in served.server.requests] == [True] * (
        trips - 1
    ) + [False]
    assert answer.text == "Enough."
    assert answer.metadata["status"] == "limit_reached"
    assert answer.metadata["limit"] == "max_iterations"
    assert answer.metadata["iterations"] == trips
    assert len(tools.seen) == trips - 1


async def test_a_kernel_without_functions_reaches_no_limit(ask: Ask) -> None:
    """Where there was nothing to withhold, the only trip's answer is an answer."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([say("Hello.")]), budget=Budget(max_iterations=1)
    )
    assert (await ask(service, kernel=Kernel())).metadata["status"] == "answered"


@each_of("trips", [1, 2])
async def test_under_stop_every_trip_offers_functions(
    ask: Ask, resend: Any, trips: int
) -> None:
    """``on_limit="stop"`` reserves no trip: N requests with functions, the last calls answered "not executed"."""
    tools = Tools()
    history = question()
    inner = ScriptedChatCompletion(stubborn)
    service = FunctionInvokingChatCompletion(
        inner, budget=Budget(max_iterations=trips, on_limit="stop")
    )
    answer = await ask(service, BOUNDED.Auto(), to=history, kernel=tools.kernel())
    assert [bool(request.tools) for request in inner.requests] == [True] * trips
    assert answer.text == ""
    assert answer.calls == []
    assert answer.metadata["status"] == "limit_reached"
    assert answer.metadata["limit"] == "max_iterations"
    assert len(tools.seen) == trips - 1
    assert "Not executed" in str(first_result(history.messages[-1]).result)
    history.add_message(answer.message)
    history.add_user_message("Go on.")
    await resend(history)


async def test_under_raise_the_error_has_everything(
    ask: Ask, tools: Tools, resend: Any, history: ChatHistory
) -> None:
    """``on_limit="raise"``: the error carries history, usage, limit and checkpoint, and the history is in order."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(stubborn),
        budget=Budget(max_iterations=2, on_limit="raise"),
    )
    with pytest.raises(LimitReachedError, match="max_iterations=2") as raised:
        await ask(service, BOUNDED.Auto())
    error = raised.value
    assert isinstance(error, KernelException)
    assert error.status == "limit_reached"
    assert error.limit == "max_iterations"
    assert error.iterations == 2
    assert error.tool_calls == 1
    assert error.usage is not None and error.usage.prompt_tokens > 0
    assert (
        error.checkpoint is not None and error.checkpoint.state().usage.iterations == 2
    )
    assert error.chat_history is not None
    assert [m.role for m in error.chat_history.messages] == [
        m.role for m in history.messages
    ]
    await resend(history)


async def test_too_many_calls_raise_the_words_of_the_proposal(ask: Ask) -> None:
    """The error at ``max_tool_calls`` says "Max number of tool call reached"."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(stubborn),
        budget=Budget(max_tool_calls=1, on_limit="raise"),
    )
    with pytest.raises(LimitReachedError, match=r"^Max number of tool call reached"):
        await ask(service)


@each_of(
    ("budget", "limit"),
    [
        ({"max_iterations": 1}, "max_iterations"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ],
)
async def test_calls_can_be_returned_at_a_limit(
    ask: Ask,
    resend: Any,
    budget: dict[str, Any],
    limit: str,
) -> None:
    """``on_limit="return_calls"``: the returned message has text and calls once each, and waits for their results."""
    tools = Tools()
    history = question()
    reply = calls(call("t-echo", {"text": "a"}), ADD, text="Two things.")
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([reply]),
        budget=Budget(**budget, on_limit="return_calls"),
    )
    answer = await ask(service, to=history, kernel=tools.kernel())
    assert answer.metadata["status"] == "limit_reached"
    assert answer.metadata["limit"] == limit
    assert answer.calls == [("t-echo", '{"text":"a"}'), ("t-add", '{"a":1,"b":2}')]
    assert tools.seen == []
    assert len(history.messages) == 1
    history.add_message(answer.message)
    for item in answer.message.items:
        if isinstance(item, FunctionCallContent):
            result = FunctionResultContent(id=item.id, name=item.name, result="by hand")
            history.add_message(
                ChatMessageContent(role=AuthorRole.TOOL, items=[result])
            )
    await resend(history)
    assert answer.text == "Two things."


@each_of("choice", ["withdraw", "none"])
async def test_the_last_trip_may_keep_the_schema(
    ask: Ask, serve: Serve, choice: Any
) -> None:
    """``last_trip="none"`` sends the functions with tool choice none; ``withdraw`` leaves both out."""
    served = serve(eager)
    service = FunctionInvokingChatCompletion(
        served.connector, budget=Budget(max_iterations=2, last_trip=choice)
    )
    answer = await ask(service, to=question())
    last = served.server.requests[-1]
    assert bool(last.tools) == (choice == "none")
    assert last.tool_choice == ("none" if choice == "none" else None)
    assert answer.text == "Enough."
    assert answer.metadata["limit"] == "max_iterations"
    assert served.server.refused == []


@each_of(
    ("budget", "ran", "limit"),
    [
        (Budget(max_tool_calls=3), 3, None),
        (Budget(max_tool_calls=2), 0, "max_tool_calls"),
        (
            Budget(max_tool_calls=2, batch_over_limit="fill_remaining"),
            2,
            "max_tool_calls",
        ),
        (
            Budget(max_tool_calls=0, batch_over_limit="fill_remaining"),
            0,
            "max_tool_calls",
        ),
        (Budget(max_calls_per_function={"t-echo": 1}), 1, "max_calls_per_function"),
        (Budget(max_repeated_calls=1), 3, None),
    ],
    ids=["fits", "reject", "fill", "none", "per-function", "no-repeat"],
)
async def test_a_batch_counts_as_it_is(
    ask: Ask,
    budget: Budget,
    ran: int,
    limit: str | None,
) -> None:
    """A batch of 3 is 3 calls: never one over runs, and the others are answered "Not executed" in their places."""
    tools = Tools()
    history = question()
    three = calls(*(call("t-echo", {"text": text}) for text in "abc"))
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([three, say("Done.")]), budget=budget
    )
    answer = await ask(service, to=history, kernel=tools.kernel())
    assert sorted(tools.seen) == list("abc")[:ran]
    assert answer.metadata["tool_calls"] == ran
    assert answer.text == "Done."
    assert answer.metadata["limit"] == limit
    results = [str(first_result(message).result) for message in history.messages[2:]]
    assert results[:ran] == list("abc")[:ran]
    assert len(results) == 3 and all(
        result.startswith("Not executed") for result in results[ran:]
    )


async def test_uninvited_calls_are_dropped(
    ask: Ask, tools: Tools, resend: Any, history: ChatHistory
) -> None:
    """A model that calls although functions were withdrawn is not obeyed, and the message is safe to add."""
    inner = ScriptedChatCompletion(lambda request: calls(ADD, text="I insist."))
    answer = await ask(
        FunctionInvokingChatCompletion(inner, budget=Budget(max_iterations=1))
    )
    assert (answer.text, tools.seen) == ("I insist.", [])
    history.add_message(answer.message)
    await resend(history)


@each_of(
    ("budget", "limit"),
    [
        ({"max_total_tokens": 1}, "max_total_tokens"),
        ({"max_consecutive_errors": 1}, "max_consecutive_errors"),
        ({"max_repeated_calls": 2}, "max_repeated_calls"),
    ],
)
async def test_the_first_limit_that_is_reached_names_the_end(
    ask: Ask, budget: dict[str, Any], limit: str
) -> None:
    """Other limits also withdraw the functions, and are named."""
    fails = lambda request: call("t-fail") if request.tools else say("Enough.")  # noqa: E731  (shorter than a function)
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(fails), budget=Budget(**budget)
    )
    answer = await ask(service, BOUNDED.Auto(), to=question())
    assert answer.text == "Enough."
    assert answer.metadata["status"] == "limit_reached"
    assert answer.metadata["limit"] == limit


async def test_no_request_follows_a_deadline_that_has_passed(ask: Ask) -> None:
    """Time that is over leaves none for a forced answer: the run ends by the limit's name, and nothing is sent."""
    inner = ScriptedChatCompletion([say("Never sent.")])
    service = FunctionInvokingChatCompletion(
        inner, budget=Budget(deadline=datetime(2020, 1, 1, tzinfo=UTC))
    )
    answer = await ask(service, BOUNDED.Auto())
    assert answer.text == ""
    assert answer.metadata["status"] == "limit_reached"
    assert answer.metadata["limit"] == "deadline"
    assert inner.requests == []


async def test_a_budget_that_names_no_function_is_refused(ask: Ask) -> None:
    """A misspelt function in ``max_calls_per_function`` would guard nothing: it is refused before any request."""
    inner = ScriptedChatCompletion([say("Never sent.")])
    service = FunctionInvokingChatCompletion(
        inner, budget=Budget(max_calls_per_function={"t-ad": 1})
    )
    with pytest.raises(
        PlannerInvalidConfigurationError, match="max_calls_per_function names t-ad"
    ):
        await ask(service)
    assert inner.requests == []


REPORTED = [
    ({"iterations": 3}, 3),
    ({"Iterations": 3}, 3),
    ({}, 1),
    ({"iterations": True}, 1),
    ({"iterations": "3"}, 1),
    ({"iterations": 2.0}, 1),
    ({"iterations": 0}, 1),
    ({"iterations": -2}, 1),
    ({"iterations": None, "Iterations": 2}, 2),
]


@each_of(("metadata", "charged"), REPORTED, ids=[repr(told) for told, _ in REPORTED])
async def test_what_a_connector_reports_is_charged(
    ask: Ask, metadata: Mapping[str, object], charged: int
) -> None:
    """Each reply is charged the round trips that it reports; 1 where it reports none, or nonsense."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("3")], metadata=metadata)
    )
    answer = await ask(service, to=question())
    assert answer.metadata["iterations"] == 2 * charged


async def test_a_connector_that_overspends_ends_the_run(ask: Ask) -> None:
    """Where a reply reports more trips than were left, no further request is made: limit_reached, with its text."""
    inner = ScriptedChatCompletion(
        [calls(ADD, text="So far."), say("Never sent.")], metadata={"iterations": 5}
    )
    service = FunctionInvokingChatCompletion(inner, budget=Budget(max_iterations=3))
    answer = await ask(service, BOUNDED.Auto())
    assert len(inner.requests) == 1
    assert answer.metadata["iterations"] == 5
    assert answer.metadata["status"] == "limit_reached"
    assert answer.metadata["limit"] == "max_iterations"


async def test_calls_that_a_foreign_stream_ran_itself_do_not_run_again(
    tools: Tools, kernel: Kernel, history: ChatHistory
) -> None:
    """A foreign service that loops by itself streams calls, results and answer: nothing of it runs a second time."""
    stock = ScriptedChatCompletion([ADD, say("Three."), say("Three again.")])

    class Looping(ScriptedChatCompletion):
        async def get_streaming_chat_message_contents(
            self, chat_history: Any, settings: Any, **kwargs: Any
        ) -> Any:
            own = self.get_prompt_execution_settings_class()(
                function_choice_behavior=AUTO()
            )
            stream = stock.get_streaming_chat_message_contents(
                ChatHistory(messages=[*chat_history]), own, **kwargs
            )
            async for chunks in stream:
                for chunk in chunks:
                    chunk.metadata = {**chunk.metadata, "iterations": 2}
                yield chunks

    settings = stock.get_prompt_execution_settings_class()(
        function_choice_behavior=AUTO()
    )
    service = FunctionInvokingChatCompletion(scripted_by(Looping, []))
    stream = service.get_streaming_chat_message_contents(
        history, settings, kernel=kernel
    )
    chunks: list[StreamingChatMessageContent] = [
        chunk async for group in stream for chunk in group
    ]
    assert tools.seen == [(1, 2)]
    assert (chunks[-1].metadata["iterations"], chunks[-1].metadata["status"]) == (
        2,
        "answered",
    )


async def test_a_stop_before_the_start_sends_nothing(ask: Ask) -> None:
    """A stop handle that was used already: no request, an empty message, status stopped."""
    stop = StopHandle()
    stop.stop("Changed my mind.")
    inner = ScriptedChatCompletion([say("Never sent.")])
    answer = await ask(FunctionInvokingChatCompletion(inner), stop=stop)
    assert answer.text == ""
    assert answer.metadata["status"] == "stopped"
    assert inner.requests == []


async def test_the_behaviours_callback_may_refuse_a_call(
    ask: Ask, tools: Tools
) -> None:
    """``pre_invoke_callback`` is asked with the 1-based trip, name and arguments before a call runs; False refuses."""
    asked: list[tuple[int, str, Any]] = []

    def gate(trip: int, name: str, arguments: Mapping[str, Any]) -> bool:
        asked.append((trip, name, dict(arguments)))
        return False

    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("Then not.")])
    )
    answer = await ask(service, BOUNDED.Auto(pre_invoke_callback=gate))
    assert asked == [(1, "t-add", {"a": 1, "b": 2})]
    assert answer.text == "Then not."
    assert tools.seen == []
    assert answer.metadata["tool_calls"] == 0
