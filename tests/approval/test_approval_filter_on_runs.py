"""ApprovalFilter on a kernel that a planner, service or handler works on: it decides before anything runs."""

from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve, Deny
from planner_ext.hitl_manager import ApprovalSettings, ToolCall
from planner_ext.testing import call, calls
from support.approval import (
    BOTH_CALLS,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Door,
    World,
    check_sendable,
    only,
    planner_with,
    results,
    three_doors,
    two_doors,
    world,
)
from support.approval_filter import AUTO, BOTH, FUNCTION, POLICY, under_each


def guarded(script: Any, by: ApprovalFilter, under: Any, **plugins: Any) -> World:
    here = world(script, **plugins)
    for kind in under:
        here.kernel.add_filter(kind, by)
    return here


@under_each
@three_doors
async def test_without_an_approver_the_run_pauses_for_the_call(
    door: Door, under: Any
) -> None:
    """Nothing of the batch has run, the run is paused, and ``resume`` decides, here and in another process."""
    by = ApprovalFilter(POLICY)
    here = guarded(BOTH_CALLS, by, under)
    paused = await door.ask(here)
    assert paused.status == "paused"
    assert paused.waiting == ["call_2"]
    assert here.ran == []
    assert here.requests == 1
    there = guarded([DONE], ApprovalFilter(POLICY), under)
    done = await door.resume(there, paused.checkpoint, {"call_2": Approve(by="ann")})
    assert (done.status, there.ran) == ("answered", [("look", "7"), REFUNDED])
    refused = guarded([DONE], by, under)
    done = await door.resume(refused, paused.checkpoint, {"call_2": Deny("No.")})
    assert (done.status, refused.ran) == ("answered", [("look", "7")])


@under_each
@two_doors
async def test_with_an_approver_it_is_asked_once_before_anything_runs(
    door: Door, under: Any
) -> None:
    """The person decides while nothing of the batch has run; what they approve runs, what they deny does not."""
    for answer, ran in (
        (Approve(), [("look", "7"), REFUNDED]),
        (Deny("No."), [("look", "7")]),
    ):
        seen: list[tuple[str, int]] = []

        here = world(BOTH_CALLS)

        def person(
            call: ToolCall, answer: Any = answer, seen: Any = seen, here: World = here
        ) -> Any:
            seen.append((call.function_name, len(here.ran)))
            return answer

        for kind in under:
            here.kernel.add_filter(kind, ApprovalFilter(POLICY, person))
        outcome = await door.ask(here)
        assert outcome.status == "answered"
        assert seen == [("refund", 0)]
        assert here.ran == ran


@under_each
async def test_a_policy_is_asked_once_for_each_call(under: Any) -> None:
    """Under one type or both, whether it approves or is silent."""
    for answer in (Approve(), None):
        seen: list[str] = []

        def policy(call: ToolCall, answer: Any = answer, seen: list[str] = seen) -> Any:
            seen.append(call.function_name)
            return answer

        here = guarded(BOTH_CALLS, ApprovalFilter(policy), under)
        await Door("planner", False).ask(here)
        assert (seen, len(here.ran)) == (["look", "refund"], 2)


@under_each
async def test_who_approved_is_recorded(under: Any) -> None:
    """The filter's approval where the run's interceptors are silent, else theirs."""
    by = ApprovalFilter(lambda call: Approve(by="filter"))
    for interceptors, author in (
        ([], "filter"),
        ([lambda call: Approve(by="interceptor")], "interceptor"),
    ):
        here = guarded([REFUND, DONE], by, under)
        planner = planner_with(interceptors=interceptors)
        result = await planner.invoke(here.kernel, "Go.")
        assert [one.by for one in result.decisions] == [author]


@under_each
async def test_what_it_approved_is_bound(under: Any) -> None:
    """A filter beside it changes nothing of the call, whether it is registered before or after."""

    async def alter(context: Any, next: Any) -> None:
        context.arguments["amount"] = 9999
        await next(context)

    for before in (True, False):
        here = world([REFUND, DONE])
        filters = [alter, ApprovalFilter(POLICY, lambda call: Approve())]
        for kind in under:
            for one in filters if before else reversed(filters):
                here.kernel.add_filter(kind, one)
        await Door("planner", False).ask(here)
        assert here.ran == []


@under_each
async def test_an_edit_is_seen_as_the_value_that_the_function_gets(under: Any) -> None:
    """What an interceptor puts in place of the arguments is converted before the filter's policy decides on it."""
    rules = [
        {"function": "refund", "arguments": {"amount": {"gt": 100}}, "action": "deny"}
    ]
    for written, ran in (("5", [("refund", "7", 5.0, "")]), ("500", [])):
        here = guarded(
            [REFUND, DONE],
            by=ApprovalFilter(
                ApprovalPolicy.from_dict({"default": "allow", "rules": rules})
            ),
            under=under,
        )
        edit = Approve(arguments={"order": 7, "amount": written})
        await Door("planner", False).ask(here, interceptors=[lambda _, edit=edit: edit])
        assert here.ran == ran


