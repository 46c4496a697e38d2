"""The service's stream: what its chunks carry, that they add up, and that leaving it early ends everything."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import reduce
from operator import add
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, StreamingChatMessageContent
from semantic_kernel.functions import kernel_function

from planner_ext import Budget, FunctionInvokingChatCompletion
from planner_ext.errors import LimitReachedError
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, call, calls, say
from support.narrow import present
from support.served import Served, Tools
from support.stock import every_call, every_result, first_result, scripted_by

Serve = Callable[..., Served]
Resend = Callable[[ChatHistory], Awaitable[None]]
Stream = AsyncGenerator[list[StreamingChatMessageContent], Any]

ADD = call("t-add", {"a": 1, "b": 2})
AUTO = PromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())


async def chunks_of(stream: Stream) -> list[StreamingChatMessageContent]:
    return [chunk for chunks in [chunks async for chunks in stream] for chunk in chunks]


async def test_chunks_tell_their_round_trip_and_one_model(
    serve: Serve, kernel: Kernel, history: ChatHistory
) -> None:
    """Every chunk carries its trip, counted from 0 and never going back, one model id, and choice 0."""
    served = serve([calls(ADD, text="Let me see."), ADD, say("Three, I think.")])
    service = FunctionInvokingChatCompletion(served.connector)
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    )
    trips = [present(chunk.function_invoke_attempt) for chunk in chunks]
    assert trips == sorted(trips) and set(trips) == {0, 1, 2}
    assert {chunk.ai_model_id for chunk in chunks} == {"scripted"}
    assert {chunk.choice_index for chunk in chunks} == {0}


@pytest.mark.parametrize("chunk_size", [1, 8])
async def test_text_with_a_surrogate_comes_once(
    kernel: Kernel, history: ChatHistory, chunk_size: int
) -> None:
    """The chunks have text that UTF-8 cannot encode, and the history does not; the last chunk does not repeat it."""
    text = "one \ud83d, two \ud83d\ude00"
    scripted = ScriptedChatCompletion([say(text)], chunk_size=chunk_size)
    service = FunctionInvokingChatCompletion(scripted)
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    )
    assert "".join(map(str, chunks)) == text


async def test_chunks_of_one_trip_add_up(
    serve: Serve, kernel: Kernel, history: ChatHistory
) -> None:
    """The assistant chunks of a trip, and its tool chunks, can each be summed with ``+``; the sums are the messages."""
    served = serve(
        [
            calls(ADD, call("t-echo", {"text": "y"}), text="Let me see."),
            say("Three, I think."),
        ]
    )
    service = FunctionInvokingChatCompletion(served.connector)
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    )

    def total(role: str, trip: int) -> StreamingChatMessageContent:
        return reduce(
            add,
            [c for c in chunks if (c.role, c.function_invoke_attempt) == (role, trip)],
        )

    first, results, last = (
        total("assistant", 0),
        total("tool", 0),
        total("assistant", 1),
    )
    assert (first.content, last.content) == ("Let me see.", "Three, I think.")
    assert [
        (i.id, i.name, i.arguments)
        for i in first.items
        if i.content_type == "function_call"
    ] == [
        ("call_1", "t-add", '{"a":1,"b":2}'),
        ("call_2", "t-echo", '{"text":"y"}'),
    ]
    assert [(item.id, item.name, item.result) for item in every_result(results)] == [
        ("call_1", "t-add", "3"),
        ("call_2", "t-echo", "y"),
    ]
    assert last.metadata["iterations"] == 2


async def test_calls_in_the_sum_are_those_that_ran(
    tools: Tools, kernel: Kernel, history: ChatHistory
) -> None:
    """Arguments in the sum of the chunks are the model's to the last character, a delta of ``{}`` included."""
    inner = ScriptedChatCompletion(
        [call("t-echo", {"text": "hell {} world"}), say("Done.")], chunk_size=2
    )
    service = FunctionInvokingChatCompletion(inner)
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    )
    total = reduce(
        add,
        [c for c in chunks if (c.role, c.function_invoke_attempt) == ("assistant", 0)],
    )
    (called,) = [item for item in total.items if item.content_type == "function_call"]
    assert tools.seen == ["hell {} world"]
    assert called.arguments == '{"text":"hell {} world"}'


async def test_the_metadata_is_on_the_last_chunk_alone(
    serve: Serve, kernel: Kernel, history: ChatHistory
) -> None:
    """Only the last chunk says what the run came to; every connector key is on it, and no text a second time."""
    served = serve([ADD, say("Three.")])
    service = FunctionInvokingChatCompletion(served.connector)
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    )
    assert [i for i, chunk in enumerate(chunks) if "status" in chunk.metadata] == [
        len(chunks) - 1
    ]
    assert chunks[-1].metadata.keys() >= {
        "id",
        "created",
        "usage",
        "iterations",
        "tool_calls",
        "status",
        "limit",
    }
    assert (chunks[-1].role, chunks[-1].content) == ("assistant", "")
    assert chunks[-1].finish_reason == "stop"


