"""ApprovalFilter binds what it approved, on stock kernels: function, arguments, and one start."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve
from planner_ext.durable import effect
from planner_ext.hitl_manager import ToolCall
from planner_ext.testing import call
from support.approval import DONE, Shop, World, asked, both_ways
from support.approval_filter import (
    AUTO,
    BOTH,
    FUNCTION,
    chat,
    guarded,
    read,
    under_each,
)
from support.values import each_of

ALLOWING = {"default": "ask", "rules": [{"function": "transfer", "action": "allow"}]}


class Bank(Shop):
    """A shop whose transfer takes a list and a default."""

    @kernel_function(description="Pays.")
    async def transfer(
        self, steps: list[int], currency: str = "EUR", count: int = 1
    ) -> str:
        self.ran.append(("transfer", steps, currency, count))
        return "paid"

    @effect("idempotent")
    @kernel_function(description="Prints.")
    async def label(self, steps: list[int]) -> str:
        self.ran.append(("label", steps))
        return "printed"


TRANSFER = call("shop-transfer", {"steps": [10]})
ONCE = ("transfer", [10], "EUR", 1)


def replaced(context: Any) -> None:
    context.arguments = KernelArguments(steps=[10_000])


def in_place(context: Any) -> None:
    context.arguments["steps"].append(10_000)


def added(context: Any) -> None:
    context.arguments["currency"] = "BTC"


def removed(context: Any) -> None:
    del context.arguments["steps"]


def exchanged(context: Any) -> None:
    context.function = context.kernel.get_function("shop", "wipe")


CHANGES: list[Callable[[Any], None]] = [replaced, in_place, added, removed, exchanged]


def bank(
    by: ApprovalFilter, under: Any, *inner: tuple[Any, Any], reply: Any = TRANSFER
) -> World:
    here = guarded([reply, DONE], by=by, under=under, shop=Bank())
    for kind, one in inner:
        here.kernel.add_filter(kind, one)
    return here


FILTERS = {
    "person": lambda: ApprovalFilter(
        ApprovalPolicy.from_dict({"default": "ask"}), lambda call: Approve()
    ),
    "rule": lambda: ApprovalFilter(ApprovalPolicy.from_dict(ALLOWING)),
    "default": lambda: ApprovalFilter(ApprovalPolicy.from_dict({"default": "allow"})),
    "callback": lambda: ApprovalFilter(lambda call: Approve()),
}


PLACES = [
    (AUTO, AUTO[0]),
    (AUTO, FUNCTION[0]),
    (FUNCTION, FUNCTION[0]),
    (BOTH, AUTO[0]),
    (BOTH, FUNCTION[0]),
]
"""Under which types the approval filter is registered, and under which the one behind it."""


@each_of(("under", "kind"), PLACES, ids=str)
@each_of(
    ("change", "who"),
    [*zip(CHANGES, cycle(FILTERS), strict=False)],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_a_filter_behind_it_changes_nothing_that_was_approved(
    who: str, change: Any, under: Any, kind: str
) -> None:
    """Registered under one type or both, the call is refused for a change by any inner filter, under any approval."""

    async def alter(context: Any, next: Any) -> None:
        change(context)
        await next(context)

    here = bank(FILTERS[who](), under, (kind, alter))
    await chat(here, asked())
    assert here.ran == []
    assert "was not run" in read(here)[0]


@under_each
@both_ways
async def test_what_outer_filters_change_is_what_is_decided(
    under: Any, streamed: bool
) -> None:
    """A filter that was registered before it acts before it: the policy sees, and binds, what that made of the call."""
    seen: list[Any] = []

    def policy(call: ToolCall) -> Any:
        seen.append(dict(call.arguments))
        return Approve()

    async def alter(context: Any, next: Any) -> None:
        context.arguments["steps"] = [20]
        await next(context)

    here = guarded(
        [TRANSFER, DONE], by=ApprovalFilter(lambda call: None), under=(), shop=Bank()
    )
    for kind in under:
        here.kernel.add_filter(kind, alter)
        here.kernel.add_filter(kind, ApprovalFilter(policy))
    await chat(here, asked(), streamed=streamed)
    assert (here.ran, seen[0]["steps"]) == ([("transfer", [20], "EUR", 1)], [20])


async def twice(context: Any, next: Any) -> None:
    await next(context)
    await next(context)


async def together(context: Any, next: Any) -> None:
    await asyncio.gather(next(context), next(context))


@each_of("filter", [twice, together], ids=lambda one: one.__name__)
@each_of(
    ("under", "kind"),
    [(AUTO, AUTO[0]), (AUTO, FUNCTION[0]), (FUNCTION, FUNCTION[0])],
    ids=str,
)
@both_ways
async def test_one_approval_is_one_start(
    under: Any, kind: str, filter: Any, streamed: bool
) -> None:
    """A second ``next`` of an inner filter gives the result again; what is declared idempotent runs again."""
    here = bank(FILTERS["callback"](), under, (kind, filter))
    await chat(here, asked(), streamed=streamed)
    assert (here.ran, read(here)) == ([ONCE], ["paid"])
    here = bank(
        FILTERS["callback"](),
        under,
        (kind, filter),
        reply=call("shop-label", {"steps": [1]}),
    )
    await chat(here, asked(), streamed=streamed)
    assert here.ran == [("label", [1])] * 2


@both_ways
async def test_a_second_next_that_runs_nothing_is_logged(
    streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on a stock kernel the warning names the declaration that allows a second run."""
    here = bank(FILTERS["callback"](), AUTO, (AUTO[0], twice))
    await chat(here, asked(), streamed=streamed)
    (warned,) = [
        one.getMessage()
        for one in caplog.records
        if one.name == "planner_ext.sk.functions.execution"
    ]
    assert "shop-transfer" in warned and '@effect("idempotent")' in warned


