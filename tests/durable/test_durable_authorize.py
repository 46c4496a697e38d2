"""Who may decide: a hook is asked for each decision on a kept run, where it is made and where a worker takes it."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalPolicy,
    ApprovalSettings,
    Approve,
    Budget,
    Deny,
    requires_approval,
)
from planner_ext.cli.approvals import show_pending
from planner_ext.durable import (
    ApprovalRefusedError,
    Approvals,
    DecisionRequest,
    NotAuthorizedError,
    RetryPolicy,
    RunConflictError,
    RunRefusedError,
    Runs,
    RunsClient,
)
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.store import open_database, opened_store
from planner_ext.errors import DecisionRefusedError, ServiceCallError
from planner_ext.events import RunStarted
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.durable import (
    effects_in,
    on_sqlite,
    open_runs,
    planner_of,
    store_neutral,
    turn,
)

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


def of_staff(request: DecisionRequest) -> bool | str:
    """Let those decide who have one of the call's roles."""
    if (
        request.call is None
        or not request.call.roles
        or STAFF.get(request.by) in request.call.roles
    ):
        return True
    return f"that takes one of: {', '.join(request.call.roles)}"


async def drive(store: str, tmp_path: Path, **options: Any) -> Any:
    async with open_runs(store, poll_seconds=0.01, **options) as runs:
        return await (await runs.start(*world(tmp_path), "Pay.", run_id="a")).result()


async def test_a_decision_is_refused_by_name_when_it_is_made(
    store: str, tmp_path: Path
) -> None:
    """The hook hears who, which run, which call and what; a refusal is kept, and the next person decides."""
    assert (await drive(store, tmp_path)).status == "paused"
    heard: list[DecisionRequest] = []

    async def authorize(request: DecisionRequest) -> bool | str:
        heard.append(request)
        return of_staff(request)

    async with Approvals.connect(store, authorize=authorize) as approvals:
        with pytest.raises(
            ApprovalRefusedError,
            match="'bo' may not decide 'a/0/pay': that takes one of: manager",
        ):
            await approvals.decide(ID, Approve(by="bo"))
        with pytest.raises(
            ApprovalRefusedError, match="An unnamed person may not decide"
        ):
            await approvals.decide(ID, Deny())
        (refused, unnamed) = (await approvals.show(ID)).refused
        assert (refused.by, refused.kind, unnamed.by) == ("bo", "approve", "")
        assert "that takes one of: manager" in refused.refused
        assert await approvals.decide(ID, Approve(by="ann"))

    assert [
        (one.by, one.run_id, one.call and (one.call.id, one.call.roles))
        for one in heard
    ] == [(by, "a", (ID, ("manager",))) for by in ("bo", "", "ann")]
    assert heard[2].decision == Approve(by="ann")
    assert (await drive(store, tmp_path, authorize=authorize)).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5"]


def forgets(_: DecisionRequest) -> None:
    """A hook without a return."""


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
        (forgets, "the authorize hook does not allow it"),
        (lambda _: False, "the authorize hook does not allow it"),
        (lambda _: {"allowed": True}, "the authorize hook does not allow it"),
    ],
    ids=["reason", "refusal", "fault", "None", "False", "junk"],
)
async def test_only_true_allows_a_decision(
    hook: Any, reason: str, store: str, tmp_path: Path
) -> None:
    """True allows; a reason, None, False, an exception and junk do not."""
    await drive(store, tmp_path)
    async with Approvals.connect(store, authorize=hook) as approvals:
        with pytest.raises(
            ApprovalRefusedError, match=f"'ann' may not decide 'a/0/pay': {reason}"
        ):
            await approvals.decide(ID, Approve(by="ann"))
        assert (await approvals.show(ID)).status == "open"
    async with Approvals.connect(store, authorize=lambda _: True) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))


def anybody(_: DecisionRequest) -> bool:
    return True


