"""The condition ``after`` of a policy: what came from outside makes what follows ask."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.contents import FunctionCallContent as Asked
from semantic_kernel.contents import FunctionResultContent as Answered
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    Approve,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    PlannerPlugin,
    Supply,
)
from planner_ext.approval.guards import guard_name
from planner_ext.core.fold import fold
from planner_ext.errors import InvalidPolicyError
from planner_ext.events import CallFinished, CallStarted, ModelReplied
from planner_ext.hitl_manager import Checkpoint, Defer, ToolCall
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.approval import (
    BOTH_CALLS,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    asked,
    one_door,
    only,
    planner_with,
    service_or_handler,
    world,
)
from support.approval_filter import AUTO, BOTH, FUNCTION, chat, guarded
from support.values import each_of

RULE = {"function": "refund", "after": "shop-look", "action": "ask"}
POLICY = ApprovalPolicy.from_dict({"default": "allow", "rules": [RULE]})
"""Asks about a refund that comes after a look."""

WHY = "It comes after a call of shop-look."
LOOKED = ("look", "7")


def a_call(after: Any = frozenset[str]()) -> ToolCall:
    return ToolCall(
        id="c",
        plugin_name="shop",
        function_name="refund",
        fully_qualified_name="shop-refund",
        arguments={},
        raw_arguments="{}",
        iteration=0,
        index=0,
        batch_size=1,
        fingerprint="f",
        after=after,
    )


def asks(after: Any, called: Any) -> bool:
    """Whether a policy with this condition asks about a call that comes after these."""
    rule = {"after": after, "action": "ask"}
    return isinstance(
        ApprovalPolicy.from_dict({"default": "allow", "rules": [rule]})(a_call(called)),
        Defer,
    )


# What a rule says.


@each_of(
    ("after", "called", "expected"),
    [
        ("web-fetch", {"web-fetch"}, True),
        ("web-fetch", {"web-look", "mail-fetch"}, False),
        ("web-*", {"mail-read", "web-look"}, True),
        ("*-fetch", {"web-fetch"}, True),
        ("fetch", {"web-fetch"}, True),
        ("fetch", {"fetch"}, True),
        ("web", {"web-fetch"}, False),
        (["mail-*", "web-fetch"], {"web-fetch"}, True),
        ("web-fetch", {"Web-Fetch"}, True),
        ("Web.Fetch", {"web-fetch"}, True),
        ("web-fetch_page", {"web_fetch_page"}, True),
        ("web-fetch", {"web.fetch"}, True),
        ("page", {"web-fetch_page"}, False),
        ("fetch", {"web_fetch"}, True),
        ("fetch_page", {"web_fetch_page"}, True),
        ("fetch-page", {"web-fetch-page"}, True),
        ("*", set[str](), False),
        ("web-fetch", None, True),
    ],
)
def test_a_pattern_is_for_functions_however_they_are_spelled(
    after: Any, called: Any, expected: bool
) -> None:
    """A pattern names functions in full or without their plugin; case and separators do not matter; unknown matches."""
    assert asks(after, called) is expected


@given(name=st.text(max_size=40), pattern=st.text(min_size=1, max_size=20))
def test_no_name_and_no_pattern_fails(name: str, pattern: str) -> None:
    """With any name of a function in the history, a rule can be asked; the pattern ``*`` is for every name."""
    assert asks("*", {name})
    assert asks(pattern, {name}) in (True, False)


@each_of(
    ("rule", "named"),
    [
        ({"after": "web-fetch", "action": "allow"}, "actions ask and deny"),
        ({"after": [], "action": "ask"}, "must name a function"),
        ({"after": "", "action": "ask"}, "rules.0.after"),
        ({"after": 7, "action": "ask"}, "rules.0.after"),
        ({"after": {"plugin": "web"}, "action": "ask"}, "rules.0.after"),
    ],
)
def test_what_cannot_be_meant_is_refused(rule: dict[str, Any], named: str) -> None:
    """An allow rule would be freed by a forged history; an empty condition says nothing; both are refused by name."""
    with pytest.raises(InvalidPolicyError, match=named):
        ApprovalPolicy.from_dict({"default": "ask", "rules": [rule]})


def test_a_decision_says_after_which_call() -> None:
    """Without a reason of the rule, person and model read which calls made it match; with one they read that."""
    deny = {"after": ["web-*", "mail-read"], "action": "deny"}
    policy = ApprovalPolicy.from_dict({"default": "allow", "rules": [deny]})
    assert policy(a_call({"web-fetch", "mail-read", "shop-look"})) == Deny(
        "It comes after a call of mail-read, web-fetch.", by="policy rule 1"
    )
    unknown = policy(a_call(None))
    assert (
        isinstance(unknown, Deny)
        and "calls before it are not known here" in unknown.reason
    )
    named = ApprovalPolicy.from_dict(
        {"default": "allow", "rules": [deny | {"reason": "No."}]}
    )
    assert named(a_call({"web-fetch"})) == Deny("No.", by="policy rule 1")


def test_guards_of_equal_policies_are_equal() -> None:
    """One name and a list of it, in any order, are the same policy to a process that continues a run."""
    forms = ("b-x", ["b-x"]), (["b-x", "a-x"], ["a-x", "b-x", "a-x"])
    for one, other in forms:
        first, second = (
            ApprovalPolicy.from_dict(
                {"default": "ask", "rules": [{"after": after, "action": "ask"}]}
            )
            for after in (one, other)
        )
        assert guard_name(first) == guard_name(second)
    assert guard_name(POLICY) != guard_name(
        ApprovalPolicy.from_dict({"default": "allow", "rules": []})
    )


async def test_a_name_that_no_function_has_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A misspelt name in ``after`` guards nothing: a run says so, with the rule's number."""
    rule = {"function": "refund", "after": ["shop-lok", "look"], "action": "ask"}
    policy = ApprovalPolicy.from_dict({"default": "allow", "rules": [rule]})
    with caplog.at_level(logging.WARNING):
        await planner_with(interceptors=[policy]).invoke(world([DONE]).kernel, "Go.")
    assert (
        "Rule 1 of the approval policy is for calls after shop-lok, which is no function of this run"
        in caplog.text
    )
    assert "after look" not in caplog.text


