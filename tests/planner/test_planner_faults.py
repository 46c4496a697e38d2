"""What goes wrong outside has a name, loses nothing, and can be continued from; and the pace of requests."""

import threading
from itertools import pairwise
from typing import Any

import pytest
from openai import AsyncOpenAI, Timeout
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.open_ai.exceptions.content_filter_ai_exception import (
    ContentFilterAIException,
)
from semantic_kernel.exceptions import (
    KernelException,
    ServiceInvalidAuthError,
    ServiceInvalidResponseError,
    ServiceResponseException,
)
from semantic_kernel.functions import kernel_function

from planner_ext import Budget
from planner_ext.errors import (
    InvalidReplyError,
    PlannerException,
    ServiceCallError,
    ToolExecutionError,
)
from planner_ext.events import RequestFailed
from planner_ext.hitl_manager import Checkpoint
from planner_ext.iteration import ToolExecution
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.narrow import run_of
from support.planner import (
    ADD,
    PLAN,
    Clock,
    Math,
    both_ways,
    check_sendable,
    final,
    invoke,
    kernel_of,
    never_stops,
    openai_kernel,
    planner_with,
    resume,
    scripted,
)
from support.values import each_of

NO_CHOICES = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [],
}

faults = each_of(
    ("fault", "error"),
    [
        (ScriptedFault(status=500), ServiceCallError),
        (ScriptedFault(status=401), ServiceCallError),
        (ScriptedFault(drop=True), ServiceCallError),
        (ScriptedFault(status=200, body=NO_CHOICES), InvalidReplyError),
        (
            ScriptedFault(status=200, body={**NO_CHOICES, "choices": None}),
            InvalidReplyError,
        ),
        (ScriptedFault(status=200, body="<html>"), InvalidReplyError),
        (
            ScriptedFault(
                status=400, body={"error": {"message": "no", "code": "content_filter"}}
            ),
            ContentFilterAIException,
        ),
    ],
    ids=["500", "401", "dropped", "no-choices", "null-choices", "no-json", "filtered"],
)
places = each_of("place", [0, 1, 2], ids=["plan", "first-step", "after-tools"])


@both_ways
@places
@faults
async def test_a_failed_request_loses_nothing(
    fault: ScriptedFault, error: type[KernelException], place: int, streamed: bool
) -> None:
    """A fault is a named error, ours or Semantic Kernel's, with the history and a checkpoint to continue from.

    The request that the server has seen is charged.
    """
    whole, math = [PLAN, ADD, final()], Math()
    async with openai_kernel([*whole[:place], fault], math=math) as (kernel, first):
        with pytest.raises(error) as raised:
            await invoke(planner_with(), kernel, streamed=streamed)

    assert isinstance(raised.value, KernelException)
    caught = run_of(raised.value)
    check_sendable(caught.chat_history)
    assert caught.checkpoint is not None

    async with openai_kernel(whole[place:], math=math) as (kernel, second):
        checkpoint = Checkpoint.from_json(caught.checkpoint.to_json())
        result = await resume(planner_with(), kernel, checkpoint, streamed=streamed)
    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.iterations == 4
    assert (len(first.requests), len(second.requests)) == (place + 1, 3 - place)
    assert (math.sums, result.tool_calls) == ([(1, 2)], 1)


@both_ways
async def test_a_request_that_reaches_no_server_is_not_charged(streamed: bool) -> None:
    """A refused connection costs nothing; the run continues with its whole budget."""
    with ScriptedOpenAIServer([]) as gone:
        client = AsyncOpenAI(base_url=gone.url, api_key="any", max_retries=0)
    connector = OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
    with pytest.raises(ServiceCallError) as raised:
        await invoke(
            planner_with(plan=False, max_iterations=2),
            kernel_of(connector),
            streamed=streamed,
        )
    caught = run_of(raised.value)
    assert caught.checkpoint is not None
    (failed,) = [
        fact for fact in caught.checkpoint.facts if isinstance(fact, RequestFailed)
    ]
    assert failed.usage.iterations == 0

    async with openai_kernel([ADD, say("It is 3.")]) as (kernel, server):
        result = await resume(
            planner_with(plan=False), kernel, caught.checkpoint, streamed=streamed
        )
    assert result.final_answer == "It is 3."
    assert result.iterations == 2
    assert len(server.requests) == 2


