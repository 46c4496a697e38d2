"""pre_invoke, the behaviour's callback, check_for_intervention and @requires_approval."""

import logging
from typing import Annotated, Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalPolicy,
    BoundedFunctionChoiceBehavior,
    FunctionInvokingChatCompletion,
    hitl_manager,
    requires_approval,
)
from planner_ext.errors import PlannerExtError
from planner_ext.hitl_manager import ApprovalSettings, Defer, ToolCall
from planner_ext.testing import call, calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Door,
    decided,
    handler_doors,
    one_door,
    planner_doors,
    results,
    service_and_handler,
    three_doors,
    world,
)
from support.values import each_of


def as_option(where: str, callback: Any) -> dict[str, Any]:
    """Give a callback as ``pre_invoke`` or as the behaviour's own."""
    if where == "option":
        return {"pre_invoke": callback}
    return {
        "behavior": BoundedFunctionChoiceBehavior.Auto(pre_invoke_callback=callback)
    }


both_places = each_of("where", ["option", "behavior"])


@both_places
@three_doors
async def test_pre_invoke_sees_the_trip_from_one(door: Door, where: str) -> None:
    """It is asked with the 1-based round trip, the full name and the arguments of each call; False refuses."""
    seen: list[Any] = []

    def callback(*asked: Any) -> bool:
        seen.append(asked)
        return asked[0] < 2

    here = world([LOOK, REFUND, DONE])
    outcome = await door.ask(here, **as_option(where, callback))
    assert seen == [
        (1, "shop-look", {"order": "7"}),
        (2, "shop-refund", {"order": "7", "amount": 50}),
    ]
    assert here.ran == [("look", "7")]
    assert outcome.status == "answered"
    assert "did not run" in results(outcome.history)[1]


@both_places
@one_door
async def test_pre_invoke_true_does_not_approve(door: Door, where: str) -> None:
    """True does not approve: a marked function still waits."""
    here = world([WIPE, DONE])
    outcome = await door.ask(here, **as_option(where, lambda *_: True))
    assert (outcome.status, here.ran) == ("paused", [])


async def later(*_: Any) -> Any:
    return True


def failing(*_: Any) -> Any:
    raise RuntimeError


@both_places
@one_door
async def test_only_true_lets_a_call_run(door: Door, where: str) -> None:
    """Async True passes; a callback that raises refuses. For an answer of another type see ``test_no_decision.py``."""
    here = world([REFUND, DONE])
    await door.ask(here, **as_option(where, later))
    assert here.ran == [REFUNDED]
    for callback in (failing, lambda *_: False, lambda: True):
        here = world([REFUND, DONE])
        outcome = await door.ask(here, **as_option(where, callback))
        assert (here.ran, outcome.status) == ([], "answered")


@one_door
async def test_pre_invoke_cannot_change_the_arguments(door: Door) -> None:
    """It gets a copy: what it writes there is written nowhere else."""

    def meddling(trip: int, name: str, arguments: Any) -> bool:
        arguments["amount"] = 9999
        return True

    here = world([REFUND, DONE])
    await door.ask(here, pre_invoke=meddling)
    assert here.ran == [REFUNDED]


@three_doors
async def test_option_and_behaviour_must_both_agree(door: Door) -> None:
    """With a callback in the options and one in the behaviour, one False is enough."""
    for mine, its in ((True, False), (False, True)):
        here = world([REFUND, DONE])
        await door.ask(
            here,
            pre_invoke=lambda *_, mine=mine: mine,
            **as_option("behavior", lambda *_, its=its: its),
        )
        assert here.ran == []


@service_and_handler
async def test_the_check_defers_or_abstains(door: Door) -> None:
    """check_for_intervention, sync or async: True defers the call, False abstains, and does not approve."""

    async def slow(call: ToolCall) -> bool:
        return call.function_name == "refund"

    for check in (slow, lambda call: call.function_name == "refund"):
        here = world()
        outcome = await door.ask(here, check_for_intervention=check)
        assert outcome.status == "paused"
        assert outcome.waiting == ["call_2"]
        assert here.ran == []
    here = world()
    outcome = await door.ask(
        here,
        check_for_intervention=lambda call: False,
        interceptors=[lambda call: None],
    )
    assert (outcome.status, here.ran) == ("answered", [("look", "7"), REFUNDED])


@service_and_handler
async def test_a_check_that_fails_denies(door: Door) -> None:
    """The call is refused, and the run continues."""
    here = world([REFUND, DONE])
    outcome = await door.ask(here, check_for_intervention=failing)
    assert (outcome.status, here.ran) == ("answered", [])


@handler_doors
async def test_the_default_check_logs_and_never_prints(
    door: Door, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The handler's default hook logs plugin.function of each call, lets it continue, and prints nothing."""
    caplog.set_level(logging.INFO, logger="planner_ext.hitl_manager")
    here = world()
    await door.ask(here)
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.name == "planner_ext.hitl_manager"
    ]
    assert (len(here.ran), ["shop.look" in logged[0], "shop.refund" in logged[1]]) == (
        2,
        [True, True],
    )
    assert capfd.readouterr() == ("", "")


