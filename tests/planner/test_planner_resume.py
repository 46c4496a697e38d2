"""A run continues: in another process, with a larger budget, and with what it spent before."""

from typing import Any

import pytest

from planner_ext import Approve, Budget, Defer, FunctionInvokingChatCompletion
from planner_ext.errors import (
    InvalidCheckpointError,
    LimitReachedError,
    PlannerInvalidConfigurationError,
)
from planner_ext.hitl_manager import Checkpoint
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    say,
)
from support.planner import (
    ADD,
    GOAL,
    PLAN,
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
    texts,
)
from support.values import each_of

all_ends = each_of("on_limit", ["answer", "stop", "return_calls", "raise"])
all_limits = each_of("limit", ["max_iterations", "max_tool_calls"])


async def limited(
    kernel: Any, limit: str, on_limit: Any, *, streamed: bool = False
) -> Any:
    """Run into a limit after one call; give what carries the checkpoint, a result or an error."""
    trips, tools = (3, None) if limit == "max_iterations" else (9, 1)
    planner = planner_with(
        budget=Budget(on_limit=on_limit, max_iterations=trips, max_tool_calls=tools)
    )
    if on_limit != "raise":
        return await invoke(planner, kernel, streamed=streamed)
    with pytest.raises(LimitReachedError) as raised:
        await invoke(planner, kernel, streamed=streamed)
    return raised.value


@both_ways
@all_limits
@all_ends
async def test_every_limited_run_continues_from_json(
    on_limit: Any, limit: str, streamed: bool
) -> None:
    """With a larger budget a fresh planner and kernel finish the run from JSON text; the usage continues."""
    async with openai_kernel(never_stops) as (kernel, first):
        ended = await limited(kernel, limit, on_limit, streamed=streamed)
    text = ended.checkpoint.to_json()
    math = Math()
    async with openai_kernel([ADD, final()], math=math) as (kernel, second):
        budget = Budget(max_iterations=20, max_tool_calls=20)
        result = await resume(
            planner_with(),
            kernel,
            Checkpoint.from_json(text),
            streamed=streamed,
            budget=budget,
        )

    assert (result.status, result.final_answer) == ("answered", "It is 3.")
    assert (
        result.iterations
        == ended.iterations + 2
        == len(first.requests) + len(second.requests)
    )
    assert result.tool_calls == ended.tool_calls + len(math.sums)
    assert result.usage.total_tokens == first.total_tokens + second.total_tokens
    check_sendable(result.chat_history)


@both_ways
@all_limits
async def test_calls_that_a_limit_returned_run_after_all(
    limit: str, streamed: bool
) -> None:
    """A batch that was handed back is run when the budget allows it, before the next request."""
    kernel, _ = scripted(never_stops)
    ended = await limited(kernel, limit, "return_calls", streamed=streamed)
    math = Math()
    service = ScriptedChatCompletion([final()])
    result = await resume(
        planner_with(),
        kernel_of(service, math=math),
        ended.checkpoint,
        streamed=streamed,
        budget=Budget(max_iterations=20),
    )

    assert math.sums == [(1, 2)]
    assert len(service.requests) == 1
    assert result.status == "answered"


@both_ways
async def test_a_forced_answer_is_removed_when_the_run_continues(
    streamed: bool,
) -> None:
    """The answer that a limit forced is taken out of the history when the run continues."""
    kernel, _ = scripted(never_stops)
    ended = await limited(kernel, "max_iterations", "answer", streamed=streamed)
    kernel, service = scripted([final()])
    await resume(
        planner_with(),
        kernel,
        ended.checkpoint,
        streamed=streamed,
        budget=Budget(max_iterations=9),
    )

    assert ended.final_answer == "Enough."
    assert ("assistant", "Enough.") not in texts(service.requests[0])


@all_limits
async def test_a_spent_budget_makes_no_request(limit: str) -> None:
    """Resumed without a larger budget, the run ends at the same limit, and nothing more runs."""
    kernel, _ = scripted(never_stops)
    ended = await limited(kernel, limit, "stop")
    math, service = Math(), ScriptedChatCompletion(never_stops)
    planner = planner_with()
    result = await resume(planner, kernel_of(service, math=math), ended.checkpoint)

    assert result.status == "limit_reached"
    assert result.limit == limit
    assert math.sums == []
    assert service.requests == []


async def test_a_resumed_run_stays_bounded() -> None:
    """A budget without max_iterations leaves that of the options: a model that never stops does not run for ever."""
    math = Math()

    def script(request: ScriptedRequest) -> ScriptedReply:
        return ADD if request.tools and request.index < 60 else say("Enough.")

    kernel = kernel_of(ScriptedChatCompletion(script), math=math)
    planner = planner_with(
        plan=False, max_iterations=6, budget=Budget(max_tool_calls=2)
    )
    ended = await invoke(planner, kernel)
    assert (ended.limit, ended.iterations) == ("max_tool_calls", 4)

    result = await resume(
        planner,
        kernel,
        ended.checkpoint,
        budget=Budget(max_tool_calls=99),
    )
    assert (result.limit, result.iterations) == ("max_iterations", 6)


async def test_the_budget_of_a_wrapped_service_holds_after_resuming() -> None:
    """A larger budget of the caller does not lift the one that the service was registered with."""
    inner = ScriptedChatCompletion(never_stops)
    kernel = kernel_of(
        FunctionInvokingChatCompletion(inner, budget=Budget(max_iterations=3))
    )
    ended = await invoke(planner_with(plan=False), kernel)
    assert (ended.limit, len(inner.requests)) == ("max_iterations", 3)

    result = await resume(
        planner_with(plan=False),
        kernel,
        ended.checkpoint,
        budget=Budget(max_iterations=8),
    )
    assert (result.limit, len(inner.requests)) == ("max_iterations", 3)


