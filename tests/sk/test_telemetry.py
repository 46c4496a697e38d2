"""Spans and metrics of a run: what is recorded, under what, and what never is."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.metrics import _internal as metrics
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    Deny,
    FunctionInvokingChatCompletion,
    StopHandle,
    ToolCallHandler,
    ToolUseSession,
    requires_approval,
)
from planner_ext.durable import Runs
from planner_ext.errors import ServiceCallError
from planner_ext.hitl_manager import Checkpoint, Supply
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.planner import (
    ADD,
    GOAL,
    PLAN,
    Clock,
    Math,
    both_ways,
    drained,
    final,
    invoke,
    kernel_of,
    openai_kernel,
    planner_with,
    resume,
    scripted,
)
from support.telemetry import Recording, events_of, recording, said_by, tree_of

__all__ = ["recording"]

AGENT = "invoke_agent FunctionCallingStepwisePlanner"
SERVICE = "invoke_agent FunctionInvokingChatCompletion"
ITERATION = "planner_ext.iteration"
TOOL = "execute_tool math-add"
TWO = calls(ADD, call("math-add", {"a": 3, "b": 4}, id="second"))
AUTO = PromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())


class Bank:
    """A function that a person has to approve."""

    @requires_approval(prompt="May it?")
    @kernel_function(description="Pays.")
    async def pay(self, amount: int) -> str:
        return f"paid {amount}"


PAY = call("bank-pay", {"amount": 5}, id="pay")


def bank(*script: ScriptedReply | Exception) -> Kernel:
    return kernel_of(ScriptedChatCompletion([*script]), bank=Bank(), math=Math())


def no_plan(**options: Any) -> Any:
    return planner_with(plan=False, **options)


# The shape of a trace.


@both_ways
async def test_requests_and_calls_are_children_of_their_iteration(
    recording: Recording, streamed: bool
) -> None:
    """The connector's span and those of parallel calls lie in the iteration, which lies in the run; streamed, too."""
    async with openai_kernel([TWO, say("It is 3.")]) as (kernel, _):
        await invoke(no_plan(), kernel, streamed=streamed)
    first = (ITERATION, [("chat scripted", []), (TOOL, []), (TOOL, [])])
    assert recording.trees == [(AGENT, [first, (ITERATION, [("chat scripted", [])])])]
    assert [
        said_by(span)["planner_ext.iteration"] for span in recording.named(ITERATION)
    ] == [
        0,
        1,
    ]


async def test_a_time_limit_does_not_cut_the_trace(recording: Recording) -> None:
    """Under a time limit requests and calls run in tasks of their own; their spans keep their places."""
    kernel, _ = scripted([TWO, say("It is 3.")])
    await no_plan(budget=Budget(max_active_seconds=60)).invoke(kernel, GOAL)
    assert recording.trees == [
        (AGENT, [(ITERATION, [(TOOL, []), (TOOL, [])]), (ITERATION, [])])
    ]


async def test_a_plan_request_is_a_plan_span(recording: Recording) -> None:
    """The request for a plan is the conventions' ``plan`` operation."""
    kernel, _ = scripted([PLAN, final()])
    await planner_with(plan=True).invoke(kernel, GOAL)
    assert recording.trees == [
        (AGENT, [("plan FunctionCallingStepwisePlanner", []), (ITERATION, [])])
    ]


async def test_the_wait_for_the_next_request_is_in_no_iteration(
    recording: Recording,
) -> None:
    """The span of a plan or an iteration ends before ``min_iteration_time_ms`` is waited for."""
    ended_at_wait: list[list[str]] = []

    class Watching(Clock):
        async def sleep(self, seconds: float) -> None:
            ended_at_wait.append([span.name for span in recording.spans])
            await super().sleep(seconds)

    kernel, _ = scripted([PLAN, ADD, final()])
    options: dict[str, Any] = {"min_iteration_time_ms": 1000, "clock": Watching()}
    await planner_with(plan=True, **options).invoke(kernel, GOAL)
    plan = "plan FunctionCallingStepwisePlanner"
    assert ended_at_wait == [[plan], [plan, ITERATION, TOOL]]


