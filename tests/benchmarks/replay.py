"""Recorded model runs through our loop, judged against the recording: a table.

    python tests/benchmarks/replay.py --kit DIR                 every recording and variant, plain and streamed
    python tests/benchmarks/replay.py --kit DIR --every 12      each twelfth

The kit is a folder with ``harness.py`` (``load_case``, ``list_cases``, ``start_server``, ``build_kernel``, ``judge``).
Each case runs through the service and through the planner, with the calls of a batch one after the other and all at
once. Exits with 1 if any run is not as it should be: as recorded and faithful one after the other; the same calls in
any order, with results in call order, all at once; and the usage told equal to the server's.
"""

import argparse
import asyncio
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from semantic_kernel.contents import ChatHistory

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
)
from planner_ext.events import ResultReady
from planner_ext.iteration import ToolExecution

COLUMNS = (
    "runs",
    "good",
    "faithful",
    "same calls",
    "in order",
    "usage told",
    "trips",
    "recorded",
)


@dataclass(frozen=True)
class Way:
    """One way to run a case."""

    door: str
    streamed: bool
    sequential: bool

    @property
    def name(self) -> str:
        """Say which."""
        return f"{self.door}, {'streamed' if self.streamed else 'plain'}, {'1 by 1' if self.sequential else 'at once'}"

    @property
    def execution(self) -> ToolExecution:
        """How the functions are run: those that are at once need no threads, they answer at once."""
        return ToolExecution(max_concurrency=1 if self.sequential else None)


WAYS = [
    Way(door, streamed, one)
    for door in ("service", "planner")
    for streamed in (False, True)
    for one in (True, False)
]


async def through_service(
    built: Any, case: dict[str, Any], way: Way
) -> tuple[list[str], int]:
    """Converse through the wrapper, adding each final message as an application does."""
    service = FunctionInvokingChatCompletion(built.service, execution=way.execution)
    settings = service.instantiate_prompt_execution_settings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto(
            maximum_use_attempts=None
        )
    )
    history = (
        ChatHistory(system_message=case["system"]) if case["system"] else ChatHistory()
    )
    finals: list[str] = []
    tokens = 0
    for turn in case["turns"]:
        history.add_user_message(turn["user"])
        if way.streamed:
            pieces: dict[int, str] = {}
            async for chunk in service.get_streaming_chat_message_content(
                history, settings, kernel=built.kernel
            ):
                if chunk is not None and chunk.role == "assistant":
                    trip = chunk.function_invoke_attempt or 0
                    pieces[trip] = pieces.get(trip, "") + str(chunk)
                    metadata = chunk.metadata
            finals.append(pieces[max(pieces)])
            history.add_assistant_message(finals[-1])
        else:
            message = await service.get_chat_message_content(
                history, settings, kernel=built.kernel
            )
            assert message is not None
            metadata = message.metadata
            finals.append(str(message))
            history.add_message(message)
        tokens += metadata["usage"].prompt_tokens + metadata["usage"].completion_tokens
    return finals, tokens


async def through_planner(
    built: Any, case: dict[str, Any], way: Way
) -> tuple[list[str], int]:
    """Converse through the planner, each turn going on from the last one's history."""
    options = FunctionCallingStepwisePlannerOptions(
        max_iterations=None, plan=False, execution=way.execution
    )
    planner = FunctionCallingStepwisePlanner("replay", options)
    history = (
        ChatHistory(system_message=case["system"]) if case["system"] else ChatHistory()
    )
    finals: list[str] = []
    tokens = 0
    for turn in case["turns"]:
        if way.streamed:
            stream = planner.invoke_stream(
                built.kernel, turn["user"], chat_history=history
            )
            (result,) = [
                event.result async for event in stream if isinstance(event, ResultReady)
            ]
        else:
            result = await planner.invoke(
                built.kernel, turn["user"], chat_history=history
            )
        finals.append(result.final_answer)
        tokens += result.usage.total_tokens
        assert result.chat_history is not None
        history = result.chat_history
    return finals, tokens


DOORS: dict[
    str, Callable[[Any, dict[str, Any], Way], Awaitable[tuple[list[str], int]]]
] = {
    "service": through_service,
    "planner": through_planner,
}


async def run_case(
    kit: Any, server: Any, case: dict[str, Any], way: Way
) -> Counter[str]:
    """Run one case one way, and count what is as it should be."""
    built = kit.build_kernel(case, server.url, session=f"{case['name']}|{way.name}")
    try:
        finals, tokens = await DOORS[way.door](built, case, way)
    finally:
        await built.close()
    report = kit.judge(case, server, built, finals)
    told = (
        tokens
        == report["usage"]["prompt_tokens"] + report["usage"]["completion_tokens"]
    )
    return Counter(
        {
            "runs": 1,
            "good": report["good"],
            "faithful": report["faithful"],
            "same calls": report["same_calls_any_order"],
            "in order": not report["reordered_results"],
            "usage told": told,
            "trips": report["round_trips"],
            "recorded": report["round_trips_recorded"],
        }
    )


def failed(way: Way, count: Counter[str]) -> bool:
    """Whether a count falls short of what its way promises."""
    promised = {"faithful", "same calls", "in order", "usage told"} | (
        {"good"} if way.sequential else set()
    )
    return (
        any(count[column] != count["runs"] for column in promised)
        or count["trips"] != count["recorded"]
    )


async def main(kit: Any, pattern: str, every: int) -> int:
    """Run, print the table, and tell whether all was as promised."""
    names = kit.list_cases(pattern)
    names = [
        variant
        for name in names
        for variant in ([name, f"{name}:seq"] if ":gpt41:" in name else [name])
    ][::every]
    table: dict[str, Counter[str]] = {way.name: Counter() for way in WAYS}
    odd: list[str] = []
    with kit.start_server() as server:
        for name in names:
            case = kit.load_case(name)
            for way in WAYS:
                try:
                    count = await run_case(kit, server, case, way)
                except Exception as error:
                    count = Counter({"runs": 1})
                    odd.append(f"{name} ({way.name}): {type(error).__name__}: {error}")
                if failed(way, count):
                    odd.append(f"{name} ({way.name}): {dict(count)}")
                table[way.name].update(count)
            server.rows.clear()
            server.sessions.clear()
    print(
        f"{len(names)} recordings\n{'':28}"
        + "".join(f"{column:>12}" for column in COLUMNS)
    )
    for name, count in table.items():
        print(f"{name:28}" + "".join(f"{count[column]:>12}" for column in COLUMNS))
    for line in odd:
        print("not as promised:", line)
    return 1 if odd else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kit", required=True, help="folder of the replay kit")
    parser.add_argument("--only", default="*", help="pattern of case names")
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.kit)
    logging.disable(logging.CRITICAL)
    raise SystemExit(
        asyncio.run(
            main(importlib.import_module("harness"), arguments.only, arguments.every)
        )
    )
