"""An approval "for the rest of the run" answers one question: of one source, of the same roles, in the same run."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from semantic_kernel.filters.filter_types import FilterTypes
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve, Deny, PlannerPlugin
from planner_ext.durable import Runs
from planner_ext.hitl_manager import ApprovalSettings, Defer, ToolCall
from planner_ext.testing import call, calls, say
from support.approval import (
    DONE,
    REFUND,
    REFUNDED,
    WIPE,
    Door,
    one_door,
    planner_with,
    settings_with,
    three_doors,
    world,
)
from support.inside import Hidden
from support.values import each_of

ALWAYS = Approve(always="function", by="clerk")
MORE = call("shop-refund", {"order": "8", "amount": 60})
MILLION = call("shop-refund", {"order": "9", "amount": 1_000_000})
PAID_MORE = ("refund", "8", 60.0, "")
BOSS_ABOVE_1000: dict[str, Any] = {
    "default": "allow",
    "rules": [
        {
            "function": "refund",
            "arguments": {"amount": {"gt": 1000}},
            "action": "ask",
            "roles": ["boss"],
        },
        {"function": "refund", "action": "ask", "roles": ["clerk"]},
    ],
}


ANYBODY = ApprovalSettings(authorize=lambda request: True)


def policy() -> ApprovalPolicy:
    return ApprovalPolicy.from_dict(BOSS_ABOVE_1000)


def options(of_filter: bool, here: Any) -> dict[str, Any]:
    """Guard a kernel by the policy: in a filter, or by a run's options."""
    if not of_filter:
        return {"interceptors": [policy()], "approval": ANYBODY}
    here.kernel.add_filter(
        FilterTypes.AUTO_FUNCTION_INVOCATION, ApprovalFilter(policy())
    )
    return {"approval": ANYBODY}


@each_of("of_filter", [False, True], ids=["option", "filter"])
@three_doors
async def test_an_always_of_the_clerk_does_not_answer_the_question_for_the_boss(
    door: Door, of_filter: bool
) -> None:
    """What the clerk's rule asks later runs unasked; what the boss's rule asks waits for the boss."""
    first = world([REFUND])
    paused = await door.ask(first, **options(of_filter, first))
    here = world([MORE, MILLION])
    again = await door.resume(
        here, paused.checkpoint, {"call_1": ALWAYS}, **options(of_filter, here)
    )
    assert (again.status, here.ran) == ("paused", [REFUNDED, PAID_MORE])
    assert [one["roles"] for one in again.pending] == [["boss"]]


@each_of("of_filter", [False, True], ids=["option", "filter"])
@one_door
async def test_within_one_batch_an_always_answers_the_same_question_alone(
    door: Door, of_filter: bool
) -> None:
    """An approver beside the run is asked the boss's question, too, and not the clerk's again."""
    asked: list[tuple[str, ...]] = []

    def clerk(call: ToolCall) -> Any:
        asked.append(tuple(call.roles))
        return ALWAYS if "clerk" in call.roles else Deny("Not mine.")

    here = world([calls(REFUND, MORE, MILLION), DONE])
    given: dict[str, Any] = {"interceptors": [policy()], "approver": clerk}
    if of_filter:
        here.kernel.add_filter(
            FilterTypes.AUTO_FUNCTION_INVOCATION,
            ApprovalFilter(policy(), approver=clerk),
        )
        given = {}
    await door.ask(here, **given)
    assert (here.ran, asked) == ([REFUNDED, PAID_MORE], [("clerk",), ("boss",)])


async def test_a_kept_run_asks_the_boss_in_its_next_life(tmp_path: Path) -> None:
    """The source is in the journal: a worker that has only that asks the boss's question, and not the clerk's."""
    planner = planner_with(interceptors=[policy()], approval=ANYBODY)
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        handle = await runs.start(
            planner, world([REFUND]).kernel, "Refund.", run_id="a"
        )
        assert (await handle.result()).status == "paused"
    here = world([MORE, MILLION])
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        handle = await runs.resume(
            "a", planner, here.kernel, decisions={"call_1": ALWAYS}
        )
        result = await handle.result()
    assert (here.ran, [one.roles for one in result.pending]) == (
        [REFUNDED, PAID_MORE],
        [("boss",)],
    )


