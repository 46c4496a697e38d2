"""What a policy says of arguments: each predicate, what cannot be evaluated, and that nothing makes it raise."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from test_policy import a_call, policy, verdict

from planner_ext import ApprovalPolicy
from planner_ext.hitl_manager import Decision
from support.examples import tried
from support.values import each_of

HOLDS: list[tuple[dict[str, Any], Any, bool]] = [
    ({"equals": 5}, 5, True),
    ({"equals": 5}, 5.0, True),
    ({"equals": 5}, 6, False),
    ({"equals": 5}, "5", False),
    ({"equals": "5"}, 5, False),
    ({"equals": 1}, True, False),
    ({"equals": 0}, False, False),
    ({"equals": True}, 1, False),
    ({"equals": False}, 0, False),
    ({"equals": True}, True, True),
    ({"equals": None}, None, True),
    ({"equals": None}, 0, False),
    ({"equals": {"a": [1]}}, {"a": [1]}, True),
    ({"equals": {"a": 1, "b": 2}}, {"b": 2, "a": 1}, True),
    ({"equals": [True]}, [1], False),
    ({"equals": {"dry_run": True}}, {"dry_run": 1}, False),
    ({"equals": [[0]]}, [[False]], False),
    ({"one_of": ["a", "b"]}, "b", True),
    ({"one_of": ["a", "b"]}, "c", False),
    ({"one_of": [1, 2]}, True, False),
    ({"one_of": [[True]]}, [1], False),
    ({"one_of": []}, "a", False),
    ({"one_of": [None, 1]}, None, True),
    ({"one_of": [None, 1]}, 2, False),
    ({"gt": 5}, 5, False),
    ({"gt": 5}, 5.1, True),
    ({"ge": 5}, 5, True),
    ({"lt": 5}, 5, False),
    ({"lt": 5}, 4, True),
    ({"le": 5}, 5, True),
    ({"gt": 5}, 10**400, True),
    ({"lt": 1.5}, -(10**400), True),
    ({"ge": 1, "le": 9}, 5, True),
    ({"ge": 1, "le": 9}, 10, False),
    ({"glob": "a*"}, "abc", True),
    ({"glob": "a*"}, "Abc", False),
    ({"glob": "*@example.org"}, "x@example.org\n@evil.com", False),
    ({"glob": "a*"}, "a\nb", True),
    ({"glob": "a*", "one_of": ["abc"]}, "abd", False),
]


@each_of(("predicate", "value", "holds"), HOLDS, ids=repr)
def test_each_predicate(predicate: dict[str, Any], value: Any, holds: bool) -> None:
    """Equals compares JSON values (a boolean is not a number, on any level), bounds compare numbers, glob texts."""
    rule = {"arguments": {"x": predicate}, "action": "allow"}
    assert (verdict(policy(rule, default="deny")(a_call(x=value))) == "allow") == holds


NOT_EVALUABLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gt": 5}, {}),
    ({"equals": 5}, {}),
    ({"one_of": [5]}, {}),
    ({"glob": "*"}, {}),
    ({"gt": 5}, {"x": "9"}),
    ({"le": 5}, {"x": None}),
    ({"lt": 5}, {"x": True}),
    ({"ge": 5}, {"x": [9]}),
    ({"glob": "*"}, {"x": 5}),
    ({"glob": "*"}, {"x": None}),
    ({"glob": "*"}, {"x": ["a"]}),
    ({"equals": 7}, {"x": "7"}),
    ({"equals": "7"}, {"x": 7}),
    ({"equals": 1}, {"x": True}),
    ({"equals": True}, {"x": 1}),
    ({"equals": "true"}, {"x": True}),
    ({"equals": 7}, {"x": None}),
    ({"equals": "7"}, {"x": ["7"]}),
    ({"equals": {"a": 7}}, {"x": "7"}),
    ({"equals": {"a": 7}}, {"x": {"a": "7"}}),
    ({"equals": [7, {"a": [True]}]}, {"x": [7, {"a": [1]}]}),
    ({"one_of": [7, 8]}, {"x": "7"}),
    ({"one_of": ["7", "8"]}, {"x": 7}),
    ({"one_of": [0, 1]}, {"x": True}),
    ({"one_of": ["a"]}, {"x": None}),
    ({"one_of": [{"a": 7}]}, {"x": {"a": "7"}}),
    ({"one_of": [{"a": 7}, {"b": 7}]}, {"x": {"a": "7"}}),
    ({"one_of": [None, "a"]}, {"x": 7}),
    ({"equals": 7, "le": 9}, {"x": "7"}),
]


DECIDABLE: list[tuple[dict[str, Any], Any]] = [
    ({"equals": 7}, 8),
    ({"equals": 7.5}, 8),
    ({"equals": None}, 7),
    ({"equals": None}, "None"),
    ({"equals": {"a": 7}}, {"a": 8}),
    ({"equals": {"a": 7}}, {"b": "7"}),
    ({"equals": {"a": 7, "b": 1}}, {"a": "7", "b": 2}),
    ({"equals": [7]}, ["7", 8]),
    ({"equals": ["a", 7]}, ["b", "7"]),
    ({"one_of": [7, "7"]}, 8),
    ({"one_of": [7, "7"]}, "8"),
    ({"one_of": [None, "a"]}, "b"),
    ({"one_of": []}, 8),
    ({"one_of": []}, None),
    ({"one_of": [None]}, 8),
]


@each_of(("predicate", "value"), DECIDABLE, ids=repr)
@each_of("action", ["deny", "ask", "allow"])
def test_what_differs_matches_no_rule(
    predicate: dict[str, Any], value: Any, action: str
) -> None:
    """A value of the condition's own type that differs does not match, under any action."""
    default = "deny" if action == "allow" else "allow"
    assert (
        verdict(
            policy({"arguments": {"x": predicate}, "action": action}, default=default)(
                a_call(x=value)
            )
        )
        == default
    )