@both_ways
@each_of("kind", [408, 429, 503, "read timeout"])
async def test_a_request_that_a_server_has_seen_is_charged(
    kind: int | str, streamed: bool
) -> None:
    """A refusal of a busy server, and a reply that did not come in time, cost the trip, and no more than that."""
    released = threading.Event()

    def late(_: ScriptedRequest) -> ScriptedReply:
        released.wait(30)
        return say("Too late.")

    fault = [ScriptedFault(status=kind)] if isinstance(kind, int) else late
    with ScriptedOpenAIServer(fault) as server:
        timeout = Timeout(30, read=0.2)
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0, timeout=timeout
        ) as client:
            kernel = kernel_of(
                OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
            )
            with pytest.raises(ServiceCallError) as raised:
                await invoke(
                    planner_with(plan=False, max_iterations=2),
                    kernel,
                    streamed=streamed,
                )
        released.set()
    caught = run_of(raised.value)
    assert caught.checkpoint is not None
    (failed,) = [
        fact for fact in caught.checkpoint.facts if isinstance(fact, RequestFailed)
    ]
    assert failed.usage.iterations == caught.checkpoint.state().usage.iterations == 1


async def test_the_tokens_of_a_failed_request_are_estimated_where_they_are_limited() -> (
    None
):
    """What was sent counts against ``max_total_tokens``, and the usage says that it was estimated."""
    kernel, _ = scripted([ConnectionResetError("gone")])
    with pytest.raises(ServiceCallError) as raised:
        await planner_with(plan=False, budget=Budget(max_total_tokens=9000)).invoke(
            kernel, "Add."
        )
    caught = run_of(raised.value)
    assert caught.checkpoint is not None
    usage = caught.checkpoint.state().usage
    assert usage.prompt_tokens == usage.estimated_tokens > 0


def test_the_errors_are_semantic_kernels_errors() -> None:
    """Code that catches Semantic Kernel's exceptions catches these."""
    assert issubclass(ServiceCallError, ServiceResponseException)
    assert issubclass(InvalidReplyError, ServiceInvalidResponseError)
    assert issubclass(PlannerException, KernelException)


@both_ways
@each_of("kind", [ServiceInvalidAuthError, ConnectionError, IndexError])
async def test_every_exception_of_a_connector_has_history_and_checkpoint(
    kind: type[Exception], streamed: bool
) -> None:
    """No exception of a connector leaves without the run that it broke; Semantic Kernel's own stay what they are."""
    math, raised = Math(), kind("gone")
    kernel = kernel_of(ScriptedChatCompletion([PLAN, ADD, raised, final()]), math=math)
    with pytest.raises(KernelException) as caught:
        await invoke(planner_with(), kernel, streamed=streamed)

    error: Any = caught.value
    assert error is raised or isinstance(error, PlannerException)
    check_sendable(error.chat_history)
    result = await resume(planner_with(), kernel, error.checkpoint, streamed=streamed)
    assert (result.status, math.sums) == ("answered", [(1, 2)])


@both_ways
async def test_a_callback_that_fails_does_not_lose_the_run(streamed: bool) -> None:
    """What iteration_completed raises comes out as it is, with history and checkpoint; resuming runs nothing again."""

    async def broken(context: Any) -> None:
        raise ZeroDivisionError("no totals")

    math = Math()
    kernel = kernel_of(ScriptedChatCompletion([PLAN, ADD, final()]), math=math)
    with pytest.raises(ZeroDivisionError) as caught:
        await invoke(
            planner_with(iteration_completed=broken), kernel, streamed=streamed
        )

    error: Any = caught.value
    check_sendable(error.chat_history)
    checkpoint = Checkpoint.from_json(error.checkpoint.to_json())
    result = await resume(planner_with(), kernel, checkpoint, streamed=streamed)
    assert result.status == "answered"
    assert result.tool_calls == 1
    assert math.sums == [(1, 2)]


async def test_the_model_reads_that_a_function_failed() -> None:
    """By default a function's failure is its result, without internal detail, and its sibling's result is kept."""
    kernel, service = scripted([PLAN, calls(call("math-fail"), ADD), final()])
    result = await invoke(planner_with(), kernel)

    failed, added = (
        str(message["content"]) for message in service.requests[2].messages[-2:]
    )
    assert "math-fail failed" in failed
    assert "db7" not in failed
    assert added == "3"
    assert (result.status, result.tool_calls) == ("answered", 2)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["together", "one-by-one"])
