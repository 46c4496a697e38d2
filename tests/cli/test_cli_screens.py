"""Golden screens, in ``screens``: what a person sees at 40, 80 and 200 columns, on a terminal and in a pipe."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pyte
import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.cli.approvals import _call_lines
from planner_ext.cli.show import Progress, print_answer, print_pending
from planner_ext.cli.text import Terminal
from planner_ext.durable import PendingApproval
from planner_ext.events import ResultReady
from planner_ext.testing import ScriptedChatCompletion, call, calls, say

SCREENS = Path(__file__).parent / "screens"
GOAL = (
    "Find out which of the three lamps in the window is the one that the customer saw."
)
LIMITS = Budget(
    max_iterations=5,
    max_tool_calls=12,
    max_total_tokens=100_000,
    max_active_seconds=12_000,
)
CODE = """\
from pathlib import Path


def clean(days: int) -> None:
\t\"\"\"Remove old reports.\"\"\"
    for path in Path("/srv/data").glob("*.csv"):
        if path.stat().st_mtime < days * 86_400:
            print(path, "is old, and will be removed with the next of the monthly clean-ups")
    print("done")

clean(1)
clean(2)
clean(3)
for p in Path("/").iterdir(): p.unlink()
"""
PENDING = PendingApproval(
    id="order-7/0/call_1",
    run_id="order-7",
    call_id="call_1",
    asked_at=datetime(2026, 11, 22, tzinfo=UTC),
    fully_qualified_name="shop-run_script",
    arguments={
        "code": CODE,
        "mail": {"to": "ann@shop.example", "body": "Dear Ann,\n\nfare\u200bwell ⚠️"},
        "rows": [{"order": "A-7", "amount": 2.5}, {"order": "7", "amount": None}],
        "words": ["אבג", 1, 1000],
    },
    fingerprint="f" * 64,
    prompt="May it?",
    summary="Runs a script of 14 lines",
    asked_by="policy rule 2",
    roles=("operator",),
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "It runs as root."},
            "dry_run": {"type": "boolean", "default": False},
        },
        "description": "Runs a script on the server.",
    },
)


class Shop:
    @kernel_function
    def price(self, article: str) -> int:
        return {"lamp": 42}.get(article, 7)


async def shown(on: Terminal) -> None:
    """Print a run with four limits, a question about a call, and the call in a list."""
    on.say(f"Run order-7: {GOAL}")
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    script = [
        calls(
            call("shop-price", {"article": "lamp"}),
            call("shop-price", {"article": "a bed " * 20}),
        ),
        replace(
            call("shop-price", {"article": "lamp"}),
            text="I look at the other two lamps, too.",
        ),
        say("It is the lamp in the middle."),
    ]
    kernel.add_service(ScriptedChatCompletion(script))
    options = FunctionCallingStepwisePlannerOptions(plan=False, budget=LIMITS)
    planner = FunctionCallingStepwisePlanner(options=options)
    with Progress(on) as progress:
        async for event in planner.invoke_stream(kernel, GOAL):
            progress.show(event)
            if isinstance(event, ResultReady):
                print_answer(on, event.result)
    print_pending(on, PENDING, lines=20)
    for line in _call_lines(PENDING):
        on.print_line(line)


async def screen_of(width: int, kind: str) -> str:
    """What is printed, without what differs from run to run."""
    file = StringIO()
    is_terminal = kind == "terminal"
    on = Terminal(file, width=width, force_terminal=is_terminal, color_system=None)
    await shown(on)
    written = file.getvalue()
    text = drawn(written, width) if is_terminal else written
    text = re.sub(r"\d+\.\d\d s", "0.00 s", text)
    return re.sub(r"\d+ days ago", "6 days ago", text)


def drawn(written: str, width: int) -> str:
    """What a terminal of this width has on it when everything was written."""
    screen = pyte.Screen(width, 400)
    # The emulator ends a text at isolates and the style of an emoji, which terminals draw as nothing.
    text = re.sub("[\u2068\u2069\ufe0f]", "", written)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip() + "\n"


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
@pytest.mark.parametrize("width", [40, 80, 200])
async def test_nothing_that_was_printed_is_lost(width: int, kind: str) -> None:
    """The goal, every round trip and every call stay on the screen; a pipe's lines are whole."""
    screen = await screen_of(width, kind)
    assert screen == (SCREENS / f"{kind}-{width}.txt").read_text("utf-8")
    for part in ("customer", "Round trip 1", "shop-price", "unlink"):
        assert part in screen
