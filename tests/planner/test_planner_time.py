"""Time limits interrupt all work in flight, and the run ends by the limit's name with a history that can be sent."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, Budget
from planner_ext.durable import effect
from planner_ext.engine import concurrency as in_time_module
from planner_ext.events import CallFinished, CallStarted, ModelReplied, Planned
from planner_ext.hitl_manager import (
    ApprovalSettings,
    Approve,
    Checkpoint,
    Defer,
    ModelClarifier,
)
from planner_ext.iteration import ToolExecution
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.narrow import as_type, run_of
from support.planner import (
    ADD,
    PLAN,
    Clock,
    Math,
    both_ways,
    check_sendable,
    invoke,
    kernel_of,
    openai_kernel,
    planner_with,
    resume,
)
from support.stock import add_filter, first_result
from support.values import each_of

either_limit = pytest.mark.parametrize("limit", ["deadline", "max_active_seconds"])


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_time_module, "GRACE", 0.02)


def budget_of(limit: str, clock: Clock, seconds: float = 10.0, **more: Any) -> Budget:
    at = (
        datetime.fromtimestamp(clock.seconds + seconds, UTC)
        if limit == "deadline"
        else seconds
    )
    return Budget(**{limit: at}, **more)


def hangs(clock: Clock, *places: int) -> Callable[[ScriptedRequest], Awaitable[None]]:
    """Make the requests of these numbers take for ever; all others take no time."""
    made: list[ScriptedRequest] = []

    async def before_reply(request: ScriptedRequest) -> None:
        made.append(request)
        if len(made) - 1 in places:
            clock.seconds += 100
            await asyncio.Future()

    return before_reply


class Tools:
    """Functions that take their time, each in its way."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.release = threading.Event()
        self.swallowed = asyncio.Event()
        self.late = asyncio.Event()
        self.cancelled: list[str] = []

    @kernel_function
    async def hang(self) -> str:
        self.clock.seconds += 100
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled.append("hang")
            raise
        return ""

    @kernel_function
    async def swallow(self) -> str:
        self.clock.seconds += 100
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            await self.swallowed.wait()
        self.late.set()
        raise RuntimeError("late")

    @kernel_function
    async def answers_its_cancellation(self) -> str:
        self.clock.seconds += 100
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            return "late"
        return ""

    @kernel_function
    def block(self) -> str:
        self.clock.seconds += 100
        self.release.wait()
        return ""

    @kernel_function
    async def quick(self) -> str:
        return "quick"


@either_limit
@both_ways
@each_of("place", ["plan", "step", "second step", "form"])
async def test_a_request_in_flight_is_cancelled(
    limit: str, streamed: bool, place: str
) -> None:
    """It is charged as a trip; the history can be sent, and with a larger budget the run is answered."""
    clock = Clock()
    script = {
        "plan": [PLAN],
        "step": [],
        "second step": [ADD],
        "form": [say("no JSON")],
    }[place]

    class Answer(BaseModel):
        value: int

    good = say('{"value": 3}')
    service = ScriptedChatCompletion(
        [*script, good, good, good],
        before_reply=hangs(clock, len(script[:1]) * (place != "plan")),
    )
    form: dict[str, Any] = {"response_format": Answer} if place == "form" else {}
    planner = planner_with(
        plan=place == "plan", budget=budget_of(limit, clock), clock=clock, **form
    )
    kernel = kernel_of(service)
    result = await invoke(planner, kernel, streamed=streamed)
    assert (result.status, result.limit) == ("limit_reached", limit)
    replies = [
        fact for fact in result.facts if isinstance(fact, ModelReplied | Planned)
    ]
    assert (result.iterations, len(replies)) == (
        len(service.requests),
        len(service.requests) - 1,
    )
    check_sendable(result.chat_history)

    larger = Budget(max_iterations=result.iterations + 3)
    checkpoint = Checkpoint.from_json(result.checkpoint.to_json())
    resumed = await resume(
        planner, kernel, checkpoint, streamed=streamed, budget=larger
    )
    assert resumed.status == "answered"
    assert resumed.iterations == len(service.requests)


