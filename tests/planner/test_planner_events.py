"""What a run tells while it happens: the same facts plain and streamed, text as it comes, and the result last."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from semantic_kernel.contents import ChatMessageContent

from planner_ext import Budget
from planner_ext.errors import LimitReachedError
from planner_ext.events import (
    Ended,
    Fact,
    ModelReplied,
    Planned,
    ResultReady,
    Resumed,
    TextDelta,
)
from planner_ext.testing import ScriptedReply, call, calls, say
from support.narrow import as_type
from support.planner import (
    ADD,
    PLAN,
    Math,
    both_ways,
    drained,
    final,
    invoke,
    never_stops,
    openai_kernel,
    planner_with,
    result_in,
    resume,
    scripted,
)

EVENTFUL: list[ScriptedReply] = [
    PLAN,
    calls(ADD, call("math-add", {"a": 30, "b": 40}), text="Both at once."),
    calls(call("math-fail"), call("math-nothing"), call("math-add", "{not json")),
    calls(ADD, final()),
]
"""A run in which everything happens that can happen to a call."""

OF_THE_RUN = {"at", "seconds", "run_id", "fingerprint"}


def essence(value: Any) -> Any:
    """Reduce a message to what it says; connectors add more to it, and differently when they stream."""
    if isinstance(value, ChatMessageContent):
        return value.role, value.to_dict()
    if isinstance(value, tuple):
        return tuple(essence(item) for item in value)
    return value


def comparable(facts: Sequence[Fact]) -> list[tuple[str, dict[str, Any]]]:
    """List facts without what differs from run to run."""
    return [
        (
            fact.type,
            {
                item.name: essence(getattr(fact, item.name))
                for item in fields(fact)
                if item.name not in OF_THE_RUN
            },
        )
        for fact in facts
    ]


async def test_plain_and_streamed_runs_record_the_same_facts() -> None:
    """Kind by kind and field by field, but for time and ids, a streamed run's facts are a plain run's."""
    runs = []
    for streamed in (False, True):
        async with openai_kernel(EVENTFUL) as (kernel, _):
            runs.append(
                await invoke(
                    planner_with(budget=Budget(max_tool_calls=9)),
                    kernel,
                    streamed=streamed,
                )
            )
    plain, stream = (comparable(run.facts) for run in runs)

    assert [kind for kind, _ in stream] == [kind for kind, _ in plain]
    for one, other in zip(plain, stream, strict=True):
        assert one == other
    assert Counter(kind for kind, _ in plain) == {
        "RunStarted": 1,
        "Planned": 1,
        "ModelReplied": 3,
        "CallDecided": 7,
        "CallStarted": 3,
        "CallFinished": 3,
        "CallsWithheld": 1,
        "IterationCompleted": 3,
        "Ended": 1,
    }


async def test_the_results_of_plain_and_streamed_runs_are_the_same() -> None:
    """Answer, history and usage do not depend on how the requests were made."""
    results = []
    for streamed in (False, True):
        async with openai_kernel(EVENTFUL) as (kernel, _):
            results.append(await invoke(planner_with(), kernel, streamed=streamed))
    plain, stream = results

    for name in (
        "status",
        "final_answer",
        "iterations",
        "tool_calls",
        "limit",
        "reason",
        "plan",
    ):
        assert getattr(plain, name) == getattr(stream, name)
    assert plain.usage.total_tokens == stream.usage.total_tokens
    assert plain.chat_history is not None
    assert stream.chat_history is not None
    assert [m.to_dict() for m in plain.chat_history.messages] == [
        m.to_dict() for m in stream.chat_history.messages
    ]


async def test_a_stream_tells_every_fact_in_order_and_the_result_last() -> None:
    """The facts of a stream are those of the result's journal; the last event, and only that, carries the result."""
    kernel, _ = scripted(EVENTFUL)
    events = await drained(planner_with().invoke_stream(kernel, "goal"))

    *before, last = events
    assert isinstance(last, ResultReady)
    assert last.result.status == "answered"
    assert not any(isinstance(event, ResultReady) for event in before)
    told = [event for event in before if not isinstance(event, TextDelta)]
    assert told == list(last.result.facts)


