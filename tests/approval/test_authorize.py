"""Who decides is let in explicitly: the ``authorize`` hook is asked at every door, and only True allows."""

from collections.abc import Callable
from typing import Any

import pytest
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import KernelPlugin

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    Approve,
    Deny,
    FunctionInvokingChatCompletion,
    ToolUseSession,
)
from planner_ext.errors import (
    DecisionRefusedError,
    PlannerInvalidConfigurationError,
    RunNotAnsweredError,
)
from planner_ext.hitl_manager import (
    ApprovalSettings,
    Authorize,
    DecisionRequest,
    Defer,
    Supply,
    ToolCall,
)
from planner_ext.testing import ScriptedChatCompletion, call, calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Door,
    Shop,
    asked,
    every_door,
    one_door,
    results,
    three_doors,
    two_doors,
    world,
)
from support.approval_filter import AUTO, POLICY, chat, guarded
from support.values import each_of

ROLES: dict[str, Any] = {
    "function": "refund",
    "action": "ask",
    "reason": "So much?",
    "roles": ["manager"],
}
FOR_MANAGERS = ApprovalPolicy.from_dict({"default": "allow", "rules": [ROLES]})
STAFF = {"ann": "manager", "bo": "clerk"}


def of_staff(request: DecisionRequest) -> bool | str:
    """Let those decide who have one of the call's roles."""
    if (
        request.call is None
        or not request.call.roles
        or STAFF.get(request.by) in request.call.roles
    ):
        return True
    return f"that takes one of: {', '.join(request.call.roles)}"


STAFF_ONLY = ApprovalSettings(authorize=of_staff)
ALL_DECISIONS = [
    Approve(by="bo"),
    Deny("No.", by="bo"),
    Supply("paid", by="bo"),
    Approve(),
]


@each_of("decision", ALL_DECISIONS, ids=["approve", "deny", "supply", "unnamed"])
@every_door
async def test_who_lacks_the_role_is_refused_and_the_call_still_waits(
    door: Door, decision: Any
) -> None:
    """By name, with the reason, for every decision; nothing ran, and a person with the role decides afterwards."""
    here = world([REFUND, DONE])
    options: dict[str, Any] = {"interceptors": [FOR_MANAGERS], "approval": STAFF_ONLY}
    paused = await door.ask(here, **options)
    (waiting,) = paused.waiting
    who = "'bo'" if decision.by else "An unnamed person"
    with pytest.raises(
        DecisionRefusedError,
        match=f"{who} may not decide .*: that takes one of: manager",
    ) as refusal:
        await door.resume(here, paused.checkpoint, {waiting: decision}, **options)
    assert refusal.value.call_id == waiting
    assert here.ran == []
    assert here.requests == 1
    done = await door.resume(
        here, paused.checkpoint, {waiting: Approve(by="ann")}, **options
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED])


@three_doors
async def test_roles_without_a_hook_refuse_to_be_decided(door: Door) -> None:
    """Nothing could check them: the refusal names the roles and the way out, also of a denial."""
    here = world([REFUND, DONE])
    paused = await door.ask(here, interceptors=[FOR_MANAGERS])
    for decision in (Approve(by="ann"), Deny(by="ann")):
        with pytest.raises(
            DecisionRefusedError,
            match=r"it is for manager to decide, .* authorize= of ApprovalSettings",
        ):
            await door.resume(
                here,
                paused.checkpoint,
                {paused.waiting[0]: decision},
                interceptors=[FOR_MANAGERS],
            )
    assert here.ran == []


async def on_leave(_: DecisionRequest) -> str:
    return "on leave"


def is_down(_: DecisionRequest) -> bool:
    raise ConnectionError("the directory is down")


def leaves(_: DecisionRequest) -> bool:
    raise SystemExit("bye")


def forgets(_: DecisionRequest) -> None:
    """A hook without a return."""


HOOKS: dict[str, tuple[Callable[[DecisionRequest], Any], str]] = {
    "text": (on_leave, "on leave"),
    "fault": (is_down, "the directory is down"),
    "exit": (leaves, "bye"),
    "none": (forgets, "it returned None, and only True allows"),
    "false": (lambda _: False, "it returned False, and only True allows"),
    "one": (lambda _: 1, "it returned 1, and only True allows"),
    "junk": (lambda _: {"allowed": True}, "and only True allows"),
}


