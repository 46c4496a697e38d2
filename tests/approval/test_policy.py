"""Policies as data: what they say, what they refuse to mean, and how they decide."""

import logging
from pathlib import Path
from typing import Any

import pytest

from planner_ext import ApprovalPolicy, Approve, Deny
from planner_ext.errors import InvalidPolicyError
from planner_ext.hitl_manager import Decision, Defer, ToolCall
from planner_ext.testing import call, calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    Door,
    one_door,
    three_doors,
    world,
)
from support.values import each_of


def a_call(
    plugin: str = "shop", function: str = "refund", **arguments: Any
) -> ToolCall:
    return ToolCall(
        id="c",
        plugin_name=plugin,
        function_name=function,
        fully_qualified_name=f"{plugin}-{function}",
        arguments=arguments,
        raw_arguments="{}",
        iteration=0,
        index=0,
        batch_size=1,
        fingerprint="f",
    )


def policy(*rules: dict[str, Any], default: Any = "ask") -> ApprovalPolicy:
    return ApprovalPolicy.from_dict({"default": default, "rules": list(rules)})


def verdict(decision: Decision) -> str:
    return {Approve: "allow", Deny: "deny", Defer: "ask"}[type(decision)]


YAML = """
default: ask
rules:
  - function: look
    action: allow
  - plugin: shop
    function: refund
    arguments:
      amount: {le: 100}
      order: {glob: "7*"}
    action: allow
    reason: small change
  - plugin: shop
    action: deny
    reason: not here
    expires_in: 60
"""


@pytest.mark.parametrize("source", ["yaml", "text", "dict"])
def test_yaml_and_dict_say_the_same(source: str, tmp_path: Path) -> None:
    """A policy reads the same from a YAML file, YAML text and a mapping; the first rule that matches wins."""
    if source == "yaml":
        (tmp_path / "policy.yaml").write_text(YAML, encoding="utf-8")
        read = ApprovalPolicy.from_yaml(tmp_path / "policy.yaml")
    elif source == "text":
        read = ApprovalPolicy.from_yaml_text(YAML)
    else:
        read = policy(
            {"function": "look", "action": "allow"},
            {
                "plugin": "shop",
                "function": "refund",
                "arguments": {"amount": {"le": 100}, "order": {"glob": "7*"}},
                "action": "allow",
                "reason": "small change",
            },
            {
                "plugin": "shop",
                "action": "deny",
                "reason": "not here",
                "expires_in": 60,
            },
        )
    assert read(a_call(function="look")) == Approve(by="policy rule 1")
    assert read(a_call(order="77", amount=100)) == Approve(by="policy rule 2")
    assert read(a_call(order="77", amount=101)) == Deny("not here", by="policy rule 3")
    assert read(a_call("bank", "pay")) == Defer()


def test_questions_carry_reason_and_expiry() -> None:
    """An ``ask`` rule's reason is what the person reads, its ``expires_in`` when the question closes."""
    asked = policy({"action": "ask", "reason": "Sure?", "expires_in": 60})(a_call())
    assert asked == Defer(prompt="Sure?", expires_in=60)


UNUSABLE: dict[str, tuple[Any, str]] = {
    "no-default": ({"rules": []}, "lacks default"),
    "empty": ({}, "default"),
    "default-null": ({"default": None}, "default"),
    "default-other": ({"default": "approve"}, "default"),
    "unknown-key": ({"default": "ask", "rule": []}, "rule"),
    "unknown-key-in-rule": (
        {"default": "ask", "rules": [{"action": "deny", "functions": "x"}]},
        "functions",
    ),
    "unknown-key-in-predicate": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"amount": {"above": 5}}}],
        },
        "above",
    ),
    "no-action": ({"default": "ask", "rules": [{"function": "x"}]}, "action"),
    "action-other": ({"default": "ask", "rules": [{"action": "defer"}]}, "action"),
    "action-bool": ({"default": "ask", "rules": [{"action": True}]}, "action"),
    "empty-predicate": (
        {"default": "ask", "rules": [{"action": "deny", "arguments": {"amount": {}}}]},
        "amount",
    ),
    "predicate-value": (
        {"default": "ask", "rules": [{"action": "deny", "arguments": {"amount": 5}}]},
        "amount",
    ),
    "bound-text": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"a": {"gt": "5"}}}],
        },
        "gt",
    ),
    "bound-bool": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"a": {"gt": True}}}],
        },
        "gt",
    ),
    "bound-null": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"a": {"gt": None}}}],
        },
        "gt",
    ),
    "bound-nan": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"a": {"gt": float("nan")}}}],
        },
        "gt",
    ),
    "glob-null": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"a": {"glob": None}}}],
        },
        "glob",
    ),
    "one-of-null": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"a": {"one_of": None}}}],
        },
        "one_of",
    ),
    "one-of-text": (
        {
            "default": "ask",
            "rules": [{"action": "deny", "arguments": {"a": {"one_of": "x"}}}],
        },
        "one_of",
    ),
    "function-list": (
        {"default": "ask", "rules": [{"action": "deny", "function": ["a"]}]},
        "function",
    ),
    "rules-mapping": ({"default": "ask", "rules": {"action": "deny"}}, "rules"),
    "rules-null": ({"default": "ask", "rules": None}, "rules"),
    "expires-zero": (
        {"default": "ask", "rules": [{"action": "ask", "expires_in": 0}]},
        "expires_in",
    ),
    "expires-text": (
        {"default": "ask", "rules": [{"action": "ask", "expires_in": "60"}]},
        "expires_in",
    ),
    "expires-never": (
        {"default": "ask", "rules": [{"action": "ask", "expires_in": 1e12}]},
        "expires_in",
    ),
    "list": ([{"function": "x", "action": "ask"}], "keys default and rules; got"),
    "path": ("policy.yaml", "keys default and rules; got 'policy.yaml'"),
    "expires-nan": (
        {"default": "ask", "rules": [{"action": "ask", "expires_in": float("nan")}]},
        "expires_in",
    ),
}


