"""A planner's run that waits for a person, and what is reported between its round trips."""

from typing import Any

import pytest

from planner_ext import Approve, Deny, FunctionInvokingChatCompletion
from planner_ext.errors import DecisionRefusedError, RunNotAnsweredError
from planner_ext.hitl_manager import (
    ApprovalSettings,
    Checkpoint,
    Defer,
    Supply,
    ToolCall,
)
from planner_ext.iteration import FunctionInvocationIterationContext
from planner_ext.testing import ScriptedChatCompletion, call, calls
from support.planner import (
    ADD,
    PLAN,
    Math,
    both_ways,
    check_sendable,
    final,
    invoke,
    kernel_of,
    openai_kernel,
    planner_with,
    resume,
    scripted,
    texts,
)
from support.values import each_of

FAIL = call("math-fail")


def ask_before_adding(call: ToolCall) -> Defer | None:
    """Wait for a person before anything is added."""
    return Defer("Really?") if call.function_name == "add" else None


def careful(**options: Any) -> Any:
    return planner_with(interceptors=[ask_before_adding], **options)


async def paused(
    *script: Any, streamed: bool = False
) -> tuple[Any, Math, ScriptedChatCompletion]:
    service, math = ScriptedChatCompletion([PLAN, *script]), Math()
    return (
        await invoke(careful(), kernel_of(service, math=math), streamed=streamed),
        math,
        service,
    )


@both_ways
async def test_a_deferred_call_pauses_the_run_as_a_value(streamed: bool) -> None:
    """Nothing of the batch has run, the calls that wait are in the result, and its history can be sent as it is."""
    result, math, service = await paused(calls(ADD, FAIL), streamed=streamed)

    assert result.status == "paused"
    assert result.final_answer == ""
    assert result.tool_calls == 0
    assert (math.sums, len(service.requests)) == ([], 2)
    (pending,) = result.pending
    assert pending.id == "call_1"
    assert pending.fully_qualified_name == "math-add"
    assert pending.arguments == {"a": 1, "b": 2}
    check_sendable(result.chat_history)
    with pytest.raises(RunNotAnsweredError):
        result.raise_for_status()


@both_ways
@pytest.mark.parametrize("otherwise", [False, True], ids=["same-way", "other-way"])
@each_of(
    ("decision", "read", "ran"),
    [
        (Approve(by="ann"), "3", [(1, 2)]),
        (Approve({"a": 20, "b": 30}), "50", [(20, 30)]),
        (Deny("too much"), "too much", []),
        (Supply({"sum": 4}), '{"sum":4}', []),
    ],
    ids=["approve", "edit", "deny", "supply"],
)
async def test_a_decision_continues_from_json(
    decision: Any, read: str, ran: Any, otherwise: bool, streamed: bool
) -> None:
    """A fresh planner and kernel carry a decision out, plain or streamed, however the run began; the usage goes on."""
    async with openai_kernel([PLAN, ADD]) as (kernel, first):
        waiting = await invoke(careful(), kernel, streamed=streamed)
    checkpoint = Checkpoint.from_json(waiting.checkpoint.to_json())
    math = Math()
    async with openai_kernel([final()], math=math) as (kernel, second):
        result = await resume(
            careful(),
            kernel,
            checkpoint,
            decisions={"call_1": decision},
            streamed=streamed is not otherwise,
        )
        (request,) = second.requests

    assert result.status == "answered"
    assert result.iterations == 3
    assert math.sums == ran
    assert result.usage.total_tokens == first.total_tokens + second.total_tokens
    assert read in str(request.messages[-1]["content"])
    check_sendable(result.chat_history)


@both_ways
async def test_without_decisions_a_run_stays_paused(streamed: bool) -> None:
    """Resumed without a decision, or with one for another call, the run makes no request and runs nothing."""
    waiting, math, service = await paused(ADD, streamed=streamed)
    kernel = kernel_of(service, math=math)
    still = await resume(careful(), kernel, waiting.checkpoint, streamed=streamed)
    with pytest.raises(DecisionRefusedError, match="call_9"):
        await resume(
            careful(),
            kernel,
            waiting.checkpoint,
            decisions={"call_9": Approve()},
            streamed=streamed,
        )

    assert (still.status, still.pending) == ("paused", waiting.pending)
    assert (len(service.requests), math.sums) == (2, [])


