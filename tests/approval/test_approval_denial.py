"""What becomes of a denied call, and of the calls beside a deferred one."""

from typing import Any

from semantic_kernel.contents import ChatHistory, FunctionCallContent

from planner_ext import Approve, Budget, Deny
from planner_ext.events import CallStarted, CallsWithheld
from planner_ext.hitl_manager import ApprovalSettings, Defer, Supply, ToolCall
from planner_ext.testing import call, calls, say
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    check_sendable,
    decided,
    one_door,
    only,
    results,
    service_and_handler,
    three_doors,
    two_doors,
    world,
)
from support.values import each_of

DENY_REFUND = only("refund", Deny("Too much."))
REFUSED = "The call was refused and did not run: Too much."


def called(history: ChatHistory) -> list[str | None]:
    """List the calls of a history by id."""
    return [
        item.id
        for message in history.messages
        for item in message.items
        if isinstance(item, FunctionCallContent)
    ]


@three_doors
async def test_refuse_answers_the_call_and_costs_no_request(door: Door) -> None:
    """``refuse``: the model reads the refusal as the call's result; no request more than without it, functions stay."""
    here = world([calls(LOOK, REFUND), say("Sorry.")])
    outcome = await door.ask(
        here, interceptors=[DENY_REFUND], approval=ApprovalSettings(on_denial="refuse")
    )
    assert outcome.status == "answered"
    assert outcome.text == "Sorry."
    assert here.requests == 2
    assert outcome.tool_calls == 1
    assert (here.ran, results(outcome.history)) == ([("look", "7")], ["sent", REFUSED])
    assert here.service.requests[1].tools != ()
    check_sendable(outcome.history)


@three_doors
async def test_reask_removes_the_call_and_asks_without_functions(door: Door) -> None:
    """``reask``: the denied call is gone, its siblings' results stay; one request more, without functions."""
    here = world([calls(LOOK, REFUND), say("Sorry.")])
    outcome = await door.ask(
        here, interceptors=[DENY_REFUND], approval=ApprovalSettings(on_denial="reask")
    )
    assert outcome.status == "answered"
    assert outcome.text == "Sorry."
    assert here.requests == 2
    assert here.ran == [("look", "7")]
    assert called(outcome.history) == ["call_1"]
    assert results(outcome.history) == ["sent"]
    assert (here.service.requests[0].tools != (), here.service.requests[1].tools) == (
        True,
        (),
    )
    check_sendable(outcome.history)


@three_doors
async def test_reask_of_a_lone_call_leaves_no_trace_of_it(door: Door) -> None:
    """``reask`` of the only call: the next request is the first one over again, without functions, and no limit."""
    here = world([REFUND, say("Sorry.")])
    outcome = await door.ask(
        here, interceptors=[DENY_REFUND], approval=ApprovalSettings(on_denial="reask")
    )
    assert outcome.status == "answered"
    assert called(outcome.history) == []
    assert here.ran == []
    assert here.service.requests[1].messages == here.service.requests[0].messages


@three_doors
async def test_return_calls_ends_the_run_with_its_batch(door: Door) -> None:
    """``return_calls``: the run ends without a request; nothing of the batch ran, and the caller has its calls."""
    here = world([calls(LOOK, REFUND), DONE])
    outcome = await door.ask(
        here,
        interceptors=[DENY_REFUND],
        approval=ApprovalSettings(on_denial="return_calls"),
    )
    assert outcome.status == "stopped"
    assert here.requests == 1
    assert here.ran == []
    assert outcome.tool_calls == 0
    if door.kind != "service":
        assert called(outcome.history) == ["call_1", "call_2"]


