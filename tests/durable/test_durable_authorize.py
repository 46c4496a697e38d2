"""Who may decide: a hook is asked for each decision on a kept run, where it is made and where a worker takes it."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Deny, requires_approval
from planner_ext.cli.store import show_pending
from planner_ext.durable import ApprovalRefusedError, Approvals, DecisionRequest, Runs
from planner_ext.durable.store import open_database
from planner_ext.errors import DecisionRefusedError
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, ScriptedRequest, call, say
from support.durable import effects_in, open_runs, planner_of, store_neutral, turn

ID = "a/0/pay"


class Till:
    """A till whose money only a manager may pay out."""

    def __init__(self, effects: Path) -> None:
        self._effects = effects

    @requires_approval(roles=["manager"])
    @kernel_function
    async def pay(self, amount: int) -> str:
        with self._effects.open("a") as file:
            file.write(f"pay {amount}\n")
        return "paid"


def pays(request: ScriptedRequest) -> ScriptedReply:
    return [call("till-pay", {"amount": 5}, id="pay"), say("Paid.")][turn(request)]


def world(tmp_path: Path) -> tuple[Any, Kernel]:
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(pays))
    kernel.add_plugin(Till(tmp_path / "effects"), "till")
    return planner_of(), kernel


STAFF = {"ann": "manager", "bo": "clerk"}


def of_staff(request: DecisionRequest) -> str | None:
    """Let those decide who have one of the call's roles."""
    if not request.call.roles or STAFF.get(request.by) in request.call.roles:
        return None
    return f"that takes one of: {', '.join(request.call.roles)}"


async def drive(store: str, tmp_path: Path, **options: Any) -> Any:
    async with open_runs(store, poll_seconds=0.01, **options) as runs:
        return await (await runs.start(*world(tmp_path), "Pay.", run_id="a")).result()


async def test_a_decision_is_refused_by_name_when_it_is_made(store: str, tmp_path: Path) -> None:
    """The hook hears who, which run, which call and what; a refusal is kept, and the next person decides."""
    assert (await drive(store, tmp_path)).status == "paused"
    heard: list[DecisionRequest] = []

    async def authorize(request: DecisionRequest) -> str | None:
        heard.append(request)
        return of_staff(request)

    async with Approvals.connect(store, authorize=authorize) as approvals:
        with pytest.raises(ApprovalRefusedError, match="'bo' may not decide 'a/0/pay': that takes one of: manager"):
            await approvals.decide(ID, Approve(by="bo"))
        with pytest.raises(ApprovalRefusedError, match="An unnamed person may not decide"):
            await approvals.decide(ID, Deny())
        (refused, unnamed) = (await approvals.show(ID)).refused
        assert (refused.by, refused.kind, unnamed.by) == ("bo", "approve", "")
        assert "that takes one of: manager" in refused.refused
        assert await approvals.decide(ID, Approve(by="ann"))

    assert [(one.by, one.run_id, one.call.id, one.call.roles) for one in heard] == [
        (by, "a", ID, ("manager",)) for by in ("bo", "", "ann")
    ]
    assert heard[2].decision == Approve(by="ann")
    assert (await drive(store, tmp_path)).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5"]


def fails(_: DecisionRequest) -> None:
    raise ConnectionError("the directory is down")


def refuses(_: DecisionRequest) -> None:
    raise PermissionError("on leave")


@store_neutral(
    ("hook", "reason"),
    [
        (lambda _: "on leave", "on leave"),
        (refuses, "on leave"),
        (fails, "the directory is down"),
        (lambda _: False, "the authorize hook does not allow it"),
        (lambda _: {"allowed": True}, "the authorize hook does not allow it"),
    ],
    ids=["reason", "refusal", "fault", "False", "junk"],
)
async def test_whatever_is_not_an_allowance_refuses(hook: Any, reason: str, store: str, tmp_path: Path) -> None:
    """None and True allow; a reason, False, an exception and junk do not."""
    await drive(store, tmp_path)
    async with Approvals.connect(store, authorize=hook) as approvals:
        with pytest.raises(ApprovalRefusedError, match=f"'ann' may not decide 'a/0/pay': {reason}"):
            await approvals.decide(ID, Approve(by="ann"))
        assert (await approvals.show(ID)).status == "open"
    async with Approvals.connect(store, authorize=lambda _: True) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))