async def test_a_nested_run_lies_in_the_call_that_it_is(recording: Recording) -> None:
    """The run of a planner that is called as a function is a child of that call."""
    inner, _ = scripted([ADD, say("It is 3.")])
    helper = PlannerPlugin(no_plan(), kernel=inner, description="Adds.")
    (name,) = kernel_of(helper=helper).plugins["helper"].functions
    outer = kernel_of(
        ScriptedChatCompletion([call(f"helper-{name}", {"goal": GOAL}), say("Done.")]),
        helper=helper,
    )
    await no_plan().invoke(outer, GOAL)
    nested = (AGENT, [(ITERATION, [(TOOL, [])]), (ITERATION, [])])
    assert recording.trees == [
        (
            AGENT,
            [(ITERATION, [(f"execute_tool helper-{name}", [nested])]), (ITERATION, [])],
        )
    ]


async def test_a_run_lies_in_the_span_of_its_caller(recording: Recording) -> None:
    """What the application traces around a run is the parent of the run, and current again after it."""
    kernel, _ = scripted([say("It is 3.")])
    with (
        trace.get_tracer_provider()
        .get_tracer("application")
        .start_as_current_span("request") as outer
    ):
        await no_plan().invoke(kernel, GOAL)
        assert trace.get_current_span() is outer
    assert recording.trees == [("request", [(AGENT, [(ITERATION, [])])])]


async def by_service(kernel: Kernel) -> None:
    service = FunctionInvokingChatCompletion(kernel.get_service("chat"))
    history = ChatHistory()
    history.add_user_message(GOAL)
    await service.get_chat_message_content(history, AUTO, kernel=kernel)


async def by_handler(kernel: Kernel) -> None:
    history = ChatHistory()
    history.add_user_message(GOAL)
    assert [
        message
        async for message in ToolCallHandler(kernel, settings=AUTO).invoke(history)
    ]


async def by_session(kernel: Kernel) -> None:
    await ToolUseSession(kernel).prompt(GOAL)


@pytest.mark.parametrize("door", [by_service, by_handler, by_session])
async def test_every_door_traces(
    recording: Recording, door: Callable[[Kernel], Awaitable[None]]
) -> None:
    """Service, handler and session trace a run as the planner does."""
    await door(scripted([ADD, say("It is 3.")], service_id="chat")[0])
    assert recording.trees == [(SERVICE, [(ITERATION, [(TOOL, [])]), (ITERATION, [])])]


