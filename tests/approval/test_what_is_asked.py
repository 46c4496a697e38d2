"""What a call says of itself to the person who decides it: its summary, who asks, what the function does."""

import logging
from typing import Annotated, Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalPolicy,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.core.errors import InvalidLimitError
from planner_ext.hitl_manager import ApprovalSettings, Defer, ToolCall
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, call, calls, say

SUMMARY = "Refund {amount:.2f} {currency} for {order}"


class Till:
    @requires_approval(summary=SUMMARY)
    @kernel_function(description="Pays money back.")
    def refund(
        self, order: str, amount: float, currency: Annotated[str, "ISO 4217"] = "CHF"
    ) -> str:
        raise AssertionError("nobody approved it")

    @kernel_function
    def wipe(self) -> str:
        raise AssertionError("nobody approved it")


async def waiting(*asked: ScriptedReply, **options: Any) -> tuple[ToolCall, ...]:
    """What waits when the model has called these."""
    kernel = Kernel()
    kernel.add_plugin(Till(), "till")
    kernel.add_service(ScriptedChatCompletion([calls(*asked), say("Done.")]))
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(**{"plan": False, **options})
    )
    return (await planner.invoke(kernel, "Settle.")).pending


REFUND = {"order": "A-7", "amount": 7, "currency": "EUR"}


async def test_a_call_says_what_it_does() -> None:
    """The summary is written with the arguments that the function gets."""
    (refund,) = await waiting(call("till-refund", REFUND))
    assert refund.summary == "Refund 7.00 EUR for A-7"
    assert refund.asked_by == "@requires_approval"
    assert refund.parameters is not None
    assert refund.parameters["description"] == "Pays money back."
    assert refund.parameters["properties"]["currency"] == {
        "type": "string",
        "description": "ISO 4217",
        "default": "CHF",
    }


async def test_a_summary_that_does_not_fit_hides_no_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A call without one of its arguments waits as any other, with all that it has."""
    with caplog.at_level(logging.WARNING):
        (refund,) = await waiting(call("till-refund", {"order": "A-7", "amount": 7}))
    assert (refund.summary, refund.arguments) == ("", {"order": "A-7", "amount": 7.0})
    assert "does not fit" in caplog.text


async def test_a_rule_that_asks_keeps_the_summary_of_the_function() -> None:
    """Who asks is the rule, by its number; what the call does is said by the function."""
    policy = ApprovalPolicy.from_dict(
        {
            "default": "ask",
            "rules": [
                {"plugin": "mail", "action": "deny"},
                {"function": "refund", "action": "ask"},
            ],
        }
    )
    refund, wipe = await waiting(
        call("till-refund", REFUND), call("till-wipe"), interceptors=[policy]
    )
    assert (refund.asked_by, refund.summary) == (
        "policy rule 2",
        "Refund 7.00 EUR for A-7",
    )
    assert (wipe.asked_by, wipe.summary) == ("policy default", "")


async def test_an_interceptor_that_asks_is_named() -> None:
    """Without a rule, the name is the function's; where everything is asked, the run's default asks."""

    async def ask_wipes(_: ToolCall) -> Defer:
        return Defer(summary="Deletes everything")

    (wipe,) = await waiting(call("till-wipe"), interceptors=[ask_wipes])
    assert wipe.asked_by.endswith("ask_wipes")
    assert wipe.summary == "Deletes everything"
    (wipe,) = await waiting(
        call("till-wipe"), approval=ApprovalSettings(unmatched="defer")
    )
    assert wipe.asked_by == "default of the run"


def test_a_summary_is_a_text() -> None:
    """Another value is refused when the function is marked."""
    with pytest.raises(InvalidLimitError, match="summary must be text"):
        requires_approval(summary=7)  # pyright: ignore[reportCallIssue, reportArgumentType]  # junk, on purpose
