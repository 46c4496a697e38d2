"""Who may decide a call, as data: from the function's mark or the rule that asks to the pending call."""

from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalPolicy, Defer, requires_approval
from planner_ext.core.facts import CallDecided
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.errors import InvalidLimitError, InvalidPolicyError
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.durable import planner_of
from support.values import each_of

ASK: dict[str, Any] = {"action": "ask", "reason": "Sure?"}


class Bank:
    @requires_approval(roles=["clerk", "manager"])
    @kernel_function
    def pay(self, amount: int) -> str:
        return f"paid {amount}"


async def paused(*interceptors: Any) -> Any:
    kernel = Kernel()
    kernel.add_service(
        ScriptedChatCompletion([call("bank-pay", {"amount": 5}), say("Paid.")])
    )
    kernel.add_plugin(Bank(), "bank")
    return await planner_of(interceptors=interceptors).invoke(kernel, "Pay.")


def policy(**rule: Any) -> ApprovalPolicy:
    return ApprovalPolicy.from_dict({"default": "ask", "rules": [{**ASK, **rule}]})


@each_of(
    ("interceptors", "roles"),
    [
        ((), ("clerk", "manager")),
        ((policy(),), ("clerk", "manager")),
        ((lambda _: Defer("Sure?"),), ("clerk", "manager")),
        ((policy(roles=["owner"]),), ("owner",)),
        ((lambda _: Defer(roles=["owner"]),), ("owner",)),
    ],
    ids=["mark", "rule", "interceptor", "rule with roles", "interceptor with roles"],
)
async def test_roles_reach_the_pending_call(
    interceptors: tuple[Any, ...], roles: tuple[str, ...]
) -> None:
    """A rule or interceptor that asks without roles leaves those of the function's mark."""
    (waiting,) = (await paused(*interceptors)).pending
    assert waiting.roles == roles
    assert waiting.as_dict()["roles"] == [*roles]


async def test_roles_survive_the_journal_and_cost_nothing_without() -> None:
    """The fact that defers has them; a fact without roles is written as before, and read."""
    facts = [fact for fact in (await paused()).facts if isinstance(fact, CallDecided)]
    (written,) = dump_facts(facts)
    assert written["roles"] == ["clerk", "manager"]
    assert load_facts([written]) == tuple(facts)

    older = {
        name: value
        for name, value in written.items()
        if name not in ("roles", "parameters")
    }
    (read,) = load_facts([older])
    assert isinstance(read, CallDecided)
    assert read.roles == ()
    assert read.parameters == ""
    assert dump_facts([read]) == [older]


@each_of("roles", ["manager", [""], [7], None, {"manager"}])
def test_roles_are_names(roles: Any) -> None:
    """A single text, which is a sequence of letters, is refused like anything else but a list of names."""
    with pytest.raises(InvalidLimitError, match="roles must be a list of names"):
        requires_approval(roles=roles)
    with pytest.raises(InvalidPolicyError, match="roles"):
        policy(roles=roles)


@pytest.mark.parametrize("action", ["allow", "deny"])
def test_roles_belong_to_a_question(action: str) -> None:
    """A rule that asks no question and has roles is a mistake, and refused."""
    with pytest.raises(
        InvalidPolicyError, match=f"roles are for the action ask; this one is {action}"
    ):
        policy(action=action, roles=["manager"])


def test_the_roles_of_a_rule_are_part_of_the_policy() -> None:
    """Two policies that differ in them are two: a kept run began under one of them."""
    assert policy(roles=["owner"]).normal_form() != policy().normal_form()
    assert "roles" not in policy().normal_form()["rules"][0]