async def test_text_arrives_before_the_reply_has_ended(
    kernel: Kernel, history: ChatHistory
) -> None:
    """Chunks are passed on as they come: the first is there while the connector still holds back the second."""
    more = asyncio.Event()

    class Slow(ScriptedChatCompletion):
        async def _inner_get_streaming_chat_message_contents(
            self, *args: Any, **kwargs: Any
        ) -> Any:
            async for chunks in super()._inner_get_streaming_chat_message_contents(
                *args, **kwargs
            ):
                yield chunks
                if chunks[0].content:
                    await more.wait()

    service = FunctionInvokingChatCompletion(
        scripted_by(Slow, [say("Hello you.")], chunk_size=5)
    )
    async with aclosing(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    ) as stream:
        texts = []
        async for (chunk,) in stream:
            texts.append(chunk.content)
            if chunk.content == "Hello":
                assert not more.is_set()
                more.set()
    assert "".join(texts) == "Hello you."


async def test_ids_in_the_stream_are_those_of_the_history(
    kernel: Kernel, history: ChatHistory
) -> None:
    """Calls and results in the stream go by the same ids as in the history, reissued ones included."""
    echo = call("t-echo", {"text": "x"}, id="")
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([calls(ADD, echo), say("Done.")])
    )
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    )
    called = reduce(
        add,
        [c for c in chunks if (c.role, c.function_invoke_attempt) == ("assistant", 0)],
    )
    answered = next(chunk for chunk in chunks if chunk.role == "tool")
    kept = [item.id for item in every_call(history.messages[1])]
    assert [item.id for item in every_result(answered)] == kept
    assert [
        item.id for item in called.items if item.content_type == "function_call"
    ] == kept


async def test_a_history_made_of_the_chunks_can_be_sent(
    serve: Serve, kernel: Kernel
) -> None:
    """A consumer may build its history from the chunks: the results of a batch in one tool message are sent in full."""
    asked = ChatHistory()
    asked.add_user_message("What is 1 + 2?")
    own = ChatHistory(messages=list(asked.messages))
    served = serve([calls(ADD, ADD), say("Three."), say("Yes.")])
    service = FunctionInvokingChatCompletion(served.connector)
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(asked, AUTO, kernel=kernel)
    )
    for role, trip in (("assistant", 0), ("tool", 0), ("assistant", 1)):
        own.add_message(
            reduce(
                add,
                [
                    c
                    for c in chunks
                    if (c.role, c.function_invoke_attempt) == (role, trip)
                ],
            )
        )
    own.add_user_message("Sure?")
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(own, AUTO, kernel=kernel)
    )
    assert "".join(chunk.content for chunk in chunks) == "Yes."
    assert served.server.refused == []


async def test_closing_the_stream_ends_what_runs(
    tools: Tools, kernel: Kernel, history: ChatHistory, resend: Resend
) -> None:
    """Once ``aclose`` returns, the function is cancelled, no task is left, and the history can be sent."""
    inner = ScriptedChatCompletion(
        [calls(call("t-hang"), text="Wait a moment, please."), say("Never sent.")]
    )
    before = asyncio.all_tasks()
    stream = FunctionInvokingChatCompletion(inner).get_streaming_chat_message_contents(
        history, AUTO, kernel=kernel
    )
    await anext(stream)
    await tools.started.wait()
    await stream.aclose()
    assert tools.cancelled
    assert asyncio.all_tasks() == before
    assert (len(inner.requests), len(history.messages)) == (1, 3)
    await resend(history)


async def test_leaving_the_loop_ends_what_runs(
    tools: Tools, kernel: Kernel, history: ChatHistory, resend: Resend
) -> None:
    """After a ``break`` the function is cancelled, the task ends, and the history can be sent."""
    inner = ScriptedChatCompletion(
        [calls(call("t-hang"), text="Wait a moment, please."), say("Never sent.")]
    )
    before = asyncio.all_tasks()
    service = FunctionInvokingChatCompletion(inner)
    async for _ in service.get_streaming_chat_message_contents(
        history, AUTO, kernel=kernel
    ):
        await tools.started.wait()
        break
    while left := asyncio.all_tasks() - before:
        await asyncio.wait(left)
    assert tools.cancelled is True
    assert len(inner.requests) == 1
    assert len(history.messages) == 3
    await resend(history)


async def test_a_cancelled_consumer_ends_what_runs(
    tools: Tools, kernel: Kernel, history: ChatHistory
) -> None:
    """A consumer that is cancelled while it waits for a chunk leaves nothing running."""
    service = FunctionInvokingChatCompletion(ScriptedChatCompletion([call("t-hang")]))
    before = asyncio.all_tasks()
    consumer = asyncio.create_task(
        chunks_of(
            service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
        )
    )
    await tools.started.wait()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert tools.cancelled
    assert asyncio.all_tasks() == before
    assert len(history.messages) == 3


