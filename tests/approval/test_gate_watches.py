"""Which calls the chain of deciders has to be shown at all."""

from typing import Any

from planner_ext.approval.decisions import ApprovalSettings, Defer
from planner_ext.approval.policy import ApprovalPolicy
from planner_ext.engine.gate import InterceptorChain
from support.values import each_of


async def asked(*_: object) -> None:
    """A decider without an opinion."""


def test_an_empty_chain_watches_nothing() -> None:
    """Without a decider, and where silence approves, no call has to be shown."""
    assert not InterceptorChain(options=ApprovalSettings()).watches("math-add")


@each_of(
    "given",
    [
        {"interceptors": (asked,)},
        {
            "interceptors": (
                ApprovalPolicy.from_dict({"default": "allow", "rules": []}),
            )
        },
        {"pre_invoke": (asked,)},
        {"checks": (asked,)},
        {"options": ApprovalSettings(unmatched="defer")},
        {"options": ApprovalSettings(unmatched="deny")},
    ],
    ids=["interceptor", "policy", "pre-invoke", "check", "defer", "deny"],
)
def test_every_decider_watches_every_call(given: dict[str, Any]) -> None:
    """Each kind of decider is enough, and so is a default that does not approve."""
    assert InterceptorChain(**{"options": ApprovalSettings(), **given}).watches(
        "math-add"
    )


def test_a_mark_watches_its_own_function() -> None:
    """A function marked for approval is watched where no other is."""
    chain = InterceptorChain(
        options=ApprovalSettings(), marked={"math-add": Defer()}.get
    )
    assert chain.watches("math-add")
    assert not chain.watches("math-sub")