@each_of("on_limit", ["answer", "stop", "return_calls"])
async def test_an_interrupted_request_ends_the_run_under_every_on_limit(
    on_limit: Any,
) -> None:
    """No forced answer follows: it would have no time."""
    clock = Clock()
    service = ScriptedChatCompletion([say("never")], before_reply=hangs(clock, 0))
    planner = planner_with(
        plan=False, budget=budget_of("deadline", clock, on_limit=on_limit), clock=clock
    )
    result = await planner.invoke(kernel_of(service), "go")
    assert result.status == "limit_reached"
    assert result.limit == "deadline"
    assert result.final_answer == ""
    assert len(service.requests) == 1


@either_limit
@both_ways
@each_of("name", ["hang", "swallow", "answers_its_cancellation", "block"])
@pytest.mark.parametrize("concurrency", [None, 1])
async def test_a_function_is_cancelled_at_the_limit(
    limit: str, streamed: bool, name: str, concurrency: int | None
) -> None:
    """It is recorded as timed out, however it reacts; what ran beside it keeps its result, and the run ends."""
    clock = Clock()
    tools = Tools(clock)
    service = ScriptedChatCompletion(
        [calls(call("tools-quick"), call(f"tools-{name}"), call("tools-quick"))]
    )
    kernel = kernel_of(service, tools=tools)
    execution = ToolExecution(max_concurrency=concurrency)
    planner = planner_with(
        plan=False, budget=budget_of(limit, clock), clock=clock, execution=execution
    )
    try:
        result = await invoke(planner, kernel, streamed=streamed)
    finally:
        tools.release.set()
    assert (result.status, result.limit) == ("limit_reached", limit)
    finished = {
        fact.index: fact.outcome
        for fact in result.facts
        if isinstance(fact, CallFinished)
    }
    assert finished == (
        {0: "ok", 1: "timed_out"} if concurrency else {0: "ok", 1: "timed_out", 2: "ok"}
    )
    assert (
        result.tool_calls
        == len(finished)
        == sum(isinstance(fact, CallStarted) for fact in result.facts)
    )
    check_sendable(result.chat_history)
    assert result.chat_history is not None
    results = [
        str(first_result(message).result)
        for message in result.chat_history.messages
        if message.role == "tool"
    ]
    assert results[1] == (
        f"The function tools-{name} did not answer before the time of the run was over; whether it took effect is not "
        "known."
    )
    assert results[2].startswith(
        f"Not executed: The limit {limit}=" if concurrency else "quick"
    )
    if name == "swallow":  # its late end changes nothing
        before = tuple(result.facts)
        tools.swallowed.set()
        await tools.late.wait()
        assert tuple(result.facts) == before


@pytest.mark.parametrize("name", ["swallow", "answers_its_cancellation"])
async def test_a_function_that_swallows_its_own_timeout_is_left_behind(
    name: str,
) -> None:
    """The run continues: the model reads that it did not answer in time."""
    clock = Clock()
    service = ScriptedChatCompletion([call(f"tools-{name}"), say("Done.")])
    planner = planner_with(plan=False, execution=ToolExecution(timeout=0.02))
    result = await planner.invoke(kernel_of(service, tools=Tools(clock)), "go")
    assert (result.status, result.final_answer) == ("answered", "Done.")
    assert [
        fact.outcome for fact in result.facts if isinstance(fact, CallFinished)
    ] == ["timed_out"]


async def swallowing(*_: Any) -> Any:
    """Wait for ever, and ignore cancellation."""
    while True:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            if _released.is_set():
                raise


_released = threading.Event()