@on_sqlite
async def test_a_worker_asks_its_hook_again(store: str, tmp_path: Path) -> None:
    """About what another process let in: nothing runs, the call waits again and says who was refused and why."""
    await drive(store, tmp_path, authorize=of_staff)
    async with Approvals.connect(store, authorize=anybody) as approvals:
        assert await approvals.decide(ID, Approve(by="bo"))

    assert (await drive(store, tmp_path, authorize=of_staff)).status == "paused"

    async with Approvals.connect(store) as approvals:
        shown = await approvals.show(ID)
        assert (shown.status, [one.by for one in shown.refused]) == ("open", ["bo"])
        assert (
            "'bo' may not decide 'a/0/pay': that takes one of: manager" in shown.problem
        )
    async with Approvals.connect(store, authorize=anybody) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))
    assert effects_in(tmp_path / "effects") == []
    assert (await drive(store, tmp_path, authorize=of_staff)).status == "answered"


@on_sqlite
async def test_a_worker_asks_about_the_decisions_of_a_resume(
    store: str, tmp_path: Path
) -> None:
    """The refused one is raised to who resumed, and kept; an allowed one is taken."""
    await drive(store, tmp_path)
    async with open_runs(store, poll_seconds=0.01, authorize=of_staff) as runs:
        handle = await runs.resume(
            "a", *world(tmp_path), decisions={"pay": Approve(by="bo")}
        )
        with pytest.raises(
            DecisionRefusedError, match="'bo' may not decide"
        ) as refusal:
            await handle.result()
        assert refusal.value.call_id == "pay"
        async with Approvals.connect(store) as approvals:
            (refused,) = (await approvals.show(ID)).refused
            assert (refused.by, effects_in(tmp_path / "effects")) == ("bo", [])
        handle = await runs.resume(
            "a", *world(tmp_path), decisions={"pay": Approve(by="ann")}
        )
        assert (await handle.result()).status == "answered"


@on_sqlite
async def test_a_worker_goes_by_the_roles_of_the_journal(
    store: str, tmp_path: Path
) -> None:
    """Who alters the row of the question does not become one who may decide it."""
    await drive(store, tmp_path)
    database = await open_database(store)
    try:
        (((text,),),) = await database.transact(
            ("SELECT call FROM planner_approvals", {})
        )
        altered = {"call": json.dumps({**json.loads(str(text)), "roles": ["clerk"]})}
        await database.transact(("UPDATE planner_approvals SET call = :call", altered))
    finally:
        await database.close()
    async with Approvals.connect(store, authorize=of_staff) as approvals:
        assert await approvals.decide(ID, Approve(by="bo"))

    assert (await drive(store, tmp_path, authorize=of_staff)).status == "paused"

    async with Approvals.connect(store) as approvals:
        assert re.search(
            "'bo' may not decide .* one of: manager", (await approvals.show(ID)).problem
        )