async def test_a_stream_may_be_closed_by_another_task(
    recording: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    """No span is current across a ``yield``: closed from another task, everything detaches, and the span has ended."""
    kernel, _ = scripted([TWO, say("A long answer in pieces.")])
    stream = no_plan().invoke_stream(kernel, GOAL)
    await anext(stream)
    await asyncio.create_task(closed(stream))
    assert "detach" not in caplog.text
    span = recording.only(AGENT)
    assert (span.status.status_code, said_by(span)["error.type"]) == (
        StatusCode.UNSET,
        "CancelledError",
    )


async def closed(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()


# What a span says.


async def test_the_run_says_how_it_ended_and_what_it_spent(
    recording: Recording,
) -> None:
    """The conventions' attributes, and ours where they have no word."""
    kernel, _ = scripted([ADD, say("It is 3.")])
    result = await no_plan(price=lambda model, usage: 0.25).invoke(kernel, GOAL)
    assert said_by(recording.only(AGENT)) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "FunctionCallingStepwisePlanner",
        "gen_ai.provider.name": "ScriptedChatCompletion",
        "gen_ai.request.model": "scripted",
        "gen_ai.conversation.id": result.facts[0].run_id,
        "gen_ai.usage.input_tokens": result.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": result.usage.completion_tokens,
        "planner_ext.run.status": "answered",
        "planner_ext.run.iterations": 2,
        "planner_ext.run.tool_calls": 1,
        "planner_ext.run.cost": 0.5,
    }
    first = said_by(recording.named(ITERATION)[0])
    assert (first["gen_ai.response.finish_reasons"], first["planner_ext.calls"]) == (
        ("tool_calls",),
        1,
    )


async def test_a_limit_is_an_event_and_no_error(recording: Recording) -> None:
    """A run that reaches a limit says which, when it is reached and at the end; its span is not an error."""
    kernel, _ = scripted([TWO])
    await no_plan(budget=Budget(max_tool_calls=1, on_limit="stop")).invoke(kernel, GOAL)
    span = recording.only(AGENT)
    assert span.status.status_code is StatusCode.UNSET
    attributes = said_by(span)
    assert (attributes["planner_ext.run.status"], attributes["planner_ext.limit"]) == (
        "limit_reached",
        "max_tool_calls",
    )
    withheld = {
        "planner_ext.iteration": 0,
        "planner_ext.calls": 2,
        "planner_ext.limit": "max_tool_calls",
    }
    assert events_of(span) == [
        ("planner_ext.withheld", withheld),
        ("planner_ext.limit", {"planner_ext.limit": "max_tool_calls"}),
    ]


async def test_a_request_that_a_time_limit_interrupts_is_marked(
    recording: Recording,
) -> None:
    """Its iteration has the error type ``timeout``, and so has its duration; the run ends at its limit."""
    clock = Clock()

    async def hangs(_: object) -> None:
        clock.seconds += 100
        await asyncio.Future()

    kernel, _ = scripted([say("Never.")], before_reply=hangs)
    budget = Budget(max_active_seconds=60, on_limit="stop")
    result = await no_plan(budget=budget, clock=clock).invoke(kernel, GOAL)
    assert result.limit == "max_active_seconds"
    assert said_by(recording.only(ITERATION))["error.type"] == "timeout"
    ((attributes, _),) = recording.points("gen_ai.client.operation.duration")
    assert attributes["error.type"] == "timeout"
    assert "error.type" not in said_by(recording.only(AGENT))


async def test_a_fault_is_an_error_without_its_message(recording: Recording) -> None:
    """Run and iteration are marked with the error's type; the message may hold anything, and is left out."""
    kernel, _ = scripted([RuntimeError("the key is hunter2")])
    with pytest.raises(ServiceCallError):
        await no_plan().invoke(kernel, GOAL)
    for span in (recording.only(AGENT), recording.only(ITERATION)):
        assert (span.status.status_code, span.status.description) == (
            StatusCode.ERROR,
            None,
        )
        assert said_by(span)["error.type"] == "ServiceCallError"
        assert events_of(span) == [
            ("exception", {"exception.type": "ServiceCallError"})
        ]
    ((attributes, _),) = recording.points("gen_ai.invoke_agent.duration")
    assert attributes["error.type"] == "ServiceCallError"
    assert said_by(recording.only(AGENT))["planner_ext.run.status"] == "failed"
    assert "hunter2" not in recording.text()


async def test_a_stop_is_an_event(recording: Recording) -> None:
    """A run that was asked to stop says so, without the words."""
    stop = StopHandle()
    stop.stop("Somebody said so.")
    kernel, _ = scripted([say("Never.")])
    await no_plan().invoke(kernel, GOAL, stop=stop)
    span = recording.only(AGENT)
    assert events_of(span) == [("planner_ext.stop", {})]
    assert said_by(span)["planner_ext.run.status"] == "stopped"


async def test_a_function_that_does_not_exist_is_not_named(
    recording: Recording,
) -> None:
    """The name of an unknown function is text of the model."""
    kernel, _ = scripted([call("my-secret", {}), say("Oh.")])
    await no_plan().invoke(kernel, GOAL)
    ((name, attributes),) = events_of(recording.only(AGENT))
    assert (name, attributes["planner_ext.decision.verdict"]) == (
        "planner_ext.decision",
        "answer",
    )
    assert "my-secret" not in recording.text()


# The span of a request, where Semantic Kernel writes none.


@both_ways
async def test_a_request_has_a_span_by_default(
    recording: Recording, streamed: bool
) -> None:
    """Each request, that for a plan too, is a ``chat`` span with its models, tokens and finish reason, and one only."""
    recording.be_default()
    async with openai_kernel([PLAN, ADD, say("It is 3.")]) as (kernel, _):
        result = await invoke(planner_with(plan=True), kernel, streamed=streamed)
    chat = ("chat scripted", [])
    assert recording.trees == [
        (
            AGENT,
            [
                ("plan FunctionCallingStepwisePlanner", [chat]),
                (ITERATION, [chat, (TOOL, [])]),
                (ITERATION, [chat]),
            ],
        )
    ]
    chats = recording.named("chat")
    assert {span.kind for span in chats} == {trace.SpanKind.CLIENT}
    tokens = [said_by(span)["gen_ai.usage.input_tokens"] for span in chats]
    assert sum(tokens) == result.usage.prompt_tokens
    said = said_by(chats[-1])
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "scripted"
    assert said["gen_ai.response.model"] == "scripted"
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["gen_ai.conversation.id"] == result.facts[0].run_id
    assert said.get("gen_ai.request.stream", False) == streamed
    assert not any(
        "gen_ai.usage.input_tokens" in said_by(span)
        for span in recording.named(ITERATION)
    )


async def test_a_request_that_fails_marks_its_span(recording: Recording) -> None:
    """The span of the request has the error's type, as its iteration has; the message is left out."""
    recording.be_default()
    kernel, _ = scripted([RuntimeError("the key is hunter2")])
    with pytest.raises(ServiceCallError):
        await no_plan().invoke(kernel, GOAL)
    span = recording.only("chat")
    assert span.status.status_code is StatusCode.ERROR
    assert said_by(span)["error.type"] == "ServiceCallError"
    assert "hunter2" not in recording.text()


@both_ways
async def test_the_first_chunk_is_measured(
    recording: Recording, streamed: bool
) -> None:
    """A streamed request tells when its first chunk came, in its span and as a metric; a plain one has no chunks."""
    recording.be_default()
    async with openai_kernel([say("It is 3.")]) as (kernel, _):
        await invoke(no_plan(), kernel, streamed=streamed)
    points = recording.points("gen_ai.client.operation.time_to_first_chunk")
    assert [point.count for _, point in points] == [1] * streamed
    said = said_by(recording.only("chat"))
    assert ("gen_ai.response.time_to_first_chunk" in said) == streamed


async def test_a_function_is_measured(recording: Recording) -> None:
    """The time of each function is a metric by its name, and says how it failed."""
    clock = Clock()

    class Math:
        @kernel_function
        async def divide(self, a: int) -> float:
            clock.seconds += 2 * a
            return 1 / a

    script = ScriptedChatCompletion(
        [calls(call("math-divide", {"a": 1}), call("math-divide", {"a": 0})), say("-")]
    )
    await no_plan(clock=clock).invoke(kernel_of(script, math=Math()), GOAL)
    points = recording.points("gen_ai.execute_tool.duration")
    named = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "math-divide"}
    assert [attributes for attributes, _ in points] == [
        named,
        {**named, "error.type": "failed"},
    ]
    assert [(point.count, point.sum) for _, point in points] == [(1, 2.0), (1, 0.0)]


