"""ApprovalFilter on stock kernels with an approver: the request is held open while a person decides."""

import asyncio
import threading
from typing import Any

import pytest
from semantic_kernel.functions import KernelArguments

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve, Deny
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Defer, Supply, ToolCall
from planner_ext.testing import call, calls
from support.approval import DONE, LOOK, REFUND, REFUNDED, WIPE, asked, world
from support.approval_filter import (
    BOTH,
    ENTRIES,
    FUNCTION,
    POLICY,
    Entry,
    chat,
    each_entry_under,
    every_entry,
    guarded,
    read,
    two_entries,
    under_each,
)
from support.values import each_of

REFUSED = "The call was refused and did not run: "


@each_entry_under
async def test_approved_calls_run(entry: Entry, under: Any) -> None:
    """What the person approves runs once, asked once, under either filter type and under both."""
    seen: list[ToolCall] = []

    async def approver(call: ToolCall) -> Any:
        seen.append(call)
        return Approve(by="ann")

    here = guarded(by=ApprovalFilter(POLICY, approver), under=under)
    await entry.ask(here)
    assert ([c.fully_qualified_name for c in seen], sorted(here.ran)) == (
        ["shop-refund"],
        [("look", "7"), REFUNDED],
    )
    assert dict(seen[0].arguments) == {"order": "7", "amount": 50}
    assert sorted(read(here)) == ["refunded 50", "sent"]


@each_entry_under
async def test_denied_calls_do_not_run(entry: Entry, under: Any) -> None:
    """What the person denies does not run; the model reads the reason, siblings keep their results."""
    here = guarded(
        by=ApprovalFilter(POLICY, lambda call: Deny("Too much.")), under=under
    )
    await entry.ask(here)
    assert (here.ran, sorted(read(here))) == (
        [("look", "7")],
        [f"{REFUSED}Too much.", "sent"],
    )


@each_entry_under
async def test_supplied_results_are_read(entry: Entry, under: Any) -> None:
    """A supplied result takes the function's place, written as JSON."""
    here = guarded(
        [REFUND, DONE],
        by=ApprovalFilter(POLICY, lambda call: Supply({"paid": None})),
        under=under,
    )
    await entry.ask(here)
    assert (here.ran, read(here)) == ([], ['{"paid":null}'])


@each_entry_under
async def test_edited_arguments_run(entry: Entry, under: Any) -> None:
    """An edit runs in place of the model's arguments, exactly: what it leaves out is left out."""
    sent = call("shop-refund", {"order": "7", "amount": 50, "note": "to the attacker"})
    edit = Approve(arguments={"order": "7", "amount": 20})
    here = guarded(
        [sent, DONE], by=ApprovalFilter(POLICY, lambda call: edit), under=under
    )
    await entry.ask(here)
    assert here.ran == [("refund", "7", 20.0, "")]


@each_entry_under
async def test_an_invalid_edit_refuses(entry: Entry, under: Any) -> None:
    """An edit that the function does not take is a refusal."""
    edit = Approve(arguments={"order": "7", "speed": 1})
    here = guarded(
        [REFUND, DONE], by=ApprovalFilter(POLICY, lambda call: edit), under=under
    )
    await entry.ask(here)
    assert (here.ran, read(here)[0].startswith(REFUSED)) == ([], True)


async def hangs(call: ToolCall) -> Any:
    return await asyncio.Future()


@every_entry
async def test_a_timeout_refuses(entry: Entry) -> None:
    """A person who does not decide in time has refused."""
    here = guarded([REFUND, DONE], by=ApprovalFilter(POLICY, hangs, timeout=0.02))
    await entry.ask(here)
    assert (here.ran, read(here)) == ([], [f"{REFUSED}It was not decided in time."])


async def test_a_blocking_approver_times_out() -> None:
    """An approver that blocks, as ``input()`` does, neither holds up the event loop nor approves after the timeout."""
    released, alive = threading.Event(), list[bool]()

    def blocks(call: ToolCall) -> Any:
        alive.append(released.wait(1))
        return Approve()

    here = guarded([REFUND, DONE], by=ApprovalFilter(POLICY, blocks, timeout=0.05))
    try:
        await chat(here, asked())
    finally:
        released.set()
    assert (here.ran, read(here)) == ([], [f"{REFUSED}It was not decided in time."])


async def raising(call: ToolCall) -> Any:
    raise RuntimeError("password=hunter2")


async def stubborn(call: ToolCall) -> Any:
    try:
        return await asyncio.Future()
    except asyncio.CancelledError:
        return Approve()


async def cancelled_inside(call: ToolCall) -> Any:
    waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    waiting.cancel()
    return await waiting


