"""Runs that code of an application makes: what is decided in them is checked when the code is called again."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalSettings,
    Approve,
    Checkpoint,
    Defer,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    Supply,
    requires_approval,
)
from planner_ext.approval.decisions import Decision, ToolCall
from planner_ext.durable import effect
from planner_ext.errors import DecisionRefusedError
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)

both_ways = pytest.mark.parametrize("streamed", [False, True])


def planner_with(**options: Any) -> FunctionCallingStepwisePlanner:
    return FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False, **options)
    )


def results_in(request: ScriptedRequest) -> list[str]:
    return [str(one["content"]) for one in request.messages if one["role"] == "tool"]


def pays(request: ScriptedRequest) -> ScriptedReply:
    """Pay the order that the goal names, and answer with what came of it."""
    read = results_in(request)
    order = int(str(request.messages[0]["content"]).rsplit(" ", 1)[-1])
    return say(read[0]) if read else call("shop-pay", {"order": order})


class Shop:
    def __init__(self) -> None:
        self.paid: list[int] = []

    @requires_approval
    @kernel_function
    async def pay(self, order: int) -> str:
        self.paid.append(order)
        return f"paid {order}"


class Other:
    @requires_approval
    @kernel_function(name="pay")
    async def pay(self, order: int, currency: str = "EUR") -> str:
        raise AssertionError("another function has run")


def work_of(world: "World") -> Any:
    class Code:
        @effect("idempotent")
        @kernel_function
        async def work(self, goals: str) -> str:
            world.entered += 1
            return await world.makes(world, goals.split(", "))

    return Code()


async def in_a_row(world: "World", goals: Sequence[str]) -> str:
    planner = planner_with(**world.inner)
    made = [await planner.invoke(world.own, goal) for goal in goals]
    return ", ".join(one.final_answer for one in made)


async def at_once(world: "World", goals: Sequence[str]) -> str:
    planner = planner_with(**world.inner)
    made = await asyncio.gather(*(planner.invoke(world.own, goal) for goal in goals))
    return ", ".join(one.final_answer for one in made)


@dataclass
class World:
    """A planner whose function makes runs with a kernel that only it knows."""

    asks: Any = field(default_factory=lambda: call("code-work", {"goals": "Pay 7"}))
    inner: dict[str, Any] = field(default_factory=dict[str, Any])
    outer: dict[str, Any] = field(default_factory=dict[str, Any])
    makes: Callable[..., Any] = in_a_row
    shop: Shop = field(default_factory=Shop)
    entered: int = 0

    def __post_init__(self) -> None:
        self.own = Kernel(services=[ScriptedChatCompletion(pays)])
        self.own.add_plugin(self.shop, "shop")
        self.service = ScriptedChatCompletion(
            lambda request: (
                say("; ".join(read)) if (read := results_in(request)) else self.asks
            )
        )
        self.kernel = Kernel(services=[self.service])
        self.kernel.add_plugin(work_of(self), "code")
        self.planner = planner_with(**self.outer)

    async def invoke(self, *, streamed: bool = False) -> Any:
        if not streamed:
            return await self.planner.invoke(self.kernel, "Go.")
        stream = self.planner.invoke_stream(self.kernel, "Go.")
        return [event async for event in stream][-1].result  # pyright: ignore[reportAttributeAccessIssue]

    async def resume(
        self,
        paused: Any,
        decisions: dict[str, Decision],
        *,
        streamed: bool = False,
    ) -> Any:
        """Resume in another process."""
        checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
        planner = planner_with(**self.outer)
        if not streamed:
            return await planner.resume(self.kernel, checkpoint, decisions)
        stream = planner.resume_stream(self.kernel, checkpoint, decisions)
        return [event async for event in stream][-1].result  # pyright: ignore[reportAttributeAccessIssue]


IN = "call_1/call_1"


@both_ways
async def test_a_call_in_a_kernel_of_the_codes_own_is_approved(streamed: bool) -> None:
    """The run around does not know that kernel; the approval is checked when the code has made its run again."""
    world = World()
    paused = await world.invoke(streamed=streamed)
    assert [one.path for one in paused.pending] == [IN]
    result = await world.resume(paused, {IN: Approve(by="ann")}, streamed=streamed)
    assert (result.final_answer, world.shop.paid) == ("paid 7", [7])
    assert result.iterations == 4
    assert [one.by for one in result.decisions if one.by] == ["ann"]


@pytest.mark.parametrize(
    ("decision", "answer"),
    [
        (Deny("no", by="ann"), "The call was refused and did not run: no"),
        (Supply("was paid", by="ann"), "was paid"),
    ],
)
async def test_a_denial_and_a_result_are_told_to_the_model_inside(
    decision: Decision, answer: str
) -> None:
    """Nothing runs."""
    world = World()
    result = await world.resume(await world.invoke(), {IN: decision})
    assert (result.final_answer, world.shop.paid) == (answer, [])


async def test_an_edit_is_converted_and_checked_with_the_codes_kernel() -> None:
    """The function runs with the arguments of the person."""
    world = World()
    edit = Approve(by="ann", arguments={"order": "70"})
    result = await world.resume(await world.invoke(), {IN: edit})
    assert (result.final_answer, world.shop.paid) == ("paid 70", [70])


async def test_an_edit_is_reviewed_by_the_rules_of_the_run_inside() -> None:
    """It raises another question there, and the call waits with the edited arguments."""

    def ask_the_boss(asked: ToolCall) -> Defer | None:
        return Defer(roles=["boss"]) if asked.arguments["order"] > 50 else None

    async def allow(request: Any) -> bool:
        return bool(request.by)

    settings = ApprovalSettings(authorize=allow)
    world = World(inner={"interceptors": [ask_the_boss], "approval": settings})
    edit = Approve(by="ann", arguments={"order": 70})
    again = await world.resume(await world.invoke(), {IN: edit})
    (waiting,) = again.pending
    assert (waiting.roles, waiting.arguments) == (("boss",), {"order": 70})
    assert world.shop.paid == []
    result = await world.resume(again, {IN: Approve(by="boss")})
    assert (result.final_answer, world.shop.paid) == ("paid 70", [70])


async def test_an_edit_that_does_not_fit_is_refused_by_name() -> None:
    """The call waits as it did, in the error's checkpoint too."""
    world = World()
    paused = await world.invoke()
    edit = Approve(by="ann", arguments={"order": "seven"})
    with pytest.raises(DecisionRefusedError, match="order") as refused:
        await world.resume(paused, {IN: edit})
    assert refused.value.call_id == IN
    assert world.shop.paid == []
    result = await world.resume(refused.value, {IN: Approve(by="ann")})
    assert (result.final_answer, world.shop.paid) == ("paid 7", [7])