@under_each
async def test_what_waits_is_what_the_policy_decided_on(under: Any) -> None:
    """A call that an interceptor edited waits with the edit, which is what a filter's rules have seen."""
    rules = [
        {"function": "refund", "arguments": {"amount": {"lt": 40}}, "action": "deny"}
    ]
    for denying, status in ((rules, "answered"), ([], "paused")):
        policy = ApprovalPolicy.from_dict({"default": "ask", "rules": denying})
        here = guarded([REFUND, DONE], by=ApprovalFilter(policy), under=under)
        edit = Approve(arguments={"order": "7", "amount": 5})
        outcome = await Door("planner", False).ask(
            here, interceptors=[lambda _, edit=edit: edit]
        )
        assert (outcome.status, here.ran) == (status, [])
        assert [one["arguments"]["amount"] for one in outcome.pending] == [5] * (
            status == "paused"
        )


@under_each
async def test_the_stricter_say_wins(under: Any) -> None:
    """A filter's denial stands above an interceptor's approval, and an interceptor's above a filter's."""
    denying = ApprovalFilter(ApprovalPolicy.from_dict({"default": "deny"}))
    here = guarded([REFUND, DONE], denying, under)
    await Door("planner", False).ask(here, interceptors=[only("refund", Approve())])
    assert here.ran == []
    here = guarded([REFUND, DONE], ApprovalFilter(lambda call: Approve()), under)
    await Door("planner", False).ask(here, interceptors=[only("refund", Deny("No."))])
    assert here.ran == []
    here = guarded([REFUND, DONE], denying, under)
    outcome = await Door("planner", False).ask(
        here, approval=ApprovalSettings(unmatched="defer")
    )
    assert (here.ran, outcome.status == "paused") == ([], False)


@under_each
async def test_a_marked_function_is_decided_by_the_filters_approver_or_waits(
    under: Any,
) -> None:
    """``@requires_approval`` asks the filter's person; without one the run pauses; an allow rule frees the function."""
    seen: list[str] = []

    def person(call: ToolCall) -> Any:
        seen.append(call.prompt)
        return Approve()

    here = guarded([WIPE, DONE], ApprovalFilter(POLICY, person), under)
    assert (await Door("planner", False).ask(here)).status == "answered"
    assert (here.ran, seen) == ([("wipe",)], ["Really everything?"])
    here = guarded([WIPE], ApprovalFilter(POLICY), under)
    assert (await Door("planner", False).ask(here)).waiting == ["call_1"]
    freeing = {"default": "ask", "rules": [{"function": "wipe", "action": "allow"}]}
    here = guarded(
        [WIPE, DONE], ApprovalFilter(ApprovalPolicy.from_dict(freeing)), under
    )
    await Door("planner", False).ask(here)
    assert here.ran == [("wipe",)]


async def test_an_approval_for_the_rest_of_the_run_answers_the_filters_question() -> (
    None
):
    """Given on a paused run, it holds for the filter's questions, too."""
    by = ApprovalFilter(POLICY)
    paused = await Door("planner", False).ask(guarded([REFUND], by, BOTH))
    here = guarded([REFUND, DONE], by, BOTH)
    done = await Door("planner", False).resume(
        here, paused.checkpoint, {"call_1": Approve(always="function")}
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED, REFUNDED])
    check_sendable(done.history)


@under_each
@two_doors
async def test_an_approval_for_the_rest_of_the_run_outlives_a_pause(
    door: Door, under: Any
) -> None:
    """A call that it answers waits with its batch, and runs after the sibling is decided, without another question."""
    by = ApprovalPolicy.from_dict({"default": "ask"})
    first = await door.ask(guarded([REFUND], ApprovalFilter(by), under))
    then = guarded([calls(REFUND, LOOK)], ApprovalFilter(by), under)
    second = await door.resume(
        then, first.checkpoint, {"call_1": Approve(always="function")}
    )
    assert (second.waiting, then.ran) == (["call_2"], [REFUNDED])
    there = guarded([DONE], ApprovalFilter(by), under)
    done = await door.resume(there, second.checkpoint, {"call_2": Approve()})
    assert (done.status, there.ran) == ("answered", [REFUNDED, ("look", "7")])


@pytest.mark.parametrize("under", [FUNCTION, BOTH], ids=["function", "both"])
async def test_a_call_inside_a_call_is_still_asked_about(under: Any) -> None:
    """What a function of the run invokes on its own is another call, which the filter decides when it runs."""

    class Proxy:
        @kernel_function
        async def look(self, order: str) -> str:
            result = await here.kernel.invoke(
                plugin_name="shop", function_name="refund", order=order, amount=50
            )
            return str(result)

    by = ApprovalFilter(POLICY, lambda call: Deny("No."))
    here = guarded([call("proxy-look", {"order": "7"}), DONE], by, under, proxy=Proxy())
    outcome = await Door("planner", False).ask(here)
    assert (here.ran, "No." in results(outcome.history)[0]) == ([], True)


async def test_a_rule_for_no_function_is_reported_before_anything_is_called(
    caplog: Any,
) -> None:
    """A run on the kernel names the misspelt rule as it begins, once."""
    by = ApprovalFilter(
        ApprovalPolicy.from_dict(
            {"default": "ask", "rules": [{"function": "refnd", "action": "deny"}]}
        )
    )
    for _ in range(2):
        await Door("planner", False).ask(guarded([DONE], by, AUTO))
    assert (
        len(
            [
                one
                for one in caplog.records
                if "Rule 1 of the approval policy" in one.getMessage()
            ]
        )
        == 1
    )