@each_of(("predicate", "arguments"), NOT_EVALUABLE, ids=repr)
@each_of(
    ("action", "default", "expected"),
    [
        ("deny", "allow", "deny"),
        ("ask", "allow", "ask"),
        ("allow", "deny", "deny"),
    ],
)
def test_what_cannot_be_evaluated_is_on_the_safe_side(
    predicate: dict[str, Any],
    arguments: dict[str, Any],
    action: str,
    default: str,
    expected: str,
) -> None:
    """A missing argument, or one of another type, matches a deny or ask rule, and never an allow rule."""
    read = policy({"arguments": {"x": predicate}, "action": action}, default=default)
    assert verdict(read(a_call(**arguments))) == expected


def test_all_predicates_of_a_rule_must_hold() -> None:
    """One that is false is enough for a rule not to match, even where another one cannot be evaluated."""
    rule = {
        "arguments": {"amount": {"gt": 5}, "order": {"equals": "7"}},
        "action": "deny",
    }
    read = policy(rule, default="allow")
    assert [
        verdict(read(a_call(**given)))
        for given in (
            {"amount": 6, "order": "7"},
            {"amount": 6, "order": "8"},
            {"amount": "six", "order": "7"},
            {"amount": "six", "order": "8"},
            {"order": "8"},
            {},
        )
    ] == ["deny", "allow", "deny", "allow", "allow", "deny"]


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(["amount", "order", "x", ""]) | st.text(max_size=5)
BOUNDS = st.integers(-10, 10) | st.floats(-1e6, 1e6)
PREDICATES = st.fixed_dictionaries(
    {},
    optional={
        "equals": JSON,
        "one_of": st.lists(JSON, max_size=3),
        "gt": BOUNDS,
        "ge": BOUNDS,
        "lt": BOUNDS,
        "le": BOUNDS,
        "glob": st.text(alphabet="ab*?[]!-^\\.\n", max_size=12),
    },
).filter(bool)
RULES = st.fixed_dictionaries(
    {"action": st.sampled_from(["allow", "deny", "ask"])},
    optional={
        "plugin": st.text(alphabet="shop*?[]!", max_size=6),
        "function": st.text(alphabet="refund*?[]!", max_size=6),
        "arguments": st.dictionaries(NAMES, PREDICATES, max_size=3),
        "reason": st.text(max_size=5),
    },
)
POLICIES = st.builds(
    lambda default, rules: ApprovalPolicy.from_dict(
        {"default": default, "rules": rules}
    ),
    st.sampled_from(["ask", "deny", "allow"]),
    st.lists(RULES, max_size=4),
)


@tried(50)
@given(read=POLICIES, arguments=st.dictionaries(NAMES, JSON, max_size=4))
def test_a_policy_never_raises(read: ApprovalPolicy, arguments: dict[str, Any]) -> None:
    """With any rules and any JSON as arguments there is a decision, and the same one again."""
    call = _with(arguments)
    decision: Decision = read(call)
    assert verdict(decision) in ("allow", "deny", "ask")
    assert read(call) == decision == (read.by_rule(call) or read.by_default())


def _with(arguments: dict[str, Any]) -> Any:
    return replace(a_call(), arguments=arguments)


@tried(60)
@given(rule=RULES, arguments=st.dictionaries(NAMES, JSON, max_size=4))
def test_denying_is_never_looser_than_allowing(
    rule: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """All that an allow rule matches, the same rule matches as a deny or ask rule."""
    call = _with(arguments)
    if verdict(policy({**rule, "action": "allow"}, default="deny")(call)) == "allow":
        assert (
            verdict(policy({**rule, "action": "deny"}, default="allow")(call)) == "deny"
        )
        assert (
            verdict(policy({**rule, "action": "ask"}, default="allow")(call)) == "ask"
        )
