"""What a prompt may spend, what the model reads of a failure, and what a deferred call comes to."""

import asyncio
from typing import Any

import pytest
from semantic_kernel.contents import AuthorRole

from planner_ext import Approve, Budget, Deny, ToolCallHandler
from planner_ext.engine.concurrency import StopHandle
from planner_ext.errors import (
    LimitReachedError,
    PlannerInvalidConfigurationError,
    RunNotAnsweredError,
    ServiceNotFoundError,
)
from planner_ext.hitl_manager import Checkpoint, Defer
from planner_ext.iteration import ToolExecution
from planner_ext.session import AutomaticToolUseConfig, ToolUseSession
from planner_ext.testing import call, calls, say
from support.session import OPEN, Talks, Tools, ask, kernel_of, message, served, shape
from support.values import each_of

ADD = call("t-add", {"a": 1, "b": 2})
TWO = AutomaticToolUseConfig(max_tool_calls=2)


@each_of(
    ("field", "value"),
    [
        ("enabled", 1),
        ("enabled", "yes"),
        ("enabled", None),
        ("max_tool_calls", -1),
        ("max_tool_calls", True),
        ("max_tool_calls", 2.0),
        ("max_tool_calls", "2"),
        ("max_tool_calls", None),
    ],
)
def test_a_config_that_means_nothing_is_refused(field: str, value: Any) -> None:
    """The error names the field, what it takes, and what it got."""
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=rf"AutomaticToolUseConfig\.{field} must be .*; got",
    ):
        AutomaticToolUseConfig(**{field: value})


def test_a_session_takes_a_config_and_nothing_else() -> None:
    """Another value for the config, or a kernel without a service, is refused by name."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match="tool_use_config must be of the class"
    ):
        ToolUseSession(kernel_of([]), tool_use_config=True)  # pyright: ignore[reportArgumentType]  # junk, on purpose
    with pytest.raises(ServiceNotFoundError, match="chat completion service 'other'"):
        ToolUseSession(kernel_of([]), service_id="other")
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="service_id must be of the class str; got a",
    ):
        ToolUseSession(kernel_of([]), service_id=say("Hi."))  # pyright: ignore[reportArgumentType]  # junk, on purpose
    with pytest.raises(PlannerInvalidConfigurationError, match="budget must be"):
        ToolUseSession(kernel_of([]), budget=5)  # pyright: ignore[reportArgumentType]  # junk, on purpose


async def test_the_limit_raises_and_carries_history_and_usage(talk: Talks) -> None:
    """The call beyond it does not run, the model is not asked again, and the error says what was spent."""
    talking = talk(lambda _: ADD, TWO)
    with pytest.raises(
        LimitReachedError, match="Max number of tool call reached"
    ) as caught:
        await talking.ask("?")
    error = caught.value
    assert error.limit == "max_tool_calls"
    assert error.tool_calls == 2
    assert error.iterations == 3
    assert error.usage is not None
    assert error.usage.total_tokens > 0
    assert error.checkpoint is not None
    assert error.chat_history is not None
    assert shape(error.chat_history) == talking.shape
    assert (len(talking.tools.seen), talking.requests) == (2, 3)
    assert talking.shape[-1] == (
        "tool",
        "call_3=Not executed: The limit max_tool_calls=2 was reached.",
    )


async def test_a_batch_counts_as_it_is(talk: Talks) -> None:
    """Of a batch that would pass the limit none runs; one that just fits does."""
    talking = talk([calls(ADD, ADD), say("Both."), calls(ADD, ADD, ADD)], TWO)
    assert await talking.ask("?") == "Both."
    assert len(talking.tools.seen) == 2
    with pytest.raises(LimitReachedError, match="Max number of tool call reached"):
        await talking.ask("Again?")
    assert len(talking.tools.seen) == 2


async def test_a_limit_of_none_at_all_raises_at_the_first_call(talk: Talks) -> None:
    """``max_tool_calls=0`` runs nothing, and answers what needs nothing."""
    talking = talk([say("Hello."), ADD], AutomaticToolUseConfig(max_tool_calls=0))
    assert await talking.ask("Hi.") == "Hello."
    with pytest.raises(LimitReachedError):
        await talking.ask("?")
    assert talking.tools.seen == []


async def test_the_count_is_per_prompt(talk: Talks) -> None:
    """What one prompt used is not missing from the next; after the limit, too, the session continues."""
    talking = talk(
        [*[ADD, ADD, say("Done.")] * 2, *[ADD] * 3, ADD, say("At last.")], TWO
    )
    assert [await talking.ask("?"), await talking.ask("?")] == ["Done.", "Done."]
    with pytest.raises(LimitReachedError):
        await talking.ask("?")
    assert await talking.ask() == "At last."
    assert len(talking.tools.seen) == 7


async def test_the_limit_over_http(streamed: bool) -> None:
    """What the session holds after the limit is a history that a server as strict as OpenAI's takes."""
    script = [*[calls(ADD, ADD)] * 2, say("I could not.")]
    async with served(script, Tools()) as (kernel, server):
        session = ToolUseSession(kernel, tool_use_config=TWO)
        with pytest.raises(LimitReachedError):
            await ask(session, "?", streamed=streamed)
        assert await ask(session, "And?", streamed=streamed) == "I could not."
        assert (len(server.requests), server.refused) == (3, [])


