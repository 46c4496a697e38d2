"""Which guards of a run are missing in the process that is to continue it, and how they are named."""

import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

from planner_ext import ApprovalPolicy
from planner_ext.approval.guards import guard_name
from planner_ext.core.facts import Guards
from planner_ext.engine.activation import missing_guards
from support.values import each_of

REFUND = {"function": "refund", "action": "ask"}
LOOK = {"function": "look", "action": "allow"}
LOOK_UP = {"plugin": "a", "function": "look-up", "action": "allow"}


def policy(*rules: dict[str, str], default: str = "ask") -> str:
    return json.dumps(
        {"default": default, "rules": list(rules)},
        sort_keys=True,
        separators=(",", ":"),
    )


def guard() -> None:
    """A guard that has a name."""


class Guard:
    def __call__(self) -> None:
        """A guard without one."""


def test_a_guard_is_named_as_another_process_finds_it() -> None:
    assert guard_name(guard) == f"{__name__}.guard"
    assert guard_name(partial(guard)) == f"partial of {__name__}.guard"
    assert guard_name(Guard()) == f"{__name__}.Guard"
    assert guard_name(len) == "builtins.len"
    assert (
        json.loads(
            guard_name(ApprovalPolicy.model_validate({"default": "deny", "rules": []}))
        )["default"]
        == "deny"
    )


@each_of(
    ("change", "same"),
    [
        ({}, True),
        ({"reason": "for people"}, True),
        ({"plugin": "*"}, True),
        ({"arguments": {"amount": {"le": 100.0}, "order": {"glob": "7*"}}}, True),
        ({"arguments": {"amount": {"le": 101}, "order": {"glob": "7*"}}}, False),
        ({"arguments": {"amount": {"le": 100}}}, False),
        ({"expires_in": 60}, False),
    ],
)
def test_a_policy_is_named_by_what_it_decides(
    change: dict[str, Any], same: bool
) -> None:
    """The order of keys, explicit defaults, 100.0 for 100 and what is for people make no difference; all else does."""
    arguments = {"order": {"glob": "7*"}, "amount": {"le": 100}}
    rule: dict[str, Any] = {
        "function": "refund",
        "action": "ask",
        "arguments": arguments,
    }
    names = [
        guard_name(ApprovalPolicy.from_dict({"default": "deny", "rules": [one]}))
        for one in (rule, rule | change)
    ]
    assert (names[0] == names[1]) is same


def test_the_guard_of_a_program_has_the_name_of_its_file(tmp_path: Path) -> None:
    program = tmp_path / "till.py"
    lines = [
        "from planner_ext.approval.guards import guard_name",
        "def guard(): ...",
        "NAME = guard_name(guard)",
    ]
    program.write_text("\n".join(lines), encoding="utf-8")
    assert runpy.run_path(str(program), run_name="__main__")["NAME"] == "till.guard"


@each_of(
    ("before", "now", "found"),
    [
        ({}, {"interceptors": ("a",)}, ""),
        ({"interceptors": ("a", "b")}, {"interceptors": ("b",)}, "the interceptor a"),
        (
            {"interceptors": ("a", "b")},
            {"interceptors": ("b", "a")},
            "the order of the interceptors: it was a, then b",
        ),
        (
            {"checks": ("x" * 301, "b")},
            {"checks": ("b", "x" * 301)},
            "it was " + "x" * 300 + "..., then b",
        ),
        ({"filters": (policy(),)}, {}, "the approval policy {"),
        (
            {"interceptors": (policy(),)},
            {"interceptors": (policy(default="deny"),)},
            "its default was ask, is deny",
        ),
        (
            {"interceptors": (policy(REFUND),)},
            {"interceptors": (policy(),)},
            "its rule 1 was",
        ),
        (
            {"interceptors": (policy(),)},
            {"interceptors": (policy(REFUND),)},
            "was not there",
        ),
        (
            {"interceptors": (policy(REFUND),)},
            {"interceptors": (policy(LOOK),)},
            'is {"action": "allow"',
        ),
        ({"unmatched": "deny"}, {}, "now 'approve' instead of 'deny'"),
        ({"unmatched": "approve"}, {"unmatched": "deny"}, ""),
        ({"expires_in": 5.0}, {}, "expires_in is now None instead of 5.0"),
        (
            {"expires_in": 5.0},
            {"expires_in": 6.0},
            "expires_in is now 6.0 instead of 5.0",
        ),
        ({"expires_in": 5.0}, {"expires_in": 5.0}, ""),
        ({"expires_in": 5.0}, {"expires_in": 4.0}, ""),
        ({}, {"expires_in": 5.0}, ""),
        (
            {"marked": ("shop-refund", "shop-gone")},
            {},
            "@requires_approval of shop-refund",
        ),
        (
            {"interceptors": ("a",)},
            {"interceptors": (policy(LOOK), "a")},
            ": rule 1 of a policy that",
        ),
        (
            {"interceptors": ("a",)},
            {"interceptors": ("a", policy(LOOK, default="allow"))},
            "",
        ),
        (
            {"checks": ("a",)},
            {"checks": ("a",), "interceptors": (policy(LOOK),)},
            "the say of what is asked later",
        ),
        (
            {"marked": ("shop-look",)},
            {"marked": ("shop-look",), "interceptors": (policy(LOOK),)},
            "allows calls",
        ),
        (
            {"marked": ("shop-refund",)},
            {"marked": ("shop-refund",), "interceptors": (policy(LOOK),)},
            "",
        ),
        (
            {"marked": ("a-look-up",)},
            {"marked": ("a-look-up",), "interceptors": (policy(LOOK_UP),)},
            "allows calls",
        ),
    ],
)
def test_a_missing_guard_is_named(
    before: dict[str, Any], now: dict[str, Any], found: str
) -> None:
    missing = missing_guards(
        Guards(**before), Guards(**now), ["shop-refund", "shop-look"]
    )
    assert (found in missing[0]) if found else not missing
