"""``planner-ext replay`` and ``planner-ext runs fork``: a recorded run is played, a kept one goes on in another way."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    PlannerPlugin,
    requires_approval,
)
from planner_ext.testing import ScriptedChatCompletion, call, calls, record, say
from support.command_line import Command
from support.durable_shop import RUN, STORE, refunds, till

__all__ = ["till"]

SHOP = """
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function
from planner_ext import requires_approval

class Shop:
    @kernel_function(description="The price of an article.")
    def price(self, article: str, count: int = 1) -> str:
        print("looked up")
        return f"{article}: PRICE"

    @kernel_function(description="Refund an order.")
    @requires_approval()
    def refund(self, order: str) -> str:
        open("refunds.txt", "a").write(order)
        return f"refunded {order}"

def make():
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    return kernel
"""


class Shop:
    @kernel_function(description="The price of an article.")
    def price(self, article: str, count: int = 1) -> str:
        return f"{article}: 12 EUR"

    @kernel_function(description="Refund an order.")
    @requires_approval()
    def refund(self, order: str) -> str:
        return f"refunded {order}"


async def recorded(path: Path, *, plan: bool, decision: Any = None) -> None:
    """A run with a price, and a refund that a person decides."""
    script = [
        *([say("1. Look.")] if plan else []),
        calls(
            call("shop-price", {"article": "lamp"}),
            call("shop-refund", {"order": "A-7"}),
        ),
        say("A lamp costs 12 EUR."),
    ]
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=plan)
    )
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    kernel.add_service(ScriptedChatCompletion(script))
    with record(path) as tape:
        taped = tape.kernel(kernel)
        paused = await planner.invoke(taped, "What does a lamp cost?")
        await planner.resume(
            taped, paused.checkpoint, {one.id: decision for one in paused.pending}
        )


@pytest.fixture
def shop(here: Path) -> Path:
    (here / "shop.py").write_text(SHOP.replace("PRICE", "12 EUR"))
    return here


CASSETTE = "lamp.json"


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize(
    "decision",
    [
        Approve(by="ann"),
        Approve(arguments={"order": "A-8"}, by="ann"),
        Deny("no", by="ann"),
    ],
)
async def test_a_cassette_is_played_and_printed(
    shop: Path, command: Command, plan: bool, decision: Any
) -> None:
    """Played as recorded, with functions or with what the cassette says of them, it prints the answer; exit code 0."""
    await recorded(shop / CASSETTE, plan=plan, decision=decision)
    for more in (
        (),
        ("--kernel", "shop:make"),
        ("--kernel", "shop:make", "--functions", "recorded"),
    ):
        played = await asyncio.to_thread(command, "replay", CASSETTE, *more)
        assert (played.code, played.out) == (0, "A lamp costs 12 EUR.\n"), played.err
        assert "As recorded" in played.err
    assert not (shop / "refunds.txt").exists()


@pytest.mark.parametrize("how", ["no person asked", "no result"])
async def test_a_cassette_approves_no_call_of_a_live_function(
    shop: Path, command: Command, how: str
) -> None:
    """An approval in a file, altered or not, lets no function run that asks for one."""
    await recorded(shop / CASSETTE, plan=False, decision=Approve(by="ann"))
    data = json.loads((shop / CASSETTE).read_text())
    (run,) = data["runs"]
    if how == "no person asked":
        facts = [
            fact
            for fact in run
            if fact["type"] == "CallDecided" and fact["function"] == "shop-refund"
        ]
        for fact in facts:
            fact |= {"person": False, "approved": False, "by": "", "verdict": "run"}
        data["runs"] = [
            [
                fact
                for fact in run
                if fact["type"] not in ("Paused", "Resumed") and fact is not facts[0]
            ]
        ]
    else:
        start = next(
            place for place, fact in enumerate(run) if fact["type"] == "Resumed"
        )
        end = next(
            place
            for place in range(start, len(run))
            if run[place]["type"] == "CallStarted"
        )
        data["runs"] = [run[:end]]
    (shop / CASSETTE).write_text(json.dumps(data))
    await asyncio.to_thread(command, "replay", CASSETTE, "--kernel", "shop:make")
    assert not (shop / "refunds.txt").exists()


async def test_what_differs_is_printed(shop: Path, command: Command) -> None:
    """A function that returns something else is named; the exit code is 1, and the JSON lists the differences."""
    await recorded(shop / CASSETTE, plan=False, decision=Approve())
    (shop / "shop.py").write_text(SHOP.replace("PRICE", "13 EUR"))
    played = await asyncio.to_thread(
        command, "replay", CASSETTE, "--kernel", "shop:make"
    )
    assert (played.code, played.out) == (1, "A lamp costs 12 EUR.\n")
    assert (
        "the result of shop-price: expected 'lamp: 12 EUR', got 'lamp: 13 EUR'"
        in " ".join(played.err.split())
    )
    played = await asyncio.to_thread(
        command, "replay", CASSETTE, "--kernel", "shop:make", "--json"
    )
    (found,) = played.document["differences"]
    assert (found["function"], found["got"], played.document["status"]) == (
        "shop-price",
        "lamp: 13 EUR",
        "answered",
    )


async def test_a_nested_planner_is_played_by_its_result(
    shop: Path, command: Command
) -> None:
    """Without a kernel a planner inside a function answers as recorded; its requests are not missed."""
    inner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False)
    )
    kernel = Kernel()
    kernel.add_plugin(PlannerPlugin(inner), "helper")
    script = [
        call("helper-reach_goal", {"goal": "Think."}),
        say("42"),
        say("It is 42."),
    ]
    kernel.add_service(ScriptedChatCompletion(script))
    outer = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False)
    )
    with record(shop / CASSETTE) as tape:
        await outer.invoke(tape.kernel(kernel), "What is it?")
    played = await asyncio.to_thread(command, "replay", CASSETTE)
    assert (played.code, played.out) == (0, "It is 42.\n"), played.err


def test_what_cannot_be_replayed_is_refused(shop: Path, command: Command) -> None:
    """A file that is not a cassette, and an invalid option, exit with 2 and a reason."""
    (shop / CASSETTE).write_text("{}")
    assert command("replay", CASSETTE).code == 2
    assert "a JSON object of the kind 'cassette'" in command("replay", CASSETTE).err
    assert "cannot be read" in command("replay", "gone.json").err


async def test_functions_that_cannot_be_made_are_refused(
    shop: Path, command: Command
) -> None:
    """A cassette that describes its functions oddly, and a kernel that is not there, exit with 2 and a way out."""
    await recorded(shop / CASSETTE, plan=False, decision=Approve())
    for tool in (
        {"function": 5},
        {"function": {"name": "a-b", "parameters": 5}},
        {"function": {"name": "a-\n"}},
    ):
        write_tools(shop / CASSETTE, [tool])
        odd = await asyncio.to_thread(command, "replay", CASSETTE)
        assert odd.code == 2, odd
        assert "give --kernel" in odd.err
    assert (
        await asyncio.to_thread(command, "replay", CASSETTE, "--kernel", "nowhere:make")
    ).code == 2


def write_tools(path: Path, tools: list[Any]) -> None:
    """Replace the functions that the first request of a cassette offers."""
    document = json.loads(path.read_text("utf-8"))
    document["requests"][0]["tools"] = tools
    path.write_text(json.dumps(document), "utf-8")


def test_a_kept_run_is_forked_and_shown_beside_its_fork(
    here: Path, command: Command, till: None
) -> None:
    """The fork continues in this process with what was spent; a page shows both runs; the run is as it was."""
    assert command(*RUN).code == 4
    forked = command(
        *(
            "runs",
            "fork",
            "order-7",
            "--at",
            "0",
            "--run-id",
            "order-7b",
            "--kernel",
            "till:kernel",
            *STORE,
        ),
        *("--instruction", "Think again.", "--html", "fork.html", "--json"),
    )
    assert forked.code == 4, forked.err
    assert forked.document["run_id"] == "order-7b"
    assert "Think again." in str(forked.document["chat_history"])
    page = (here / "fork.html").read_text("utf-8")
    assert "Think again." in page
    assert page.count("shop-refund") > 1
    assert (
        command("runs", "show", "order-7", *STORE, "--json").document["status"]
        == "paused"
    )
    assert refunds(here) == []


def test_a_fork_waits_where_no_kernel_is_given(command: Command, till: None) -> None:
    """Without a kernel the fork is added, and the command that resumes it is printed; a wrong iteration is refused."""
    assert command(*RUN).code == 4
    added = command("runs", "fork", "order-7", "--at", "0", "--run-id", "later", *STORE)
    assert added.code == 0
    assert "runs resume later" in " ".join(added.err.split())
    assert (
        command("runs", "show", "later", *STORE, "--json").document["status"]
        == "stopped"
    )
    refused = command("runs", "fork", "order-7", "--at", "5", *STORE)
    assert refused.code == 2
    assert "cannot be forked after iteration 5" in " ".join(refused.err.split())