async def test_a_budget_adds_limits_and_says_what_happens(talk: Talks) -> None:
    """Of two limits on calls the tighter holds; ``on_limit`` is then the budget's."""
    forced = talk([ADD, say("Enough.")], budget=Budget(max_iterations=2))
    assert await forced.ask("?") == "Enough."
    tighter = talk([ADD, ADD], TWO, budget=Budget(max_tool_calls=1, on_limit="raise"))
    with pytest.raises(LimitReachedError) as caught:
        await tighter.ask("?")
    assert caught.value.tool_calls == 1
    returned = talk(
        [ADD, ADD, say("3.")], budget=Budget(max_tool_calls=1, on_limit="return_calls")
    )
    assert await returned.ask("?") == ""
    assert [each.id for each in returned.session.pending] == ["call_2"]
    assert (
        await returned.ask_to_the_end(
            [each.result(3) for each in returned.session.pending]
        )
        == "3."
    )


async def test_the_model_reads_the_message_of_a_functions_error(talk: Talks) -> None:
    """A function that raises does not end the prompt, and its siblings' results stand."""
    talking = talk([calls(call("t-fail"), ADD), say("It is closed.")])
    assert await talking.ask("?") == "It is closed."
    failed, added = talking.shape[2:4]
    assert "the warehouse is closed" in failed[1]
    assert added == ("tool", "call_2=3")


async def test_execution_replaces_that_default(talk: Talks) -> None:
    """With an execution of its own the application decides what the model reads."""
    talking = talk([call("t-fail"), say("It failed.")], execution=ToolExecution())
    await talking.ask("?")
    assert "the warehouse is closed" not in talking.shape[2][1]


async def test_a_batch_runs_at_once_and_stands_in_call_order(talk: Talks) -> None:
    """The first call waits for the second; results stand in call order, and the model waits for all of them."""
    talking = talk([calls(call("t-wait"), call("t-release")), say("Done.")])
    assert await talking.ask("?") == "Done."
    assert talking.tools.seen == ["release", "wait"]
    assert talking.shape[2:4] == [
        ("tool", "call_1=waited"),
        ("tool", "call_2=released"),
    ]
    assert talking.requests == 2


async def test_a_deferred_call_raises_with_its_checkpoint(talk: Talks) -> None:
    """A session does not pause: nothing ran, the session is as before, and a handler can take the run from there."""
    talking = talk(
        [ADD, say("3.")],
        initial_prompts=[message(AuthorRole.SYSTEM, text="s")],
        interceptors=[defer],
    )
    with pytest.raises(
        RunNotAnsweredError, match=r"does not wait.*ToolCallHandler"
    ) as caught:
        await talking.ask("?")
    assert caught.value.status == "paused"
    assert (talking.tools.seen, talking.shape) == ([], [("system", "s")])
    checkpoint = caught.value.checkpoint
    assert isinstance(checkpoint, Checkpoint)

    history = caught.value.chat_history
    assert history is not None
    kernel = kernel_of(talking.service, talking.tools)
    handler = ToolCallHandler(kernel, interceptors=[defer])
    answers = [
        each
        async for each in handler.resume(history, checkpoint, {"call_1": Approve()})
    ]
    assert [str(each) for each in answers] == ["3."]
    going_on = ToolUseSession(kernel, initial_prompts=history)
    assert [role for role, _ in shape(going_on.history())] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


async def test_interceptors_decide_in_closed_loop_alone(talk: Talks) -> None:
    """In closed loop a refused call is answered; in open loop nothing runs, and no question is asked."""
    asked: list[str] = []

    async def refuse(tool_call: Any) -> Deny:
        asked.append(tool_call.id)
        return Deny("not today")

    closed = talk([ADD, say("Refused.")], interceptors=[refuse])
    assert await closed.ask("?") == "Refused."
    assert "not today" in closed.shape[2][1]
    opened = talk([ADD, say("3.")], OPEN, interceptors=[refuse])
    assert await opened.ask_to_the_end("?") == "3."
    assert asked == ["call_1"]


async def test_a_stop_ends_a_prompt_with_its_calls_answered(talk: Talks) -> None:
    """What runs finishes, no request follows, the text is "", and the session continues."""
    talking, stop = talk([call("t-wait"), say("Yes.")]), StopHandle()
    asking = asyncio.ensure_future(talking.ask("?", stop=stop))
    await talking.tools.started.wait()
    stop.stop("enough")
    talking.tools.go_on.set()
    assert await asking == ""
    assert talking.shape[-1] == ("tool", "call_1=waited")
    assert await talking.ask("Still there?") == "Yes."


async def defer(_: Any) -> Defer:
    """Leave every call to a person."""
    return Defer()