async def test_a_paused_run_can_be_cancelled() -> None:
    """``cancel`` needs no kernel: every call is answered, nothing runs, and who and why are in the reason."""
    waiting, math, _ = await paused(calls(ADD, FAIL))
    result = careful().cancel(waiting.checkpoint, by="ann", reason="too risky \ud800")

    assert result.status == "stopped"
    assert result.pending == ()
    assert math.sums == []
    assert "ann" in result.reason
    assert "too risky ?" in result.reason  # a lone surrogate cannot be sent
    check_sendable(result.chat_history)
    assert result.iterations == waiting.iterations


@both_ways
async def test_every_batch_is_reported_between_round_trips(streamed: bool) -> None:
    """iteration_completed is awaited once for each batch in which a function ran, before the next request."""
    told: list[tuple[int, bool, int]] = []
    service = ScriptedChatCompletion([PLAN, ADD, call("math-nothing"), ADD, final()])

    async def completed(context: FunctionInvocationIterationContext) -> None:
        told.append((context.iteration, context.is_streaming, len(service.requests)))

    kernel = kernel_of(service)
    result = await invoke(
        planner_with(iteration_completed=completed), kernel, streamed=streamed
    )

    assert result.status == "answered"
    assert told == [(0, streamed, 2), (2, streamed, 4)]


async def test_the_callback_may_end_the_run() -> None:
    """``terminate`` keeps the results, makes no further request, and is an end of its own that can be resumed."""

    async def enough(context: FunctionInvocationIterationContext) -> None:
        context.terminate = True

    kernel, service = scripted([PLAN, ADD, final()])
    result = await invoke(planner_with(iteration_completed=enough), kernel)
    assert result.status == "stopped"
    assert result.tool_calls == 1
    assert len(service.requests) == 2
    check_sendable(result.chat_history)

    result = await resume(planner_with(), kernel, result.checkpoint)
    assert (result.status, result.tool_calls) == ("answered", 1)
    assert [role for role, _ in texts(service.requests[2])] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]


async def test_pre_invoke_refuses_by_name_and_trip() -> None:
    """pre_invoke gets the 1-based trip, the full name and the arguments; False refuses, and the run continues."""
    asked: list[tuple[int, str, dict[str, Any]]] = []

    def small_numbers_only(iteration: int, name: str, arguments: Any) -> bool:
        asked.append((iteration, name, dict(arguments)))
        return arguments["a"] < 10

    math = Math()
    kernel = kernel_of(
        ScriptedChatCompletion(
            [PLAN, ADD, call("math-add", {"a": 30, "b": 40}), final()]
        ),
        math=math,
    )
    result = await invoke(planner_with(pre_invoke=small_numbers_only), kernel)

    assert (result.status, math.sums) == ("answered", [(1, 2)])
    assert asked == [
        (1, "math-add", {"a": 1, "b": 2}),
        (2, "math-add", {"a": 30, "b": 40}),
    ]


async def test_the_interceptors_of_a_wrapped_service_are_asked_too() -> None:
    """A planner over a service that was registered with interceptors asks its own first, then the service's."""
    asked: list[str] = []

    def of_service(call: ToolCall) -> Deny:
        asked.append("service")
        return Deny("not here")

    math = Math()
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, final()]), interceptors=[of_service]
    )
    planner = planner_with(
        interceptors=[lambda _: asked.append("planner")], plan="1. Add."
    )
    result = await invoke(planner, kernel_of(service, math=math))

    assert asked == ["planner", "service"]
    assert (result.status, math.sums) == ("answered", [])


async def test_what_a_wrapped_service_refuses_stays_refused() -> None:
    """A service that was registered to run nothing unasked, ``unmatched="deny"``, does so under a planner as well."""
    math = Math()
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, final()]),
        approval=ApprovalSettings(unmatched="deny"),
    )
    result = await invoke(planner_with(plan="1. Add."), kernel_of(service, math=math))

    assert result.status == "answered"
    assert math.sums == []
    assert result.tool_calls == 0
