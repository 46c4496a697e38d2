"""What a round trip costs the client, beside the leanest loop by hand and Semantic Kernel's own: a table of ratios.

    python tests/benchmarks/round_trips.py                           10 trips of 1 call, plain
    python tests/benchmarks/round_trips.py --trips 1 10 50 200 --calls 1 8 --repetitions 5
    python tests/benchmarks/round_trips.py --stream --trips 10
    python tests/benchmarks/round_trips.py --stream --trips 1 --chunks 2000
    python tests/benchmarks/round_trips.py --trips 1 --functions 200

Self-contained: a server in a process of its own answers over HTTP on this machine, as OpenAI does, with ``--calls``
function calls in each of ``--trips`` replies and then with a text. Four clients run against it, by turns and starting
with another one in each repetition, so that all share the machine's noise:

    by hand   the openai client; messages and tools go in ``extra_body``, past the client's walk through the history
    stock     Semantic Kernel's OpenAI connector with its own loop
    service   the same connector in `planner_ext.FunctionInvokingChatCompletion`
    planner   the same kernel under `planner_ext.FunctionCallingStepwisePlanner`, without a plan

The functions do next to nothing, so all that is measured is overhead. A figure is the median over the repetitions of
the process's CPU time, in milliseconds per request; in brackets, its ratio to the loop by hand. The first run of each
client is not counted. CPU time of the server is not in it; run nothing else on the machine.
"""

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import re
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
)
from planner_ext.engine.ports import TextDelta

