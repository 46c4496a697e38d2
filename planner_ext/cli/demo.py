"""``planner-ext demo``: shows the package's promises on this machine, without a key.

A scripted model behind a real HTTP server is asked through Semantic Kernel's connector.
Every printed number was counted during the run, by the server, too.
"""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import semantic_kernel
from openai import AsyncOpenAI
from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.contents import AuthorRole
from semantic_kernel.filters import FilterTypes

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
)
from planner_ext.cli import demo_shop as shop
from planner_ext.cli.command import ExitCode
from planner_ext.cli.show import Progress, print_answer
from planner_ext.cli.text import Terminal, TextFlow
from planner_ext.compare import Option, Run, Trial, option, run_comparison
from planner_ext.core.facts import CallFinished
from planner_ext.durable.records import (
    fold_journal,
)
from planner_ext.durable.store import opened_store
from planner_ext.testing import Script, ScriptedOpenAIServer

_ALLOWED = 5
"""Round trips in the first part."""

_AS_WRITTEN = ("option-1", "option-2", "option-3")
_LOOPS = (
    "Semantic Kernel",
    "Semantic Kernel, streamed",
    "planner_ext",
    "planner_ext, streamed",
)
"""The options of the comparison, and the loops beside them, in the first part."""

_GOAL_BUDGET = 10
"""Round trips in the second part."""

_RUN = "order-7"
_STORE = "runs.db"
"""The run of the third part, and the file that its processes share."""


async def run_demo(console: Terminal) -> int:
    """Show all parts; 0 if every charge equals the independent count."""
    _print(
        console,
        "Nothing here needs a key or leaves this machine: a scripted model behind a real HTTP server, asked by "
        "OpenAI's client through Semantic Kernel's connector. Every number below was counted while it ran.",
        style="dim",
    )
    agrees = [await _limits(console), await _goal(console), await _survival(console)]
    _print(
        console,
        'Your own: planner-ext run "a goal" --kernel module:factory --model NAME',
        style="dim",
    )
    return ExitCode.ANSWERED if all(agrees) else ExitCode.NO_ANSWER


async def _limits(console: Terminal) -> bool:
    """Ask a model that never stops; return whether our loops kept within the budget."""
    _print_title(
        console,
        "1",
        f"A model that never stops calling functions, and {_ALLOWED} round trips allowed",
    )
    limits: list[object] = []
    comparison = await run_comparison(
        max_iterations=_ALLOWED,
        scripts=("never-ending",),
        options=(*_AS_WRITTEN, *(_one_request(name, limits) for name in _LOOPS)),
    )
    own = comparison.runs[-2:]
    _print_loops(console, comparison.runs)
    ours = own[0]
    _print(
        console,
        f"planner_ext: charged {ours.charged}, the server counted {ours.trips}; limit reached: {limits[-1]}; "
        f'answer: "{ours.answer}"',
        style="bold",
    )
    _print(
        console,
        f"Semantic Kernel {semantic_kernel.__version__} was given maximum_auto_invoke_attempts={_ALLOWED}, which "
        "counts rounds of function calls: the request for an answer comes on top, or, streamed, is never made. "
        "planner_ext is the same service inside FunctionInvokingChatCompletion with "
        f"Budget(max_iterations={_ALLOWED}): every request counts, and the last one is kept for an answer. "
        'ADR: the options of the decision record "Automatic Tool Calling Controls", as it writes them; '
        "planner-ext compare shows them all.",
        style="dim",
    )
    return all(run.charged == run.trips <= _ALLOWED and run.answer for run in own)


def _one_request(name: str, limits: list[object]) -> Option:
    """Make an option of one request, whose loop is Semantic Kernel's or ours; it adds the limit that it names."""

    async def ask(trial: Trial) -> None:
        behavior = FunctionChoiceBehavior.Auto(  # pyright: ignore[reportUnknownMemberType]
            maximum_auto_invoke_attempts=_ALLOWED
        )
        given = {"function_choice_behavior": behavior}
        settings = trial.settings.model_copy(update=given)
        if name.startswith("planner_ext"):
            trial.service = FunctionInvokingChatCompletion(
                trial.service, budget=trial.budget
            )
        if name.endswith("streamed"):
            chunks = await trial.chunks(settings)
            replies = [one for one in chunks if one.role == AuthorRole.ASSISTANT]
        else:
            replies = await trial.service.get_chat_message_contents(
                trial.history, settings, kernel=trial.kernel
            )
        metadata = {
            key: value for reply in replies for key, value in reply.metadata.items()
        }
        trial.charged = metadata.get("iterations", 0)
        trial.answer = "".join(reply.content for reply in replies)
        limits.append(metadata.get("limit"))

    return option(name)(ask)