async def test_closing_ends_the_connectors_stream(
    kernel: Kernel, history: ChatHistory
) -> None:
    """Leaving while the model speaks closes the connector's own stream before ``aclose`` returns."""
    closed = asyncio.Event()

    class Watched(ScriptedChatCompletion):
        async def _inner_get_streaming_chat_message_contents(
            self, *args: Any, **kwargs: Any
        ) -> Any:
            try:
                async for chunks in super()._inner_get_streaming_chat_message_contents(
                    *args, **kwargs
                ):
                    yield chunks
                    if chunks[0].content:
                        await asyncio.Future()
            finally:
                closed.set()

    before = asyncio.all_tasks()
    service = FunctionInvokingChatCompletion(
        scripted_by(Watched, [say("Hello, you there.")])
    )
    async with aclosing(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    ) as stream:
        async for (chunk,) in stream:
            if chunk.content:
                break
    assert closed.is_set()
    assert asyncio.all_tasks() == before
    assert len(history.messages) == 1


async def test_a_slow_consumer_holds_the_run_back(
    kernel: Kernel, history: ChatHistory
) -> None:
    """A run is only so far ahead of who reads it: a long reply does not pile up in memory."""
    sent = 0

    class Counted(ScriptedChatCompletion):
        async def _inner_get_streaming_chat_message_contents(
            self, *args: Any, **kwargs: Any
        ) -> Any:
            nonlocal sent
            async for chunks in super()._inner_get_streaming_chat_message_contents(
                *args, **kwargs
            ):
                sent += 1
                yield chunks

    service = FunctionInvokingChatCompletion(
        scripted_by(Counted, [say("x" * 5000)], chunk_size=1)
    )
    read, furthest = 0, 0
    async for _ in service.get_streaming_chat_message_contents(
        history, AUTO, kernel=kernel
    ):
        read += 1
        for _ in range(3):
            await asyncio.sleep(0)
        furthest = max(furthest, sent - read)
    assert read >= 5000
    assert furthest < 200


async def test_an_error_ends_the_stream_and_is_raised(
    serve: Serve, kernel: Kernel, history: ChatHistory
) -> None:
    """What a run raises comes out of the stream after the chunks before it; nothing is left running."""
    served = serve([calls(ADD, text="Let me see."), ADD])
    budget = Budget(max_iterations=2, on_limit="raise")
    stream = FunctionInvokingChatCompletion(
        served.connector, budget=budget
    ).get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    texts: list[str] = []
    with pytest.raises(LimitReachedError):
        async for (chunk,) in stream:
            texts.append(chunk.content)
    assert "".join(texts) == "Let me see."
    assert [message.role for message in history.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]


async def test_the_singular_stream_leaves_nothing_running(
    tools: Tools, kernel: Kernel, history: ChatHistory
) -> None:
    """``get_streaming_chat_message_content``, the door of Semantic Kernel's base class, cancels what runs, too."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([calls(call("t-hang"), text="Wait, please.")])
    )
    before = asyncio.all_tasks()
    async with aclosing(
        service.get_streaming_chat_message_content(history, AUTO, kernel=kernel)
    ) as stream:
        await anext(stream)
        await tools.started.wait()
    while left := asyncio.all_tasks() - before:
        await asyncio.wait(left)
    assert tools.cancelled
    assert len(history.messages) == 3


async def test_a_batch_in_a_stream_shows_every_result(
    kernel: Kernel, history: ChatHistory
) -> None:
    """The tool chunk of a batch has one result for each call, refused and failed ones included, in call order."""

    class Slow:
        @kernel_function
        async def slow(self) -> str:
            await asyncio.sleep(0)
            return "slow"

    kernel.add_plugin(Slow(), "s")
    batch = calls(
        call("s-slow"), call("t-fail"), call("t-no"), call("t-add", '{"a": 1, "b'), ADD
    )
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([batch, ScriptedReply(text="Done.")])
    )
    chunks = await chunks_of(
        service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    )
    (shown,) = [chunk for chunk in chunks if chunk.role == "tool"]
    kept = [
        first_result(message) for message in history.messages if message.role == "tool"
    ]
    assert [(i.id, i.name, i.result) for i in every_result(shown)] == [
        (i.id, i.name, i.result) for i in kept
    ]
    assert len(kept) == 5


async def nothing_left(before: set[asyncio.Task[Any]]) -> None:
    """Wait for every task that a test did not start itself; generators are closed by tasks of the event loop."""
    await asyncio.sleep(0)
    while left := asyncio.all_tasks() - before:
        await asyncio.wait(left)
        del left
    gc.collect()


async def test_a_run_that_failed_unseen_is_not_reported_later(
    kernel: Kernel, history: ChatHistory, caplog: pytest.LogCaptureFixture
) -> None:
    """A consumer that leaves before it met the run's error is not told of it by the event loop afterwards."""
    before = asyncio.all_tasks()
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([calls(ADD, text="So."), RuntimeError("no")])
    )
    stream = service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    await anext(stream)
    await nothing_left(before)
    await stream.aclose()
    del stream
    await nothing_left(before)
    assert [
        record.message
        for record in caplog.records
        if "never retrieved" in record.message
    ] == []