@each_of("what", UNUSABLE)
def test_what_means_nothing_is_refused_by_name(what: str) -> None:
    """Unknown keys, a missing default and values that no predicate takes are refused; the error names the place."""
    data, named = UNUSABLE[what]
    with pytest.raises(InvalidPolicyError, match=named):
        ApprovalPolicy.from_dict(data)


TEXTS: dict[str, tuple[str, str]] = {
    "duplicate-key": ("default: ask\ndefault: allow\n", "default"),
    "duplicate-in-rule": (
        "default: ask\nrules:\n- {action: deny, action: allow}\n",
        "action",
    ),
    "duplicate-argument": (
        "default: ask\nrules:\n- {action: deny, arguments: {a: {gt: 1}, a: {gt: 9}}}\n",
        "'a'",
    ),
    "duplicate-predicate": (
        "default: ask\nrules:\n- {action: deny, arguments: {a: {gt: 1, gt: 9}}}\n",
        "gt",
    ),
    "merged-key": ("x: &x {default: allow}\ndefault: ask\n<<: *x\n", "x"),
    "empty": ("", "policy"),
    "list": ("- default: ask", "policy"),
    "text": ("ask", "policy"),
    "broken": ("default: [ask", "YAML"),
    "tag": ("default: !!python/object/apply:os.system ['true']", "YAML"),
    "two-documents": ("default: ask\n---\ndefault: allow\n", "YAML"),
    "yes-is-no-text": (
        "default: ask\nrules:\n- {action: deny, function: yes}\n",
        "function",
    ),
    "key-is-a-list": ("? [default]\n: ask\n", "policy|YAML"),
}


@each_of("what", TEXTS)
def test_invalid_yaml_of_a_policy_is_refused_by_name(what: str) -> None:
    """Duplicate keys on any level, other documents and other tags are refused; a policy never runs anything."""
    text, named = TEXTS[what]
    with pytest.raises(InvalidPolicyError, match=named):
        ApprovalPolicy.from_yaml_text(text)


def test_a_policy_cannot_be_changed() -> None:
    """Once read, a policy stays what it is, even if the data that it was read from changes."""
    data: dict[str, Any] = {"default": "deny", "rules": [{"action": "deny"}]}
    read = ApprovalPolicy.from_dict(data)
    data["rules"][0]["action"] = "allow"
    with pytest.raises(ValueError, match="frozen"):
        read.default = "allow"
    assert verdict(read(a_call())) == "deny"


GLOBS = [
    ("refund", "refund", True),
    ("refund", "Refund", False),
    ("REFUND", "refund", False),
    ("re*", "refund", True),
    ("*fund", "refund", True),
    ("re?und", "refund", True),
    ("re[fx]und", "refund", True),
    ("re[!f]und", "refund", False),
    ("", "refund", False),
    ("refund", "refund2", False),
    ("refund", "a_refund", False),
    ("*", "", True),
    ("r.fund", "refund", False),
    ("refund|look", "refund", False),
    ("(refund)", "refund", False),
    ("refund", "refund\n", False),
]


@each_of(("pattern", "name", "matches"), GLOBS)
def test_globs_are_case_sensitive_and_match_whole_names(
    pattern: str, name: str, matches: bool
) -> None:
    """``*``, ``?`` and ``[]`` are patterns, everything else is itself, upper and lower case are different."""
    assert (
        verdict(policy({"function": pattern, "action": "deny"})(a_call(function=name)))
        == "deny"
    ) == matches


def test_a_glob_for_the_plugin_does_not_match_the_function() -> None:
    """Plugin and function are matched each by its own pattern, never joined."""
    read = policy(
        {"plugin": "shop-*", "action": "deny"},
        {"function": "shop-refund", "action": "deny"},
    )
    assert verdict(read(a_call())) == "ask"


