"""Semantic Kernel's own tests of connector, behaviour and agent, with our service around each connector.

    git clone --depth 1 https://github.com/microsoft/semantic-kernel DIR
    python tests/benchmarks/semantic_kernel_tests.py DIR/python

Fetches nothing. As a pytest plugin this module puts the service around whatever connector invokes functions by itself.
Exits with 1 if another test fails than those of `DIFFERENT`, or if one of these passes by now.
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)

from planner_ext import FunctionInvokingChatCompletion

TESTS = (
    "tests/unit/connectors/ai/open_ai/services/test_azure_chat_completion.py",
    "tests/unit/connectors/ai/open_ai/services/test_openai_chat_completion.py",
    "tests/unit/connectors/ai/open_ai/services/test_openai_chat_completion_base.py",
    "tests/unit/connectors/ai/test_function_choice_behavior.py",
    "tests/unit/agents/chat_completion",
)
_REPLACED = "replaces Kernel.invoke_function_call, which this loop does not use"
_NO_FUNCTIONS = (
    "several answers are refused where functions are offered; its kernel has none"
)
DIFFERENT = {
    "test_cmc_tool_calling_parallel_tool_calls": _REPLACED,
    "test_cmc_tool_calling_parallel_tool_calls_disabled": _REPLACED,
    "test_cmc_function_call_behavior": _REPLACED,
    "test_cmc_function_choice_behavior": _REPLACED,
    "test_cmc_fcb_parallel_func_calling_disabled": _REPLACED,
    "test_cmc_function_choice_behavior_missing_kwargs": _NO_FUNCTIONS,
    "test_scmc_function_choice_behavior_missing_kwargs": _NO_FUNCTIONS,
    "test_no_kernel_provided_throws_error": "compares the text of the error",
}
"""Why a test fails with the service."""

_plain = ChatCompletionClientBase.get_chat_message_contents
_plain_stream = ChatCompletionClientBase.get_streaming_chat_message_contents


def _around(service: Any, settings: Any) -> Any:
    """Return the service around a connector that would invoke functions itself, or None."""
    behavior = getattr(settings, "function_choice_behavior", None)
    invokes = behavior is not None and behavior.auto_invoke_kernel_functions
    ours = isinstance(service, FunctionInvokingChatCompletion)
    supported = service.SUPPORTS_FUNCTION_CALLING and not ours
    return FunctionInvokingChatCompletion(service) if invokes and supported else None


@functools.wraps(_plain)
async def _asked(self: Any, chat_history: Any, settings: Any, **named: Any) -> Any:
    if (around := _around(self, settings)) is not None:
        return await around.get_chat_message_contents(chat_history, settings, **named)
    return await _plain(self, chat_history, settings, **named)


@functools.wraps(_plain_stream)
async def _streamed(
    self: Any, chat_history: Any, settings: Any, **named: Any
) -> AsyncGenerator[Any]:
    if (around := _around(self, settings)) is not None:
        stream = around.get_streaming_chat_message_contents(
            chat_history, settings, **named
        )
    else:
        stream = _plain_stream(self, chat_history, settings, **named)
    async for chunk in stream:
        yield chunk


def pytest_configure() -> None:
    """Put the service around the connectors."""
    base: Any = ChatCompletionClientBase
    base.get_chat_message_contents = _asked
    base.get_streaming_chat_message_contents = _streamed


def main(folder: Path) -> int:
    """Run the tests, and say which fail and why."""
    path = os.pathsep.join([str(Path(__file__).parent), str(folder), *sys.path])
    options = ("-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-o")
    command = [sys.executable, "-m", "pytest", *options, "asyncio_mode=auto"]
    done = subprocess.run(
        [*command, "-c", os.devnull, f"--rootdir={folder}", *TESTS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))
    for name in sorted(failed):
        print(f"{name}: {DIFFERENT.get(name, 'NOT EXPECTED')}")
    for name in sorted(DIFFERENT.keys() - failed):
        print(f"{name}: passes now")
    print(done.stdout.strip().splitlines()[-1])
    return int(failed != DIFFERENT.keys())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: semantic_kernel_tests.py DIR, the folder python of a checkout")
    sys.exit(main(Path(sys.argv[1]).resolve()))