@each_of("hook", HOOKS)
@one_door
async def test_only_true_allows(door: Door, hook: str) -> None:
    """A text is the reason, and so is that of an exception; a hook that forgets its return refuses."""
    authorize, reason = HOOKS[hook]
    here = world([WIPE, DONE])
    options: dict[str, Any] = {"approval": ApprovalSettings(authorize=authorize)}
    paused = await door.ask(here, **options)
    with pytest.raises(DecisionRefusedError, match=f"'ann' may not decide .*{reason}"):
        await door.resume(
            here, paused.checkpoint, {paused.waiting[0]: Approve(by="ann")}, **options
        )
    assert here.ran == []


@one_door
async def test_the_hook_sees_what_is_decided(door: Door) -> None:
    """The action, who, the run, the call as it waits, and the decision; a door vouches for no name."""
    heard: list[DecisionRequest] = []

    async def authorize(request: DecisionRequest) -> bool:
        heard.append(request)
        return True

    here = world([WIPE, DONE])
    options: dict[str, Any] = {"approval": ApprovalSettings(authorize=authorize)}
    paused = await door.ask(here, **options)
    assert heard == []
    decision = Approve(by="ann")
    await door.resume(here, paused.checkpoint, {paused.waiting[0]: decision}, **options)
    (request,) = heard
    assert request.action == "decide"
    assert request.by == "ann"
    assert request.decision == decision
    assert request.verified is False
    assert request.call is not None
    assert (request.call.id, request.call.fully_qualified_name) == (
        paused.waiting[0],
        "shop-wipe",
    )
    assert request.call.fingerprint == paused.pending[0]["fingerprint"]
    assert request.run_id


@one_door
async def test_one_refused_decision_takes_none(door: Door) -> None:
    """The decisions of one resume are all or nothing."""
    both = [
        call("shop-wipe", {}, id="wipe"),
        call("shop-refund", {"order": "7", "amount": 50}, id="refund"),
    ]
    here, options = (
        world([calls(*both), DONE]),
        {"interceptors": [FOR_MANAGERS], "approval": STAFF_ONLY},
    )
    paused = await door.ask(here, **options)
    with pytest.raises(DecisionRefusedError, match="'bo' may not decide 'refund'"):
        await door.resume(
            here,
            paused.checkpoint,
            {"wipe": Approve(by="bo"), "refund": Approve(by="bo")},
            **options,
        )
    assert here.ran == []


@two_doors
async def test_the_hook_of_a_wrapped_service_has_its_say(door: Door) -> None:
    """A door around a service asks its own hook, and the service's: both have to allow."""
    here = world([REFUND, DONE])
    wrapped = FunctionInvokingChatCompletion(here.service, approval=STAFF_ONLY)
    here.kernel.add_service(wrapped, overwrite=True)
    here.service = wrapped  # pyright: ignore[reportAttributeAccessIssue]  # a service is a service
    options: dict[str, Any] = {
        "interceptors": [FOR_MANAGERS],
        "approval": ApprovalSettings(authorize=lambda _: True),
    }
    paused = await door.ask(here, **options)
    with pytest.raises(DecisionRefusedError, match="'bo' may not decide"):
        await door.resume(
            here, paused.checkpoint, {paused.waiting[0]: Approve(by="bo")}, **options
        )
    await door.resume(
        here, paused.checkpoint, {paused.waiting[0]: Approve(by="ann")}, **options
    )
    assert here.ran == [REFUNDED]


# A person who is asked while the run is open.