# In a run of this package.


@one_door
@each_of(
    ("script", "status", "ran"),
    [
        ((LOOK, REFUND, DONE), "paused", [LOOKED]),
        ((REFUND, LOOK, DONE), "answered", [REFUNDED, LOOKED]),
        (BOTH_CALLS, "answered", [LOOKED, REFUNDED]),
        ((LOOK, DONE), "answered", [LOOKED]),
    ],
    ids=["after", "before", "beside", "without"],
)
async def test_a_call_comes_after_those_of_earlier_batches(
    door: Door, script: Any, status: str, ran: Any
) -> None:
    """What an earlier batch started counts; the calls of one batch do not come after each other."""
    here = world(script)
    outcome = await door.ask(here, interceptors=[POLICY], execution=None)
    assert (outcome.status, here.ran) == (status, ran)
    assert [one["prompt"] for one in outcome.pending] == (
        [WHY] if status == "paused" else []
    )


async def test_a_call_that_failed_has_started() -> None:
    """A function that raised may have shown its text first: started is enough."""

    class Web:
        @kernel_function
        async def fetch(self) -> str:
            raise RuntimeError("half a page")

    here = world([call("web-fetch"), REFUND, DONE], web=Web())
    policy = ApprovalPolicy.from_dict(
        {"default": "allow", "rules": [RULE | {"after": "fetch"}]}
    )
    result = await planner_with(interceptors=[policy]).invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("paused", [])


@pytest.mark.parametrize(
    "decision", [Deny("No."), Supply("what a person said")], ids=["denied", "supplied"]
)
async def test_a_call_that_did_not_start_does_not_count(decision: Any) -> None:
    """Nothing from outside came with a call that was denied, or that a person answered."""
    here = world([LOOK, REFUND, DONE])
    result = await planner_with(interceptors=[only("look", decision), POLICY]).invoke(
        here.kernel, "Go."
    )
    assert (result.status, here.ran) == ("answered", [REFUNDED])


@service_or_handler
@each_of("name", ["shop-look", "Shop.Look", "shop_look"])
async def test_calls_in_the_history_that_a_run_begins_with_count(
    door: Door, name: str
) -> None:
    """A chat that continues has read what it has read; a pair that was put there makes a rule only stricter."""
    history, here = asked(), world([REFUND, DONE])
    history.add_message(
        ChatMessageContent(
            role=AuthorRole.ASSISTANT, items=[Asked(id="a", name="shop-look")]
        )
    )
    history.add_message(
        ChatMessageContent(
            role=AuthorRole.TOOL, items=[Answered(id="a", name=name, result="x")]
        )
    )
    history.add_user_message("Go on.")
    outcome = await door.ask(here, history=history, interceptors=[POLICY])
    assert (outcome.status, here.ran) == ("paused", [])