@each_of("where", ["function", "plugin", "argument"])
def test_a_pathological_pattern_hangs_nothing(where: str) -> None:
    """Fifty stars on a name of ten thousand characters are matched: no pattern can hang a run."""
    pattern, name = "*a" * 50 + "b", "a" * 10_000
    rule = (
        {"arguments": {"x": {"glob": pattern}}}
        if where == "argument"
        else {where: pattern}
    )
    names: dict[str, Any] = {where: name} if where != "argument" else {"x": name}
    assert verdict(policy({**rule, "action": "deny"})(a_call(**names))) == "ask"


def test_it_decides_on_the_resolved_name() -> None:
    """A policy reads plugin and function of the call, not the text that the model sent."""
    sent = a_call(function="look")
    assert (
        verdict(policy({"function": "look", "action": "allow"}, default="deny")(sent))
        == "allow"
    )


@one_door
async def test_unused_rules_are_reported(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule for no function of the run guards nothing: its number is logged as a warning, and used ones are not."""
    rules = [
        {"function": "look", "action": "allow"},
        {"function": "refnud", "action": "ask"},
    ]
    with caplog.at_level(logging.WARNING, logger="planner_ext"):
        await door.ask(
            world([LOOK, DONE]), interceptors=[policy(*rules, default="allow")]
        )
    warned = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]
    assert [text for text in warned if "olicy" in text] == [
        "Rule 2 of the approval policy is for no function of this run."
    ]


@three_doors
async def test_a_policy_works_through_every_door(door: Door) -> None:
    """Allowed, denied and asked about in one batch, by rules and by the default."""
    read = policy(
        {"function": "look", "action": "allow"},
        {"function": "charge", "action": "deny"},
    )
    here = world([calls(LOOK, REFUND, call("shop-charge", {"amount": 1}))])
    outcome = await door.ask(here, interceptors=[read])
    assert outcome.status == "paused"
    assert outcome.waiting == ["call_2"]
    assert here.ran == []


def test_several_policies_are_asked_in_order() -> None:
    """As interceptors, the rules of all come before the default of the first."""
    one, two = policy(default="allow"), policy({"action": "deny"}, default="allow")
    assert (one.by_rule(a_call()), verdict(two(a_call()))) == (None, "deny")


ALIASES = "&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a], &c [*b, *b, *b, *b, *b]"
HOSTILE = {
    "itself": ("&a [*a]", "may have 50 levels"),
    "aliases": (
        f"[{ALIASES}, [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c], *c, *c, *c, *c, *c, *c, *c, *c, *c, *c]",
        "10,000",
    ),
    "levels": ("[" * 60 + "]" * 60, "may have 50 levels"),
    "deep": ("[" * 5000, "nested too deeply"),
    "date": ("2026-11-22", "got a date. Quote it"),
    "no-date": ("2026-99-99", "cannot be read"),
    "set": ("!!set {a, b}", "expected JSON values; got {"),
    "inside": ("{a: !!set {a, b}}", "expected JSON values; got {"),
    "no-set": ("!!set a", "cannot be read"),
    "name": ("{1: 2}", "a name in a JSON object is a text; got 1"),
    "infinite": (".inf", "got inf"),
    "long": ("0x" + "f" * 9000, "expected JSON values"),
}


@each_of("what", HOSTILE)
def test_a_value_that_no_argument_equals_is_refused(what: str) -> None:
    """Dates, endless aliases and depths get the policy's own error: none is silently without effect, or hangs."""
    value, problem = HOSTILE[what]
    with pytest.raises(InvalidPolicyError, match=problem):
        ApprovalPolicy.from_yaml_text(
            f"default: ask\nrules: [{{arguments: {{a: {{equals: {value}}}}}, action: ask}}]"
        )


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    """A file that is not UTF-8 is refused by name, with its path."""
    (tmp_path / "policy.yaml").write_bytes(
        b"default: ask\nrules: [{reason: \xff, action: ask}]"
    )
    with pytest.raises(InvalidPolicyError, match=r"in UTF-8; .*policy\.yaml"):
        ApprovalPolicy.from_yaml(tmp_path / "policy.yaml")


def test_text_in_the_place_of_a_path_is_refused_with_the_way_out() -> None:
    """``from_yaml`` takes a path; for YAML text there is another method."""
    with pytest.raises(InvalidPolicyError, match="from_yaml_text"):
        ApprovalPolicy.from_yaml("default: ask\nrules: []\n")


def test_ten_thousand_keys_are_read_in_seconds() -> None:
    """Equal keys are found in time that grows with their number."""
    text = "default: ask\n" + "".join(f"k{n}: {n}\n" for n in range(10_000))
    with pytest.raises(InvalidPolicyError, match="unknown key"):
        ApprovalPolicy.from_yaml_text(text)