NAME = "tools-look_up"
DESCRIPTION = "Looks up the weather."
RESULT = "It is sunny with a light breeze. " * 31
SYSTEM, QUESTION = (
    "You are a helpful assistant. Use the tools.",
    "What is the weather like, in each of these cities?",
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
HEAD = {"id": "chatcmpl-1", "created": 1700000000, "model": "scripted"}


@dataclass(frozen=True)
class Work:
    """What one run consists of: replies with calls, calls in each, pieces of the text at the end, functions offered."""

    trips: int
    calls: int
    chunks: int
    stream: bool
    functions: int = 1

    @property
    def names(self) -> list[str]:
        """Name the functions; only the first is called."""
        return [
            "look_up",
            *(f"look_up_{number}" for number in range(1, self.functions)),
        ]

    def body(self, trip: int) -> bytes:
        """Write the body of the response of a trip: JSON, or server-sent events."""
        return b"".join(self._parts(trip))

    def answer(self, trip: int) -> bytes:
        """Write the whole HTTP response of a trip."""
        if not self.stream:
            body = self.body(trip)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            return head % len(body) + body
        chunked = b"".join(
            b"%x\r\n%b\r\n" % (len(part), part) for part in self._parts(trip)
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + chunked + b"0\r\n\r\n"

    def _parts(self, trip: int) -> list[bytes]:
        ids = (
            [f"call_t{trip:05d}x{index}" for index in range(self.calls)]
            if trip < self.trips
            else []
        )
        called = [
            {
                "index": i,
                "id": id,
                "type": "function",
                "function": {"name": NAME, "arguments": '{"city": "Paris"}'},
            }
            for i, id in enumerate(ids)
        ]
        ended = "tool_calls" if called else "stop"
        if not self.stream:
            message = {
                "role": "assistant",
                "content": None if called else "word " * self.chunks,
            }
            if called:
                message["tool_calls"] = [
                    {k: v for k, v in call.items() if k != "index"} for call in called
                ]
            choice = {"index": 0, "message": message, "finish_reason": ended}
            return [
                json.dumps(
                    HEAD
                    | {"object": "chat.completion", "choices": [choice], "usage": USAGE}
                ).encode()
            ]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
        deltas += [{"tool_calls": [call]} for call in called] or [
            {"content": "word "}
        ] * self.chunks
        events = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            for delta in deltas
        ]
        events += [
            {"choices": [{"index": 0, "delta": {}, "finish_reason": ended}]},
            {"choices": [], "usage": USAGE},
        ]
        lines = [
            json.dumps(HEAD | {"object": "chat.completion.chunk"} | event).encode()
            for event in events
        ]
        return [b"data: %b\n\n" % line for line in (*lines, b"[DONE]")]


def serve(work: Work, channel: Connection) -> None:
    """Answer for ever; the trip of a request is read off the last call in it."""
    answers = [work.answer(trip) for trip in range(work.trips + 1)]

    async def converse(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            at = body.rfind(b"call_t")
            writer.write(answers[0 if at < 0 else int(body[at + 6 : at + 11]) + 1])
            await writer.drain()

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await converse(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(quiet, "127.0.0.1", 0, limit=1 << 26)
        channel.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def function_of(name: str) -> Callable[..., Awaitable[str]]:
    """Make a function for a kernel."""

    @kernel_function(name=name, description=DESCRIPTION)
    async def look_up(city: str) -> str:
        return RESULT

    return look_up


look_up = function_of("look_up")


def kernel_of(work: Work, **options: Any) -> Kernel:
    """Make a kernel with the functions of a run."""
    kernel = Kernel(**options)
    for name in work.names:
        kernel.add_function("tools", function_of(name))
    return kernel


Ask: TypeAlias = Callable[
    [AsyncOpenAI, dict[str, Any]], Awaitable[tuple[str, list[Any]]]
]
"""Makes one request with messages and tools; returns text and calls."""


def by_hand_of(
    client: AsyncOpenAI, work: Work, ask: Ask | None = None
) -> Callable[[], Awaitable[str]]:
    """Make the loop by hand; the schemas are written once."""
    schemas = [
        {"name": f"tools-{name}", "description": DESCRIPTION, "parameters": PARAMETERS}
        for name in work.names
    ]
    tools = [{"type": "function", "function": schema} for schema in schemas]
    asks = ask or (hand_streamed if work.stream else hand_plain)
    return lambda: by_hand(client, asks, tools)


async def by_hand(client: AsyncOpenAI, ask: Ask, tools: list[Any]) -> str:
    """Chain calls with nothing but the openai client."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    extra = {"messages": messages, "tools": tools}
    while True:
        text, called = await ask(client, extra)
        if not called:
            return text
        messages.append({"role": "assistant", "tool_calls": called})
        results = await asyncio.gather(
            *(look_up(**json.loads(call["function"]["arguments"])) for call in called)
        )
        for call, result in zip(called, results, strict=True):
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": result}
            )


async def hand_plain(
    client: AsyncOpenAI, extra: dict[str, Any]
) -> tuple[str, list[Any]]:
    """Make one plain request."""
    response = await client.chat.completions.create(
        model="scripted", messages=[], extra_body=extra
    )
    message = response.choices[0].message
    return message.content or "", [
        written(c.id, c.function.name, c.function.arguments)
        for c in message.tool_calls or ()
        if c.type == "function"
    ]


async def hand_streamed(
    client: AsyncOpenAI, extra: dict[str, Any]
) -> tuple[str, list[Any]]:
    """Make one streamed request."""
    text: list[str] = []
    called: dict[int, tuple[str, str, list[str]]] = {}
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(
        model="scripted", messages=[], extra_body=extra, **options
    ):
        for choice in chunk.choices:
            if choice.delta.content:
                text.append(choice.delta.content)
            for piece in choice.delta.tool_calls or ():
                known = called.setdefault(
                    piece.index, (piece.id, piece.function.name, [])
                )
                known[2].append(piece.function.arguments or "")
    return "".join(text), [
        written(id, name, "".join(pieces)) for id, name, pieces in called.values()
    ]


def written(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Write a call as OpenAI's JSON."""
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


class Chained:
    """A connector with a loop around it: Semantic Kernel's own, or ours."""

    def __init__(self, client: AsyncOpenAI, work: Work, *, wrapped: bool) -> None:
        stock = OpenAIChatCompletion("scripted", async_client=client)
        most = work.trips + 2
        self._service = (
            FunctionInvokingChatCompletion(stock, budget=Budget(max_iterations=most))
            if wrapped
            else stock
        )
        self._stream = work.stream
        self._kernel = kernel_of(work)
        auto = FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=most)
        self._settings = OpenAIChatPromptExecutionSettings(
            function_choice_behavior=auto
        )

    async def run(self) -> str:
        """Ask once."""
        history = ChatHistory(system_message=SYSTEM)
        history.add_user_message(QUESTION)
        if not self._stream:
            return str(
                await self._service.get_chat_message_content(
                    history, self._settings, kernel=self._kernel
                )
            )
        chunks = self._service.get_streaming_chat_message_content(
            history, self._settings, kernel=self._kernel
        )
        return "".join(
            [
                chunk.content
                async for chunk in chunks
                if chunk is not None and chunk.role == "assistant"
            ]
        )


def planner_of(client: AsyncOpenAI, work: Work) -> Callable[[], Awaitable[str]]:
    """Make the planner over the same connector."""
    kernel = kernel_of(
        work,
        services={"scripted": OpenAIChatCompletion("scripted", async_client=client)},
    )
    options = FunctionCallingStepwisePlannerOptions(
        budget=Budget(max_iterations=work.trips + 2),
        plan=False,
        execution_settings=OpenAIChatPromptExecutionSettings(
            function_choice_behavior=BoundedFunctionChoiceBehavior.Auto(
                maximum_use_attempts=None
            )
        ),
    )
    planner = FunctionCallingStepwisePlanner("scripted", options)

    async def run() -> str:
        if not work.stream:
            return (await planner.invoke(kernel, QUESTION)).final_answer
        events = planner.invoke_stream(kernel, QUESTION)
        return "".join(
            [event.text async for event in events if isinstance(event, TextDelta)]
        )

    return run


def cost_of(
    loop: asyncio.AbstractEventLoop, run: Callable[[], Awaitable[str]], work: Work
) -> float:
    """Measure some runs: milliseconds of CPU per request."""
    runs = max(1, 60 // (work.trips + 1))
    gc.collect()
    begun = time.process_time()
    texts = [loop.run_until_complete(run()) for _ in range(runs)]
    spent = time.process_time() - begun
    expected = "word " * work.chunks
    assert all(text == expected for text in texts), (
        f"expected {work.chunks} words at the end, got {texts[0][:80]!r}"
    )
    return spent * 1000 / runs / (work.trips + 1)


def compare(work: Work, repetitions: int) -> dict[str, float]:
    """Measure every client by turns: median milliseconds per request."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(work, theirs), daemon=True
    )
    server.start()
    loop = asyncio.new_event_loop()
    try:
        client = AsyncOpenAI(
            base_url=f"http://127.0.0.1:{ours.recv()}/v1", api_key="any", max_retries=0
        )
        clients: dict[str, Callable[[], Awaitable[str]]] = {
            "by hand": by_hand_of(client, work),
            "stock": Chained(client, work, wrapped=False).run,
            "service": Chained(client, work, wrapped=True).run,
            "planner": planner_of(client, work),
        }
        costs: dict[str, list[float]] = {name: [] for name in clients}
        for run in clients.values():
            loop.run_until_complete(run())
        for turn in range(repetitions):
            names = [*clients]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                costs[name].append(cost_of(loop, clients[name], work))
        loop.run_until_complete(client.close())
    finally:
        loop.close()
        server.terminate()
        server.join()
    return {name: statistics.median(values) for name, values in costs.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--trips", type=int, nargs="+", default=[10], help="replies with calls in a run"
    )
    parser.add_argument(
        "--calls",
        type=int,
        nargs="+",
        default=[1],
        help="calls in each of those replies",
    )
    parser.add_argument(
        "--chunks", type=int, default=1, help="pieces of text at the end"
    )
    parser.add_argument(
        "--functions",
        type=int,
        default=1,
        help="functions offered, of which one is called",
    )
    parser.add_argument("--stream", action="store_true", help="stream the replies")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    print(
        f"{'ms of CPU per request (x by hand)':36}"
        + "".join(f"{n:>18}" for n in ("by hand", "stock", "service", "planner"))
    )
    for trips in given.trips:
        for calls in given.calls:
            work = Work(trips, calls, given.chunks, given.stream, given.functions)
            costs = compare(work, given.repetitions)
            offered = f", {work.functions} offered" if work.functions > 1 else ""
            name = f"{trips} trips, {calls} calls{offered}, {'streamed' if given.stream else 'plain'}"
            cells = [
                f"{cost:.2f} ({cost / costs['by hand']:.2f})" for cost in costs.values()
            ]
            print(f"{name:36}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main()