@pytest.mark.parametrize("change", ["gone", "other"])
async def test_an_approval_that_does_not_fit_is_refused_by_name(change: str) -> None:
    """Where the function is gone, or another one has its name; it can be approved when it is there again."""
    world = World()
    paused = await world.invoke()
    world.own.plugins.pop("shop")
    if change == "other":
        world.own.add_plugin(Other(), "shop")
    with pytest.raises(DecisionRefusedError, match="no longer what was asked") as error:
        await world.resume(paused, {IN: Approve(by="ann")})
    assert (error.value.call_id, world.shop.paid) == (IN, [])
    world.own.plugins.pop("shop", None)
    world.own.add_plugin(world.shop, "shop")
    result = await world.resume(paused, {IN: Approve(by="ann")})
    assert (result.final_answer, world.shop.paid) == ("paid 7", [7])


async def test_what_was_decided_beside_a_refused_decision_is_kept() -> None:
    """The sibling has run once, and the error's checkpoint says so; the refused call still waits in it."""
    goals = {"goals": "Pay 7"}
    world = World(
        asks=calls(call("code-work", goals), call("shop-pay", {"order": 1})),
        outer={"approval": ApprovalSettings(on_deferred="run_safe_first")},
    )
    beside = Shop()
    world.kernel.add_plugin(beside, "shop")
    paused = await world.invoke()
    world.own.plugins.pop("shop")
    decisions: dict[str, Decision] = {
        IN: Approve(by="ann"),
        "call_2": Approve(by="ann"),
    }
    with pytest.raises(DecisionRefusedError) as refused:
        await world.resume(paused, decisions)
    world.own.add_plugin(world.shop, "shop")
    result = await world.resume(refused.value, {IN: Approve(by="ann")})
    assert (world.shop.paid, beside.paid) == ([7], [1])
    assert result.status == "answered"