async def test_an_agent_has_the_name_that_it_was_given(recording: Recording) -> None:
    """Name and id of a planner or a service are those of its spans and metrics."""
    kernel, _ = scripted([say("It is 3.")])
    await no_plan(name="clerk", agent_id="clerk-1").invoke(kernel, GOAL)
    span = recording.only("invoke_agent clerk")
    named = {"gen_ai.agent.name": "clerk", "gen_ai.agent.id": "clerk-1"}
    assert named.items() <= said_by(span).items()
    ((attributes, _),) = recording.points("gen_ai.invoke_agent.duration")
    assert named.items() <= attributes.items()


# A run that goes on.


@both_ways
async def test_a_resumed_run_links_to_the_span_before_the_pause(
    recording: Recording, streamed: bool
) -> None:
    """Each activation is a trace of its own unless it has a parent, with a link to the one before."""
    kernel, planner = bank(PAY, PAY, say("Paid.")), no_plan()
    result = await invoke(planner, kernel, streamed=streamed)
    for _ in range(2):
        checkpoint = Checkpoint.from_json(result.checkpoint.to_json())
        result = await resume(
            planner,
            kernel,
            checkpoint,
            streamed=streamed,
            decisions={"pay": Approve(by="ann")},
        )
    assert result.status == "answered"
    spans = recording.named(AGENT)
    assert [[link.context.span_id for link in span.links] for span in spans] == [
        [],
        *([span.context and span.context.span_id] for span in spans[:-1]),
    ]
    assert [said_by(span)["planner_ext.run.status"] for span in spans] == [
        "paused",
        "paused",
        "answered",
    ]
    assert {said_by(span)["gen_ai.conversation.id"] for span in spans} == {
        result.facts[0].run_id
    }
    assert (
        sum(said_by(span)["gen_ai.usage.input_tokens"] for span in spans)
        == result.usage.prompt_tokens
    )


