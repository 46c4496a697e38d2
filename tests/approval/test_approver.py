"""The option ``approver``: a person is asked while the run stays open, about what would otherwise pause it."""

import asyncio
from typing import Any

import pytest
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    Approve,
    Deny,
    FunctionInvokingChatCompletion,
)
from planner_ext.hitl_manager import ApprovalSettings, Defer, Supply, ToolCall
from planner_ext.testing import ScriptedChatCompletion, call, calls
from support.approval import (
    BOTH_CALLS,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Door,
    Shop,
    check_sendable,
    every_door,
    one_door,
    results,
    world,
)
from support.values import each_of

ASKS = ApprovalPolicy.from_dict(
    {
        "default": "allow",
        "rules": [
            {
                "function": "refund",
                "action": "ask",
                "reason": "So much?",
                "roles": ["boss"],
            }
        ],
    }
)


@every_door
async def test_what_is_approved_runs_without_a_pause(door: Door) -> None:
    """The person sees the question, its roles and what would run; no call of the batch has run before."""
    here, seen = world(), list[tuple[Any, ...]]()

    async def ann(call: ToolCall) -> Approve:
        seen.append(
            (
                call.fully_qualified_name,
                dict(call.arguments),
                call.prompt,
                call.roles,
                len(here.ran),
            )
        )
        return Approve(by="ann")

    done = await door.ask(here, interceptors=[ASKS], approver=ann)
    assert (done.status, sorted(here.ran)) == ("answered", [("look", "7"), REFUNDED])
    assert seen == [
        ("shop-refund", {"order": "7", "amount": 50.0}, "So much?", ("boss",), 0)
    ]
    check_sendable(done.history)


@each_of(
    "asking",
    [
        {
            "interceptors": [
                lambda call: Defer() if call.function_name == "refund" else None
            ]
        },
        {"check_for_intervention": lambda call: call.function_name == "refund"},
        {"approval": ApprovalSettings(unmatched="defer")},
        {"interceptors": [ApprovalPolicy.from_dict({"default": "ask"})]},
    ],
    ids=["interceptor", "check", "unmatched", "default"],
)
@one_door
async def test_every_deferral_of_a_call_asks_the_person(
    door: Door, asking: dict[str, Any]
) -> None:
    """An interceptor, the callback, the setting for undecided calls and a policy's default."""
    here = world([REFUND, DONE])
    done = await door.ask(here, **asking, approver=lambda call: Approve())
    assert (done.status, here.ran) == ("answered", [REFUNDED])


@one_door
async def test_a_marked_function_is_asked_about(door: Door) -> None:
    """With the prompt of its mark; what nothing defers is not asked about."""
    here, prompts = world([calls(LOOK, WIPE), DONE]), list[str]()

    def ann(call: ToolCall) -> Approve:
        prompts.append(call.prompt)
        return Approve()

    await door.ask(here, approver=ann)
    assert (sorted(here.ran), prompts) == (
        [("look", "7"), ("wipe",)],
        ["Really everything?"],
    )


def hangs_up(call: ToolCall) -> Approve:
    raise EOFError


