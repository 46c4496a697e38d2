"""A quorum and an escalation in a rule, as data."""

from typing import Any

import pytest

from planner_ext import ApprovalPolicy
from planner_ext.core.facts import Panel
from planner_ext.errors import InvalidPolicyError
from planner_ext.hitl_manager import Defer, ToolCall
from support.values import each_of

CALL = ToolCall(
    id="pay",
    plugin_name="bank",
    function_name="pay",
    fully_qualified_name="bank-pay",
    arguments={},
    fingerprint="",
)


def policy(**rule: Any) -> ApprovalPolicy:
    """A policy of one rule."""
    given = {"action": "ask", **rule}
    return ApprovalPolicy.from_dict({"default": "deny", "rules": [given]})


def test_a_rule_says_how_many_decide_and_who_later() -> None:
    """Both reach the question, and are part of what a kept run began under."""
    asks = policy(quorum=2, escalates_in=14_400, escalates_to=["lead"])
    decision = asks(CALL)
    assert isinstance(decision, Defer)
    assert decision.panel == Panel(
        quorum=2, escalates_in=14_400, escalates_to=("lead",)
    )
    assert asks.needs_store
    assert asks.normal_form() != policy().normal_form()
    assert policy(quorum=1).normal_form() == policy().normal_form()


def test_another_quorum_is_another_question() -> None:
    """What one person approved for the rest of a run, or by a grant, answers no question for two."""
    alone = policy()(CALL)
    together = policy(quorum=2)(CALL)
    assert isinstance(alone, Defer)
    assert isinstance(together, Defer)
    assert alone.source != together.source


@each_of(
    ("rule", "problem"),
    [
        ({"quorum": 0}, "rules.0.quorum"),
        ({"quorum": True}, "rules.0.quorum"),
        ({"quorum": 1.5}, "rules.0.quorum"),
        ({"quorum": "2"}, "rules.0.quorum"),
        ({"escalates_in": 60}, "go together"),
        ({"escalates_to": ["lead"]}, "go together"),
        ({"escalates_in": 0, "escalates_to": ["lead"]}, "rules.0.escalates_in"),
        ({"escalates_in": 60, "escalates_to": []}, "go together"),
        ({"escalates_in": 60, "escalates_to": [""]}, "rules.0.escalates_to"),
        ({"escalates_in": 60, "escalates_to": "lead"}, "rules.0.escalates_to"),
        (
            {"escalates_in": 60, "escalates_to": ["lead"], "expires_in": 60},
            "must be below expires_in",
        ),
        ({"quorum": 2, "action": "allow"}, "are for the action ask"),
        (
            {"escalates_in": 60, "escalates_to": ["lead"], "action": "deny"},
            "are for the action ask",
        ),
    ],
)
def test_an_invalid_one_is_refused_by_name(rule: dict[str, Any], problem: str) -> None:
    """Each message names the place, or what belongs together."""
    with pytest.raises(InvalidPolicyError, match=problem):
        policy(**rule)