@three_doors
async def test_who_lacks_the_role_does_not_answer_for_the_approver(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """Their answer counts for nothing, approval or denial: the call still waits, and the log says why."""
    for answer in (Approve(by="bo"), Deny(by="bo")):
        here = world([REFUND, DONE])
        paused = await door.ask(
            here,
            interceptors=[FOR_MANAGERS],
            approval=STAFF_ONLY,
            approver=lambda _, answer=answer: answer,
        )
        assert (paused.status, here.ran) == ("paused", [])
    assert (
        "'bo' may not decide 'call_1': that takes one of: manager. The call still waits."
        in caplog.text
    )


@three_doors
async def test_the_approver_sees_the_roles_and_passes_the_hook(door: Door) -> None:
    """Under the hook by name; without one it is the application's own function, which can check the roles itself."""
    for approval in (STAFF_ONLY, ApprovalSettings()):
        here, seen = world([REFUND, DONE]), list[Any]()

        async def ann(call: ToolCall, seen: list[Any] = seen) -> Approve:
            seen.append(call.roles)
            return Approve(by="ann")

        done = await door.ask(
            here, interceptors=[FOR_MANAGERS], approval=approval, approver=ann
        )
        assert done.status == "answered"
        assert here.ran == [REFUNDED]
        assert seen == [("manager",)]


async def test_an_approver_that_fails_still_denies_under_a_hook() -> None:
    """The denial has no author, so the hook is not asked."""

    def hangs_up(_: ToolCall) -> Approve:
        raise EOFError

    done = await Door("planner", False).ask(
        world([REFUND, DONE]),
        interceptors=[FOR_MANAGERS],
        approval=STAFF_ONLY,
        approver=hangs_up,
    )
    assert results(done.history) == [
        "The call was refused and did not run: It could not be decided."
    ]


async def test_a_session_checks_roles() -> None:
    """A session cannot pause: the prompt raises where the approver's answer is refused, and nothing ran."""
    here = world([REFUND, DONE])
    session = ToolUseSession(
        here.kernel,
        interceptors=[FOR_MANAGERS],
        approval=STAFF_ONLY,
        approver=lambda _: Approve(by="bo"),
    )
    with pytest.raises(RunNotAnsweredError):
        await session.prompt("Refund.")
    assert here.ran == []


@pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)  # of Semantic Kernel
@pytest.mark.parametrize(("by", "ran"), [("ann", [REFUNDED]), ("bo", [])])
async def test_the_hook_of_the_outer_run_holds_inside_an_agent(
    by: str, ran: list[Any]
) -> None:
    """A nested run asks its own approver under the hooks of all runs around it."""
    shop = Shop()
    inner = ChatCompletionAgent(
        service=FunctionInvokingChatCompletion(
            ScriptedChatCompletion([REFUND, DONE]),
            interceptors=[FOR_MANAGERS],
            approver=lambda _: Approve(by=by),
        ),
        name="Clerk",
        description="Refunds.",
        plugins=[KernelPlugin.from_object("shop", shop)],
    )
    script = [call("Clerk-Clerk", {"messages": "Refund."}), DONE]
    outer = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(script), approval=STAFF_ONLY
    )
    await ChatCompletionAgent(service=outer, name="Desk", plugins=[inner]).get_response(
        "Refund."
    )
    assert shop.ran == ran


# The filter of a stock kernel.


@each_of("decision", ALL_DECISIONS, ids=["approve", "deny", "supply", "unnamed"])
async def test_the_filter_of_a_stock_kernel_asks_its_hook(decision: Any) -> None:
    """`ApprovalFilter.resume` refuses by name; the call still waits, and who has the role decides it."""
    by = ApprovalFilter(FOR_MANAGERS, authorize=of_staff)
    here, history = guarded([REFUND, DONE], by=by, under=AUTO), asked()
    await chat(here, history)
    with pytest.raises(
        DecisionRefusedError,
        match="may not decide 'call_1': that takes one of: manager",
    ):
        await by.resume(here.kernel, history, {"call_1": decision})
    assert (len(by.pending(history)), here.ran) == (1, [])
    assert await by.resume(here.kernel, history, {"call_1": Approve(by="ann")}) == ()
    assert here.ran == [REFUNDED]


async def test_the_filter_refuses_roles_without_a_hook() -> None:
    """As every door does."""
    by = ApprovalFilter(FOR_MANAGERS)
    here, history = guarded([REFUND, DONE], by=by, under=AUTO), asked()
    await chat(here, history)
    with pytest.raises(DecisionRefusedError, match="it is for manager to decide"):
        await by.resume(here.kernel, history, {"call_1": Approve(by="ann")})
    assert here.ran == []


@pytest.mark.parametrize(("by", "ran"), [("ann", [REFUNDED]), ("bo", [])])
async def test_the_hook_decides_about_the_filters_approver(
    by: str, ran: list[Any]
) -> None:
    """On a stock kernel nothing can pause, so an answer that is refused leaves the call refused."""
    one = ApprovalFilter(
        FOR_MANAGERS, approver=lambda _: Approve(by=by), authorize=of_staff
    )
    here = guarded([REFUND, DONE], by=one, under=AUTO)
    await chat(here, asked())
    assert here.ran == ran


