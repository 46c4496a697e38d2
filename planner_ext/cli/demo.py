"""``planner-ext demo``: what the package promises, shown on this machine without a key.

The model is a script behind a real HTTP server, asked by OpenAI's own client through Semantic Kernel's own connector.
Every number that is printed was counted while it ran: the server counts for itself.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import semantic_kernel
from openai import AsyncOpenAI
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatHistory

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
    FunctionInvokingChatCompletion,
)
from planner_ext.cli.demo_durable import survival
from planner_ext.cli.demo_kernel import CallCounter, Export, shop_kernel
from planner_ext.cli.demo_page import Ledger, paragraph, table, title
from planner_ext.cli.demo_script import GOAL, insatiable_model, order_script
from planner_ext.cli.show import Progress, Signs, print_answer
from planner_ext.compare import run_comparison
from planner_ext.events import ResultReady
from planner_ext.testing import Script, ScriptedOpenAIServer

__all__ = ["run_demo"]

_ALLOWED = 5
"""Round trips that the first part allows."""

_GOAL_BUDGET = 10
"""Round trips that the second part allows."""


async def run_demo(console: Console) -> bool:
    """Show all parts; return whether everything that this package charged is what others counted."""
    paragraph(
        console,
        "Nothing here needs a key or leaves this machine: a scripted model behind a real HTTP server, asked by "
        "OpenAI's client through Semantic Kernel's connector. Every number below was counted while it ran.",
        style="dim",
    )
    agrees = [await _limits(console), await _goal(console), await survival(console)]
    paragraph(console, 'Your own: planner-ext run "a goal" --kernel module:factory --model NAME', style="dim")
    return all(agrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """What one loop did with the model that never stops.

    Attributes:
        requests: Round trips, as the server counted them.
        reported: Round trips, as the final message's metadata has them; None where it has none.
    """

    name: str
    requests: int
    reported: int | None
    answer: str
    limit: str | None

    @property
    def exact(self) -> bool:
        """Whether the loop reports what the server counted."""
        return self.reported == self.requests


async def _limits(console: Console) -> bool:
    """Ask a model that never stops calling, four times; return whether our loops kept to what was allowed."""
    title(console, "1", f"A model that never stops calling functions, and {_ALLOWED} round trips allowed")
    stock = [await _loop(ours=False, streamed=streamed) for streamed in (False, True)]
    own = [await _loop(ours=True, streamed=streamed) for streamed in (False, True)]
    table(console, _limits_table([*stock, *await _options_as_written(), *own], Signs(console)))
    ours = own[0]
    paragraph(
        console,
        f"planner_ext: charged {ours.reported}, the server counted {ours.requests}; limit reached: {ours.limit}; "
        f'answer: "{ours.answer}"',
        style="bold",
    )
    paragraph(
        console,
        f"Semantic Kernel {semantic_kernel.__version__} was given maximum_auto_invoke_attempts={_ALLOWED}, which "
        "counts rounds of function calls: the request for an answer comes on top, or, streamed, is never made. "
        "planner_ext is the same service inside FunctionInvokingChatCompletion with "
        f"Budget(max_iterations={_ALLOWED}): every request counts, and the last one is kept for an answer. "
        'ADR: the options of the decision record "Automatic Tool Calling Controls", as it writes them; '
        "planner-ext compare shows them all.",
        style="dim",
    )
    return all(loop.exact and loop.requests <= _ALLOWED and loop.answer for loop in own)


async def _options_as_written() -> list[_Loop]:
    """Put the three options of the decision record, as it writes them, before such a model."""
    found = await run_comparison(max_iterations=_ALLOWED, scripts=("never-ending",))
    names = {option.key: option.name for option in found.options if option.name.endswith("as written")}
    return [
        _Loop(
            name=f"ADR, {names[run.option].removesuffix(', as written')}",
            requests=run.trips,
            reported=run.charged,
            answer=run.answer,
            limit=None,
        )
        for run in found.runs
        if run.option in names
    ]


async def _loop(*, ours: bool, streamed: bool) -> _Loop:
    async with _scripted(insatiable_model) as (server, connector):
        service = (
            FunctionInvokingChatCompletion(connector, budget=Budget(max_iterations=_ALLOWED)) if ours else connector
        )
        kernel = Kernel()
        kernel.add_plugin(Export(), "export")
        answer, metadata = await _asked(service, kernel, streamed=streamed)
        return _Loop(
            name=("planner_ext" if ours else "Semantic Kernel") + (", streamed" if streamed else ""),
            requests=len(server.requests),
            reported=metadata.get("iterations"),
            answer=answer,
            limit=metadata.get("limit"),
        )


async def _asked(service: ChatCompletionClientBase, kernel: Kernel, *, streamed: bool) -> tuple[str, dict[str, Any]]:
    """Ask through a service; return the text and the metadata of its answer."""
    history = ChatHistory()
    history.add_user_message("Wait until the export is finished, then say so.")
    behavior = FunctionChoiceBehavior.Auto(  # pyright: ignore[reportUnknownMemberType]
        maximum_auto_invoke_attempts=_ALLOWED
    )
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=behavior)
    if not streamed:
        message = await service.get_chat_message_content(history, settings, kernel=kernel)
        return (message.content, message.metadata) if message else ("", {})
    answer = ""
    metadata: dict[str, Any] = {}
    async for chunk in service.get_streaming_chat_message_content(history, settings, kernel=kernel):
        if chunk is not None and chunk.role == AuthorRole.ASSISTANT:
            answer, metadata = answer + chunk.content, metadata | chunk.metadata
    return answer, metadata


def _limits_table(loops: list[_Loop], signs: Signs) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("loop")
    table.add_column("the server\ncounted", justify="right")
    table.add_column("the loop\nreports", justify="right")
    table.add_column("an answer")
    for loop in loops:
        reported = Text("nothing", "red") if loop.reported is None else Text(str(loop.reported))
        counted = Text(str(loop.requests), "red" if loop.requests > _ALLOWED else "")
        answered = Text(f"{signs.good} yes", "green") if loop.answer else Text(f"{signs.bad} no", "red")
        table.add_row(Text(loop.name, "bold" if loop.exact else ""), counted, reported, answered)
    return table


async def _goal(console: Console) -> bool:
    """Let the planner reach a goal with functions that really run."""
    title(console, "2", "A goal, a plan, and functions that really run")
    paragraph(console, f"Goal: {GOAL}")
    counter = CallCounter()
    kernel = shop_kernel(counter)
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=True, max_iterations=_GOAL_BUDGET)
    )
    async with _scripted(order_script()) as (server, connector):
        kernel.add_service(connector)
        result = await _watched(planner, kernel, console)
        requests, tokens = len(server.requests), server.total_tokens
    console.print()
    print_answer(console, result)
    ledger = Ledger(
        (
            ("round trips", result.iterations, "the server", requests),
            ("tokens", result.usage.total_tokens, "the server", tokens),
            ("function calls", result.tool_calls, "a filter", counter.count),
        )
    )
    table(console, ledger.table(Signs(console)))
    return ledger.agrees and result.status == "answered"


async def _watched(
    planner: FunctionCallingStepwisePlanner, kernel: Kernel, console: Console
) -> FunctionCallingStepwisePlannerResult:
    with Progress(console) as progress:
        async with aclosing(planner.invoke_stream(kernel, GOAL)) as events:
            async for event in events:
                progress.show(event)
                if isinstance(event, ResultReady):
                    return event.result
    raise AssertionError("a stream ends with its result")


@asynccontextmanager
async def _scripted(script: Script) -> AsyncGenerator[tuple[ScriptedOpenAIServer, OpenAIChatCompletion], None]:
    """Serve a script on this machine, with OpenAI's client and Semantic Kernel's connector in front of it."""
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            yield server, OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