def _print_loops(console: Terminal, runs: Sequence[Run]) -> None:
    signs = console.signs
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("loop")
    table.add_column("the server\ncounted", justify="right")
    table.add_column("the loop\nreports", justify="right")
    table.add_column("an answer")
    for run in runs:
        reported = Text(str(run.charged)) if run.charged else Text("nothing", "red")
        counted = Text(str(run.trips), "red" if run.trips > _ALLOWED else "")
        answered = (
            Text(f"{signs.good} yes", "green")
            if run.answer
            else Text(f"{signs.bad} no", "red")
        )
        name = run.option.replace("option-", "ADR, option ")
        style = "bold" if run.charged == run.trips else ""
        table.add_row(Text(name, style), counted, reported, answered)
    _print_table(console, table)


async def _goal(console: Terminal) -> bool:
    _print_title(console, "2", "A goal, a plan, and functions that really run")
    _print(console, f"Goal: {shop.ORDER_GOAL}")
    calls: list[object] = []

    async def count(context: Any, next: Any) -> None:
        calls.append(context)
        await next(context)

    options = FunctionCallingStepwisePlannerOptions(
        plan=True, max_iterations=_GOAL_BUDGET
    )
    planner = FunctionCallingStepwisePlanner(options=options)
    kernel = shop.order_kernel()
    kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, count)  # pyright: ignore[reportUnknownMemberType]
    async with _scripted(shop.order_script) as (server, connector):
        kernel.add_service(connector)
        with Progress(console, cut=True) as progress:
            result = await progress.watch(
                planner.invoke_stream(kernel, shop.ORDER_GOAL)
            )
        requests = len(server.requests)
        tokens = server.total_tokens
    console.print()
    print_answer(console, result)
    agrees = _print_ledger(
        console,
        ("round trips", result.iterations, "the server", requests),
        ("tokens", result.usage.total_tokens, "the server", tokens),
        ("function calls", result.tool_calls, "a filter", len(calls)),
    )
    return agrees and result.status == "answered"


async def _survival(console: Terminal) -> bool:
    """Pause, edit, approve, kill and finish a run; return whether it refunded once."""
    _print_title(
        console, "3", "A refund that waits for a person, and a process that is killed"
    )
    if sys.platform == "win32":
        _print(console, "Shown on systems with SIGKILL only.")
        return True
    _print(
        console,
        f"Each line is a process of its own; {_STORE} is all that they share.",
        after=False,
    )
    with (
        TemporaryDirectory() as folder,
        ScriptedOpenAIServer(shop.refund_script) as server,
    ):
        try:
            await _refund(_Shell(console, Path(folder), server.url))
        except _UnexpectedExitError as error:
            _print(console, str(error), style="red", indent=6)
            return False
        return await _print_refund(console, Path(folder), server)


async def _refund(shell: "_Shell") -> None:
    app = "from planner_ext.cli.demo_shop import refund_app as app, refund_kernel as kernel\n"
    shell.folder.joinpath("shop.py").write_text(app, encoding="utf-8")
    start = (
        "run",
        shop.REFUND_GOAL,
        "--kernel",
        "shop:kernel",
        "--no-plan",
        "--run-id",
        _RUN,
    )
    await shell.run(*start, code=4, note="paused; the process has ended")
    waiting = await shell.run("approvals", "list", code=0, lines=2)
    await shell.run(
        "approvals", "edit", waiting[0], "amount=24.5", "--by", "ann", code=0, lines=1
    )
    work = ("worker", "--app", "shop:app", "--once")
    killed = "killed, after the money went out and before that was recorded"
    await shell.run(*work, code=-signal.SIGKILL, note=killed, crash_at="after_tool")
    await shell.run(
        *work,
        code=0,
        note="the refund is asked for again under the same key, so it is not made again",
    )