@one_door
@pytest.mark.parametrize(("by", "ran"), [("ann", [REFUNDED]), ("bo", [])])
async def test_filters_that_differ_in_their_hook_are_two(
    door: Door, by: str, ran: list[Any]
) -> None:
    """The same policy and approver do not make them one: in a run, too, each hook is asked."""

    def approver(_: ToolCall) -> Approve:
        return Approve(by=by)

    both: tuple[Authorize, ...] = (of_staff, lambda _: True)
    for hooks in (both, both[::-1]):
        here = world([REFUND, DONE])
        for hook in hooks:
            one = ApprovalFilter(FOR_MANAGERS, approver=approver, authorize=hook)
            here.kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, one)
        await door.ask(here)
        assert here.ran == ran


@one_door
async def test_the_hook_of_the_kernels_filter_holds_in_a_run(door: Door) -> None:
    """A call that waits there under the filter's policy is decided by whom the filter's hook lets in."""
    here = world([REFUND, DONE])
    here.kernel.add_filter(
        FilterTypes.AUTO_FUNCTION_INVOCATION,
        ApprovalFilter(FOR_MANAGERS, authorize=of_staff),
    )
    paused = await door.ask(here)
    with pytest.raises(DecisionRefusedError, match="'bo' may not decide"):
        await door.resume(
            here, paused.checkpoint, {paused.waiting[0]: Approve(by="bo")}
        )
    await door.resume(here, paused.checkpoint, {paused.waiting[0]: Approve(by="ann")})
    assert here.ran == [REFUNDED]


# What is no hook.


@each_of("hook", ["manager", True, ApprovalPolicy, [of_staff]])
def test_an_invalid_hook_is_refused_by_name(hook: Any) -> None:
    """With the way out: a function that returns True."""
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="authorize must be a function of the request",
    ):
        ApprovalSettings(authorize=hook)
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="authorize must be a function of the request",
    ):
        ApprovalFilter(POLICY, authorize=hook)


def test_hooks_are_merged_once() -> None:
    """The same hook of a door and of the service in it is asked once."""
    both = STAFF_ONLY.within(ApprovalSettings(authorize=on_leave)).within(STAFF_ONLY)
    assert both.authorize == (of_staff, on_leave)
    assert STAFF_ONLY.within(STAFF_ONLY).authorize is of_staff


@pytest.mark.parametrize(
    "question",
    [Defer("Sure?", roles=["manager"]), Defer("Sure?")],
    ids=["roles", "anyone"],
)
async def test_the_hook_decides_about_an_interceptors_question(
    question: Defer,
) -> None:
    """The hook sees the roles of the question, from every source."""
    heard: list[Any] = []

    def authorize(request: DecisionRequest) -> bool:
        heard.append(request.call and tuple(request.call.roles))
        return True

    here, approval = world([LOOK, DONE]), ApprovalSettings(authorize=authorize)
    options: dict[str, Any] = {
        "interceptors": [lambda _: question],
        "approval": approval,
    }
    door = Door("planner", False)
    paused = await door.ask(here, **options)
    await door.resume(
        here, paused.checkpoint, {paused.waiting[0]: Approve()}, **options
    )
    assert heard == [tuple(question.roles)]


def swapping(decisions: dict[str, Any]) -> Any:
    """Make a hook during which the decision that it is asked about is exchanged for another."""

    async def allow(request: DecisionRequest) -> bool:
        decisions["call_1"] = Approve(by="bo")
        return isinstance(request.decision, Deny)

    return allow


@three_doors
async def test_the_decision_that_the_hook_allowed_is_the_one_that_counts(
    door: Door,
) -> None:
    """The caller's mapping may change while the hook is asked."""
    decisions: dict[str, Any] = {"call_1": Deny("No.", by="ann")}
    paused = await door.ask(
        world([REFUND]), interceptors=[FOR_MANAGERS], approval=STAFF_ONLY
    )
    here = world([DONE])
    swapped = ApprovalSettings(authorize=swapping(decisions))
    done = await door.resume(
        here,
        paused.checkpoint,
        decisions,
        interceptors=[FOR_MANAGERS],
        approval=swapped,
    )
    assert (here.ran, results(done.history)) == (
        [],
        ["The call was refused and did not run: No."],
    )


async def test_so_it_is_where_a_filter_resumes_a_history() -> None:
    """`ApprovalFilter.resume` takes what its hook was asked about."""
    decisions: dict[str, Any] = {"call_1": Deny("No.", by="ann")}
    by, history = ApprovalFilter(POLICY, authorize=swapping(decisions)), asked()
    here = guarded([REFUND, DONE], by=by, under=AUTO)
    await chat(here, history)
    assert await by.resume(here.kernel, history, decisions) == ()
    assert (here.ran, results(history)) == (
        [],
        ["The call was refused and did not run: No."],
    )