@pytest.mark.parametrize("kind", [AUTO[0], FUNCTION[0]])
async def test_a_next_that_is_kept_runs_nothing_later(kind: str) -> None:
    """After the call has its result, an inner filter cannot run the function with the approval that is over."""
    kept: list[Any] = []

    async def keep(context: Any, next: Any) -> None:
        kept.append(lambda: next(context))

    here = bank(FILTERS["callback"](), (kind,), (kind, keep))
    await chat(here, asked())
    with (
        pytest.raises(Exception, match="has ended")
        if kind == FUNCTION[0]
        else nullcontext()
    ):
        await kept[0]()
    assert here.ran == []


@under_each
async def test_it_is_asked_once_for_each_call(under: Any) -> None:
    """Whether it approves, is silent or is registered twice, the policy is asked about a call once."""
    for answer in (Approve(), None):
        seen: list[str] = []

        def policy(call: ToolCall, answer: Any = answer, seen: list[str] = seen) -> Any:
            seen.append(call.function_name)
            return answer

        here = bank(ApprovalFilter(policy), under)
        await chat(here, asked())
        assert (here.ran, seen) == ([ONCE], ["transfer"])


@under_each
async def test_where_it_is_silent_an_inner_filter_may_enrich_the_call(
    under: Any,
) -> None:
    """Nothing was approved, so nothing is bound; a policy that is registered behind the change sees it."""

    async def enrich(context: Any, next: Any) -> None:
        context.arguments["currency"] = "USD"
        await next(context)

    here = bank(ApprovalFilter(lambda call: None), under, (FUNCTION[0], enrich))
    await chat(here, asked())
    assert here.ran == [("transfer", [10], "USD", 1)]


async def test_a_rule_that_is_for_no_function_is_reported_once(caplog: Any) -> None:
    """A misspelt name guards nothing, and is logged when the filter first decides."""
    rules = [
        {"function": "transfre", "action": "deny"},
        {"function": "transfer", "action": "allow"},
    ]
    by = ApprovalFilter(ApprovalPolicy.from_dict({"default": "allow", "rules": rules}))
    for _ in range(2):
        await chat(bank(by, BOTH), asked())
    assert [
        one.getMessage() for one in caplog.records if "Rule" in one.getMessage()
    ] == ["Rule 1 of the approval policy is for no function of this kernel."]


