"""An approval binds, from every source: after it a filter changes neither the function nor the arguments."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import ApprovalPolicy, Approve
from planner_ext.hitl_manager import Defer, ToolCall
from planner_ext.testing import call, calls
from support.approval import (
    DONE,
    REFUND,
    REFUNDED,
    Door,
    Shop,
    results,
    two_doors,
    world,
)
from support.values import each_of

CHANGED = "The function {} was not run: a filter of the application changed what had been approved."


class Bank(Shop):
    """A shop whose transfer takes a list, a default and a parameter that the model does not see."""

    @kernel_function(description="Pays.")
    async def transfer(
        self,
        steps: list[int],
        currency: str = "EUR",
        tenant: Annotated[
            str, "Who pays", {"include_in_function_choices": False}
        ] = "none",
    ) -> str:
        self.ran.append(("transfer", steps, currency, tenant))
        return "paid"


TRANSFER = call("shop-transfer", {"steps": [10]})


def replaced(context: Any) -> None:
    context.arguments = KernelArguments(steps=[10_000])


def in_place(context: Any) -> None:
    context.arguments["steps"].append(10_000)


def other_type(context: Any) -> None:
    context.arguments["steps"] = (10,)


def added(context: Any) -> None:
    context.arguments["currency"] = "BTC"


def removed(context: Any) -> None:
    del context.arguments["steps"]


def exchanged(context: Any) -> None:
    context.function = context.kernel.get_function("shop", "wipe")


CHANGES: list[Callable[[Any], None]] = [
    replaced,
    in_place,
    other_type,
    added,
    removed,
    exchanged,
]


async def interceptor(call: ToolCall) -> Any:
    return Approve()


APPROVERS: dict[str, dict[str, Any]] = {
    "interceptor": {"interceptors": [interceptor]},
    "policy-rule": {
        "interceptors": [
            ApprovalPolicy.from_dict(
                {
                    "default": "ask",
                    "rules": [{"function": "transfer", "action": "allow"}],
                }
            )
        ]
    },
    "policy-default": {
        "interceptors": [ApprovalPolicy.from_dict({"default": "allow"})]
    },
}


def filtered(here: Any, kind: Any, change: Callable[[Any], None]) -> Any:
    async def alter(context: Any, next: Any) -> None:
        change(context)
        await next(context)

    here.kernel.add_filter(kind, alter)
    return here


@pytest.mark.parametrize("kind", ["auto_function_invocation", "function_invocation"])
@each_of("change", CHANGES, ids=lambda one: one.__name__)
@each_of("approver", APPROVERS)
async def test_an_approval_from_any_source_binds_the_call(
    approver: str, change: Any, kind: str
) -> None:
    """An interceptor's approval without a name, a rule's and a policy's default: a changed call does not run."""
    here = filtered(world([TRANSFER, DONE], Bank()), kind, change)
    outcome = await Door("planner", False).ask(here, **APPROVERS[approver])
    assert here.ran == []
    assert results(outcome.history) == [CHANGED.format("shop-transfer")]


@pytest.mark.parametrize("kind", ["auto_function_invocation", "function_invocation"])
@two_doors
async def test_an_approval_is_bound_through_every_door(door: Door, kind: str) -> None:
    """Planner, service and handler refuse alike what a filter changed after an interceptor had approved it."""
    here = filtered(world([TRANSFER, DONE], Bank()), kind, in_place)
    outcome = await door.ask(here, **APPROVERS["interceptor"])
    assert (here.ran, results(outcome.history)) == (
        [],
        [CHANGED.format("shop-transfer")],
    )


@pytest.mark.parametrize("always", ["function", "arguments"])
async def test_a_sticky_approval_binds_the_call(always: Any) -> None:
    """What was approved for the rest of the run is approved with the arguments that the model gave."""
    door = Door("planner", False)
    asking: dict[str, Any] = {"interceptors": [lambda call: Defer()]}
    paused = await door.ask(world([TRANSFER], Bank()), **asking)
    here = world([TRANSFER, DONE], Bank())
    seen: list[int] = []

    def second(context: Any) -> None:
        seen.append(1)
        if len(seen) == 2:
            in_place(context)

    filtered(here, "function_invocation", second)
    done = await door.resume(
        here, paused.checkpoint, {"call_1": Approve(always=always)}, **asking
    )
    assert [one[1] for one in here.ran] == [[10]]
    assert results(done.history)[1] == CHANGED.format("shop-transfer")


async def test_application_arguments_that_the_model_could_give_are_bound() -> None:
    """The value that the application gives for such a parameter is part of what was approved."""
    here = filtered(world([TRANSFER, DONE], Bank()), "auto_function_invocation", added)
    await Door("planner", False).ask(
        here, arguments=KernelArguments(currency="USD"), **APPROVERS["interceptor"]
    )
    assert here.ran == []


@pytest.mark.parametrize("kind", ["auto_function_invocation", "function_invocation"])
async def test_a_parameter_hidden_from_the_model_is_the_application_s(
    kind: str,
) -> None:
    """A filter may fill what neither the model nor the approver sees."""

    def fill(context: Any) -> None:
        context.arguments["tenant"] = "acme"

    here = filtered(world([TRANSFER, DONE], Bank()), kind, fill)
    await Door("planner", False).ask(here, **APPROVERS["interceptor"])
    assert here.ran == [("transfer", [10], "EUR", "acme")]


async def test_where_nothing_approved_a_filter_may_change_arguments_but_not_the_function() -> (
    None
):
    """Without interceptors a filter may enrich a call; what runs is still the function that was called."""
    here = filtered(world([TRANSFER, DONE], Bank()), "auto_function_invocation", added)
    await Door("planner", False).ask(here)
    assert here.ran == [("transfer", [10], "BTC", "none")]
    here = filtered(
        world([TRANSFER, DONE], Bank()), "auto_function_invocation", exchanged
    )
    outcome = await Door("planner", False).ask(here)
    assert (here.ran, "was not run" in results(outcome.history)[0]) == ([], True)


async def test_siblings_of_a_changed_call_run() -> None:
    """Only the call that a filter changed is refused."""

    def wipe_amount(context: Any) -> None:
        if context.function.name == "transfer":
            in_place(context)

    here = filtered(
        world([calls(TRANSFER, REFUND), DONE], Bank()),
        "auto_function_invocation",
        wipe_amount,
    )
    await Door("planner", False).ask(here, **APPROVERS["interceptor"])
    assert here.ran == [REFUNDED]