APPROVERS: dict[str, Any] = {
    "raises": raising,
    "stubborn": stubborn,
    "cancelled-inside": cancelled_inside,
    "none": lambda call: None,
    "defer": lambda call: Defer(),
    "other-call": lambda call: Approve(fingerprint="0" * 64),
    "other-arity": lambda: Approve(),
    "junk-arguments": lambda call: Approve(arguments="all"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "junk-keys": lambda call: Approve(arguments={("order",): 1}),  # pyright: ignore[reportArgumentType]  # junk, on purpose
}


@each_of("approver", APPROVERS)
@two_entries
async def test_an_answer_other_than_approval_refuses(
    entry: Entry, approver: str
) -> None:
    """An approver that raises, hangs on or leaves it open refuses; the model reads no detail of it."""
    here = guarded(
        [REFUND, DONE], by=ApprovalFilter(POLICY, APPROVERS[approver], timeout=0.05)
    )
    await entry.ask(here)
    assert here.ran == []
    assert "refused" in read(here)[0]
    assert "hunter2" not in read(here)[0]


@each_entry_under
async def test_marks_are_honoured(entry: Entry, under: Any) -> None:
    """A marked function is asked about under every default of the policy; an allow rule frees it."""
    for policy, expected in (
        (ApprovalPolicy.from_dict({"default": "allow"}), []),
        (lambda call: None, []),
        (
            ApprovalPolicy.from_dict(
                {"default": "allow", "rules": [{"function": "wipe", "action": "allow"}]}
            ),
            [("wipe",)],
        ),
    ):
        here = guarded(
            [WIPE, DONE], by=ApprovalFilter(policy, lambda call: Deny()), under=under
        )
        await entry.ask(here)
        assert here.ran == expected


@each_entry_under
async def test_policies_and_interceptors_decide_by_themselves(
    entry: Entry, under: Any
) -> None:
    """A policy that allows or denies a call asks no person; an interceptor may replace it, and denies if it raises."""
    asked_about: list[ToolCall] = []

    async def never_asked(call: ToolCall) -> Approve:
        asked_about.append(call)
        return Approve()

    for policy, expected in (
        (ApprovalPolicy.from_dict({"default": "allow"}), [REFUNDED]),
        (ApprovalPolicy.from_dict({"default": "deny"}), []),
        (lambda call: Deny() if call.arguments["amount"] > 10 else None, []),
        (raising, []),
    ):
        here = guarded(
            [REFUND, DONE], by=ApprovalFilter(policy, never_asked), under=under
        )
        await entry.ask(here)
        assert here.ran == expected
    assert asked_about == []


async def test_calls_of_a_batch_are_asked_about_each() -> None:
    """Three refunds, three questions; each gets its own answer."""
    seen: list[str] = []

    async def approver(call: ToolCall) -> Any:
        seen.append(call.id)
        await asyncio.sleep(0)
        return Approve() if call.id == "call_2" else Deny()

    here = guarded(
        [calls(REFUND, REFUND, REFUND), DONE],
        by=ApprovalFilter(POLICY, approver),
        under=BOTH,
    )
    await chat(here, asked())
    assert (sorted(seen), here.ran) == (["call_1", "call_2", "call_3"], [REFUNDED])


async def test_direct_invocations_are_asked_about() -> None:
    """Under ``function_invocation`` a call by the application itself is asked about, too."""
    decisions = iter([Deny("No."), Approve()])
    here = guarded(
        [], by=ApprovalFilter(POLICY, lambda call: next(decisions)), under=FUNCTION
    )
    arguments = KernelArguments(order="7", amount=50)
    first = await here.kernel.invoke(
        plugin_name="shop", function_name="refund", arguments=arguments
    )
    assert (here.ran, str(first)) == ([], f"{REFUSED}No.")
    await here.kernel.invoke(
        plugin_name="shop", function_name="refund", arguments=arguments
    )
    assert here.ran == [REFUNDED]


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_without_an_approver_function_filters_refuse(streamed: bool) -> None:
    """``function_invocation`` alone cannot wait for a person: without an approver it refuses, and says why."""
    here = guarded(by=ApprovalFilter(POLICY), under=FUNCTION)
    await Entry("chat", streamed).ask(here)
    assert here.ran == [("look", "7")]
    assert any("nobody can be asked" in text for text in read(here))


@under_each
@pytest.mark.parametrize("entry", ENTRIES[2:], ids=str)
async def test_application_arguments_need_not_be_json(entry: Entry, under: Any) -> None:
    """An application argument may be of any type, such as a session; it is not shown to a person."""
    seen: list[ToolCall] = []

    def policy(call: ToolCall) -> Any:
        seen.append(call)

    here = guarded([REFUND, DONE], by=ApprovalFilter(policy), under=under)
    await entry.ask(here, KernelArguments(session=object(), token="hunter2"))
    assert here.ran == [REFUNDED]
    shown = [c for c in seen if c.function_name == "refund"]
    assert [dict(c.arguments) for c in shown] == [{"order": "7", "amount": 50}]
    assert "hunter2" not in repr(shown)


@each_of(
    "options",
    [
        {"approver": 5},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": True},
        {"timeout": "5"},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    """Policy, approver and timeout are checked, and named."""
    with pytest.raises(PlannerInvalidConfigurationError, match=next(iter(options))):
        ApprovalFilter(POLICY, **options)
    with pytest.raises(PlannerInvalidConfigurationError, match="policy"):
        ApprovalFilter({"default": "ask"})  # pyright: ignore[reportArgumentType]  # junk, on purpose


async def test_a_kernel_without_risky_calls_is_as_before() -> None:
    """Where nothing is asked about, requests and results are those of a kernel without the filter."""
    plain, filtered = (
        world([LOOK, DONE]),
        guarded([LOOK, DONE], by=ApprovalFilter(POLICY), under=BOTH),
    )
    for here in (plain, filtered):
        await chat(here, asked())
    assert [r.messages for r in plain.service.requests] == [
        r.messages for r in filtered.service.requests
    ]