@each_of(
    "who",
    [
        "interceptor",
        "pre_invoke",
        "iteration_completed",
        "observer",
        "filter",
        "connector",
    ],
)
@both_ways
async def test_a_function_that_swallows_cancellation_is_left_behind(
    who: str, streamed: bool
) -> None:
    """The run ends on time by the deadline's name, with a history that can be sent."""
    clock = Clock()

    async def hang(*arguments: Any) -> Any:
        clock.seconds += 100
        await swallowing()

    async def filtering(context: Any, next: Any) -> None:
        await hang()

    before_reply = hang if who == "connector" else None
    service = ScriptedChatCompletion([ADD, say("never")], before_reply=before_reply)
    math = Math()
    kernel = kernel_of(service, math=math)
    options: dict[str, Any] = {
        "interceptor": {"interceptors": [hang]},
        "pre_invoke": {"pre_invoke": hang},
        "iteration_completed": {"iteration_completed": hang},
        "observer": {"observers": [hang]},
    }.get(who, {})
    if who == "filter":
        add_filter(kernel, "auto_function_invocation", filtering)
    planner = planner_with(
        plan=False, budget=budget_of("deadline", clock), clock=clock, **options
    )
    _released.clear()
    try:
        result = await invoke(planner, kernel, streamed=streamed)
    finally:
        _released.set()
        for task in tuple(in_time_module._abandoned):
            task.cancel()
    assert (result.status, result.limit) == ("limit_reached", "deadline")
    check_sendable(result.chat_history)
    assert len(math.sums) == (1 if who == "iteration_completed" else 0)


async def test_an_interceptor_that_swallows_its_own_timeout_denies() -> None:
    """The run continues without it."""
    service = ScriptedChatCompletion([ADD, say("Done.")])
    approval, math = ApprovalSettings(interceptor_timeout=0.02), Math()
    planner = planner_with(plan=False, interceptors=[swallowing], approval=approval)
    _released.clear()
    try:
        result = await planner.invoke(kernel_of(service, math=math), "go")
    finally:
        _released.set()
        for task in tuple(in_time_module._abandoned):
            task.cancel()
    assert (result.status, math.sums) == ("answered", [])


async def test_a_persons_time_is_free_of_active_seconds() -> None:
    """Neither an approver that blocks nor a clarifier that is a person uses it up."""
    clock = Clock()

    async def approver(_: Any) -> Approve:
        clock.seconds += 1000
        await asyncio.sleep(0.05)
        return Approve(by="ann")

    async def person(_: Any) -> str | None:
        clock.seconds += 1000
        await asyncio.sleep(0.05)
        return None

    service = ScriptedChatCompletion([ADD, say("3, is that right?")])
    planner = planner_with(
        plan=False,
        budget=budget_of("max_active_seconds", clock),
        clock=clock,
        interceptors=[approver],
        clarifier=person,
    )
    result = await invoke(planner, kernel_of(service))
    assert (result.status, result.usage.active_seconds) == ("answered", 0.0)


async def test_waiting_for_a_filters_approver_costs_no_active_time() -> None:
    """An `ApprovalFilter` of the kernel that holds the run open while it asks uses up no active seconds."""
    clock = Clock()

    async def approver(_: Any) -> Approve:
        clock.seconds += 1000
        await asyncio.sleep(0.05)
        return Approve(by="ann")

    math = Math()
    kernel = kernel_of(ScriptedChatCompletion([ADD, say("3")]), math=math)
    add_filter(
        kernel,
        "auto_function_invocation",
        ApprovalFilter(ApprovalPolicy.model_validate({"default": "ask"}), approver),
    )
    planner = planner_with(
        plan=False, budget=budget_of("max_active_seconds", clock), clock=clock
    )
    result = await invoke(planner, kernel)
    assert (result.status, len(math.sums)) == ("answered", 1)


