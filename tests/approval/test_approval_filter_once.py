"""ApprovalFilter.resume decides what was shown, once: no id is guessed, no approved call runs twice."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalFilter, Approve, Deny
from planner_ext.errors import DecisionRefusedError
from planner_ext.hitl_manager import Supply, ToolCall
from planner_ext.testing import ScriptedReply, call, calls
from planner_ext.testing.script import ScriptedCall
from support.approval import (
    DONE,
    REFUND,
    REFUNDED,
    Shop,
    World,
    asked,
    both_ways,
    check_sendable,
    results,
    world,
)
from support.approval_filter import BOTH, POLICY, chat, guarded
from support.stock import add_filter
from support.values import each_of


class Slow(Shop):
    """A shop whose refund ends when the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()
        self.ends = asyncio.Event()
        self.history = ChatHistory()
        self.read: list[str] = []

    @kernel_function(description="Pays money back.")
    async def refund(self, order: str, amount: float, note: str = "") -> str:
        self.ran.append(("refund", order, amount, note))
        self.read = results(self.history)
        self.started.set()
        await self.ends.wait()
        return "refunded"


async def waiting(
    *script: Any, shop: Any = None, streamed: bool = False
) -> tuple[World, ApprovalFilter, ChatHistory]:
    by, history = ApprovalFilter(POLICY), asked()
    here = guarded(
        [*(script or (REFUND,)), DONE],
        by=by,
        **({} if shop is None else {"shop": shop}),
    )
    await chat(here, history, streamed=streamed)
    return here, by, history


def same_id(*amounts: float) -> ScriptedReply:
    given = [{"order": "7", "amount": amount} for amount in amounts]
    return ScriptedReply(
        calls=tuple(
            ScriptedCall(name="shop-refund", arguments=one, id="same") for one in given
        )
    )


async def test_a_clone_of_the_kernel_has_the_same_filter() -> None:
    """Under both types it still asks once."""
    seen: list[str] = []

    def ask(call: ToolCall) -> Approve:
        seen.append(call.id)
        return Approve()

    here = guarded([REFUND, DONE], by=ApprovalFilter(POLICY, approver=ask), under=BOTH)
    await chat(replace(here, kernel=here.kernel.clone()), asked())
    assert (seen, here.ran) == (["call_1"], [REFUNDED])


@each_of("amounts", [(1, 9999), (50, 50)], ids=["different", "equal"])
@both_ways
async def test_an_id_that_waits_twice_is_decided_by_fingerprint(
    streamed: bool, amounts: Any
) -> None:
    """Without one it is refused by name; with one, as the key or in the approval, exactly that call is decided."""
    here, by, history = await waiting(same_id(*amounts), streamed=streamed)
    first, second = by.pending(history)
    assert first.fingerprint != second.fingerprint
    for decision in (Approve(), Deny(), Supply("paid")):
        with pytest.raises(DecisionRefusedError, match="2 times"):
            await by.resume(here.kernel, history, {"same": decision})
    assert here.ran == []
    rest = await by.resume(
        here.kernel, history, {"same": Approve(fingerprint=second.fingerprint)}
    )
    assert ([one.fingerprint for one in rest], here.ran) == (
        [first.fingerprint],
        [("refund", "7", amounts[1], "")],
    )
    assert await by.resume(here.kernel, history, {first.fingerprint: Deny("No.")}) == ()
    assert len(here.ran) == 1


async def test_a_call_that_is_decided_twice_in_one_resume_is_refused() -> None:
    """By its id and by its fingerprint at once: nothing runs."""
    here, by, history = await waiting()
    (pending,) = by.pending(history)
    with pytest.raises(DecisionRefusedError, match="Two decisions"):
        await by.resume(
            here.kernel, history, {"call_1": Approve(), pending.fingerprint: Approve()}
        )
    assert here.ran == []


async def test_a_fingerprint_is_of_one_conversation_and_one_place() -> None:
    """The same call of another conversation has another one, and a waiting result is worth nothing elsewhere."""
    here, by, history = await waiting()
    _, _, other = await waiting()
    (pending,), (elsewhere,) = by.pending(history), by.pending(other)
    assert pending.fingerprint != elsewhere.fingerprint
    with pytest.raises(DecisionRefusedError, match="another call"):
        await by.resume(
            here.kernel, other, {"call_1": Approve(fingerprint=pending.fingerprint)}
        )
    moved = ChatHistory()
    moved.add_user_message("Refund nothing.")
    moved.messages += history.messages[1:]
    assert by.pending(moved) == ()
    moved = ChatHistory(
        messages=[
            *history.messages,
            history.messages[1].model_copy(deep=True),
            history.messages[-1],
        ]
    )
    assert {one.fingerprint for one in by.pending(moved)} == {pending.fingerprint}
    assert here.ran == []


@both_ways
async def test_two_resumes_at_once_run_it_once(streamed: bool) -> None:
    """The second finds nothing that waits; while the function runs the history says that it started."""
    shop = Slow()
    here, by, shop.history = await waiting(shop=shop, streamed=streamed)
    first = asyncio.create_task(
        by.resume(here.kernel, shop.history, {"call_1": Approve()})
    )
    await shop.started.wait()
    assert "in doubt" in shop.read[0]
    assert by.pending(shop.history) == ()
    with pytest.raises(DecisionRefusedError, match="call_1"):
        await by.resume(here.kernel, shop.history, {"call_1": Approve()})
    shop.ends.set()
    await first
    assert (len(shop.ran), results(shop.history)) == (1, ["refunded"])


