"""The decisions of a run, read from its facts."""

from dataclasses import replace
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalSettings,
    Approve,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.approval.record import decisions_of
from planner_ext.core.errors import InvalidLimitError
from planner_ext.core.facts import CallDecided, Fact, wrapped
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.core import calls, clarified, decided, replied, run_started
from support.values import each_of

BEGUN: list[Fact] = [run_started(), replied(calls("f"))]


@each_of(
    ("fact", "record"),
    [
        ({"verdict": "run"}, None),
        (
            {"verdict": "run", "approved": True, "by": "Ada"},
            {"kind": "approve", "by": "Ada", "arguments": {}},
        ),
        ({"verdict": "defer"}, None),
        ({"verdict": "answer", "reason": "unknown"}, None),
        (
            {"verdict": "deny", "reason": "no", "by": "Ada"},
            {"kind": "deny", "by": "Ada", "reason": "no"},
        ),
        (
            {"verdict": "answer", "reason": "supplied", "answer": "7"},
            {"kind": "supply", "result": "7", "reason": ""},
        ),
        (
            {"verdict": "answer", "reason": "expired"},
            {"kind": "expire", "result": None},
        ),
        (
            {"verdict": "answer", "person": True, "by": "Ada"},
            {"kind": "deny", "by": "Ada"},
        ),
    ],
)
def test_a_decision_is_read_from_its_fact(
    fact: dict[str, Any], record: dict[str, Any] | None
) -> None:
    found = decisions_of([*BEGUN, decided(0, **fact)])
    assert len(found) == (record is not None)
    for one in found:
        assert {name: one.as_dict()[name] for name in record or {}} == record
        assert one.at.isoformat() == one.as_dict()["at"] == "1970-01-01T00:00:00+00:00"


def test_a_decision_repeated_by_a_recovery_is_one() -> None:
    denied: dict[str, Any] = {"verdict": "deny", "reason": "no"}
    facts = [
        *BEGUN,
        decided(0, **denied),
        decided(0, **denied, at=5.0),
        decided(0, **denied, by="Ada", at=6.0),
    ]
    assert len(decisions_of(facts)) == 2


def test_a_decision_in_a_run_inside_a_call_names_the_calls_around_it() -> None:
    """Its call is a path, in which a slash of an id is escaped."""
    asked = replied(calls("f", "g"))
    odd = replace(asked, calls=(replace(asked.calls[0], id="a/b"), asked.calls[1]))
    inside = [*BEGUN, decided(0, verdict="deny")]
    facts = [run_started(), odd, *(wrapped(fact, ((0, 0, 0),)) for fact in inside)]
    facts.append(wrapped(asked, ((0, 1, 0),)))
    facts += [wrapped(fact, ((0, 1, 0), (0, 1, 0))) for fact in inside]
    assert [one.call for one in decisions_of(facts)] == ["a%2Fb/c0", "c1/c1/c0"]


def test_an_answer_to_a_question_counts_and_silence_does_not() -> None:
    asked: list[Fact] = [run_started(), replied(calls("ask"))]
    answered, refused = decisions_of(
        [*asked, clarified("Oslo"), clarified(None), clarified("no", denied="late")]
    )
    assert answered.kind == "supply"
    assert answered.result == "Oslo"
    assert answered.call == "c0"
    assert refused.kind == "deny"
    assert refused.result is None
    assert refused.reason == "late"
    assert answered.requested == {"question": "where?"}


@each_of(
    ("setting", "value"),
    [
        ("unmatched", "allow"),
        ("on_denial", ""),
        ("on_deferred", None),
        ("expires_in", 0),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(InvalidLimitError, match=f"{setting} must be .*; got "):
        ApprovalSettings(**{setting: value})


def test_arguments_that_cannot_be_read_are_recorded_as_none() -> None:
    (record,) = decisions_of(
        [*BEGUN, decided(0, verdict="deny", arguments='{"order": ')]
    )
    assert record.requested is None
    (record,) = decisions_of([*BEGUN, decided(0, verdict="deny", arguments="[1]")])
    assert record.requested is None


class Shop:
    @kernel_function
    def refund(self, amount: float) -> str:
        """Refund an amount."""
        return f"refunded {amount}"


@each_of(("amount", "edited"), [(50, False), (50.0, False), (20, True)])
async def test_an_edit_that_changes_nothing_is_an_approval(
    amount: float, edited: bool
) -> None:
    """A form that returned the arguments that it showed is not recorded as an edit."""
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    kernel.add_service(
        ScriptedChatCompletion([call("shop-refund", {"amount": 50}), say("Done.")])
    )
    options = FunctionCallingStepwisePlannerOptions(
        plan=False, approval=ApprovalSettings(unmatched="defer")
    )
    planner = FunctionCallingStepwisePlanner(options=options)
    paused = await planner.invoke(kernel, "Refund it.")
    decision = Approve(arguments={"amount": amount}, by="ann")
    done = await planner.resume(
        kernel, paused.checkpoint, {paused.pending[0].id: decision}
    )
    assert done.status == "answered"
    (fact,) = [
        fact for fact in done.facts if isinstance(fact, CallDecided) and fact.person
    ]
    assert fact.by == "ann"
    assert fact.approved is True
    assert (fact.edited is not None) == edited