@pytest.mark.parametrize("who", ["approver", "clarifier"])
async def test_a_deadline_does_not_wait_for_a_person(who: str) -> None:
    """Undecided calls and unanswered questions get the answer "not executed"."""
    clock = Clock()

    async def person(_: Any) -> Any:
        clock.seconds += 1000
        await asyncio.Future()

    asks = call("UserInteraction-AskUser", {"question": "Which?"})
    service = ScriptedChatCompletion([ADD if who == "approver" else asks])
    options: dict[str, Any] = (
        {"interceptors": [person]} if who == "approver" else {"clarifier": person}
    )
    planner = planner_with(
        plan=False, budget=budget_of("deadline", clock), clock=clock, **options
    )
    math = Math()
    result = await planner.invoke(kernel_of(service, math=math), "go")
    assert result.status == "limit_reached"
    assert result.limit == "deadline"
    assert math.sums == []
    check_sendable(result.chat_history)


async def test_a_deadline_runs_on_through_a_pause() -> None:
    """A decision that comes after it starts nothing more; active seconds stand still meanwhile."""
    clock, math = Clock(), Math()
    budget = Budget(
        deadline=datetime.fromtimestamp(clock.seconds + 10, UTC), max_active_seconds=10
    )
    service = ScriptedChatCompletion([ADD, say("never")])
    planner = planner_with(
        plan=False, budget=budget, clock=clock, interceptors=[lambda _: Defer()]
    )
    kernel = kernel_of(service, math=math)
    paused = await planner.invoke(kernel, "go")
    clock.seconds += 60
    result = await planner.resume(
        kernel, paused.checkpoint, {paused.pending[0].id: Approve(by="ann")}
    )
    assert result.status == "limit_reached"
    assert result.limit == "deadline"
    assert math.sums == []
    assert len(service.requests) == 1
    later = Budget(max_active_seconds=10)
    assert (
        await planner.resume(kernel, result.checkpoint, budget=later)
    ).final_answer == "never"


@either_limit
async def test_a_models_answer_to_a_question_is_interrupted(limit: str) -> None:
    """A clarifier that is a model is active, and its request is charged."""
    clock = Clock()
    helper = ScriptedChatCompletion(
        [say("blue")], service_id="helper", before_reply=hangs(clock, 0)
    )
    asks = call("UserInteraction-AskUser", {"question": "Which?"})
    service = ScriptedChatCompletion([asks], service_id="chat")
    kernel = kernel_of(service, helper)
    planner = planner_with(
        "chat",
        plan=False,
        budget=budget_of(limit, clock),
        clock=clock,
        clarifier=ModelClarifier(kernel, service_id="helper"),
    )
    result = await planner.invoke(kernel, "go")
    assert result.status == "limit_reached"
    assert result.limit == limit
    assert result.iterations == 2
    check_sendable(result.chat_history)


@either_limit
async def test_a_nested_run_has_what_is_left(limit: str) -> None:
    """Its request is interrupted by the limit of the run around, which it ends before."""
    clock = Clock()
    inner = ScriptedChatCompletion(
        [say("never")], service_id="expert", before_reply=hangs(clock, 0)
    )
    service = ScriptedChatCompletion(
        [call("expert-reach_goal", {"goal": "go"})], service_id="chat"
    )
    kernel = kernel_of(service, inner)
    kernel.add_plugin(
        PlannerPlugin(planner_with("expert", plan=False, clock=clock)), "expert"
    )
    planner = planner_with(
        "chat", plan=False, budget=budget_of(limit, clock), clock=clock
    )
    result = await planner.invoke(kernel, "go")
    assert (result.status, result.limit) == ("limit_reached", limit)
    assert result.iterations == 2
    check_sendable(result.chat_history)


async def test_an_external_cancellation_is_not_taken_for_the_limit() -> None:
    """A run that is cancelled while a limit is set is cancelled, and its calls are answered."""
    clock = Clock()
    began = asyncio.Event()

    class Waits:
        @kernel_function
        async def wait(self) -> str:
            began.set()
            await asyncio.Future()
            return ""

    planner = planner_with(plan=False, budget=budget_of("deadline", clock), clock=clock)
    task = asyncio.create_task(
        planner.invoke(
            kernel_of(ScriptedChatCompletion([call("w-wait")]), w=Waits()), "go"
        )
    )
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    check_sendable(run_of(caught.value).chat_history)