async def test_compaction_forgets_nothing() -> None:
    """A callback that removes every call from the transcript does not make the run clean."""

    async def forget(context: Any) -> None:
        context.messages[:] = [m for m in context.messages if m.role == AuthorRole.USER]

    here = world([LOOK, REFUND, DONE])
    result = await planner_with(
        interceptors=[POLICY], iteration_completed=forget
    ).invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("paused", [LOOKED])
    given = ChatHistory()
    given.add_message(
        ChatMessageContent(
            role=AuthorRole.ASSISTANT, items=[Asked(id="a", name="shop-look")]
        )
    )
    given.add_message(
        ChatMessageContent(
            role=AuthorRole.TOOL, items=[Answered(id="a", name="shop-look", result="x")]
        )
    )
    here = world([call("shop-charge", {"amount": 1}), REFUND, DONE])
    planner = planner_with(interceptors=[POLICY], iteration_completed=forget)
    result = await planner.invoke(here.kernel, "Go.", chat_history=given)
    assert (result.status, here.ran) == ("paused", [("charge", 1.0, "nobody")])


async def test_a_checkpoint_that_another_policy_resumes_knows_its_calls() -> None:
    """The calls are in the journal: a policy that the run did not begin with reads them, also those of its history."""
    given = ChatHistory()
    given.add_message(
        ChatMessageContent(
            role=AuthorRole.ASSISTANT, items=[Asked(id="a", name="web-fetch")]
        )
    )
    given.add_message(
        ChatMessageContent(
            role=AuthorRole.TOOL, items=[Answered(id="a", name="web-fetch", result="x")]
        )
    )
    charge = call("shop-charge", {"amount": 1})
    ask = only("charge", Defer())
    first = world([LOOK, charge])
    paused = await planner_with(interceptors=[ask]).invoke(
        first.kernel, "Go.", chat_history=given
    )
    checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
    for after, status in (
        ("shop-look", "paused"),
        ("web-fetch", "paused"),
        ("mail-*", "answered"),
    ):
        policy = ApprovalPolicy.from_dict(
            {"default": "allow", "rules": [RULE | {"after": after}]}
        )
        here, decisions = (
            world([REFUND, DONE]),
            {one.id: Approve() for one in paused.pending},
        )
        result = await planner_with(interceptors=[policy]).resume(
            here.kernel, checkpoint, decisions
        )
        assert result.status == status, after


async def test_every_prefix_of_a_journal_names_the_calls_of_its_earlier_batches() -> (
    None
):
    """Wherever a process dies, the facts that it left say what came before the open batch."""
    here = world([LOOK, calls(REFUND, LOOK), REFUND, DONE])
    facts = (await planner_with().invoke(here.kernel, "Go.")).facts
    for end in range(1, len(facts) + 1):
        started = [fact for fact in facts[:end] if isinstance(fact, CallStarted)]
        finished = {
            (fact.iteration, fact.index)
            for fact in facts[:end]
            if isinstance(fact, CallFinished)
        }
        sizes = {
            fact.iteration: len(fact.calls)
            for fact in facts[:end]
            if isinstance(fact, ModelReplied)
        }
        complete = {
            trip
            for trip, size in sizes.items()
            if all((trip, index) in finished for index in range(size))
        }
        earlier = {fact.function for fact in started if fact.iteration in complete}
        assert set(fold(facts[:end]).earlier) == earlier


# Around and inside.


class Errands:
    """A function of the run that calls others itself."""

    @kernel_function
    async def run(self, kernel: Kernel, first: str, then: str = "") -> str:
        given = {"look": {"order": "7"}, "refund": {"order": "7", "amount": 50}}
        for name in filter(None, (first, then)):
            await kernel.invoke(plugin_name="shop", function_name=name, **given[name])
        return "ran"


async def test_what_a_function_called_comes_up() -> None:
    """A call that a function made itself, and what it made before in the same function, count."""
    here = world(
        [call("errands-run", {"first": "look"}), REFUND, DONE], errands=Errands()
    )
    result = await planner_with(interceptors=[POLICY]).invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("paused", [LOOKED])
    inside = call("errands-run", {"first": "look", "then": "refund"})
    here = world([inside, DONE], errands=Errands())
    result = await planner_with(interceptors=[POLICY]).invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("answered", [LOOKED])
    assert [
        fact.outcome for fact in result.facts if isinstance(fact, CallFinished)
    ] == ["failed"]