@handler_doors
async def test_a_hook_put_in_place_of_the_default_is_asked(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing ``planner_ext.hitl_manager.check_for_intervention``, even after the handler was made, is enough."""

    async def mine(call: ToolCall) -> bool:
        return call.function_name == "refund"

    for hook in (mine, lambda call: call.function_name == "refund"):
        monkeypatch.setattr(hitl_manager, "check_for_intervention", hook)
        here = world()
        outcome = await door.ask(here)
        assert outcome.status == "paused"
        assert outcome.waiting == ["call_2"]
        assert here.ran == []


GUARDS: dict[str, dict[str, Any]] = {
    "interceptors": {"interceptors": [lambda call: Defer()]},
    "policy": {"interceptors": [ApprovalPolicy.from_dict({"default": "ask"})]},
    "pre-invoke": {"pre_invoke": lambda *_: False},
    "check": {"check_for_intervention": lambda call: True},
    "unmatched": {"approval": ApprovalSettings(unmatched="defer")},
    "denied": {"approval": ApprovalSettings(unmatched="deny")},
}


@each_of("guard", GUARDS)
@three_doors
async def test_a_guarded_service_stays_guarded(door: Door, guard: str) -> None:
    """Planner, handler and another wrapper around a guarded service take over its guards: none of them is lost."""
    here = world([REFUND, DONE])
    guarded: Any = FunctionInvokingChatCompletion(here.service, **GUARDS[guard])
    here.kernel.remove_service("scripted")
    here.kernel.add_service(guarded)
    here.service = guarded
    outcome = await door.ask(here)
    assert (here.ran, outcome.status in ("paused", "answered")) == ([], True)


class Marked:
    """Functions marked in every way that Python allows."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    @requires_approval
    @kernel_function
    def above(self) -> str:
        return self.ran.append("above") or ""

    @kernel_function
    @requires_approval
    def below(self) -> str:
        return self.ran.append("below") or ""

    @requires_approval(prompt="Sure?", expires_in=60)
    @kernel_function(description="x")
    async def above_with(self) -> str:
        return self.ran.append("above_with") or ""

    @kernel_function(description="x")
    @requires_approval(prompt="Sure?", expires_in=60)
    async def below_with(self) -> str:
        return self.ran.append("below_with") or ""

    @kernel_function(name="other_name")
    @requires_approval()
    async def renamed(self, x: Annotated[str, "any"] = "") -> str:
        return self.ran.append("renamed") or ""

    @requires_approval
    @staticmethod
    @kernel_function
    def static() -> str:
        STATIC.append("static")
        return ""

    @staticmethod
    @requires_approval
    @kernel_function
    def static_below() -> str:
        STATIC.append("static_below")
        return ""


STATIC: list[str] = []


@each_of(
    "name",
    [
        "above",
        "below",
        "above_with",
        "below_with",
        "other_name",
        "static",
        "static_below",
    ],
)
@one_door
async def test_a_marked_function_waits(door: Door, name: str) -> None:
    """@requires_approval holds above and below @kernel_function, bare and with arguments, on every kind of method."""
    plugin = Marked()
    STATIC.clear()
    here = world([call(f"m-{name}"), DONE], m=plugin)
    outcome = await door.ask(here)
    assert plugin.ran == []
    assert STATIC == []
    assert outcome.status == "paused"
    assert outcome.waiting == ["call_1"]
    if name.endswith("_with"):
        assert (
            outcome.pending[0]["prompt"],
            outcome.pending[0]["expires_at"] is not None,
        ) == ("Sure?", True)


@one_door
async def test_a_mark_takes_the_runs_expiry(door: Door) -> None:
    """A mark without a time of its own expires as the settings say."""
    here = world([WIPE, DONE])
    outcome = await door.ask(here, approval=ApprovalSettings(expires_in=60))
    assert (
        outcome.pending[0]["prompt"],
        outcome.pending[0]["expires_at"] is not None,
    ) == ("Really everything?", True)


@each_of("seconds", [float("nan"), float("inf"), 1e300, -1, 0, True, "60"], ids=repr)
@planner_doors
async def test_an_expiry_that_means_nothing_is_refused_or_harmless(
    door: Door, seconds: Any
) -> None:
    """Of a mark or of the settings: refused where it is given, or the call waits and the paused run can be read."""

    class Odd:
        @kernel_function
        async def f(self) -> str:
            return "ran"

    for place in ("mark", "settings"):
        try:
            mark = (
                requires_approval(expires_in=seconds)
                if place == "mark"
                else requires_approval
            )
            options: dict[str, Any] = (
                {}
                if place == "mark"
                else {"approval": ApprovalSettings(expires_in=seconds)}
            )
            mark(Odd.f)
        except PlannerExtError:
            continue
        outcome = await door.ask(world([call("odd-f"), DONE], odd=Odd()), **options)
        assert "ran" not in results(outcome.history)
        if outcome.status == "paused":
            await door.resume(
                world([DONE], odd=Odd()), outcome.checkpoint, {}, **options
            )


@one_door
async def test_the_record_says_who_decided(door: Door) -> None:
    """Rules, defaults and callbacks stand in the journal beside the verdict that they gave."""
    facts: list[Any] = []
    policy = ApprovalPolicy.from_dict(
        {"default": "allow", "rules": [{"function": "refund", "action": "deny"}]}
    )
    here = world([calls(LOOK, REFUND), DONE])
    await door.ask(here, interceptors=[policy], observers=[facts.append])
    assert [(d.verdict, d.by) for d in decided(facts)] == [
        ("run", "policy default"),
        ("deny", "policy rule 1"),
    ]