@each_of("by", ["interceptor", "person"])
@each_of(
    "batch",
    [REFUND, calls(REFUND, REFUND), calls(REFUND, call("shop-none"))],
    ids=["1", "2", "3"],
)
@two_doors
async def test_return_calls_returns_a_batch_of_denied_calls_only(
    door: Door, batch: Any, by: str
) -> None:
    """Also where no call of the batch could run: it goes back to the caller unanswered, and no request is made."""
    approval = ApprovalSettings(on_denial="return_calls")
    if by == "interceptor":
        here = world([batch, DONE])
        outcome = await door.ask(here, interceptors=[DENY_REFUND], approval=approval)
        requests = 1
    else:
        options: dict[str, Any] = {
            "interceptors": [only("refund", Defer())],
            "approval": approval,
        }
        paused = await door.ask(world([batch]), **options)
        here, requests = world([DONE]), 0
        outcome = await door.resume(
            here, paused.checkpoint, dict.fromkeys(paused.waiting, Deny()), **options
        )
    assert outcome.status == "stopped"
    assert here.requests == requests
    assert here.ran == []
    if door.kind != "service":
        assert called(outcome.history) == [
            f"call_{n}" for n in range(1, len(batch.calls) + 1)
        ]


@service_and_handler
@each_of("on_denial", ["refuse", "reask", "return_calls"])
async def test_the_requests_of_each_way_are_exact(door: Door, on_denial: Any) -> None:
    """Under each ``on_denial``, the iterations reported are the requests made."""
    here = world([LOOK, calls(LOOK, REFUND), say("Sorry.")])
    outcome = await door.ask(
        here, interceptors=[DENY_REFUND], approval=ApprovalSettings(on_denial=on_denial)
    )
    assert (
        outcome.iterations == here.requests == (2 if on_denial == "return_calls" else 3)
    )


@one_door
async def test_a_model_that_asks_again_is_denied_again(door: Door) -> None:
    """After a re-ask functions are offered again, and each new call is decided by itself."""
    here = world([REFUND, REFUND, REFUND, say("I give up.")])
    outcome = await door.ask(here, interceptors=[DENY_REFUND])
    assert here.ran == []
    assert outcome.text == "I give up."
    assert results(outcome.history) == [REFUSED] * 3


@one_door
async def test_denials_in_a_row_are_limited(door: Door) -> None:
    """``max_repeated_denials`` counts batches of which every call was denied; at the limit an answer is asked for."""
    here = world([REFUND, REFUND, say("I give up.")])
    outcome = await door.ask(
        here, interceptors=[DENY_REFUND], budget=Budget(max_repeated_denials=2)
    )
    assert outcome.status == "limit_reached"
    assert here.requests == 3
    assert here.ran == []
    assert here.service.requests[2].tools == ()


HOLD = ApprovalSettings(on_deferred="hold_all")
SAFE = ApprovalSettings(on_deferred="run_safe_first")
MIXED = calls(LOOK, REFUND, call("shop-look", {"order": "8"}), REFUND)


@one_door
async def test_hold_all_holds_every_call_of_the_batch(door: Door) -> None:
    """``hold_all``: nothing of a batch starts while one of its calls waits; only the deferred ones are pending."""
    facts: list[Any] = []
    here = world([MIXED, DONE])
    options: dict[str, Any] = {
        "interceptors": [only("refund", Defer())],
        "approval": HOLD,
    }
    outcome = await door.ask(here, observers=[facts.append], **options)
    assert outcome.status == "paused"
    assert outcome.waiting == ["call_2", "call_4"]
    assert here.ran == []
    assert outcome.tool_calls == 0
    assert [d.verdict for d in decided(facts)] == ["run", "defer", "run", "defer"]
    resumed = await door.resume(
        here,
        outcome.checkpoint,
        {"call_2": Approve(), "call_4": Deny("No.")},
        **options,
    )
    assert resumed.text == "Done."
    assert here.ran == [("look", "7"), REFUNDED, ("look", "8")]
    assert resumed.tool_calls == 3
    assert [text.split(":")[0] for text in results(resumed.history)] == [
        "sent",
        "refunded 50",
        "sent",
        "The call was refused and did not run",
    ]