@both_ways
async def test_a_copy_of_the_history_does_not_approve_twice(streamed: bool) -> None:
    """One filter takes a decision on a call once, also where the history was loaded twice."""
    here, by, history = await waiting(streamed=streamed)
    copies = [
        ChatHistory.model_validate_json(history.model_dump_json()) for _ in range(2)
    ]
    await by.resume(here.kernel, copies[0], {"call_1": Approve()})
    with pytest.raises(DecisionRefusedError, match="decided before"):
        await by.resume(here.kernel, copies[1], {"call_1": Approve()})
    assert here.ran == [REFUNDED]


@pytest.mark.parametrize(
    "first", [Deny("No."), Supply("paid by hand")], ids=["deny", "supply"]
)
async def test_what_was_refused_does_not_run_in_a_copy_of_the_history(
    first: Any,
) -> None:
    """A decision of any kind is taken once: an approval in a copy does not come after a refusal."""
    by = ApprovalFilter(POLICY)
    here, history = guarded([REFUND, DONE], by=by), asked()
    await chat(here, history)
    copy = ChatHistory.model_validate_json(history.model_dump_json())
    await by.resume(here.kernel, history, {"call_1": first})
    with pytest.raises(DecisionRefusedError, match="decided before"):
        await by.resume(here.kernel, copy, {"call_1": Approve()})
    assert here.ran == []


async def test_cancelled_while_it_runs_a_call_is_in_doubt_and_the_others_wait_again() -> (
    None
):
    """Nothing that started is said to have not run, or runs again; what had not started can still be decided."""
    shop = Slow()
    here, by, history = await waiting(calls(REFUND, REFUND), shop=shop)
    running = asyncio.create_task(
        by.resume(here.kernel, history, {"call_1": Approve(), "call_2": Approve()})
    )
    await shop.started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "in doubt" in results(history)[0]
    assert [one.id for one in by.pending(history)] == ["call_2"]
    with pytest.raises(DecisionRefusedError, match="call_1"):
        await by.resume(here.kernel, history, {"call_1": Approve()})
    shop.ends.set()
    await by.resume(here.kernel, history, {"call_2": Approve()})
    assert (len(shop.ran), results(history)[1]) == (2, "refunded")
    check_sendable(history)


async def test_a_function_that_ends_by_a_cancellation_of_its_own_failed() -> None:
    """What the function waited for was cancelled, and not the resume: the other calls are carried out."""

    class Cancelling(Shop):
        @kernel_function(description="Pays money back.")
        async def refund(self, order: str, amount: float, note: str = "") -> str:
            self.ran.append((order,))
            raise asyncio.CancelledError

    here, by, history = await waiting(calls(REFUND, REFUND), shop=Cancelling())
    await by.resume(here.kernel, history, {"call_1": Approve(), "call_2": Approve()})
    assert (len(here.ran), results(history)) == (
        2,
        ["The function shop-refund failed."] * 2,
    )


@both_ways
async def test_a_filter_changes_nothing_of_a_resumed_call(streamed: bool) -> None:
    """A function-invocation filter that changes the arguments, or runs the call twice, does neither."""

    async def alter(context: Any, next: Any) -> None:
        context.arguments["amount"] = 9999
        await next(context)

    async def twice(context: Any, next: Any) -> None:
        await next(context)
        await next(context)

    for one, ran in ((alter, []), (twice, [REFUNDED])):
        here, by, history = await waiting(streamed=streamed)
        add_filter(here.kernel, "function_invocation", one)
        await by.resume(here.kernel, history, {"call_1": Approve()})
        assert here.ran == ran
    assert results(history) == ["refunded 50"]


@both_ways
async def test_a_function_with_other_parameters_is_not_what_was_approved(
    streamed: bool,
) -> None:
    """Another type, or another default that was not shown: refused by name, and the call still waits."""

    class OtherDefault(Shop):
        @kernel_function(description="Pays money back.")
        async def refund(
            self, order: str, amount: float, note: str = "to the attacker"
        ) -> str:
            self.ran.append((order, amount, note))
            return "paid"

    class More(Shop):
        @kernel_function(description="Pays money back.")
        async def refund(
            self, order: str, amount: float, note: str = "", account: str = "x"
        ) -> str:
            self.ran.append((order, amount, note))
            return "paid"

    _, by, history = await waiting(streamed=streamed)
    for shop in (OtherDefault(), More()):
        with pytest.raises(DecisionRefusedError, match="changed"):
            await by.resume(world([], shop=shop).kernel, history, {"call_1": Approve()})
        assert (shop.ran, len(by.pending(history))) == ([], 1)


async def test_an_id_that_waits_in_two_turns_is_two_calls() -> None:
    """A model that uses an id again while the first call still waits: each is decided by its own fingerprint."""
    one, two = (
        call("shop-refund", {"order": str(n), "amount": n}, id="c") for n in (1, 2)
    )
    here, by, history = await waiting(one, two)
    history.add_user_message("And again.")
    await chat(here, history)
    first, second = by.pending(history)
    with pytest.raises(DecisionRefusedError, match="2 times"):
        await by.resume(here.kernel, history, {"c": Approve()})
    await by.resume(
        here.kernel, history, {first.fingerprint: Approve(), second.fingerprint: Deny()}
    )
    assert here.ran == [("refund", "1", 1.0, "")]