async def test_a_worker_asks_about_a_decision_that_was_made_without_the_hook(store: str, tmp_path: Path) -> None:
    """As from a command line without one: nothing runs, the call waits again and says who was refused and why."""
    await drive(store, tmp_path)
    async with Approvals.connect(store) as approvals:
        assert await approvals.decide(ID, Approve(by="bo"))

    assert (await drive(store, tmp_path, authorize=of_staff)).status == "paused"

    async with Approvals.connect(store) as approvals:
        shown = await approvals.show(ID)
        assert (shown.status, [one.by for one in shown.refused]) == ("open", ["bo"])
        assert "'bo' may not decide 'a/0/pay': that takes one of: manager" in shown.problem
        assert await approvals.decide(ID, Approve(by="ann"))
    assert effects_in(tmp_path / "effects") == []
    assert (await drive(store, tmp_path, authorize=of_staff)).status == "answered"


async def test_a_worker_asks_about_the_decisions_of_a_resume(store: str, tmp_path: Path) -> None:
    """The refused one is raised to who resumed, and kept; an allowed one is taken."""
    await drive(store, tmp_path)
    async with open_runs(store, poll_seconds=0.01, authorize=of_staff) as runs:
        handle = await runs.resume("a", *world(tmp_path), decisions={"pay": Approve(by="bo")})
        with pytest.raises(DecisionRefusedError, match="'bo' may not decide") as refusal:
            await handle.result()
        assert refusal.value.call_id == "pay"
        async with Approvals.connect(store) as approvals:
            (refused,) = (await approvals.show(ID)).refused
            assert (refused.by, effects_in(tmp_path / "effects")) == ("bo", [])
        handle = await runs.resume("a", *world(tmp_path), decisions={"pay": Approve(by="ann")})
        assert (await handle.result()).status == "answered"


async def test_a_worker_goes_by_the_roles_of_the_journal(store: str, tmp_path: Path) -> None:
    """Who alters the row of the question does not become one who may decide it."""
    await drive(store, tmp_path)
    database = await open_database(store)
    try:
        (((text,),),) = await database.transact(("SELECT call FROM planner_approvals", {}))
        altered = {"call": json.dumps({**json.loads(str(text)), "roles": ["clerk"]})}
        await database.transact(("UPDATE planner_approvals SET call = :call", altered))
    finally:
        await database.close()
    async with Approvals.connect(store, authorize=of_staff) as approvals:
        assert await approvals.decide(ID, Approve(by="bo"))

    assert (await drive(store, tmp_path, authorize=of_staff)).status == "paused"

    async with Approvals.connect(store) as approvals:
        assert re.search("'bo' may not decide .* one of: manager", (await approvals.show(ID)).problem)


async def test_roles_and_schema_are_shown_by_the_command_line(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, who may decide; as JSON also the schema of the parameters, to draw a form from."""
    await drive(store, tmp_path)
    assert await show_pending(ID, store, as_json=False) == 0
    assert "roles        manager\n" in capsys.readouterr().out
    assert await show_pending(ID, store, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["roles"] == ["manager"]
    assert shown["parameters"]["properties"] == {"amount": {"type": "integer"}}


async def test_a_hook_that_hangs_keeps_no_place(store: str, tmp_path: Path) -> None:
    """A run whose decision is never authorized can be cancelled from elsewhere, and its worker has room again."""
    asked = asyncio.Event()

    async def hang(_: DecisionRequest) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with open_runs(store, poll_seconds=0.01, authorize=hang) as runs, Runs.connect(store) as client:
        handle = await runs.start(*world(tmp_path), "Pay.", run_id="a")
        assert (await handle.result()).status == "paused"
        async with Approvals.connect(store) as approvals:
            assert await approvals.decide(ID, Approve(by="ann"))
        waiting = asyncio.create_task(handle.result())
        await asyncio.wait_for(asked.wait(), 120)
        assert await client.cancel("a", by="bo")
        assert (await asyncio.wait_for(waiting, 120)).status == "stopped"