@three_doors
async def test_run_safe_first_runs_the_others_before_the_pause(door: Door) -> None:
    """``run_safe_first``: what is approved runs before the pause and never again; results stay in call order."""
    here = world([MIXED, DONE])
    options: dict[str, Any] = {
        "interceptors": [only("refund", Defer())],
        "approval": SAFE,
    }
    outcome = await door.ask(here, **options)
    assert outcome.status == "paused"
    assert outcome.waiting == ["call_2", "call_4"]
    assert outcome.tool_calls == 2
    assert here.ran == [("look", "7"), ("look", "8")]
    check_sendable(outcome.history)
    resumed = await door.resume(
        here,
        outcome.checkpoint,
        {"call_2": Supply("later"), "call_4": Approve()},
        **options,
    )
    assert here.ran == [("look", "7"), ("look", "8"), REFUNDED]
    assert (resumed.text, resumed.tool_calls) == ("Done.", 3)
    assert results(resumed.history) == ["sent", "later", "sent", "refunded 50"]


@one_door
async def test_safe_first_starts_only_after_all_were_seen(door: Door) -> None:
    """Also with ``run_safe_first`` every call of the batch is decided before one starts."""
    order: list[str] = []

    def watch(call: ToolCall) -> Any:
        order.append("seen")
        return Defer() if call.function_name == "refund" else None

    def note(fact: Any) -> None:
        order.extend(["started"] if isinstance(fact, CallStarted) else [])

    await door.ask(
        world([MIXED, DONE]), interceptors=[watch], approval=SAFE, observers=[note]
    )
    assert order == ["seen"] * 4 + ["started"] * 2


@each_of("settings", [HOLD, SAFE], ids=["hold_all", "run_safe_first"])
@one_door
async def test_deferred_calls_count_when_they_start(
    door: Door, settings: ApprovalSettings
) -> None:
    """``max_tool_calls`` is checked on the calls about to start, after the decisions: never one over."""
    facts: list[Any] = []
    here = world([calls(LOOK, REFUND, REFUND), say("Enough.")])
    options: dict[str, Any] = {
        "interceptors": [only("refund", Defer())],
        "approval": settings,
    }
    options |= {
        "budget": Budget(max_tool_calls=2, batch_over_limit="fill_remaining"),
        "observers": [facts.append],
    }
    outcome = await door.ask(here, **options)
    decisions = {"call_2": Approve(), "call_3": Approve()}
    resumed = await door.resume(here, outcome.checkpoint, decisions, **options)
    assert len(here.ran) == 2
    assert resumed.tool_calls == 2
    assert resumed.status == "limit_reached"
    assert [fact.indexes for fact in facts if isinstance(fact, CallsWithheld)] == [(2,)]
    check_sendable(resumed.history)


@one_door
async def test_denied_beside_deferred_waits_with_it(door: Door) -> None:
    """A denied and a deferred call in one batch: only the deferred one is pending, the other keeps its refusal."""
    here = world([calls(REFUND, LOOK), DONE])
    options: dict[str, Any] = {"interceptors": [DENY_REFUND, only("look", Defer())]}
    outcome = await door.ask(here, **options)
    assert (outcome.waiting, here.ran) == (["call_2"], [])
    resumed = await door.resume(
        here, outcome.checkpoint, {"call_2": Approve()}, **options
    )
    assert (here.ran, results(resumed.history)) == ([("look", "7")], [REFUSED, "sent"])


@one_door
async def test_a_denial_may_have_no_reason(door: Door) -> None:
    """None as the reason is as good as none at all: the model reads the refusal, and the record can be read."""
    here = world([REFUND, say("Sorry.")])
    outcome = await door.ask(here, interceptors=[only("refund", Deny(None))])  # pyright: ignore[reportArgumentType]  # junk, on purpose
    assert results(outcome.history) == ["The call was refused and did not run."]
    assert Deny(None, by="ann") == Deny(by="ann")  # pyright: ignore[reportArgumentType]  # junk, on purpose
