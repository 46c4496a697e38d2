"""A small world whose runs are kept in a store: its tools leave traces on disk, its processes may be killed."""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
    requires_approval,
)
from planner_ext.durable import Approvals, Runs, effect
from planner_ext.engine.concurrency import SystemClock
from planner_ext.hitl_manager import Supply
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.rules import find_violation

GOAL = "Settle the order."
BATCH = calls(
    call("shop-book", {"order": 1}, id="book"),
    call("shop-label", {"order": 2}, id="label"),
    call("shop-charge", {"order": 3}, id="charge"),
)
PAY = call("shop-pay", {"amount": 5}, id="pay")


on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)
"""Runs a test on SQLite alone: what it checks is decided above the store, by facts that both databases keep alike."""


def store_neutral(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Parametrize a test whose cases do not depend on the database: all run on SQLite, the first on PostgreSQL, too."""
    rows = [case if isinstance(names, tuple) else (case,) for case in cases]
    values = [(*row, "sqlite") for row in rows] + [(*rows[0], "postgresql")]
    named = [f"{name}-sqlite" for name in ids] + [
        f"{name}-postgresql" for name in ids[:1]
    ]
    names = names if isinstance(names, tuple) else (names,)
    return pytest.mark.parametrize(
        (*names, "store"), values, ids=named or None, indirect=["store"]
    )


class Shop:
    """Tools that write each effect, with its key, into a file: one line each, even if the process dies."""

    def __init__(self, effects: Path, seconds: float = 0.0) -> None:
        self._effects = effects
        self._seconds = seconds

    async def _do(self, what: str) -> str:
        with self._effects.open("a") as file:
            file.write(what + "\n")
        await asyncio.sleep(self._seconds)
        return f"done {what}"

    @kernel_function(description="Books an order; nobody may do it twice.")
    async def book(self, order: int) -> str:
        return await self._do(f"book {order}")

    @effect("idempotent")
    @kernel_function(description="Prints a label.")
    async def label(self, order: int) -> str:
        return await self._do(f"label {order}")

    @effect("keyed")
    @kernel_function(description="Charges a card.")
    async def charge(self, order: int, idempotency_key: str) -> str:
        return await self._do(f"charge {order} {idempotency_key}")

    @requires_approval(prompt="Really?")
    @kernel_function(description="Pays.")
    async def pay(self, amount: int) -> str:
        return await self._do(f"pay {amount}")


def turn(request: ScriptedRequest) -> int:
    """Count the replies with calls that the model gave before: a model knows where it stands by its history alone."""
    return sum(bool(message.get("tool_calls")) for message in request.messages)


def pays(request: ScriptedRequest) -> ScriptedReply:
    """Call the tool that needs a person, then answer."""
    return [PAY, say("Paid.")][turn(request)]


def settles(request: ScriptedRequest) -> ScriptedReply:
    """Call three tools at once, then the one that needs a person, then answer."""
    return [BATCH, PAY, say("Settled.")][turn(request)]


def world(
    effects: Path, script: Script = settles, *, seconds: float = 0.0, **options: Any
) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel with the shop."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Shop(effects, seconds), "shop")
    return planner_of(**options), kernel


def planner_of(**options: Any) -> FunctionCallingStepwisePlanner:
    """Make a planner that does not plan by default."""
    given: dict[str, Any] = {"plan": False, **options}
    return FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(**given)
    )


def effects_in(file: Path) -> list[str]:
    """List the effects that took place."""
    return file.read_text().splitlines() if file.exists() else []


async def decide_all(store: str | Path, by: str = "ann") -> int:
    """Approve what waits, and say of what is in doubt that it is done; return how many decisions won."""
    async with Approvals.connect(store) as approvals:
        won = [
            await approvals.decide(
                item.id,
                Supply("It is done.", by=by)
                if item.in_doubt
                else Approve(by=by, fingerprint=item.fingerprint),
            )
            for item in await approvals.pending()
        ]
    return sum(won)


class SetClock(SystemClock):
    """The machine's clock, as somebody has set it."""

    def now(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]  # a function there
        """Return the time that it shows."""
        return time.time()


def open_runs(store: str | Path, **options: Any) -> AbstractAsyncContextManager[Runs]:
    """Open the runs in a SQLite file, or in a PostgreSQL database."""
    return (
        Runs.postgres(str(store), **options)
        if "://" in str(store)
        else Runs.sqlite(store, **options)
    )


async def see_through(
    store: str | Path,
    effects: Path,
    run_id: str,
    *,
    seconds: float = 0.0,
    worker_id: str | None = None,
) -> FunctionCallingStepwisePlannerResult:
    """Drive a run to its end, deciding every question."""
    planner, kernel = world(effects, seconds=seconds)
    async with open_runs(
        store, worker_id=worker_id, poll_seconds=0.01, max_deaths=100
    ) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id=run_id)
        result = await handle.result()
        while result.status == "paused":
            await decide_all(store)
            result = await handle.result()
    return result


def check_history(
    result: FunctionCallingStepwisePlannerResult, ids: Sequence[str]
) -> None:
    """Fail unless every call has exactly one result, with its own id, where a provider wants it."""
    assert result.chat_history is not None
    messages = [message.to_dict() for message in result.chat_history.messages]
    assert find_violation({"model": "any", "messages": messages}) is None
    assert [
        message["tool_call_id"] for message in messages if message["role"] == "tool"
    ] == list(ids)


def run_life(
    store: str | Path,
    effects: Path,
    run_id: str,
    seconds: float,
    worker_id: str | None = None,
) -> None:
    """Drive a run to its end."""
    asyncio.run(
        see_through(store, effects, run_id, seconds=seconds, worker_id=worker_id)
    )


def deciding_life(store: str | Path, report: Path) -> None:
    """Decide what waits, twice, and write down who won."""

    async def decide() -> dict[str, object]:
        async with Approvals.connect(store) as approvals:
            (item,) = await approvals.pending()
            won = [
                await approvals.decide(item.id, Approve(by=name))
                for name in ("ann", "bob")
            ]
        return {"id": item.id, "arguments": dict(item.arguments), "won": won}

    report.write_text(json.dumps(asyncio.run(decide())))