@each_of("spelling", ["10000", 10000.0, " 10000"])
@under_each
async def test_the_policy_sees_the_value_that_the_function_gets(
    under: Any, spelling: Any
) -> None:
    """A number that the model wrote as a text is a number to the policy, to the person and to the function."""
    rules = [
        {"function": "transfer", "arguments": {"count": {"le": 10}}, "action": "allow"}
    ]
    seen: list[Any] = []

    def person(call: ToolCall) -> Any:
        seen.append(call.arguments["count"])
        return Approve()

    by = ApprovalFilter(
        ApprovalPolicy.from_dict({"default": "ask", "rules": rules}), person
    )
    here = bank(
        by, under, reply=call("shop-transfer", {"steps": [1], "count": spelling})
    )
    await chat(here, asked())
    if here.ran:
        assert (seen, here.ran) == ([10_000], [("transfer", [1], "EUR", 10_000)])
        assert (type(seen[0]), type(here.ran[0][3])) == (int, int)
    here = bank(by, under, reply=call("shop-transfer", {"steps": [1], "count": "7"}))
    await chat(here, asked())
    assert (here.ran, len(seen) <= 1) == ([("transfer", [1], "EUR", 7)], True)


async def test_what_waits_is_shown_and_runs_converted() -> None:
    """``pending`` shows the value that the function will get, and that is what a resumed approval runs."""
    by, history = ApprovalFilter(ApprovalPolicy.from_dict({"default": "ask"})), asked()
    here = bank(by, AUTO, reply=call("shop-transfer", {"steps": [1], "count": "7"}))
    await chat(here, history)
    (pending,) = by.pending(history)
    assert (pending.arguments["count"], type(pending.arguments["count"])) == (7, int)
    await by.resume(here.kernel, history, {"call_1": Approve()})
    assert here.ran == [("transfer", [1], "EUR", 7)]


@under_each
async def test_a_null_is_none_to_the_person_and_to_the_function_or_refused(
    under: Any,
) -> None:
    """Semantic Kernel would make the text "None" of it, which was not shown; where null is invalid it is refused."""
    for name, ran in (("limit", [("pay", "own", None)]), ("account", [])):
        seen: list[Any] = []
        done: list[Any] = []

        @kernel_function(name="pay")
        async def pay(account: str = "own", limit: str | None = None) -> str:
            done.append(("pay", account, limit))  # noqa: B023  (called within the round)
            return "paid"

        def person(call: ToolCall, seen: list[Any] = seen) -> Any:
            seen.append(call.arguments.get("limit", "other"))
            return Approve()

        by = ApprovalFilter(ApprovalPolicy.from_dict({"default": "ask"}), person)
        here = guarded([call("bank-pay", {name: None}), DONE], by=by, under=under)
        here.kernel.add_plugin({"pay": pay}, "bank")
        await chat(here, asked())
        assert (done, seen) == (ran, [None] * len(ran))


async def test_a_null_that_waits_runs_as_none() -> None:
    """Of a null that was approved the function gets None, not the text, nor the application's value."""
    by, history, ran = (
        ApprovalFilter(ApprovalPolicy.from_dict({"default": "ask"})),
        asked(),
        list[Any](),
    )

    @kernel_function(name="pay")
    async def pay(limit: str | None = None) -> str:
        ran.append(limit)
        return "paid"

    here = guarded([call("bank-pay", {"limit": None}), DONE], by=by)
    here.kernel.add_plugin({"pay": pay}, "bank")
    await chat(here, history)
    assert [one.arguments for one in by.pending(history)] == [{"limit": None}]
    await by.resume(
        here.kernel,
        history,
        {"call_1": Approve()},
        arguments=KernelArguments(limit="9"),
    )
    assert ran == [None]


@pytest.mark.parametrize("change", [{"count": 2}, {"steps": [1]}])
async def test_a_person_s_edit_is_bound_too(change: dict[str, Any]) -> None:
    """What the person put in place of the model's arguments runs, and no filter changes it."""

    async def alter(context: Any, next: Any) -> None:
        context.arguments["count"] = 9
        await next(context)

    by = ApprovalFilter(
        ApprovalPolicy.from_dict({"default": "ask"}),
        lambda call: Approve(arguments={"steps": [5], **change}),
    )
    here = bank(by, AUTO, (AUTO[0], alter))
    await chat(here, asked())
    assert here.ran == []
