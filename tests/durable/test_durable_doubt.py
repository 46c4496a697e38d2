"""A call that had started when its process died: it runs again, is probed, or is asked about."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.core.machine import IN_DOUBT
from planner_ext.durable import (
    Approvals,
    NoEffect,
    PendingApproval,
    Runs,
    TookEffect,
    effect,
)
from planner_ext.hitl_manager import Defer, Supply
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.durable import GOAL, check_history, planner_of
from support.stock import first_result

SENT = call("post-send", {"to": "ann"}, id="send")


class Post:
    """Sends letters; the first one hangs after it was sent, until its process is gone."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.hung = asyncio.Event()

    async def send(self, to: str, key: str = "") -> str:
        self.sent.append((to, key))
        if not self.hung.is_set():
            self.hung.set()
            await asyncio.Event().wait()
        return f"sent to {to}"


def plugin(post: Post, kind: Any = None, probe: Any = None) -> object:
    """Make a plugin whose function declares what a test wants."""

    class Plugin:
        @kernel_function(description="Sends a letter.")
        async def send(self, to: str) -> str:
            return await post.send(to)

    class Keyed:
        @effect(kind or "once", probe=probe)
        @kernel_function(description="Sends a letter.")
        async def send(self, to: str, idempotency_key: str) -> str:
            return await post.send(to, idempotency_key)

    return Plugin() if kind is None and probe is None else Keyed()


class World:
    """One run whose process ends while its call runs."""

    def __init__(
        self, store: Path, kind: Any = None, probe: Any = None, in_doubt: Any = "person"
    ) -> None:
        self.store, self.in_doubt = store, in_doubt
        self.post = Post()
        self.tools = plugin(self.post, kind, probe)

    async def die(self, planner: FunctionCallingStepwisePlanner | None = None) -> None:
        """Live until the call hangs."""
        self.post.hung.clear()
        async with Runs.sqlite(self.store, grace_seconds=0) as runs:
            await runs.start(planner or planner_of(), self.kernel(), GOAL, run_id="r")
            await self.post.hung.wait()

    async def live(
        self, planner: FunctionCallingStepwisePlanner | None = None
    ) -> FunctionCallingStepwisePlannerResult:
        """Live again, for one activation."""
        async with Runs.sqlite(self.store, in_doubt=self.in_doubt) as runs:
            return await (
                await runs.start(
                    planner or planner_of(), self.kernel(), GOAL, run_id="r"
                )
            ).result()

    async def waiting(self) -> PendingApproval:
        async with Approvals.connect(self.store) as approvals:
            (item,) = await approvals.pending()
        return item

    async def decide(self, decision: Any) -> bool:
        async with Approvals.connect(self.store) as approvals:
            return await approvals.decide((await approvals.pending())[0].id, decision)

    def kernel(self) -> Kernel:
        kernel = Kernel()
        kernel.add_service(
            ScriptedChatCompletion(
                lambda request: (
                    say("Done.")
                    if any(m["role"] == "tool" for m in request.messages)
                    else SENT
                )
            )
        )
        kernel.add_plugin(self.tools, "post")
        return kernel


def heard(result: FunctionCallingStepwisePlannerResult) -> str:
    """Give what the model read as the result of the call."""
    check_history(result, ["send"])
    assert result.chat_history is not None
    return next(
        str(first_result(m).result)
        for m in result.chat_history.messages
        if m.role == "tool"
    )


@pytest.mark.parametrize("kind", ["idempotent", "keyed"])
async def test_what_may_run_again_runs_again_with_its_key(
    kind: str, tmp_path: Path
) -> None:
    """No person is asked; the second run has the first one's key, and the usage counts one call."""
    world = World(tmp_path / "runs.db", kind)
    await world.die()
    result = await world.live()
    assert world.post.sent == [("ann", "r/0/send")] * 2
    assert (result.status, heard(result), result.tool_calls) == (
        "answered",
        "sent to ann",
        1,
    )


async def test_a_call_that_runs_again_is_not_refused_for_the_limit_that_it_used_up(
    tmp_path: Path,
) -> None:
    """One call is one call, however often its process died: it is never told that it did not run."""
    world, planner = (
        World(tmp_path / "runs.db", "keyed"),
        planner_of(budget=Budget(max_tool_calls=1)),
    )
    await world.die(planner)
    result = await world.live(planner)
    assert heard(result) == "sent to ann"


