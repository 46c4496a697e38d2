"""A decision is about a function as it was: a replacement with other parameters is asked about again."""

import json
from typing import Annotated, Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Deny
from planner_ext.approval.decisions import fingerprint_of
from planner_ext.errors import DecisionRefusedError
from planner_ext.hitl_manager import Defer
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    Shop,
    one_door,
    two_doors,
    world,
)
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}


class OtherDefault(Shop):
    @kernel_function(description="Pays money back.")
    async def refund(
        self, order: str, amount: float, note: str = "to the attacker"
    ) -> str:
        self.ran.append(("refund", order, amount, note))
        return "paid"


class OneMore(Shop):
    @kernel_function(description="Pays money back.")
    async def refund(
        self, order: str, amount: float, note: str = "", account: str = "x"
    ) -> str:
        self.ran.append(("refund", order, amount, note))
        return "paid"


class OtherType(Shop):
    @kernel_function(description="Pays money back.")
    async def refund(self, order: Any, amount: float, note: str = "") -> str:
        self.ran.append(("refund", order, amount, note))
        return "paid"


class Described(Shop):
    @kernel_function(description="Pays money back, at once.")
    async def refund(
        self, order: Annotated[str, "Which"], amount: float, note: str = ""
    ) -> str:
        self.ran.append(("refund", order, amount, note))
        return "paid"


@each_of("shop", [OtherDefault, OneMore, OtherType])
@two_doors
async def test_a_function_with_other_parameters_is_asked_about_again(
    door: Door, shop: Any
) -> None:
    """An approval of the old one is refused; resumed without it the call waits again, under another fingerprint."""
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([DONE], shop())
    with pytest.raises(DecisionRefusedError, match="changed"):
        await door.resume(here, paused.checkpoint, {"call_1": Approve()}, **ASK)
    again = await door.resume(world([DONE], shop()), paused.checkpoint, {}, **ASK)
    assert (again.status, again.waiting) == ("paused", ["call_1"])
    assert again.pending[0]["fingerprint"] != paused.pending[0]["fingerprint"]
    there = world([DONE], shop())
    old = Approve(fingerprint=paused.pending[0]["fingerprint"])
    with pytest.raises(DecisionRefusedError, match="fingerprint"):
        await door.resume(there, again.checkpoint, {"call_1": old}, **ASK)
    assert (here.ran, there.ran) == ([], [])
    done = await door.resume(there, again.checkpoint, {"call_1": Approve()}, **ASK)
    assert (done.status, len(there.ran)) == ("answered", 1)


@one_door
async def test_a_new_description_keeps_the_approval(door: Door) -> None:
    """What a function takes is the same, so the approval holds."""
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([DONE], Described())
    await door.resume(here, paused.checkpoint, {"call_1": Approve()}, **ASK)
    assert here.ran == [REFUNDED]


@one_door
async def test_a_changed_call_can_still_be_denied(door: Door) -> None:
    """A denial needs no function."""
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([DONE], OneMore())
    done = await door.resume(here, paused.checkpoint, {"call_1": Deny("No.")}, **ASK)
    assert (done.status, here.ran) == ("answered", [])


@one_door
async def test_a_checkpoint_from_before_signatures_still_resumes(door: Door) -> None:
    """It says nothing of parameters, so its decision is of name and arguments, as it was when it was written."""
    paused = await door.ask(world([REFUND]), **ASK)
    data = json.loads(paused.checkpoint)
    facts = data["facts"]
    for fact in facts:
        if fact["type"] == "CallDecided":
            del fact["signature"]
            run_id = next(one["run_id"] for one in facts if one["type"] == "RunStarted")
            fact["fingerprint"] = fingerprint_of(
                run_id, fact["iteration"], fact["call_id"], fact["digest"]
            )
    here = world([DONE])
    await door.resume(here, json.dumps(data), {"call_1": Approve()}, **ASK)
    assert here.ran == [REFUNDED]


@each_of(("shop", "status"), [(Shop, "answered"), (OtherDefault, "paused")])
@one_door
async def test_an_approval_for_the_rest_of_a_run_is_of_a_function_as_it_was(
    door: Door, shop: Any, status: str
) -> None:
    """Approved for good in one life, the function runs unasked in the next one only with the same parameters."""
    ask: dict[str, Any] = {"interceptors": [lambda _: Defer()]}
    first = await door.ask(world([REFUND]), **ask)
    second = await door.resume(
        world([LOOK]), first.checkpoint, {"call_1": Approve(always="function")}, **ask
    )
    (look,) = second.waiting
    here = world([REFUND, DONE], shop())
    third = await door.resume(here, second.checkpoint, {look: Approve()}, **ask)
    assert (third.status, REFUNDED in here.ran) == (status, status == "answered")