@one_door
async def test_an_interceptor_s_question_is_its_name_and_its_prompt(door: Door) -> None:
    """Another prompt of one function, or the same prompt of another function, is another question."""

    def by_amount(call: ToolCall) -> Any:
        return Defer("Much?" if call.arguments["amount"] > 1000 else "Little?")

    paused = await door.ask(world([REFUND]), interceptors=[by_amount])
    here = world([MORE, MILLION])
    again = await door.resume(
        here, paused.checkpoint, {"call_1": ALWAYS}, interceptors=[by_amount]
    )
    assert ([one["prompt"] for one in again.pending], here.ran) == (
        ["Much?"],
        [REFUNDED, PAID_MORE],
    )


def above(amount: float) -> Any:
    """Make an interceptor that asks about larger amounts; all of them have one name."""
    return lambda call: Defer() if call.arguments["amount"] > amount else None


@one_door
async def test_interceptors_of_one_name_ask_questions_of_their_own(door: Door) -> None:
    """Two that one function made are distinguished: the answer to the second does not answer the first."""
    asking: dict[str, Any] = {"interceptors": [above(1000), above(10)]}
    paused = await door.ask(world([REFUND]), **asking)
    here = world([MORE, MILLION])
    again = await door.resume(here, paused.checkpoint, {"call_1": ALWAYS}, **asking)
    assert (again.status, here.ran) == ("paused", [REFUNDED, PAID_MORE])


@one_door
async def test_a_policy_in_a_function_of_the_application_keeps_its_rules_apart(
    door: Door,
) -> None:
    """A function that asks a policy passes on which rule asks."""
    rules: list[dict[str, Any]] = [
        {**one, "roles": []} for one in BOSS_ABOVE_1000["rules"]
    ]
    inner = ApprovalPolicy.from_dict({"default": "allow", "rules": rules})
    asking: dict[str, Any] = {"interceptors": [lambda call: inner(call)]}
    paused = await door.ask(world([REFUND]), **asking)
    here = world([MORE, MILLION])
    again = await door.resume(here, paused.checkpoint, {"call_1": ALWAYS}, **asking)
    assert (again.status, here.ran) == ("paused", [REFUNDED, PAID_MORE])


@one_door
async def test_an_interceptor_s_answer_does_not_answer_the_mark(door: Door) -> None:
    """Where the interceptor that asked is gone, the function's own mark asks: another source."""
    asks = ApprovalPolicy.from_dict({"default": "ask"})
    paused = await door.ask(
        world([call("shop-wipe", {})]), interceptors=[lambda call: Defer()]
    )
    here = world([WIPE, DONE])
    again = await door.resume(
        here, paused.checkpoint, {"call_1": ALWAYS}, interceptors=[asks]
    )
    assert (again.status, here.ran) == ("paused", [("wipe",)])


class Agency:
    """Functions that reach the shop themselves."""

    @kernel_function
    async def directly(self, kernel: Hidden, order: str = "9") -> str:
        result = await kernel.invoke(
            plugin_name="shop", function_name="refund", order=order, amount=1_000_000
        )
        return str(result)

    @kernel_function
    async def by_a_prompt(self, kernel: Hidden) -> str:
        return str(
            await kernel.invoke_prompt(
                "INNER", arguments=KernelArguments(settings=settings_with())
            )
        )


def inner_or(outer: list[Any]) -> Any:
    """Play a model that, inside a function, calls the refund; outside it says what it is given, in order."""
    said = iter(outer)

    def reply(request: Any) -> Any:
        if any("INNER" in str(message.get("content")) for message in request.messages):
            return (
                DONE
                if any(message["role"] == "tool" for message in request.messages)
                else MILLION
            )
        return next(said)

    return reply


ASKS_ALL: dict[str, Any] = {
    "interceptors": [ApprovalPolicy.from_dict({"default": "ask"})]
}
INSIDE = [
    call("agency-directly", {}),
    call("agency-by_a_prompt", {}),
    call("expert-reach_goal", {"goal": "INNER"}),
]