def nested(outer: Any, inner: Any, policy: ApprovalPolicy = POLICY) -> Any:
    """Make a kernel with a planner as a function, and the planner around it."""
    here = world(outer)
    here.kernel.add_service(ScriptedChatCompletion(inner, service_id="expert"))
    expert = FunctionCallingStepwisePlanner(
        "expert", FunctionCallingStepwisePlannerOptions(plan=False)
    )
    here.kernel.add_plugin(PlannerPlugin(expert), "expert")
    return here, planner_with(interceptors=[policy])


DELEGATE = call("expert-reach_goal", {"goal": "Part."})


async def test_what_a_nested_run_called_comes_up() -> None:
    """The answer of a nested run may hold what it read: calls around it come after its calls."""
    here, planner = nested([DELEGATE, REFUND, DONE], [LOOK, say("Read this.")])
    result = await planner.invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("paused", [LOOKED])


async def test_a_nested_run_comes_after_what_the_outer_run_called() -> None:
    """A nested run is given a goal by a model that has read: its calls come after those of the run around it."""
    here, planner = nested([LOOK, DELEGATE, DONE], [REFUND, say("Refused.")])
    result = await planner.invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("paused", [LOOKED])
    here, planner = nested([calls(LOOK, DELEGATE), DONE], [REFUND, say("Fine.")])
    result = await planner.invoke(here.kernel, "Go.")
    assert result.status == "answered" and REFUNDED in here.ran


async def test_what_a_function_of_a_nested_run_calls_comes_after_what_is_around_both() -> (
    None
):
    """Two levels down the calls around still count, and those beside still do not."""
    pays = call("errands-run", {"first": "refund"})
    for outer, inner, ran in (
        ([LOOK, DELEGATE, DONE], [pays, say("Refused.")], [LOOKED]),
        ([DELEGATE, DONE], [calls(LOOK, pays), say("Fine.")], [LOOKED, REFUNDED]),
    ):
        here, planner = nested(outer, inner)
        here.kernel.add_plugin(Errands(), "errands")
        result = await planner.invoke(here.kernel, "Go.")
        assert (result.status, here.ran) == ("answered", ran)


# On a stock kernel.


async def test_on_a_stock_kernel_the_chat_history_says_what_came_before() -> None:
    """The filter reads the calls before the reply; those beside the call do not come before it."""
    here = guarded([LOOK, REFUND, DONE], by=ApprovalFilter(POLICY))
    history = asked()
    await chat(here, history)
    assert here.ran == [LOOKED]
    here = guarded(BOTH_CALLS, by=ApprovalFilter(POLICY))
    await chat(here, asked())
    assert sorted(here.ran) == [LOOKED, REFUNDED]


async def test_without_a_chat_history_every_rule_with_after_matches() -> None:
    """Under ``function_invocation`` alone nothing is known of the calls before: the call is refused, under both not."""
    here = guarded([REFUND, DONE], by=ApprovalFilter(POLICY), under=FUNCTION)
    await chat(here, asked())
    assert here.ran == []
    for under in (AUTO, BOTH):
        here = guarded([REFUND, DONE], by=ApprovalFilter(POLICY), under=under)
        await chat(here, asked())
        assert here.ran == [REFUNDED]


@each_of("under", [AUTO, FUNCTION, BOTH])
async def test_a_filter_on_a_kernel_of_a_run_knows_what_the_run_knows(
    under: Any,
) -> None:
    """On a kernel that a run works on, the filter decides by the run's calls, also inside of functions."""
    here = guarded([LOOK, REFUND, DONE], by=ApprovalFilter(POLICY), under=under)
    result = await planner_with().invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("paused", [LOOKED])
    here = guarded([REFUND, LOOK, DONE], by=ApprovalFilter(POLICY), under=under)
    result = await planner_with().invoke(here.kernel, "Go.")
    assert (result.status, here.ran) == ("answered", [REFUNDED, LOOKED])
    inside = call("errands-run", {"first": "refund", "then": "look"})
    here = guarded(
        [inside, DONE], by=ApprovalFilter(POLICY), under=under, errands=Errands()
    )
    result = await planner_with().invoke(here.kernel, "Go.")
    assert here.ran == [REFUNDED, LOOKED]