@pytest.mark.parametrize(
    ("decision", "letters", "answer"),
    [
        (Approve(by="ann"), 2, "sent to ann"),
        (Supply("It was sent.", by="ann"), 1, "It was sent."),
        (
            Deny("Ask her yourself.", by="ann"),
            1,
            f"{IN_DOUBT} It was not run again. Ask her yourself.",
        ),
    ],
)
async def test_a_person_decides_what_is_in_doubt(
    decision: Any, letters: int, answer: str, tmp_path: Path
) -> None:
    """By default nothing runs again unasked: a person sees that it is in doubt, and says what shall be."""
    world = World(tmp_path / "runs.db")
    await world.die()
    paused = await world.live()
    item = await world.waiting()
    assert (paused.status, item.id, item.in_doubt, dict(item.arguments)) == (
        "paused",
        "r/0/send",
        True,
        {"to": "ann"},
    )
    assert "may have taken effect" in item.prompt
    assert len(world.post.sent) == 1
    assert await world.decide(decision)
    result = await world.live()
    assert (result.status, heard(result), len(world.post.sent)) == (
        "answered",
        answer,
        letters,
    )


async def test_the_model_reads_of_the_doubt_where_that_is_wanted(
    tmp_path: Path,
) -> None:
    """With ``in_doubt="model"`` no person is asked: the model reads that the effect is not known."""
    world = World(tmp_path / "runs.db", in_doubt="model")
    await world.die()
    result = await world.live()
    assert (result.status, heard(result), len(world.post.sent)) == (
        "answered",
        IN_DOUBT,
        1,
    )


def found(key: str, arguments: Mapping[str, Any]) -> TookEffect:
    return TookEffect(f"{key} to {arguments['to']}")


async def found_later(key: str, arguments: Mapping[str, Any]) -> TookEffect:
    return found(key, arguments)


@pytest.mark.parametrize(
    ("probe", "letters", "answer"),
    [
        (found, 1, "r/0/send to ann"),
        (found_later, 1, "r/0/send to ann"),
        (lambda *_: TookEffect(), 1, ""),
        (lambda *_: NoEffect(), 2, "sent to ann"),
    ],
)
async def test_a_probe_settles_the_doubt(
    probe: Callable[..., Any], letters: int, answer: str, tmp_path: Path
) -> None:
    """Asked with the key and the arguments, sync or async: the call took effect, or it runs again."""
    world = World(tmp_path / "runs.db", probe=probe)
    await world.die()
    result = await world.live()
    assert (result.status, heard(result), len(world.post.sent)) == (
        "answered",
        answer,
        letters,
    )


def fails(*_: object) -> None:
    raise OSError("the archive is closed")


@pytest.mark.parametrize("probe", [lambda *_: None, fails, lambda *_: "yes"])
async def test_a_probe_that_cannot_tell_leaves_the_doubt_to_a_person(
    probe: Any, tmp_path: Path
) -> None:
    """None, an exception and nonsense do not count as an answer."""
    world = World(tmp_path / "runs.db", probe=probe)
    await world.die()
    assert (await world.live()).status == "paused"
    assert (await world.waiting()).in_doubt


async def test_an_approved_call_in_doubt_asks_a_new_question(tmp_path: Path) -> None:
    """A person who still looks at the first question cannot answer the second with it."""
    world, planner = (
        World(tmp_path / "runs.db"),
        planner_of(interceptors=[lambda _: Defer(expires_in=3600)]),
    )
    await world.live(planner)
    first = await world.waiting()
    assert await world.decide(Approve(arguments={"to": "bob"}, by="ann"))
    await world.die(planner)
    await world.live(planner)
    second = await world.waiting()

    assert (second.in_doubt, dict(second.arguments), second.expires_at) == (
        True,
        {"to": "bob"},
        None,
    )
    asked_again = f"{first.id}@"
    assert second.id.startswith(asked_again)
    assert not second.id.removeprefix(
        asked_again
    ).isdecimal()  # a count could be foreseen by the model
    async with Approvals.connect(world.store) as approvals:
        assert not await approvals.decide(first.id, Approve(by="late"))
    assert await world.decide(Approve(by="ann", fingerprint=second.fingerprint))
    assert (await world.live(planner)).status == "answered"
    assert [to for to, _ in world.post.sent] == ["bob", "bob"]


async def test_a_run_in_doubt_can_be_cancelled(tmp_path: Path) -> None:
    """The call is not said to have not run."""
    world = World(tmp_path / "runs.db")
    await world.die()
    await world.live()
    async with Runs.sqlite(world.store) as runs:
        assert await runs.cancel("r")
    assert heard(await world.live()) == IN_DOUBT