async def test_the_hook_of_the_run_inside_is_asked() -> None:
    """About the call at its path, in the outermost run; without its leave the call waits."""
    asked: list[tuple[str, str]] = []

    async def only_the_boss(request: Any) -> bool | str:
        asked.append((request.call.path, request.run_id))
        return request.by == "boss" or "only the boss"

    world = World(inner={"approval": ApprovalSettings(authorize=only_the_boss)})
    paused = await world.invoke()
    with pytest.raises(DecisionRefusedError, match="only the boss") as refused:
        await world.resume(paused, {IN: Approve(by="ann")})
    assert (refused.value.call_id, world.shop.paid) == (IN, [])
    result = await world.resume(paused, {IN: Approve(by="boss")})
    assert (result.status, world.shop.paid) == ("answered", [7])
    assert set(asked) == {(IN, paused.checkpoint.run_id)}


async def test_a_decision_there_is_taken_once() -> None:
    """Another resume of the same checkpoint with the same planner runs nothing."""
    world = World()
    paused = await world.invoke()
    decisions: dict[str, Decision] = {IN: Approve(by="ann")}
    await world.planner.resume(world.kernel, paused.checkpoint, decisions)
    with pytest.raises(DecisionRefusedError, match="decided before") as refused:
        await world.planner.resume(world.kernel, paused.checkpoint, decisions)
    assert (refused.value.call_id, world.shop.paid) == (IN, [7])


async def test_a_refused_decision_can_be_given_again() -> None:
    """The planner that refused it does not take it for taken."""
    world = World()
    paused = await world.invoke()
    wrong = {IN: Approve(by="ann", arguments={"order": "seven"})}
    with pytest.raises(DecisionRefusedError) as refused:
        await world.planner.resume(world.kernel, paused.checkpoint, wrong)
    checkpoint: Any = refused.value.checkpoint
    right: dict[str, Decision] = {IN: Approve(by="ann")}
    result = await world.planner.resume(world.kernel, checkpoint, right)
    assert (result.status, world.shop.paid) == ("answered", [7])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_runs_that_code_makes_at_once_are_decided_one_after_the_other(
    order: tuple[int, int],
) -> None:
    """The first goes on while the second waits, and neither is made twice."""
    asks = call("code-work", {"goals": "Pay 7, Pay 8"})
    world = World(asks=asks, makes=at_once)
    paused = await world.invoke()
    paths = [one.path for one in paused.pending]
    assert [path.split("/")[0] for path in paths] == ["call_1", "call_1#1"]
    first, second = (paths[number] for number in order)
    again = await world.resume(paused, {first: Approve(by="ann")})
    assert [one.path for one in again.pending] == [second]
    assert world.shop.paid == [7 + order[0]]
    result = await world.resume(again, {second: Approve(by="ann")})
    assert (result.final_answer, sorted(world.shop.paid)) == ("paid 7, paid 8", [7, 8])
    assert result.iterations == 6


async def test_one_of_two_runs_is_denied_while_the_other_waits() -> None:
    """The denial is told to its own model alone."""
    asks = call("code-work", {"goals": "Pay 7, Pay 8"})
    world = World(asks=asks, makes=at_once)
    paused = await world.invoke()
    first, second = (one.path for one in paused.pending)
    again = await world.resume(paused, {first: Deny("no", by="ann")})
    result = await world.resume(again, {second: Approve(by="ann")})
    refused = "The call was refused and did not run: no"
    assert (result.final_answer, world.shop.paid) == (f"{refused}, paid 8", [8])