@on_sqlite
async def test_roles_and_schema_are_shown_by_the_command_line(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, who may decide; as JSON also the schema of the parameters, to draw a form from."""
    await drive(store, tmp_path)
    await show_pending(ID, store, as_json=False)
    assert "roles        manager\n" in capsys.readouterr().out
    await show_pending(ID, store, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["roles"] == ["manager"]
    assert shown["parameters"]["properties"] == {"amount": {"type": "integer"}}


@on_sqlite
async def test_a_hook_that_hangs_keeps_no_place(store: str, tmp_path: Path) -> None:
    """A run whose decision is never authorized can be cancelled from elsewhere, and its worker has room again."""
    asked = asyncio.Event()

    async def hang(_: DecisionRequest) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with (
        open_runs(store, poll_seconds=0.01, authorize=hang) as runs,
        Runs.connect(store, authorize=anybody) as client,
    ):
        handle = await runs.start(*world(tmp_path), "Pay.", run_id="a")
        assert (await handle.result()).status == "paused"
        async with Approvals.connect(store, authorize=anybody) as approvals:
            assert await approvals.decide(ID, Approve(by="ann"))
        waiting = asyncio.create_task(handle.result())
        await asyncio.wait_for(asked.wait(), 120)
        assert await client.cancel("a", by="bo")
        assert (await asyncio.wait_for(waiting, 120)).status == "stopped"


# A run that began under a hook.


@on_sqlite
async def test_a_worker_without_the_hook_refuses_to_continue(
    store: str, tmp_path: Path
) -> None:
    """By its name, with the way out; nothing ran, and a worker that has it continues."""
    await drive(store, tmp_path, authorize=of_staff)
    async with Approvals.connect(store, authorize=of_staff) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))
    with pytest.raises(
        RunRefusedError,
        match=r"authorize hook .*of_staff\. .* factory of --app gives the hook",
    ):
        await drive(store, tmp_path)
    with pytest.raises(RunRefusedError, match=r"the authorize hook .*of_staff"):
        await drive(store, tmp_path, authorize=anybody)
    assert effects_in(tmp_path / "effects") == []
    assert (await drive(store, tmp_path, authorize=of_staff)).status == "answered"


@pytest.mark.parametrize("where", ["planner", "runs", "both"])
async def test_the_hook_of_the_planner_and_of_the_runs_is_one_guard(
    where: str, tmp_path: Path
) -> None:
    """Whichever of the two has it, decisions are asked of it, and who lacks it is refused."""
    store = tmp_path / "runs.db"
    of_planner = (
        {"approval": ApprovalSettings(authorize=of_staff)} if where != "runs" else {}
    )
    of_runs: dict[str, Any] = {"authorize": of_staff} if where != "planner" else {}
    _, kernel = world(tmp_path)
    async with open_runs(store, poll_seconds=0.01, **of_runs) as runs:
        paused = await (
            await runs.start(planner_of(**of_planner), kernel, "Pay.", run_id="a")
        ).result()
        begun = paused.facts[0]
        assert isinstance(begun, RunStarted) and begun.guards is not None
        assert begun.guards.authorize == (f"{__name__}.of_staff",)
        handle = await runs.resume(
            "a", planner_of(**of_planner), kernel, decisions={"pay": Approve(by="bo")}
        )
        with pytest.raises(DecisionRefusedError, match="'bo' may not decide 'a/0/pay'"):
            await handle.result()
        with pytest.raises(NotAuthorizedError, match="which this process lacks"):
            async with Approvals.connect(store) as approvals:
                await approvals.decide(ID, Approve(by="ann"))
        if where == "planner":
            with pytest.raises(NotAuthorizedError, match="which this process lacks"):
                await runs.cancel("a")
        handle = await runs.resume(
            "a", planner_of(**of_planner), kernel, decisions={"pay": Approve(by="ann")}
        )
        assert (await handle.result()).status == "answered"


Action = Callable[[Any, Any], Awaitable[object]]

ACTIONS: dict[str, Action] = {
    "decide": lambda runs, _: runs.approvals().decide(ID, Approve(by="bo")),
    "cancel": lambda runs, _: runs.cancel("a", by="bo"),
    "set_budget": lambda runs, _: runs.set_budget(
        "a", Budget(max_iterations=9), by="bo"
    ),
    "fork": lambda runs, _: runs.fork("a", at=-1, by="bo"),
    "delete": lambda runs, _: runs.delete("a", force=True, by="bo"),
    "resume": lambda runs, world: runs.resume("a", *world, by="bo"),
}


@store_neutral("action", ACTIONS, ids=list(ACTIONS))
async def test_a_process_without_a_hook_may_do_nothing_to_the_run(
    action: str, store: str, tmp_path: Path
) -> None:
    """It is refused at once, by who asked and by the hook's name, with the way out; the run is as it was."""
    await drive(store, tmp_path, authorize=of_staff)
    async with open_runs(store, poll_seconds=0.01) as runs:
        before = await runs.load("a")
        with pytest.raises(
            NotAuthorizedError,
            match=r"'bo' may not .*began under the authorize hook .*of_staff, which",
        ):
            await ACTIONS[action](runs, world(tmp_path))
        assert await runs.load("a") == before
        assert len(await runs.list()) == 1


@pytest.mark.parametrize("action", ACTIONS)
async def test_the_hook_is_asked_about_each_action(action: str, tmp_path: Path) -> None:
    """With its name, who asks and the run; a refusal says why, and changes nothing."""
    store, heard = str(tmp_path / "runs.db"), list[DecisionRequest]()
    await drive(store, tmp_path)

    def authorize(request: DecisionRequest) -> str:
        heard.append(request)
        return "only ann"

    async with open_runs(store, poll_seconds=0.01, authorize=authorize) as runs:
        before = await runs.load("a")
        with pytest.raises(NotAuthorizedError, match=r"'bo' may not .*: only ann"):
            await ACTIONS[action](runs, world(tmp_path))
        assert await runs.load("a") == before
    (request,) = heard
    assert (request.action, request.by, request.run_id, request.verified) == (
        action,
        "bo",
        "a",
        False,
    )
    assert (request.call is None, request.decision is None) == (
        action != "decide",
        action != "decide",
    )


async def test_a_run_that_failed_is_tried_again_by_whom_the_hook_lets_in(
    tmp_path: Path,
) -> None:
    """Resuming a failed run, or starting it again under its name, is the action ``retry``."""
    store, heard, kernel = str(tmp_path / "runs.db"), list[str](), Kernel()
    kernel.add_service(ScriptedChatCompletion([ConnectionError("down"), say("Hello.")]))

    def authorize(request: DecisionRequest) -> bool:
        heard.append(request.action)
        return request.by == "ann"

    options: Any = {
        "poll_seconds": 0.01,
        "authorize": authorize,
        "retry": RetryPolicy(attempts=1),
    }
    async with open_runs(store, **options) as runs:
        with pytest.raises(ServiceCallError):
            await (await runs.start(planner_of(), kernel, "Hi.", run_id="f")).result()
        assert (await runs.load("f")).record.status == "failed"
        with pytest.raises(
            NotAuthorizedError, match="An unnamed person may not retry run 'f'"
        ):
            await runs.start(planner_of(), kernel, "Hi.", run_id="f")
        with pytest.raises(NotAuthorizedError, match="'bo' may not retry run 'f'"):
            await runs.resume("f", planner_of(), kernel, by="bo")
        assert (await runs.load("f")).record.status == "failed"
        assert (
            await (await runs.resume("f", planner_of(), kernel, by="ann")).result()
        ).status == "answered"
    assert heard == ["retry"] * 3


async def test_old_runs_are_pruned_by_whom_the_hook_lets_in(
    store: str, tmp_path: Path
) -> None:
    """All of them, or none: one that began under a hook keeps a process without one from deleting any."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(lambda _: say("Hello.")))
    for name, authorize in (("plain", None), ("guarded", of_staff)):
        async with open_runs(store, poll_seconds=0.01, authorize=authorize) as runs:
            await (await runs.start(planner_of(), kernel, "Hi.", run_id=name)).result()
    old: Any = {"older_than": timedelta(seconds=-1), "status": "answered"}
    async with Runs.connect(store) as runs:
        with pytest.raises(
            NotAuthorizedError,
            match="may not delete run 'guarded': the run began under",
        ):
            await runs.prune(**old)
        assert await runs.prune(**old, dry_run=True) == 2
    async with Runs.connect(
        store, authorize=lambda request: request.by == "ann"
    ) as runs:
        with pytest.raises(NotAuthorizedError, match="'bo' may not delete run"):
            await runs.prune(**old, by="bo")
        assert await runs.prune(**old, by="ann") == 2


async def test_a_fork_and_an_import_keep_the_hook(tmp_path: Path) -> None:
    """A copy of the run is bound as the run is, in its store and in another one."""
    store, other = tmp_path / "runs.db", tmp_path / "other.db"
    await drive(str(store), tmp_path, authorize=of_staff)
    async with Runs.connect(store, authorize=of_staff) as runs:
        fork = await runs.fork("a", at=-1, by="ann")
    async with Runs.connect(store) as runs:
        with pytest.raises(NotAuthorizedError, match=f"may not delete run '{fork}'"):
            await runs.delete(fork)
    async with opened_store(store) as opened:
        text = await export_run(opened, "a")
    async with opened_store(other) as opened:
        with pytest.raises(
            NotAuthorizedError,
            match="An unnamed person may not import run 'a': the run began under",
        ):
            await import_run(opened, text)
        assert (
            await import_run(opened, text, doorkeeper=Doorkeeper(authorize=anybody))
            == "a"
        )
        with pytest.raises(NotAuthorizedError, match="may not cancel run 'a'"):
            await RunsClient(opened).cancel("a")


async def test_a_submitted_run_is_bound_to_the_hook_before_anybody_drives_it(
    tmp_path: Path,
) -> None:
    """A process without the hook neither cancels it nor drives it; one that has it does."""
    store = str(tmp_path / "runs.db")
    async with Runs.connect(store, authorize=of_staff) as runs:
        await runs.submit("Pay.", run_id="a")
        assert (await runs.submit("Pay.", run_id="a")).run_id == "a"
    async with Runs.connect(store) as runs:
        with pytest.raises(
            NotAuthorizedError, match="may not cancel run 'a': the run began under"
        ):
            await runs.cancel("a")
    with pytest.raises(RunRefusedError, match=r"the authorize hook .*of_staff"):
        await drive(store, tmp_path)
    assert (await drive(store, tmp_path, authorize=of_staff)).status == "paused"


async def test_a_run_is_submitted_under_guards(tmp_path: Path) -> None:
    """A policy as data, what happens to undecided calls, and a hook; who drives it must have them all."""
    store = str(tmp_path / "runs.db")
    policy = ApprovalPolicy.from_dict({"default": "ask", "rules": []})
    demanded = ApprovalSettings(expires_in=60.0, authorize=of_staff)
    _, kernel = world(tmp_path)
    async with open_runs(store, poll_seconds=0.01) as runs:
        await runs.submit("Pay.", run_id="a", interceptors=[policy], approval=demanded)
        for less in ({"interceptors": [policy]}, {"approval": demanded}):
            with pytest.raises(
                RunRefusedError,
                match=r"Run 'a' cannot be continued here: it began under what .* lacks",
            ):
                await (
                    await runs.start(planner_of(**less), kernel, "Pay.", run_id="a")
                ).result()
        whole = planner_of(interceptors=[policy], approval=demanded)
        assert (
            await (await runs.start(whole, kernel, "Pay.", run_id="a")).result()
        ).status == "paused"
        with pytest.raises(RunConflictError, match="under other guards"):
            await runs.submit("Pay.", run_id="a")


@on_sqlite
async def test_who_is_vouched_for_is_vouched_for_at_the_worker(
    store: str, tmp_path: Path
) -> None:
    """An application that signs its users in says so; a name that was only typed stays one, in every process."""

    def signed_in(request: DecisionRequest) -> bool:
        return request.verified and request.by == "ann"

    await drive(store, tmp_path, authorize=signed_in)
    async with Approvals.connect(store, authorize=anybody) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))
    assert (await drive(store, tmp_path, authorize=signed_in)).status == "paused"
    async with Approvals.connect(
        store, authorize=signed_in, verified=True
    ) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))
    assert (await drive(store, tmp_path, authorize=signed_in)).status == "answered"


@on_sqlite
async def test_who_may_decide_is_known_before_the_decision(
    store: str, tmp_path: Path
) -> None:
    """The hook is asked as for an approval; nothing is decided, and no refusal is recorded."""
    await drive(store, tmp_path, authorize=of_staff)
    async with Approvals.connect(store, authorize=of_staff) as approvals:
        (waiting,) = await approvals.pending("a")
        assert await approvals.may_decide(waiting, by="ann")
        assert not await approvals.may_decide(waiting, by="bo")
        assert await approvals.pending("a") == [waiting]
        assert await approvals.refused("a") == []
    async with Approvals.connect(store) as approvals:
        assert not await approvals.may_decide(waiting, by="ann")


async def test_roles_without_a_hook_are_never_decided(
    store: str, tmp_path: Path
) -> None:
    """Neither where the decision is made nor by a worker: the call waits, and the refusal says the way out."""
    await drive(store, tmp_path)
    async with Approvals.connect(store) as approvals:
        for decision in (Approve(by="ann"), Deny(by="ann")):
            with pytest.raises(
                ApprovalRefusedError,
                match="it is for manager to decide, and nothing here can check",
            ):
                await approvals.decide(ID, decision)
    async with Approvals.connect(store, authorize=anybody) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))
    assert (await drive(store, tmp_path)).status == "paused"
    async with Approvals.connect(store) as approvals:
        assert (
            "it is for manager to decide, and nothing here can check"
            in (await approvals.show(ID)).problem
        )
    assert effects_in(tmp_path / "effects") == []