@each_of("inside", INSIDE, ids=["invoke", "prompt", "planner"])
@one_door
async def test_an_outer_always_frees_nothing_inside_a_function(
    door: Door, inside: Any
) -> None:
    """What functions and nested runs call is another run's: it is asked there, or without an approver refused."""
    plugins: dict[str, Any] = {
        "agency": Agency(),
        "expert": PlannerPlugin(planner_with()),
    }
    paused = await door.ask(world([REFUND], **plugins), **ASKS_ALL)
    here = world(inner_or([inside, DONE]), **plugins)
    again = await door.resume(here, paused.checkpoint, {"call_1": ALWAYS}, **ASKS_ALL)
    done = await door.resume(
        here, again.checkpoint, {again.waiting[0]: Approve()}, **ASKS_ALL
    )
    waits = inside is INSIDE[-1]
    assert (done.status, here.ran) == (
        "paused" if waits else "answered",
        [REFUNDED],
    )


@each_of("asks", ["rule", "mark"])
@one_door
async def test_an_inner_always_answers_what_an_outer_rule_or_mark_asks_again(
    door: Door, asks: str
) -> None:
    """A question is asked with the state of the run that makes the call: there it was answered for good."""
    asked: list[str] = []

    def ann(call: ToolCall) -> Any:
        asked.append(call.fully_qualified_name)
        return ALWAYS

    wipe = call("shop-wipe", {})
    script = iter(
        [call("expert-reach_goal", {"goal": "INNER"}), wipe, wipe, say("Inner."), DONE]
    )
    here = world(lambda _: next(script), expert=PlannerPlugin(planner_with()))
    rule = {"default": "allow", "rules": [{"function": "wipe", "action": "ask"}]}
    given: dict[str, Any] = (
        {} if asks == "mark" else {"interceptors": [ApprovalPolicy.from_dict(rule)]}
    )
    await door.ask(here, approver=ann, **given)
    assert (here.ran, asked) == ([("wipe",), ("wipe",)], ["shop-wipe"])


async def test_each_outer_run_of_a_call_asks_its_own_question() -> None:
    """An outer run's question does not hide an inner run's, which is for others."""
    asked: list[tuple[str, ...]] = []

    def ann(call: ToolCall) -> Any:
        asked.append(tuple(call.roles))
        return Approve()

    clerk = ApprovalPolicy.from_dict(
        {
            "default": "allow",
            "rules": [{"function": "refund", "action": "ask", "roles": ["clerk"]}],
        }
    )
    script = iter(
        [call("expert-reach_goal", {"goal": "INNER"}), MILLION, say("Inner."), DONE]
    )
    here = world(
        lambda _: next(script),
        expert=PlannerPlugin(planner_with(interceptors=[policy()])),
    )
    await Door("planner", False).ask(here, approver=ann, interceptors=[clerk])
    assert (len(here.ran), asked) == (1, [("clerk",), ("boss",)])


@one_door
async def test_runs_around_a_call_that_ask_the_same_are_answered_once(
    door: Door,
) -> None:
    """One policy for three planners puts one question for its roles, which expires the soonest."""
    clerks: dict[str, Any] = {
        "default": "allow",
        "rules": [{"function": "refund", "action": "ask", "roles": ["clerk"]}],
    }

    def asking(expires_in: float | None) -> dict[str, Any]:
        return {
            "interceptors": [ApprovalPolicy.from_dict(clerks)],
            "approval": ApprovalSettings(
                authorize=ANYBODY.authorize, expires_in=expires_in
            ),
        }

    script = iter(
        [
            call("boss-reach_goal", {"goal": "MIDDLE"}),
            call("clerk-reach_goal", {"goal": "INNER"}),
            REFUND,
            say("Inner."),
            say("Middle."),
            DONE,
        ]
    )
    here = world(
        lambda _: next(script),
        boss=PlannerPlugin(planner_with(**asking(60))),
        clerk=PlannerPlugin(planner_with(**asking(None))),
    )
    paused = await door.ask(here, **asking(3600))
    (waits,) = paused.pending
    seconds = datetime.fromisoformat(waits["expires_at"]) - datetime.now(UTC)
    assert seconds.total_seconds() <= 60
    done = await door.resume(
        here, paused.checkpoint, {waits["path"]: Approve(by="ann")}, **asking(3600)
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED])
