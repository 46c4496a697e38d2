"""A prompt over ``max_prompt_tokens`` is refused before it is sent, and nothing is lost."""

from typing import Any

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.errors import PlannerInvalidConfigurationError, PromptTooLargeError
from planner_ext.hitl_manager import Checkpoint
from planner_ext.iteration import FunctionInvocationIterationContext
from planner_ext.session import ToolUseSession
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedPromptExecutionSettings,
    call,
    say,
)
from support.planner import (
    ADD,
    GOAL,
    Math,
    both_ways,
    check_sendable,
    invoke,
    kernel_of,
    openai_kernel,
    planner_with,
    resume,
)
from support.stock import scripted_by
from support.values import each_of

LONG = "word " * 3000


class Library:
    """A plugin whose results are long."""

    @kernel_function
    async def read(self) -> str:
        return LONG


@both_ways
async def test_a_long_result_is_not_sent(streamed: bool) -> None:
    """That request is not made; the error has count, limit, history and a checkpoint to continue from."""
    async with openai_kernel(
        [call("library-read"), say("It is about words.")], library=Library()
    ) as (kernel, server):
        with pytest.raises(
            PromptTooLargeError, match="max_prompt_tokens is 500"
        ) as caught:
            await invoke(
                planner_with(plan=False, max_prompt_tokens=500),
                kernel,
                streamed=streamed,
            )
        error = caught.value
        assert len(server.requests) == 1
        assert error.prompt_tokens > error.max_prompt_tokens == 500
        check_sendable(error.chat_history)
        assert error.checkpoint is not None

        checkpoint = Checkpoint.from_json(error.checkpoint.to_json())
        larger = planner_with(plan=False, max_prompt_tokens=9000)
        result = await resume(larger, kernel, checkpoint, streamed=streamed)
    assert result.status == "answered"
    assert result.final_answer == "It is about words."
    assert result.iterations == 2
    assert (result.tool_calls, len(server.requests)) == (1, 2)


async def test_a_plan_request_that_is_too_long_is_not_sent_either() -> None:
    """The first request counts as all others; the run can be resumed, and then begins with its plan."""
    async with openai_kernel([say("A plan."), say("Done.")]) as (kernel, server):
        with pytest.raises(PromptTooLargeError) as caught:
            await invoke(planner_with(max_prompt_tokens=20), kernel)
        assert server.requests == []
        assert caught.value.checkpoint is not None
        result = await resume(planner_with(), kernel, caught.value.checkpoint)
    assert result.status == "answered"
    assert result.iterations == 2
    assert [fact.type for fact in result.facts].count("Planned") == 1


async def test_a_compacted_history_fits_again() -> None:
    """What the iteration-completed callback leaves out is not counted."""

    async def shorten(context: FunctionInvocationIterationContext) -> None:
        context.messages[:] = [
            message for message in context.messages if message.role == "user"
        ]

    async with openai_kernel(
        [call("library-read"), say("Done.")], library=Library()
    ) as (kernel, _):
        planner = planner_with(
            plan=False, max_prompt_tokens=500, iteration_completed=shorten
        )
        result = await invoke(planner, kernel)
    assert result.status == "answered"


async def test_max_tokens_sets_the_limit() -> None:
    """The share of max_tokens that is the prompt's is enforced."""
    async with openai_kernel([say("Done.")]) as (kernel, server):
        with pytest.raises(PromptTooLargeError, match="max_prompt_tokens is 18"):
            await invoke(planner_with(plan=False, max_tokens=20), kernel)
    assert server.requests == []


def doors(inner: ScriptedChatCompletion) -> dict[str, Any]:
    """Ask through each door, with a limit of 200 tokens."""
    kernel = kernel_of(inner, library=Library())
    history = ChatHistory()
    history.add_user_message(GOAL)
    settings = PromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    service = FunctionInvokingChatCompletion(inner, max_prompt_tokens=200)

    async def through_handler() -> None:
        async for _ in ToolCallHandler(kernel, max_prompt_tokens=200).invoke(history):
            pass

    async def through_a_stream() -> None:
        async for _ in service.get_streaming_chat_message_contents(
            history, settings, kernel=kernel
        ):
            pass

    return {
        "service": lambda: service.get_chat_message_contents(
            history, settings, kernel=kernel
        ),
        "stream": through_a_stream,
        "handler": through_handler,
        "session": lambda: ToolUseSession(kernel, max_prompt_tokens=200).prompt(GOAL),
        "wrapped": lambda: planner_with(plan=False).invoke(
            kernel_of(service, library=Library()), GOAL
        ),
    }


@pytest.mark.parametrize("door", doors(ScriptedChatCompletion([])))
async def test_every_door_has_the_limit(door: str) -> None:
    """Service, handler, session, and a planner over a service that has it, refuse the same prompt."""
    inner = ScriptedChatCompletion([call("library-read"), say("Done.")])
    with pytest.raises(PromptTooLargeError) as caught:
        await doors(inner)[door]()
    assert len(inner.requests) == 1
    check_sendable(caught.value.chat_history)


@each_of("value", [-1, True, 1.5, "9"])
def test_a_limit_is_a_count(value: Any) -> None:
    """Anything else is refused by name, at each door."""
    inner = ScriptedChatCompletion([])
    for make in (
        lambda: planner_with(max_prompt_tokens=value),
        lambda: FunctionInvokingChatCompletion(inner, max_prompt_tokens=value),
        lambda: ToolCallHandler(kernel_of(inner), max_prompt_tokens=value),
        lambda: ToolUseSession(kernel_of(inner), max_prompt_tokens=value),
    ):
        with pytest.raises(PlannerInvalidConfigurationError, match="max_prompt_tokens"):
            make()


async def test_a_reply_is_limited_by_the_settings_own_name() -> None:
    """max_completion_tokens is what the connector's settings call it; where they have no such field it is refused."""

    class Named(ScriptedPromptExecutionSettings):
        max_output_tokens: int | None = None

    class Google(ScriptedChatCompletion):
        def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
            return Named

        def _scripted(
            self, settings: PromptExecutionSettings
        ) -> ScriptedPromptExecutionSettings:
            asked.append(settings)
            return super()._scripted(settings)

    asked: list[Any] = []
    await invoke(
        planner_with(plan=False, max_completion_tokens=7),
        kernel_of(scripted_by(Google, [say("Done.")]), math=Math()),
    )
    assert {settings.max_output_tokens for settings in asked} == {7}

    inner = ScriptedChatCompletion([ADD])
    with pytest.raises(
        PlannerInvalidConfigurationError, match="max_completion_tokens=7 cannot be used"
    ):
        await invoke(planner_with(max_completion_tokens=7), kernel_of(inner))
    assert inner.requests == []