class Timed:
    """Functions that ask for the time that is left, or only look as if."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @kernel_function
    @effect("idempotent")
    async def with_default(self, time_left: float | None = None) -> str:
        self.seen.append(time_left)
        return "ok"

    @effect()
    @kernel_function
    def without(self, time_left: float | None) -> str:
        self.seen.append(time_left)
        return "ok"

    @effect("keyed")
    @kernel_function
    async def both(self, idempotency_key: str, time_left: float | None) -> str:
        self.seen.append((time_left, idempotency_key.rsplit("/", 1)[1]))
        return "ok"

    @kernel_function
    async def unmarked(self, time_left: float) -> str:
        self.seen.append(("of the model", time_left))
        return "ok"


async def test_a_function_may_ask_for_the_time_that_is_left() -> None:
    """The least of its own timeout and the run's limits; None without any. Only a marked function is given it."""
    timed, clock = Timed(), Clock()
    script = [
        calls(
            call("t-with_default", id="a"),
            call("t-without", id="b"),
            call("t-both", id="c"),
        ),
        call("t-unmarked", {"time_left": 5}),
        say("Done."),
    ]
    service = ScriptedChatCompletion([*script, *script, *script])
    kernel = kernel_of(service, t=timed)
    execution = ToolExecution(timeout={"t-both": 4.0}, max_concurrency=1)
    await invoke(
        planner_with(plan=False, execution=execution, clock=clock),
        kernel,
        time_left=99,
    )
    assert timed.seen == [None, None, (4.0, "c"), ("of the model", 5.0)]
    timed.seen.clear()
    limited = planner_with(
        plan=False,
        execution=execution,
        clock=clock,
        budget=budget_of("max_active_seconds", clock),
    )
    await invoke(limited, kernel, time_left=99)
    assert timed.seen == [10.0, 10.0, (4.0, "c"), ("of the model", 5.0)]


async def test_the_model_does_not_say_how_much_time_is_left() -> None:
    """It is in no schema of a marked function, and as an argument it is refused by name."""
    timed = Timed()
    async with openai_kernel(
        [call("t-without", {"time_left": 1e9}), say("Done.")], t=timed
    ) as (kernel, server):
        await planner_with(plan=False).invoke(kernel, "go")
    assert timed.seen == []
    first, second = (request.body for request in server.requests)
    tools = as_type(list, first["tools"])
    assert [tool["function"]["name"] for tool in tools if "time_left" in str(tool)] == [
        "t-unmarked"
    ]
    assert '"time_left" is not a parameter' in str(second)


async def stalled(limit: str, streamed: bool) -> None:
    """Ask a server that does not answer, with two seconds for it."""
    release = threading.Event()

    def stalls(_: ScriptedRequest) -> Any:
        release.wait()
        return say("late")

    async with openai_kernel(stalls) as (kernel, _):
        at: Any = datetime.now(UTC) + timedelta(seconds=2) if limit == "deadline" else 2
        planner = planner_with(plan=False, budget=Budget(**{limit: at}))
        try:
            result = await asyncio.wait_for(
                invoke(planner, kernel, streamed=streamed), 120
            )
        finally:
            release.set()
    assert result.status == "limit_reached"
    assert result.limit == limit
    assert result.iterations == 1
    assert result.usage.active_seconds < 10


async def test_a_request_over_http_ends_with_the_machines_clock() -> None:
    """A server that does not answer holds no run longer than its limit says, plain and streamed: all wait at once."""
    async with asyncio.TaskGroup() as waiting:
        for limit in ("deadline", "max_active_seconds"):
            waiting.create_task(stalled(limit, streamed=False), name=limit)
            waiting.create_task(stalled(limit, streamed=True), name=f"{limit} streamed")