async def _print_refund(
    console: Terminal, folder: Path, server: ScriptedOpenAIServer
) -> bool:
    async with opened_store(str(folder / _STORE), create=False) as store:
        stored = await store.load(_RUN)
    state = fold_journal(_RUN, stored.facts)
    paid = [
        fact
        for fact in stored.facts
        if isinstance(fact, CallFinished) and fact.function == "shop-refund"
    ]
    lines = (folder / shop.REFUND_LEDGER).read_text(encoding="utf-8").splitlines()
    amounts = ", ".join(f"{json.loads(line)['amount']:.2f}" for line in lines)
    answer = ""
    if state.ended is not None:
        answer = state.ended.answer
    console.print()
    _print(
        console,
        f'answer: "{answer}"; refunds in the shop\'s own file: {amounts}',
        style="bold",
        after=False,
    )
    agrees = _print_ledger(
        console,
        ("round trips", state.usage.iterations, "the server", len(server.requests)),
        ("tokens", state.usage.total_tokens, "the server", server.total_tokens),
        ("refunds", len(paid), "the shop", len(lines)),
    )
    return agrees and len(lines) == 1 and stored.record.status == "answered"


class _UnexpectedExitError(Exception):
    """A command ended with an unexpected exit code."""


@dataclass(frozen=True, slots=True)
class _Shell:
    console: Terminal
    folder: Path
    endpoint: str

    async def run(
        self, *words: str, code: int, note: str = "", lines: int = 0, crash_at: str = ""
    ) -> list[str]:
        """Run a command, print it with its outcome, and return the lines of its output.

        Args:
            *words: Between ``planner-ext`` and the store.
            code: The expected exit code.
            note: A remark on the outcome.
            lines: The number of output lines to show.
            crash_at: The crash point at which the process kills itself.
        """
        arguments = (*words, "--store", _STORE)
        crash = {"PLANNER_EXT_CRASH_AT": crash_at} if crash_at else {}
        unwanted = ("FORCE_COLOR", "TTY_COMPATIBLE", "PLANNER_EXT_CRASH_ONCE")
        kept = {
            name: value for name, value in os.environ.items() if name not in unwanted
        }
        endpoint = {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": self.endpoint,
            "OPENAI_CHAT_MODEL_ID": "scripted",
        }
        written = shlex.join([*map("=".join, crash.items()), "planner-ext", *arguments])
        self.console.print()
        _print(self.console, f"$ {written}", style="bold", after=False)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "planner_ext.cli", *arguments),
            cwd=self.folder,
            env={**kept, **endpoint, **crash, "PYTHONIOENCODING": "utf-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != code:
            raise _UnexpectedExitError(
                f"ended with {process.returncode}, not {code}: {err.decode('utf-8')}"
            )
        shown = out.decode("utf-8").splitlines()
        for text in filter(None, (*shown[:lines], note)):
            _print(self.console, text, indent=6, after=False)
        return shown


@asynccontextmanager
async def _scripted(
    script: Script,
) -> AsyncGenerator[tuple[ScriptedOpenAIServer, OpenAIChatCompletion]]:
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="none", max_retries=0
        ) as client:
            yield (
                server,
                OpenAIChatCompletion(ai_model_id="scripted", async_client=client),
            )


def _print_title(console: Terminal, number: str, text: str) -> None:
    console.print(Text.assemble((f" {number} ", "reverse"), "  ", (text, "bold")))


def _print(
    console: Terminal,
    text: str,
    *,
    style: str = "",
    indent: int = 2,
    after: bool = True,
) -> None:
    flow = TextFlow(console, width=min(console.width, 100), indent=indent, style=style)
    flow.write(text)
    flow.close()
    if after:
        console.print()


def _print_table(console: Terminal, rows: Table) -> None:
    console.print()
    console.print(Padding(rows, (0, 0, 0, 2), expand=False))
    console.print()


def _print_ledger(console: Terminal, *rows: tuple[str, int, str, int]) -> bool:
    """Print charges beside independent counts; return whether all agree.

    Args:
        console: Where to print.
        *rows: What was counted, the charge, who else counted, and that count.
    """
    signs = console.signs
    grid = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right", "left", "left", "right"):
        grid.add_column(justify=justify)
    for name, charged, who, counted in rows:
        sign = (
            Text(signs.good, "green") if charged == counted else Text(signs.bad, "red")
        )
        grid.add_row(
            f"{name}  ",
            "charged",
            f"{charged:,}",
            sign,
            f"{who} counted",
            f"{counted:,}",
        )
    _print_table(console, grid)
    return all(charged == counted for _, charged, _, counted in rows)
