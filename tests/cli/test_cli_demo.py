"""``planner-ext demo``: it runs offline, and what it prints is what happened."""

import os
import re
import subprocess
import sys
from io import StringIO

import pytest
from rich.cells import cell_len

from planner_ext.cli import demo, demo_shop
from planner_ext.cli.demo_shop import Calendar, Currency, Orders, Warehouse
from planner_ext.cli.text import Terminal
from planner_ext.testing import ScriptedOpenAIServer
from support.command_line import COMMAND
from support.processes import Lives


@pytest.fixture(scope="session")
def shown(lives: Lives) -> subprocess.CompletedProcess[str]:
    """One run of the demo, piped, 80 columns wide."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")
    }
    return subprocess.run(
        [lives.python, *COMMAND, "demo"],
        env=environment | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


def unwrapped(text: str) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(text.split())


def test_the_demo_succeeds_and_complains_of_nothing(
    shown: subprocess.CompletedProcess[str],
) -> None:
    """It exits with 0, and stderr stays empty."""
    assert (shown.returncode, shown.stderr) == (0, "")


def test_a_model_that_never_stops_is_charged_what_the_server_counted(
    shown: subprocess.CompletedProcess[str],
) -> None:
    """Five round trips were allowed, charged and counted, the limit is named, and there is an answer."""
    assert (
        "planner_ext: charged 5, the server counted 5; limit reached: max_iterations; "
        'answer: "E-7 is not finished: it was still running when I last looked."'
        in unwrapped(shown.stdout)
    )


@pytest.mark.parametrize(
    ("loop", "counted", "reported", "answered"),
    [
        ("Semantic Kernel", "6", "nothing", "yes"),
        ("Semantic Kernel, streamed", "5", "nothing", "no"),
        ("ADR, option 1", "10", "5", "yes"),
        ("ADR, option 2", "6", "6", "yes"),
        ("ADR, option 3", "15", "5", "no"),
        ("planner_ext", "5", "5", "yes"),
        ("planner_ext, streamed", "5", "5", "yes"),
    ],
)
def test_the_stock_loop_and_the_options_as_written_stand_beside_ours(
    shown: subprocess.CompletedProcess[str],
    loop: str,
    counted: str,
    reported: str,
    answered: str,
) -> None:
    """The table has the requests that each loop made, what it reports of them, and whether it answered."""
    row = next(
        line for line in shown.stdout.splitlines() if re.match(rf" +{loop}  ", line)
    )
    assert re.split(r"\s{2,}", row.strip()) == [
        loop,
        counted,
        reported,
        f"{'✓' if answered == 'yes' else '✗'} {answered}",
    ]


@pytest.mark.parametrize("row", ["round trips", "tokens", "function calls"])
def test_the_usage_agrees_with_who_else_counted(
    shown: subprocess.CompletedProcess[str], row: str
) -> None:
    """What the run was charged is what the server, or a filter of the kernel, counted."""
    found = re.search(
        rf"{row} +charged +([\d,]+) ✓ \w+ \w+ counted +([\d,]+)", shown.stdout
    )
    assert found is not None
    assert found[1] == found[2] != "0"


async def test_the_answer_is_made_of_what_the_functions_returned(
    shown: subprocess.CompletedProcess[str],
) -> None:
    """Customer, number, price and date in the answer are the functions' own."""
    order = await Orders().find("A-1007")
    euros = await Currency().convert(
        float(str(order["total"])), str(order["currency"]), "EUR"
    )
    days = (await Warehouse().sites())["Lyon"]
    arrival = await Calendar().add_working_days(await Calendar().today(), days)
    said = unwrapped(shown.stdout.replace("│", " "))
    assert (
        f"{order['customer']}, your {order['quantity']} lamps are reserved in Lyon"
        in said
    )
    assert f"They cost {euros:.2f} EUR ({order['total']:.2f} USD) and arrive on" in said
    assert f"{arrival}." in said


def test_a_plan_a_batch_a_failure_and_the_way_around_it_are_shown(
    shown: subprocess.CompletedProcess[str],
) -> None:
    """The plan comes first, calls of a batch end in their own order, and after the failure the same function works."""
    lines = [line.strip() for line in shown.stdout.splitlines()]
    plan, first = (
        lines.index("Round trip 1 of 10: the plan"),
        lines.index("Round trip 2 of 10"),
    )
    assert lines[plan + 1].startswith("1. ")
    started = [line for line in lines[first:] if line.startswith("→")][:3]
    ended = [line.split()[1] for line in lines[first:] if line.startswith("✓")][:3]
    assert started == [
        '→ orders-find(order_id="A-1007")',
        "→ warehouse-sites()",
        "→ calendar-today()",
    ]
    assert ended == ["calendar-today", "warehouse-sites", "orders-find"]
    reserved = [line for line in lines if re.match(r"[✓✗] warehouse-reserve ", line)]
    assert [line[0] for line in reserved] == ["✗", "✓"]
    assert "OutOfStockError: Hamburg has 1 LAMP-02, not 4" in reserved[0]


def test_a_killed_process_costs_nothing_and_the_refund_is_made_once(
    shown: subprocess.CompletedProcess[str],
) -> None:
    """The edited amount is what went back, once, by the shop's own file; the run is charged what the server counted."""
    said = unwrapped(shown.stdout)
    assert "order-7/1/call_2 amount=24.5 --by ann" in said
    assert "killed, after the money went out and before that was recorded" in said
    assert (
        "sorry: 24.50 dollars refunded for A-1007.\"; refunds in the shop's own file: 24.50 "
        in said
    )
    assert "round trips charged 3 ✓ the server counted 3" in said
    assert "refunds charged 1 ✓ the shop counted 1" in said


async def test_a_command_that_ends_otherwise_is_shown_and_fails_the_demo(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing about the processes is staged: where one does not end as it should, the demo says how, and fails."""
    monkeypatch.setattr(sys, "executable", lives.python)
    monkeypatch.setattr(demo, "_RUN", "a/b")
    out = StringIO()
    console = Terminal(out, width=80)
    assert not await demo._survival(console)
    assert "ended with 2, not 4: Error: run_id must be" in unwrapped(out.getvalue())


def test_piped_output_is_plain_text_of_80_columns(
    shown: subprocess.CompletedProcess[str],
) -> None:
    """No control character but the end of a line, and no line wider than the 80 columns."""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown.stdout)
    assert max(map(cell_len, shown.stdout.splitlines())) <= 80


async def test_a_number_that_disagrees_is_shown_and_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing about the numbers is staged: with a server that counts otherwise, the demo says so and fails."""
    monkeypatch.setattr(demo, "_survival", _survived)
    monkeypatch.setattr(demo_shop, "_THINKS_FOR", 0)
    monkeypatch.setattr(ScriptedOpenAIServer, "total_tokens", property(lambda _: 7))
    out = StringIO()
    console = Terminal(out, width=80)
    assert await demo.run_demo(console) == 1
    assert re.search(r"tokens +charged [\d,]+ ✗ the server counted +7", out.getvalue())


async def _survived(_: Terminal) -> bool:
    """Leave the last part of the demo out."""
    return True