async def test_text_comes_in_order_before_the_reply_it_is_part_of() -> None:
    """The deltas of a trip are the text of its reply, in pieces, in order; the plan's come as trip -1."""
    kernel, _ = scripted(
        [
            say("1. Add, carefully and slowly."),
            calls(ADD, text="I will add."),
            say("It is 3."),
        ]
    )
    events = await drained(planner_with().invoke_stream(kernel, "goal"))

    pieces: dict[int, str] = {}
    for event in events:
        match event:
            case TextDelta(text=text, iteration=iteration):
                assert text
                pieces[iteration] = pieces.get(iteration, "") + text
            case Planned(plan=plan):
                assert pieces == {-1: plan}
            case ModelReplied(iteration=iteration, text=text):
                assert max(pieces) == iteration
                assert pieces[iteration] == text
            case _:
                pass
    assert pieces == {
        -1: "1. Add, carefully and slowly.",
        0: "I will add.",
        1: "It is 3.",
    }
    assert len([event for event in events if isinstance(event, TextDelta)]) > 3


async def test_a_stream_that_ends_at_a_raising_limit_tells_that_it_ended_first() -> (
    None
):
    """Under on_limit="raise" the stream tells the end as a fact, then raises; no result comes."""
    kernel, _ = scripted(never_stops)
    stream = planner_with(
        max_iterations=2, budget=Budget(on_limit="raise")
    ).invoke_stream(kernel, "goal")
    events = []
    with pytest.raises(LimitReachedError):
        async for event in stream:
            events.append(event)

    assert isinstance(events[-1], Ended)


async def test_a_resumed_stream_tells_only_what_is_new() -> None:
    """resume_stream begins with the fact that the run was resumed; the result's journal has all facts."""
    kernel, _ = scripted(never_stops)
    ended = await planner_with(max_iterations=2).invoke(kernel, "goal")
    kernel, _ = scripted([final()])
    events = await drained(
        planner_with().resume_stream(
            kernel, ended.checkpoint, budget=Budget(max_iterations=9)
        )
    )

    told = [event for event in events[:-1] if not isinstance(event, TextDelta)]
    assert as_type(Resumed, told[0]).type == "Resumed"
    assert list(result_in(events).facts) == [*ended.facts, *told]


@both_ways
async def test_observers_get_every_fact(streamed: bool) -> None:
    """Sync and async observers get each fact of the journal, in order, after it was recorded."""
    told: list[Fact] = []
    told_async: list[Fact] = []

    async def watch(fact: Fact) -> None:
        told_async.append(fact)

    kernel, _ = scripted(EVENTFUL)
    result = await invoke(
        planner_with(observers=[told.append, watch]), kernel, streamed=streamed
    )

    assert told == told_async == list(result.facts)


@both_ways
async def test_an_observer_that_fails_changes_nothing(
    streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What an observer raises is logged with its name; the run and the other observers continue."""
    told: list[Fact] = []

    def broken_observer(fact: Fact) -> None:
        raise RuntimeError("no disk left")

    async def broken_later(fact: Fact) -> None:
        raise RuntimeError("no network left")

    kernel, _ = scripted(EVENTFUL)
    planner = planner_with(observers=[broken_observer, broken_later, told.append])
    result = await invoke(planner, kernel, streamed=streamed)

    assert result.status == "answered"
    assert told == list(result.facts)
    assert "broken_observer" in caplog.text
    assert "broken_later" in caplog.text


@both_ways
async def test_the_journal_says_who_was_called_and_how_it_ended(streamed: bool) -> None:
    """Facts name function, outcome and error; the error's text is in the journal and not in what the model reads."""
    math = Math()
    async with openai_kernel([PLAN, call("math-fail"), final()], math=math) as (
        kernel,
        server,
    ):
        result = await invoke(planner_with(), kernel, streamed=streamed)
        read = str(server.requests[-1].messages[-1]["content"])

    (finished,) = [fact for fact in result.facts if fact.type == "CallFinished"]
    assert (finished.function, finished.outcome) == ("math-fail", "failed")
    assert "db7" in finished.error
    assert "db7" not in read


@both_ways
async def test_a_resumed_run_keeps_its_id(streamed: bool) -> None:
    """A run has one id, before and after it was resumed; another run has another."""
    kernel, _ = scripted(never_stops)
    planner = planner_with(max_iterations=2)
    first = await invoke(planner, kernel, streamed=streamed)
    second = await invoke(planner, kernel, streamed=streamed)
    resumed = await resume(
        planner,
        kernel,
        first.checkpoint,
        streamed=streamed,
        budget=Budget(max_iterations=4),
    )

    assert (
        resumed.checkpoint.run_id == first.checkpoint.run_id != second.checkpoint.run_id
    )