async def test_a_pause_and_a_decision_are_events(recording: Recording) -> None:
    """A question, the pause, and who decided how and after how long; the values that were decided on are left out."""
    clock = Clock()
    kernel, planner = bank(PAY, say("Paid.")), no_plan(clock=clock)
    paused = await planner.invoke(kernel, GOAL)
    clock.seconds += 60
    await planner.resume(
        kernel, paused.checkpoint, {"pay": Approve(by="ann", arguments={"amount": 3})}
    )
    before, after = (events_of(span) for span in recording.named(AGENT))
    asked = {
        "gen_ai.tool.name": "bank-pay",
        "gen_ai.tool.call.id": "pay",
        "planner_ext.iteration": 0,
        "planner_ext.decision.verdict": "defer",
        "planner_ext.decision.person": False,
        "planner_ext.decision.edited": False,
    }
    assert before == [
        ("planner_ext.decision", asked),
        ("planner_ext.pause", {"planner_ext.calls": 1}),
    ]
    ((name, decided),) = after
    assert name == "planner_ext.decision"
    assert decided.pop("planner_ext.decision.wait") == 60
    own = {"verdict": "run", "person": True, "edited": True, "by": "ann"}
    assert decided == asked | {
        f"planner_ext.decision.{name}": value for name, value in own.items()
    }
    ((attributes, point),) = recording.points("planner_ext.decision.wait")
    assert attributes == {"planner_ext.decision.verdict": "run"}
    assert (point.count, point.sum) == (1, 60)


async def test_an_activation_counts_its_own_requests_and_calls(
    recording: Recording,
) -> None:
    """What a run did before its pause is not counted again when it is resumed."""
    kernel, planner = bank(ADD, PAY, say("Paid.")), no_plan()
    paused = await planner.invoke(kernel, GOAL)
    await planner.resume(kernel, paused.checkpoint, {"pay": Approve()})
    ((_, requests),) = recording.points("gen_ai.invoke_agent.inference_calls")
    ((_, functions),) = recording.points("gen_ai.invoke_agent.tool_calls")
    assert (requests.count, requests.sum) == (2, 3)
    assert (functions.count, functions.sum) == (2, 2)


async def test_a_denial_is_an_event(recording: Recording) -> None:
    """Who denied is recorded, and why is not."""
    kernel, planner = bank(PAY, say("So be it.")), no_plan()
    paused = await planner.invoke(kernel, GOAL)
    await planner.resume(
        kernel, paused.checkpoint, {"pay": Deny("She owes me money.", by="bob")}
    )
    ((_, attributes),) = events_of(recording.named(AGENT)[1])
    assert (
        attributes["planner_ext.decision.verdict"],
        attributes["planner_ext.decision.by"],
    ) == ("deny", "bob")
    assert "owes" not in recording.text()


async def test_an_answered_question_is_a_decision(recording: Recording) -> None:
    """A person's answer to the model's question is an event with who answered; question and answer are left out."""
    kernel, planner = (
        bank(
            call("UserInteraction-AskUser", {"question": "Which shade?"}), say("Done.")
        ),
        no_plan(max_clarifications=1),
    )
    asked = await planner.invoke(kernel, GOAL)
    assert asked.status == "asked"
    await planner.resume(
        kernel, asked.checkpoint, {asked.pending[0].id: Supply("Crimson.", by="ann")}
    )
    first, second = recording.named(AGENT)
    assert said_by(first)["planner_ext.run.status"] == "asked"
    ((_, attributes),) = events_of(second)
    assert attributes.pop("planner_ext.decision.wait") >= 0
    own = {"verdict": "answer", "person": True, "by": "ann"}
    assert attributes == {f"planner_ext.decision.{k}": v for k, v in own.items()} | {
        "planner_ext.iteration": 0
    }
    assert "shade" not in recording.text()
    assert "Crimson" not in recording.text()


async def test_a_kept_run_links_across_workers(
    recording: Recording, tmp_path: Path
) -> None:
    """The journal in the store has the trace; reading a result again adds no span."""
    kernel, planner = bank(PAY, say("Paid.")), no_plan()
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        paused = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()
        assert paused.status == "paused"
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        await (
            await runs.resume(
                "order-7", planner, kernel, decisions={"pay": Approve(by="ann")}
            )
        ).result()
        again = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()
    assert again.status == "answered"
    first, second = recording.named(AGENT)
    assert [link.context.span_id for link in second.links] == [
        first.context and first.context.span_id
    ]
    assert said_by(second)["gen_ai.conversation.id"] == "order-7"