ANSWERS: dict[str, tuple[Any, str]] = {
    "denied": (
        lambda call: Deny("Too much."),
        "The call was refused and did not run: Too much.",
    ),
    "supplied": (lambda call: Supply("refunded already"), "refunded already"),
    "edited": (
        lambda call: Approve(arguments={"order": "7", "amount": 5}),
        "refunded 5",
    ),
    "raised": (
        hangs_up,
        "The call was refused and did not run: It could not be decided.",
    ),
    "junk": (
        lambda call: Deny(5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
        "The call was refused and did not run: It could not be decided.",
    ),
}


@each_of("answer", ANSWERS)
@one_door
async def test_the_answer_is_carried_out(door: Door, answer: str) -> None:
    """A denial, a result and an edit count as on a paused run; an approver that fails denies."""
    approver, read = ANSWERS[answer]
    done = await door.ask(world([REFUND, DONE]), interceptors=[ASKS], approver=approver)
    assert (done.status, results(done.history)) == ("answered", [read])


@each_of("left", [None, Defer("Ask me tomorrow.")], ids=["none", "defer"])
@every_door
async def test_a_question_that_is_left_open_pauses(door: Door, left: Any) -> None:
    """None and `Defer` pause the run, as without an approver, and it is resumed like any other."""
    here = world(BOTH_CALLS)
    paused = await door.ask(here, interceptors=[ASKS], approver=lambda call: left)
    assert paused.status == "paused"
    assert len(paused.waiting) == 1
    assert here.ran == []
    decisions = {paused.waiting[0]: Approve(by="ann")}
    by_roles = ApprovalSettings(authorize=lambda request: request.by == "ann")
    done = await door.resume(
        here, paused.checkpoint, decisions, interceptors=[ASKS], approval=by_roles
    )
    assert (done.status, sorted(here.ran)) == ("answered", [("look", "7"), REFUNDED])


@one_door
async def test_a_person_may_be_slower_than_an_interceptor(door: Door) -> None:
    """Only the question's own ``expires_in`` ends the wait, with a denial; ``interceptor_timeout`` does not."""

    async def asleep(call: ToolCall) -> Approve:
        await asyncio.Event().wait()
        return Approve()

    async def slow(call: ToolCall) -> Approve:
        await asyncio.sleep(0.05)
        return Approve()

    quick = ApprovalSettings(interceptor_timeout=1e-9)  # a policy is quicker than any
    here = world([REFUND, DONE])
    await door.ask(here, interceptors=[ASKS], approval=quick, approver=slow)
    assert here.ran == [REFUNDED]
    here = world([REFUND, DONE])
    done = await door.ask(
        here, interceptors=[lambda call: Defer(expires_in=0.01)], approver=asleep
    )
    assert (done.status, here.ran) == ("answered", [])


@one_door
async def test_what_is_approved_for_the_rest_of_the_run_is_not_asked_again(
    door: Door,
) -> None:
    """``always`` counts for the rest of the run."""
    here, asked = world([REFUND, REFUND, DONE]), list[str]()

    def ann(call: ToolCall) -> Approve:
        asked.append(call.id)
        return Approve(always="function")

    await door.ask(here, interceptors=[ASKS], approver=ann)
    assert (len(here.ran), len(asked)) == (2, 1)


@each_of(
    ("answer", "questions"),
    [
        (Approve(always="function"), ["a"]),
        (Approve(always="arguments"), ["a", "b"]),
        (Approve(), ["a", "b", "c"]),
        (
            Approve(always="function", arguments={"order": "7", "amount": "much"}),
            ["a", "a", "b", "b", "c", "c"],
        ),
    ],
    ids=["function", "arguments", "once", "an-edit"],
)
@each_of("of_filter", [False, True], ids=["option", "filter"])
@one_door
async def test_an_approval_for_the_rest_of_the_run_covers_its_batch(
    door: Door, of_filter: bool, answer: Approve, questions: Any
) -> None:
    """``always`` counts at once: a person is not asked about the call after it in the same reply."""
    asked = list[str]()

    def ann(call: ToolCall) -> Approve:
        asked.append(call.id)
        return answer

    amounts = {"a": 50, "b": 5, "c": 50}
    batch = [
        call("shop-refund", {"order": "7", "amount": amount}, id=name)
        for name, amount in amounts.items()
    ]
    here = world([calls(*batch), DONE])
    if of_filter:
        here.kernel.add_filter(
            FilterTypes.AUTO_FUNCTION_INVOCATION, ApprovalFilter(ASKS, approver=ann)
        )
    await door.ask(
        here, **({} if of_filter else {"interceptors": [ASKS], "approver": ann})
    )
    assert asked == questions


@pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)  # of Semantic Kernel
@pytest.mark.parametrize("around", [False, True], ids=["its-own", "of-the-run-around"])
async def test_an_agent_inside_an_agent_asks(around: bool) -> None:
    """A run inside a function cannot pause, but it asks its own approver, or else that of the run around it."""
    shop, asked = Shop(), list[str]()

    def ann(call: ToolCall) -> Approve:
        asked.append(call.fully_qualified_name)
        return Approve()

    inner = ChatCompletionAgent(
        service=FunctionInvokingChatCompletion(
            ScriptedChatCompletion([WIPE, DONE]), approver=None if around else ann
        ),
        name="Janitor",
        description="Cleans up.",
        plugins=[KernelPlugin.from_object("shop", shop)],
    )
    script = [call("Janitor-Janitor", {"messages": "Clean up."}), DONE]
    outer = ChatCompletionAgent(
        service=FunctionInvokingChatCompletion(
            ScriptedChatCompletion(script), approver=ann if around else None
        ),
        name="Desk",
        plugins=[inner],
    )
    response = await outer.get_response("Clean up.")
    assert str(response) == "Done."
    assert shop.ran == [("wipe",)]
    assert asked == ["shop-wipe"]


@pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)  # of Semantic Kernel
async def test_a_denial_inside_a_function_names_the_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without an approver the developer reads in the log which call was denied, and what to give."""
    shop = Shop()
    inner = FunctionInvokingChatCompletion(ScriptedChatCompletion([WIPE, DONE]))
    plugin = KernelPlugin.from_object("shop", shop)
    janitor = ChatCompletionAgent(
        service=inner, name="Janitor", description="Cleans up.", plugins=[plugin]
    )

    class Office:
        @kernel_function(description="Has somebody clean up.")
        async def clean(self) -> str:
            return str((await janitor.get_response("Clean up.")).content)

    script = [call("office-clean"), DONE]
    service = FunctionInvokingChatCompletion(ScriptedChatCompletion(script))
    office = KernelPlugin.from_object("office", Office())
    await ChatCompletionAgent(
        service=service, name="Desk", plugins=[office]
    ).get_response("Clean up.")
    assert shop.ran == []
    assert [
        record.getMessage()
        for record in caplog.records
        if record.name == "planner_ext.sk.charging.nested"
    ] == ["shop-wipe is denied: no approver, and its run cannot pause in a function."]


async def test_the_approver_of_a_wrapped_service_is_kept() -> None:
    """A door around a service uses the service's approver where it has none itself."""
    here = world([REFUND, DONE])
    here.service = FunctionInvokingChatCompletion(
        here.service, approver=lambda call: Approve()
    )  # pyright: ignore[reportAttributeAccessIssue]  # a service is a service
    await Door("service", False).ask(here, interceptors=[ASKS])
    assert here.ran == [REFUNDED]