async def test_a_function_in_the_budget_of_a_resumed_run_must_be_offered() -> None:
    """A misspelt name in the new budget is refused before the first request."""
    kernel, service = scripted(never_stops)
    ended = await limited(kernel, "max_tool_calls", "stop")
    requests = len(service.requests)
    budget = Budget(max_iterations=20, max_calls_per_function={"math-ad": 1})
    with pytest.raises(
        PlannerInvalidConfigurationError, match="max_calls_per_function"
    ):
        await resume(planner_with(), kernel, ended.checkpoint, budget=budget)
    assert len(service.requests) == requests


@both_ways
async def test_an_answered_run_is_not_resumed(streamed: bool) -> None:
    """There is nothing to continue with after an answer; the error says what to do instead."""
    kernel, _ = scripted([PLAN, final()])
    result = await invoke(planner_with(), kernel, streamed=streamed)
    with pytest.raises(PlannerInvalidConfigurationError, match=r"answered.*[Ii]nvoke"):
        await resume(planner_with(), kernel, result.checkpoint, streamed=streamed)


async def test_an_incomplete_run_can_be_resumed() -> None:
    """After an empty reply the run can be resumed, and the request is made again."""
    kernel, service = scripted([PLAN, ADD, say(""), final()])
    ended = await invoke(planner_with(), kernel)
    assert ended.status == "incomplete"
    result = await resume(planner_with(), kernel, ended.checkpoint)

    assert result.status == "answered"
    assert result.iterations == 4
    assert result.tool_calls == 1
    assert texts(service.requests[3]) == texts(service.requests[2])


async def test_the_calls_of_a_finished_batch_do_not_run_again() -> None:
    """What ran before the checkpoint is in the history of the run that continues, and is not run a second time."""
    kernel, _ = scripted([PLAN, ADD, say("")])
    ended = await invoke(planner_with(), kernel)
    math, service = Math(), ScriptedChatCompletion([final()])
    text = ended.checkpoint.to_json()
    await resume(
        planner_with(),
        kernel_of(service, math=math),
        Checkpoint.from_json(text),
    )

    assert math.sums == []
    assert [role for role, _ in texts(service.requests[0])] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]


async def test_a_checkpoint_holds_no_argument_of_the_application() -> None:
    """The application's arguments, which may be secrets, are not in the checkpoint's text."""
    kernel, _ = scripted(never_stops)
    planner = planner_with(max_iterations=3)
    result = await invoke(planner, kernel, password="hunter2-hunter2")

    assert "hunter2" not in result.checkpoint.to_json()
    assert "hunter2" not in result.model_dump_json()


@each_of("key", [None, b"another"], ids=["unsigned", "other-key"])
async def test_a_checkpoint_that_was_not_signed_with_the_key_is_refused(
    key: bytes | None,
) -> None:
    """With a key, text without a signature or with another one is refused before anything runs."""
    kernel, _ = scripted(never_stops)
    result = await planner_with(max_iterations=2).invoke(kernel, "goal")
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(result.checkpoint.to_json(key), b"key")
    assert Checkpoint.from_json(result.checkpoint.to_json(b"key"), b"key").facts


@both_ways
@each_of("checkpoint", ["{}", None, Checkpoint(())], ids=["text", "None", "empty"])
async def test_anything_but_a_checkpoint_is_refused_by_name(
    checkpoint: Any, streamed: bool
) -> None:
    """JSON text in place of a checkpoint, nothing, and a checkpoint without a run get an error that says so."""
    kernel, service = scripted(never_stops)
    with pytest.raises(
        (PlannerInvalidConfigurationError, InvalidCheckpointError), match="checkpoint"
    ):
        await resume(planner_with(), kernel, checkpoint, streamed=streamed)
    assert service.requests == []


@both_ways
@each_of("key", [None, b"secret"])
async def test_a_checkpoint_is_given_as_its_text(
    key: bytes | None, streamed: bool
) -> None:
    """``resume`` and ``cancel`` take the text that ``to_json`` wrote; a key checks it as it does a checkpoint."""
    options: dict[str, Any] = {
        "plan": False,
        "checkpoint_key": key,
        "interceptors": [deferring],
    }
    paused = await invoke(
        planner_with(**options), scripted([ADD])[0], streamed=streamed
    )
    text = paused.checkpoint.to_json()
    decisions = {paused.pending[0]["id"]: Approve()}
    kernel = scripted([say("It is 3.")])[0]
    result = await resume(
        planner_with(**options), kernel, text, streamed=streamed, decisions=decisions
    )
    assert (result.status, result.tool_calls) == ("answered", 1)
    assert planner_with(**options).cancel(text, by="ann").status == "stopped"
    with pytest.raises(InvalidCheckpointError, match=r"signed|schema"):
        await resume(
            planner_with(**options),
            kernel,
            text.replace("schema", "Schema", 1),
            streamed=streamed,
        )
    if key is not None:
        with pytest.raises(InvalidCheckpointError, match="signed"):
            await resume(
                planner_with(**options),
                kernel,
                text.replace(GOAL, "Pay."),
                streamed=streamed,
            )
        with pytest.raises(InvalidCheckpointError, match="signed"):
            planner_with(**options).cancel(Checkpoint(paused.facts).to_json())


async def deferring(_: object) -> Defer:
    return Defer()
