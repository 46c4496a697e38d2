"""However a model spells an argument, everybody who decides on it sees the value that the function would get."""

import json
from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalPolicy, Approve, Budget
from planner_ext.errors import DecisionRefusedError
from planner_ext.hitl_manager import ApprovalSettings, ToolCall
from planner_ext.testing import call, calls
from support.approval import (
    DONE,
    Door,
    World,
    arguments_in,
    check_sendable,
    one_door,
    results,
    three_doors,
    world,
)
from support.narrow import as_type
from support.stock import sent_calls
from support.values import each_of

SPELLINGS: list[Any] = [7, "7", 7.0, " 7", "7 ", "+7", "007", "0_7"]
"""One account in eight spellings: all are accepted for a number."""


class Bank:
    """A plugin that records every payment; the parameter is of the type it is made with."""

    def __init__(self, kind: type = int) -> None:
        self.ran: list[tuple[Any, ...]] = []

        async def pay(account: Any, amount: float = 1.0) -> str:
            self.ran.append(("pay", account, amount))
            return "paid"

        pay.__annotations__["account"] = kind
        self.pay = kernel_function(name="pay")(pay)


def bank(*spellings: Any, kind: type = int) -> World:
    """A bank and a model that pays an account once in each spelling, one call a reply."""
    replies = [
        calls(call("bank-pay", {"account": one}, id=f"call_{n}"))
        for n, one in enumerate(spellings)
    ]
    here = world([*replies, DONE], Bank(kind))
    here.kernel.plugins.clear()
    here.kernel.add_plugin({"pay": as_type(Bank, here.shop).pay}, "bank")
    return here


def denying(**predicate: Any) -> ApprovalPolicy:
    rule = {
        "function": "pay",
        "arguments": {"account": predicate},
        "action": "deny",
        "reason": "A closed account.",
    }
    return ApprovalPolicy.from_dict({"default": "allow", "rules": [rule]})


@each_of(
    "predicate",
    [{"equals": 7}, {"one_of": [5, 7]}, {"lt": 8}, {"equals": "7"}, {"glob": "7"}],
)
@one_door
async def test_no_spelling_gets_around_a_rule(
    door: Door, predicate: dict[str, Any]
) -> None:
    """What a deny rule is for, or cannot be compared with, is denied in each of its spellings."""
    here = bank(*SPELLINGS)
    outcome = await door.ask(here, interceptors=[denying(**predicate)])
    assert here.ran == []
    assert results(outcome.history) == [
        "The call was refused and did not run: A closed account."
    ] * len(SPELLINGS)


@one_door
async def test_a_number_for_a_text_is_seen_as_the_text(door: Door) -> None:
    """A rule on a text is for the number and the boolean that would become it."""
    for spelling, text in ((7, "7"), ("7", "7"), (7.5, "7.5"), (True, "True")):
        here = bank(spelling, kind=str)
        await door.ask(here, interceptors=[denying(equals=text)])
        assert here.ran == []
        here = bank(spelling, kind=str)
        await door.ask(here, interceptors=[denying(equals="8")])
        assert here.ran == [("pay", text, 1.0)]


@one_door
async def test_one_call_in_eight_spellings_is_repeated(door: Door) -> None:
    """The limit of repeated calls counts the value: the second spelling of a payment is the same payment."""
    here = bank(*SPELLINGS)
    outcome = await door.ask(here, budget=Budget(max_repeated_calls=1))
    assert here.ran == [("pay", 7, 1.0)]
    assert outcome.tool_calls == 1


@three_doors
async def test_everybody_sees_what_the_function_gets(door: Door) -> None:
    """Interceptors, callbacks, what waits and what runs show one value; the model's own text stays as it was."""
    here, seen = bank(" 7"), list[Any]()

    async def interceptor(shown: ToolCall) -> None:
        seen.append((shown.arguments, shown.raw_arguments))

    def pre_invoke(iteration: int, name: str, arguments: Any) -> bool:
        seen.append(arguments)
        return True

    options: dict[str, Any] = {"interceptors": [interceptor], "pre_invoke": pre_invoke}
    options["approval"] = ApprovalSettings(unmatched="defer")
    asked = await door.ask(here, **options)
    assert seen == [({"account": 7}, '{"account":" 7"}'), {"account": 7}]
    (pending,) = asked.pending
    assert pending["arguments"] == {"account": 7}
    fact = json.loads(asked.checkpoint)["facts"][-2]
    assert (fact["type"], fact["arguments"]) == ("CallDecided", '{"account":7}')

    there = bank()
    decisions = {"call_0": Approve(fingerprint=pending["fingerprint"])}
    outcome = await door.resume(there, asked.checkpoint, decisions, **options)
    assert there.ran == [("pay", 7, 1.0)]
    if door.kind == "planner":
        assert arguments_in(outcome.history) == [{"account": " 7"}]
        check_sendable(outcome.history)


@one_door
async def test_edited_arguments_are_converted_too(door: Door) -> None:
    """What a person writes is converted once, too: recorded, sent to the model and run as one value."""
    here = bank(5)
    await door.ask(
        here,
        interceptors=[lambda _: Approve(arguments={"account": " 7", "amount": "50"})],
    )
    assert here.ran == [("pay", 7, 50.0)]
    sent = sent_calls(here.service.requests[1].messages[-2])[0]["function"]["arguments"]
    assert sent == '{"account":7,"amount":50}'


@one_door
async def test_a_sticky_approval_is_of_the_value(door: Door) -> None:
    """What was approved for the rest of the run is not asked about again in another spelling, nor another value run."""
    here = bank("7", 7.0, " 7", 8)
    asking = ApprovalPolicy.from_dict({"default": "ask", "rules": []})
    paused = await door.ask(here, interceptors=[asking])
    again = await door.resume(
        here,
        paused.checkpoint,
        {"call_0": Approve(always="arguments")},
        history=paused.history,
        interceptors=[asking],
    )
    assert here.ran == [("pay", 7, 1.0)] * 3
    assert [one["arguments"] for one in again.pending] == [{"account": 8}]


@one_door
async def test_a_call_that_would_now_get_another_value_asks_again(door: Door) -> None:
    """A function whose parameter is a number by now: its approval is refused by name, then it waits with the number."""
    asking = ApprovalPolicy.from_dict({"default": "ask", "rules": []})
    here = bank("7", kind=str)
    paused = await door.ask(here, interceptors=[asking])
    there = bank()
    resume: dict[str, Any] = {"history": paused.history, "interceptors": [asking]}
    with pytest.raises(DecisionRefusedError, match="call_0"):
        await door.resume(there, paused.checkpoint, {"call_0": Approve()}, **resume)
    again = await door.resume(there, paused.checkpoint, {}, **resume)
    assert ([one["arguments"] for one in again.pending], there.ran) == (
        [{"account": 7}],
        [],
    )
    resume["history"] = again.history
    await door.resume(there, again.checkpoint, {"call_0": Approve()}, **resume)
    assert there.ran == [("pay", 7, 1.0)]
