"""How many instructions a round trip costs the client, as a ratio to the loop by hand: the figure that stays.

    python tests/benchmarks/instructions.py                              10 trips, of 1 call and of 8
    python tests/benchmarks/instructions.py --trips 1 10 50 --calls 1 8
    python tests/benchmarks/instructions.py --most "service 10x1 1.0"    fails if a ratio is above this

Counted by valgrind (``callgrind``, with its ``callgrind_control``), without sockets: a transport inside the process
answers, so the figure is the same on a busy machine, to about one percent. The clients are those of
``round_trips.py``, and one more:

    prepared  the loop by hand over this package's prepared requests: what is left beside that trick

Each client runs in a process of its own, some runs first without being counted.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from round_trips import Chained, Work, by_hand_of, planner_of, written

from planner_ext.sk.chat.prepared import post

CLIENTS = ("by hand", "prepared", "stock", "service", "planner")
UNCOUNTED_RUNS = 4
INSTRUCTIONS = re.compile(r"^(?:summary|totals): (\d+)$", re.MULTILINE)


def client_of(work: Work) -> AsyncOpenAI:
    """Make an OpenAI client that is answered inside this process."""
    library = next(
        one
        for one in type(AsyncOpenAI(api_key="any")._client).__mro__
        if one.__name__ == "AsyncClient"
    )
    http: Any = sys.modules[library.__module__.partition(".")[0]]
    heads = {True: "text/event-stream", False: "application/json"}
    bodies = [work.body(trip) for trip in range(work.trips + 1)]

    def answer(request: Any) -> Any:
        sent = request.content
        at = sent.rfind(b"call_t")
        trip = 0 if at < 0 else int(sent[at + 6 : at + 11]) + 1
        return http.Response(
            200, headers={"content-type": heads[work.stream]}, content=bodies[trip]
        )

    transport = http.AsyncClient(transport=http.MockTransport(answer))
    return AsyncOpenAI(
        base_url="http://127.0.0.1/v1",
        api_key="any",
        max_retries=0,
        http_client=transport,
    )


async def prepared(client: AsyncOpenAI, extra: dict[str, Any]) -> tuple[str, list[Any]]:
    """Make one prepared request."""
    body = json.dumps({"model": "scripted", **extra}).encode()
    options = {"security": {"bearer_auth": True}}
    response = await post(
        client, path="/chat/completions", content=body, options=options, stream=False
    )
    message = response.choices[0].message
    return message.content or "", [
        written(c.id, c.function.name, c.function.arguments)
        for c in message.tool_calls or ()
    ]


def run_of(name: str, work: Work) -> Callable[[], Awaitable[str]]:
    """Make a client's run."""
    client = client_of(work)
    match name:
        case "by hand":
            return by_hand_of(client, work)
        case "prepared":
            return by_hand_of(client, work, prepared)
        case "planner":
            return planner_of(client, work)
        case _:
            return Chained(client, work, wrapped=name == "service").run


def counted(name: str, work: Work) -> None:
    """Run a client under callgrind, which counts the last run."""
    logging.disable(logging.CRITICAL)
    loop = asyncio.new_event_loop()
    run = run_of(name, work)
    for _ in range(UNCOUNTED_RUNS):
        loop.run_until_complete(run())
    gc.collect()
    gc.disable()
    switch = ["callgrind_control", "-i"]
    subprocess.run([*switch, "on", str(os.getpid())], check=True, capture_output=True)
    loop.run_until_complete(run())
    subprocess.run([*switch, "off", str(os.getpid())], check=True, capture_output=True)


def instructions(name: str, work: Work) -> float:
    """Count a client's instructions for each request, in thousands."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        tool = [
            "valgrind",
            "-q",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={out}",
        ]
        program = [
            sys.executable,
            __file__,
            "--inside",
            name,
            "--trips",
            str(work.trips),
            "--calls",
            str(work.calls),
        ]
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        streamed = ["--stream"] if work.stream else []
        subprocess.run([*tool, *program, *streamed], check=True, env=environment)
        found = [
            int(count)
            for path in Path(folder).iterdir()
            for count in INSTRUCTIONS.findall(path.read_text())
        ]
    return max(found) / 1000 / (work.trips + 1)


def main() -> None:
    """Print the table, and say which ratio is above what it may be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--trips", type=int, nargs="+", default=[10], help="replies with calls in a run"
    )
    parser.add_argument(
        "--calls",
        type=int,
        nargs="+",
        default=[1, 8],
        help="calls in each of those replies",
    )
    parser.add_argument("--stream", action="store_true", help="stream the replies")
    parser.add_argument("--clients", nargs="+", default=CLIENTS, choices=CLIENTS)
    parser.add_argument(
        "--most",
        nargs="+",
        default=[],
        metavar='"CLIENT TRIPSxCALLS RATIO"',
        help="bounds of ratios",
    )
    parser.add_argument("--inside", choices=CLIENTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        counted(given.inside, Work(given.trips[0], given.calls[0], 1, given.stream))
        return
    ratios: dict[str, float] = {}
    for trips in given.trips:
        for calls in given.calls:
            work = Work(trips, calls, 1, given.stream)
            counts = {
                name: instructions(name, work)
                for name in dict.fromkeys(("by hand", *given.clients))
            }
            cells = [
                f"{name} {count:,.0f} k ({count / counts['by hand']:.2f})"
                for name, count in counts.items()
            ]
            print(f"{trips} trips, {calls} calls: {'  '.join(cells)}", flush=True)
            ratios |= {
                f"{name} {trips}x{calls}": count / counts["by hand"]
                for name, count in counts.items()
            }
    bounds = dict(bound.rsplit(" ", 1) for bound in given.most)
    above = [
        f"{cell}: {ratios[cell]:.2f}, at most {bound}"
        for cell, bound in bounds.items()
        if ratios[cell] > float(bound)
    ]
    if above:
        raise SystemExit(
            "More instructions than allowed, as a ratio to the loop by hand: "
            + "; ".join(above)
        )


if __name__ == "__main__":
    main()
