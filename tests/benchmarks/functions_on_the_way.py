"""How many functions of the package one run passes through: a count, not a time.

    python tests/benchmarks/functions_on_the_way.py
    python tests/benchmarks/functions_on_the_way.py --list planner

Two stretches of one run with one function call are traced, for the planner and for the service: from ``invoke`` to
the first request, and from a reply with one call to the next request. Counted are the distinct functions of the
package, and the files that they are in; not the scripted service, nor what comprehensions and lambdas do.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType, FrameType

from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

import planner_ext
from planner_ext import (
    BoundedFunctionChoiceBehavior,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
)
from planner_ext.testing import ScriptedChatCompletion, call, say
from planner_ext.testing.service import ScriptedPromptExecutionSettings

PACKAGE = Path(planner_ext.__file__).parent
Run = Callable[[Kernel], Awaitable[object]]
STRETCHES = ("to the first request", "reply to next request")


class Trace:
    """Collects the functions that are entered, by stretch; a request ends one."""

    def __init__(self) -> None:
        self.stretches: list[set[CodeType]] = [set()]

    def __enter__(self) -> None:
        sys.setprofile(self._enter)

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    async def request(self, _: object) -> None:
        """Begin another stretch."""
        self.stretches.append(set())

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and is_ours(code) and not code.co_name.startswith("<"):
            self.stretches[-1].add(code)


def is_ours(code: CodeType) -> bool:
    """Whether a function is one of the package, but for its test tools."""
    file = Path(code.co_filename)
    return PACKAGE in file.parents and PACKAGE / "testing" not in file.parents


class Tools:
    """One function, of next to no work."""

    @kernel_function
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


def planner(options: FunctionCallingStepwisePlannerOptions | None = None) -> Run:
    """Make a run of the planner without a plan."""
    made = FunctionCallingStepwisePlanner(
        options=options or FunctionCallingStepwisePlannerOptions(plan=False)
    )
    return lambda kernel: made.invoke(kernel, "What is 1 + 2?")


def service() -> Run:
    """Make a run of the service."""
    settings = ScriptedPromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto(
            maximum_use_attempts=None
        )
    )

    async def run(kernel: Kernel) -> object:
        history = ChatHistory()
        history.add_user_message("What is 1 + 2?")
        asked: FunctionInvokingChatCompletion = kernel.get_service("chat")
        return await asked.get_chat_message_content(history, settings, kernel=kernel)

    return run


async def traced(door: str) -> list[set[CodeType]]:
    """Trace a second run, so that what is done once for an object is not in it."""
    trace = Trace()
    answers = [call("tools-add", {"a": 1, "b": 2}), say("It is 3.")]
    chat = ScriptedChatCompletion(
        answers * 2, service_id="chat", before_reply=trace.request
    )
    kernel = Kernel(plugins={})
    kernel.add_plugin(Tools(), "tools")
    kernel.add_service(
        FunctionInvokingChatCompletion(chat) if door == "service" else chat
    )
    run = service() if door == "service" else planner()
    await run(kernel)
    trace.stretches = [set()]
    with trace:
        await run(kernel)
    return trace.stretches


def main() -> None:
    """Print the table, or the functions themselves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", choices=("planner", "service"), help="print the functions of one door"
    )
    asked = parser.parse_args().list
    for door in ("planner", "service") if asked is None else (asked,):
        for stretch, codes in zip(
            ("to the first request", "reply to next request"),
            asyncio.run(traced(door)),
            strict=False,
        ):
            files = {code.co_filename for code in codes}
            print(
                f"{door:8} {stretch:22} {len(codes):4} functions {len(files):3} files"
            )
            for code in (
                sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno))
                if asked
                else ()
            ):
                print(
                    f"    {Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}"
                )


if __name__ == "__main__":
    main()