async def test_code_that_does_not_make_its_run_again_fails_by_name() -> None:
    """It is not called again for ever; what waits in its other run does not run."""
    asks = call("code-work", {"goals": "Pay 7, Pay 8"})

    async def forgets(world: World, goals: Sequence[str]) -> str:
        if world.entered == 1:
            return await at_once(world, goals)
        assert world.entered < 5, "called again for ever"
        return "nothing was made"

    world = World(asks=asks, makes=forgets)
    paused = await world.invoke()
    result = await world.resume(paused, {IN: Approve(by="ann")})
    assert "did not make the run that was to go on in it" in result.final_answer
    assert (world.entered, world.shop.paid) == (2, [])


async def test_code_inside_code_is_decided_at_its_depth() -> None:
    """Each run is left to the one around it until that has been made again."""

    async def nests(world: World, goals: Sequence[str]) -> str:
        return (await planner_with().invoke(deep.kernel, "Go.")).final_answer

    deep = World()
    world = World(makes=nests)
    paused = await world.invoke()
    (waiting,) = paused.pending
    assert waiting.path == f"call_1/{IN}"
    edit = Approve(by="ann", arguments={"order": 9})
    result = await world.resume(paused, {waiting.path: edit})
    assert (result.final_answer, deep.shop.paid) == ("paid 9", [9])
    assert (world.entered, deep.entered) == (2, 2)


async def test_a_hook_that_fails_leaves_the_call_waiting() -> None:
    """Its error is that of the resumption; code around the run does not see it."""

    async def fails(request: Any) -> bool:
        raise RuntimeError("no directory")

    world = World(inner={"approval": ApprovalSettings(authorize=fails)})
    paused = await world.invoke()
    with pytest.raises(DecisionRefusedError) as refused:
        await world.resume(paused, {IN: Approve(by="ann")})
    assert refused.value.call_id == IN
    checkpoint: Any = refused.value.checkpoint
    (waiting,) = checkpoint.state().batch.calls
    assert waiting.waits_inside
    assert world.shop.paid == []


async def test_a_service_refuses_such_a_decision_as_a_planner_does() -> None:
    """And goes on with the same history from the error's checkpoint."""
    world = World()
    service = FunctionInvokingChatCompletion(world.service)
    history = ChatHistory()
    history.add_user_message("Go.")
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    (paused,) = await service.get_chat_message_contents(
        history, settings, kernel=world.kernel
    )
    checkpoint = paused.metadata["checkpoint"]

    async def resume(checkpoint: Any, decision: Decision) -> Any:
        return await service.resume(
            history, checkpoint, {IN: decision}, settings, kernel=world.kernel
        )

    with pytest.raises(DecisionRefusedError) as refused:
        await resume(checkpoint, Approve(by="ann", arguments={"order": "seven"}))
    message = await resume(refused.value.checkpoint, Approve(by="ann"))
    assert (str(message), world.shop.paid) == ("paid 7", [7])
    assert [one.role.value for one in history.messages] == ["user", "assistant", "tool"]


async def test_a_decision_whose_call_began_inside_is_not_given_back() -> None:
    """A resume that is cancelled while the call inside runs has taken it: the same checkpoint does not run it again."""

    class Slow(Shop):
        @requires_approval
        @kernel_function
        async def pay(self, order: int) -> str:
            self.paid.append(order)
            await asyncio.Event().wait()
            return "paid"

    world = World(shop=Slow())
    paused = await world.invoke()
    decisions: dict[str, Decision] = {IN: Approve(by="ann")}
    resuming = asyncio.ensure_future(
        world.planner.resume(world.kernel, paused.checkpoint, decisions)
    )
    while not world.shop.paid:  # noqa: ASYNC110  (nothing tells of it)
        await asyncio.sleep(0)
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resuming
    with pytest.raises(DecisionRefusedError, match="decided before"):
        await world.planner.resume(world.kernel, paused.checkpoint, decisions)
    assert world.shop.paid == [7]