async def test_a_lost_request_is_a_crash(recording: Recording) -> None:
    """A journal that ends in a request tells the next life that a process was lost with it."""
    kernel, planner = scripted([ADD, say("It is 3."), say("It is 3.")])[0], no_plan()
    whole = await planner.invoke(kernel, GOAL)
    cut = whole.facts[
        : [fact.type for fact in whole.facts].index("IterationCompleted") + 1
    ]
    recording.exporter.clear()
    result = await planner.resume(kernel, Checkpoint(tuple(cut)))
    assert result.status == "answered"
    span = recording.only(AGENT)
    assert ("planner_ext.crash", {"planner_ext.iteration": 1}) in events_of(span)
    assert [format(link.context.span_id, "016x") for link in span.links] == [
        cut[0].trace.split("-")[2]
    ]


@pytest.mark.parametrize(
    "written",
    ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-\u202e-\x00-01"],
)
async def test_a_damaged_trace_makes_no_link(
    recording: Recording, written: str
) -> None:
    """A journal's trace is not trusted: without a valid one the span has no links."""
    kernel, planner = bank(PAY, say("Paid.")), no_plan()
    paused = await planner.invoke(kernel, GOAL)
    data = json.loads(paused.checkpoint.to_json())
    for fact in data["facts"]:
        if "trace" in fact:
            fact["trace"] = written
    await planner.resume(
        kernel, Checkpoint.from_json(json.dumps(data)), {"pay": Approve()}
    )
    assert [list(span.links) for span in recording.named(AGENT)] == [[], []]


# What is not recorded.

SECRETS = (
    "goal-7f3a",
    "argument-7f3a",
    "result-7f3a",
    "answer-7f3a",
    "reason-7f3a",
    "edited-7f3a",
)


class Vault:
    """Functions whose arguments and results are secret."""

    @kernel_function
    async def open(self, text: str) -> str:
        return "result-7f3a"

    @requires_approval
    @kernel_function
    async def ask(self, text: str) -> str:
        return "result-7f3a"


async def vault_run() -> None:
    """Let every kind of payload pass through a run: plain calls, an edited, and a denied one."""
    batch = calls(
        call("vault-open", {"text": "argument-7f3a"}),
        call("vault-ask", {"text": "argument-7f3a"}, id="edited"),
        call("vault-ask", {"text": "argument-7f3a"}, id="denied"),
    )
    kernel = kernel_of(
        ScriptedChatCompletion([batch, say("answer-7f3a")]), vault=Vault()
    )
    planner = no_plan()
    paused = await planner.invoke(kernel, "goal-7f3a")
    edited = Approve(arguments={"text": "edited-7f3a"}, by="ann")
    decisions = {"edited": edited, "denied": Deny("reason-7f3a", by="ann")}
    assert (
        await planner.resume(kernel, paused.checkpoint, decisions)
    ).status == "answered"


async def test_no_payload_is_recorded(recording: Recording) -> None:
    """Neither goal, arguments, results, reasons nor the answer are in any span or metric."""
    await vault_run()
    assert not [secret for secret in SECRETS if secret in recording.text()]


async def test_sensitive_diagnostics_add_goal_answer_and_reasons(
    recording: Recording,
) -> None:
    """With Semantic Kernel's own switch, in the conventions' form; calls are in Semantic Kernel's spans."""
    recording.be_sensitive()
    await vault_run()
    first, second = (said_by(span) for span in recording.named(AGENT))
    part = {"type": "text", "content": "goal-7f3a"}
    assert json.loads(str(first["gen_ai.input.messages"])) == [
        {"role": "user", "parts": [part]}
    ]
    assert "answer-7f3a" in str(second["gen_ai.output.messages"])
    assert "reason-7f3a" in recording.text()
    kernel, _ = scripted([RuntimeError("the key is hunter2")])
    with pytest.raises(ServiceCallError):
        await no_plan().invoke(kernel, GOAL)
    assert "hunter2" in str(recording.named(AGENT)[2].status.description)


async def test_nothing_is_written_where_nothing_listens() -> None:
    """Without a provider a journal has no trace, and its saved form not even the word."""
    kernel, planner = bank(PAY, say("Paid.")), no_plan()
    paused = await planner.invoke(kernel, GOAL)
    assert '"trace"' not in paused.checkpoint.to_json()
    result = await planner.resume(kernel, paused.checkpoint, {"pay": Approve()})
    assert {fact.trace for fact in result.facts if hasattr(fact, "trace")} == {""}


