"""What many runs at once cost one process, beside the leanest loop by hand: memory and CPU time of a run.

    python tests/benchmarks/many_runs.py
    python tests/benchmarks/many_runs.py --runs 1000 --trips 10 --calls 1 --stream

Server and clients are those of ``round_trips.py``. Each client starts in a process of its own, makes one run, and then
all runs at once on one event loop, with one openai client. Memory is what the peak of the process's resident set grew
by, divided by the runs; CPU time is that of the process, divided by the runs. A figure is the median over the
repetitions; in brackets, its ratio to the loop by hand.
"""

import argparse
import asyncio
import logging
import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection

from openai import AsyncOpenAI
from round_trips import Chained, Work, by_hand_of, planner_of, serve

CLIENTS = ("by hand", "stock", "service", "planner")
SPAWN = multiprocessing.get_context("spawn")


async def at_once(name: str, work: Work, port: int, runs: int) -> tuple[float, float]:
    """Make one run, then many at once: kilobytes and milliseconds of CPU of each."""
    async with AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="any",
        max_retries=0,
        timeout=600,
    ) as client:
        run = {
            "by hand": by_hand_of(client, work),
            "stock": Chained(client, work, wrapped=False).run,
            "service": Chained(client, work, wrapped=True).run,
            "planner": planner_of(client, work),
        }[name]
        expected = await run()
        memory, begun = peak(), time.process_time()
        texts = await asyncio.gather(*(run() for _ in range(runs)))
        spent = time.process_time() - begun
        assert texts == [expected] * runs, "a run gave another answer"
        return (peak() - memory) / runs, spent * 1000 / runs


def peak() -> int:
    """Return the peak of the process's resident set in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name: str, work: Work, port: int, runs: int, channel: Connection) -> None:
    """Measure a client in this process, which has a connection for each run."""
    logging.disable(logging.CRITICAL)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    channel.send(asyncio.run(at_once(name, work, port, runs)))


def compare(
    work: Work, runs: int, repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Measure every client by turns."""
    ours, theirs = multiprocessing.Pipe()
    server = SPAWN.Process(target=serve, args=(work, theirs), daemon=True)
    server.start()
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in CLIENTS}
    try:
        port = ours.recv()
        for _ in range(repetitions):
            for name in CLIENTS:
                client = SPAWN.Process(
                    target=measure, args=(name, work, port, runs, theirs), daemon=True
                )
                client.start()
                client.join()
                assert ours.poll(), f"{name} has failed"
                measured[name].append(ours.recv())
    finally:
        server.terminate()
        server.join()
    return measured


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="runs at once")
    parser.add_argument(
        "--trips", type=int, default=10, help="replies with calls in a run"
    )
    parser.add_argument(
        "--calls", type=int, default=1, help="calls in each of those replies"
    )
    parser.add_argument("--stream", action="store_true", help="stream the replies")
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    work = Work(given.trips, given.calls, 1, given.stream)
    medians = {
        name: [statistics.median(values) for values in zip(*each, strict=True)]
        for name, each in compare(work, given.runs, given.repetitions).items()
    }
    print(
        f"{given.runs} runs of {given.trips} trips, {given.calls} calls, {'streamed' if given.stream else 'plain'}"
    )
    print(f"{'':10}{'KB of memory a run':>22}{'ms of CPU a run':>22}")
    for name, figures in medians.items():
        ratios = zip(figures, medians["by hand"], strict=True)
        print(
            f"{name:10}"
            + "".join(f"{f'{own:.1f} ({own / hand:.2f})':>22}" for own, hand in ratios)
        )


if __name__ == "__main__":
    main()