async def test_a_failed_function_can_end_the_run_and_the_run_can_be_resumed(
    one_by_one: bool,
) -> None:
    """With on_error="raise" the batch settles, the error carries the run, and resuming runs no function again."""
    math = Math()
    service = ScriptedChatCompletion([PLAN, calls(call("math-fail"), ADD), final()])
    kernel = kernel_of(service, math=math)
    execution = ToolExecution(
        on_error="raise", max_concurrency=1 if one_by_one else None
    )
    planner = planner_with(execution=execution)
    with pytest.raises(ToolExecutionError, match="math-fail") as raised:
        await invoke(planner, kernel)

    assert isinstance(raised.value.__cause__, Exception)
    check_sendable(raised.value.chat_history)
    assert raised.value.checkpoint is not None
    checkpoint = Checkpoint.from_json(raised.value.checkpoint.to_json())
    result = await resume(planner, kernel, checkpoint)
    assert result.status == "answered"
    assert math.sums == [(1, 2)]
    assert len(service.requests) == 3


async def test_a_template_that_fails_after_the_plan_does_not_lose_the_plan() -> None:
    """Where the step template cannot be rendered the error is a named one, and what was paid is in its checkpoint."""

    class Shop:
        @kernel_function
        async def price(self) -> str:
            raise ConnectionError("no shop")

    kernel = kernel_of(ScriptedChatCompletion([PLAN]), shop=Shop())
    planner = planner_with(get_step_prompt=lambda: "{{shop.price}} {{$goal}}")
    with pytest.raises(PlannerException, match="get_step_prompt") as raised:
        await invoke(planner, kernel)
    assert raised.value.checkpoint is not None


@both_ways
async def test_a_finish_reason_that_lies_is_an_error_on_request(streamed: bool) -> None:
    """A finish reason that contradicts the reply is refused with strict_finish_reason, and not looked at without."""
    script = [PLAN, ScriptedReply(calls=ADD.calls, finish_reason="stop"), final()]
    kernel, _ = scripted(script)
    assert (
        await invoke(planner_with(), kernel, streamed=streamed)
    ).status == "answered"

    kernel, _ = scripted(script)
    with pytest.raises(InvalidReplyError, match="finish_reason") as raised:
        await invoke(planner_with(strict_finish_reason=True), kernel, streamed=streamed)
    assert raised.value.checkpoint is not None


async def test_requests_keep_their_distance() -> None:
    """min_iteration_time_ms is the least time from one request's start to the next one's, the plan request included."""
    clock, started = Clock(), []

    async def taking_a_second(request: ScriptedRequest) -> None:
        started.append(clock.seconds)
        clock.seconds += 1.0

    kernel, _ = scripted([PLAN, ADD, final()], before_reply=taking_a_second)
    planner = planner_with(min_iteration_time_ms=4000, clock=clock)
    result = await invoke(planner, kernel)

    assert result.status == "answered"
    assert [later - earlier for earlier, later in pairwise(started)] == [4.0, 4.0]
    assert clock.slept == [3.0, 3.0]


async def test_a_slow_model_is_not_waited_for_twice() -> None:
    """A request that took longer than the least time is followed by the next one at once."""
    clock = Clock()

    async def taking_ten_seconds(request: ScriptedRequest) -> None:
        clock.seconds += 10.0

    kernel, _ = scripted(never_stops, before_reply=taking_ten_seconds)
    planner = planner_with(min_iteration_time_ms=4000, clock=clock, max_iterations=4)
    result = await invoke(planner, kernel)

    assert clock.slept == []
    assert result.usage.active_seconds == pytest.approx(40.0)


async def test_facts_have_the_injected_time() -> None:
    """Every moment and duration in the journal is the given clock's."""
    clock = Clock(seconds=500.0)
    kernel, _ = scripted([PLAN, final()])
    result = await invoke(planner_with(clock=clock), kernel)

    assert {fact.at for fact in result.facts} == {500.0}
    assert result.usage.active_seconds == 0.0


@both_ways
async def test_a_long_text_beside_a_call_survives_the_checkpoint(
    streamed: bool,
) -> None:
    """A request made after a run was resumed from JSON says what it would have said without."""
    script: list[Any] = [
        PLAN,
        calls(ADD, call("math-add", "{}"), text='I "add" — naïvely.'),
        say(""),
        final(),
    ]
    kernel, service = scripted(script)
    ended = await invoke(planner_with(), kernel, streamed=streamed)
    text = ended.checkpoint.to_json()
    await resume(planner_with(), kernel, Checkpoint.from_json(text), streamed=streamed)

    assert service.requests[3].messages == service.requests[2].messages