async def test_without_a_provider_no_code_of_telemetry_is_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a run it is asked whether anything listens, and nothing else."""
    monkeypatch.setattr("planner_ext.engine.telemetry.Invocation", None)
    kernel, _ = scripted([ADD, say("It is 3.")])
    assert (await no_plan().invoke(kernel, GOAL)).status == "answered"


@pytest.mark.parametrize("recording", [ALWAYS_OFF], indirect=True)
async def test_a_run_that_is_not_sampled_has_no_spans(recording: Recording) -> None:
    """The decision of the sampler on the run holds for everything in it; metrics are still recorded."""
    async with openai_kernel([TWO, say("It is 3.")]) as (kernel, _):
        await no_plan().invoke(kernel, GOAL)
    assert tree_of(recording.spans) == []
    assert recording.points("planner_ext.run.iterations")[0][1].sum == 2


@pytest.mark.parametrize("recording", [ALWAYS_OFF], indirect=True)
async def test_nothing_is_read_off_a_run_that_is_neither_sampled_nor_measured(
    recording: Recording,
) -> None:
    """Without a meter, and with a sampler that left the run out, its facts are turned into nothing."""
    recording.patch.setattr(metrics, "_METER_PROVIDER", None)
    kernel, _ = scripted([ADD, say("It is 3.")])
    assert (await no_plan().invoke(kernel, GOAL)).status == "answered"
    assert (
        tree_of(recording.spans) == recording.points("gen_ai.client.token.usage") == []
    )


# The metrics.


async def test_the_metrics_of_a_run(recording: Recording) -> None:
    """Runs by status, iterations, calls, tokens, cost and durations, by agent and model."""
    planner = no_plan(
        budget=Budget(max_iterations=2, on_limit="stop"),
        price=lambda model, usage: 0.25,
    )
    kernel, _ = scripted([ADD, say("It is 3."), ADD, ADD])
    for status in ("answered", "limit_reached"):
        assert (await planner.invoke(kernel, GOAL)).status == status
    agent = {"gen_ai.agent.name": "FunctionCallingStepwisePlanner"}
    model = {
        "gen_ai.provider.name": "ScriptedChatCompletion",
        "gen_ai.request.model": "scripted",
    }
    chat = {"gen_ai.operation.name": "chat", **model}

    def counted(name: str) -> list[tuple[dict[str, Any], int, float]]:
        return [
            (attributes, point.count, point.sum)
            for attributes, point in recording.points(name)
        ]

    statuses = [
        agent | {"planner_ext.run.status": status}
        for status in ("answered", "limit_reached")
    ]
    assert counted("planner_ext.run.iterations") == [
        (statuses[0], 1, 2),
        (statuses[1], 1, 2),
    ]
    assert [point[:2] for point in counted("gen_ai.invoke_agent.duration")] == [
        (status, 1) for status in statuses
    ]
    assert counted("gen_ai.invoke_agent.inference_calls") == [(agent, 2, 4)]
    assert counted("gen_ai.invoke_agent.tool_calls") == [(agent, 2, 2)]
    assert [point[:2] for point in counted("gen_ai.client.operation.duration")] == [
        (chat, 4)
    ]
    assert [point[:2] for point in counted("gen_ai.client.token.usage")] == [
        (chat | {"gen_ai.token.type": kind}, 4) for kind in ("input", "output")
    ]
    ((attributes, point),) = recording.points("planner_ext.cost")
    assert (attributes, point.value) == (model, 1.0)


def scripted_turn(request: ScriptedRequest) -> ScriptedReply:
    """Answer what a model with a script in its history would."""
    return (
        ADD
        if not any(message["role"] == "tool" for message in request.messages)
        else say("It is 3.")
    )


async def test_runs_at_once_do_not_mix(recording: Recording) -> None:
    """Twenty runs of one planner at once, streamed and plain: each has its own tree."""
    planner, kernel = no_plan(), scripted(scripted_turn)[0]
    await asyncio.gather(
        *(planner.invoke(kernel, GOAL) for _ in range(10)),
        *(drained(planner.invoke_stream(kernel, GOAL)) for _ in range(10)),
    )
    assert (
        recording.trees == [(AGENT, [(ITERATION, [(TOOL, [])]), (ITERATION, [])])] * 20
    )
