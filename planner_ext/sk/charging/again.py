"""A function that is called again, since a run in it waited: the same run, and nothing that has run runs again."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.text_completion_client_base import (
    TextCompletionClientBase,
)
from semantic_kernel.contents import ChatMessageContent
from semantic_kernel.filters import FunctionInvocationContext
from semantic_kernel.functions import KernelFunctionFromPrompt
from semantic_kernel.functions.prompt_rendering_result import PromptRenderingResult

from planner_ext.core.accounts import Tab
from planner_ext.core.errors import shown
from planner_ext.core.facts import Fact, RunStarted
from planner_ext.core.values import Message
from planner_ext.engine.document import dump_message
from planner_ext.sk.errors import NestedRunRefusedError
from planner_ext.sk.messages import load_message


def is_same_run(
    begun: Fact, *, goal: str, messages: Sequence[ChatMessageContent]
) -> bool:
    """Return whether a run began with this goal and these messages."""
    if not isinstance(begun, RunStarted) or begun.goal != goal:
        return False
    before = begun.messages[: len(messages)]
    return [*map(_without_metadata, before)] == [*map(_without_metadata, messages)]


def _without_metadata(message: Message) -> dict[str, Any]:
    """Write what a model reads of a message: its metadata may name the agents of one process."""
    return {**dump_message(message), "metadata": {}}


def check_same_run(
    begun: Fact, *, goal: str, messages: Sequence[ChatMessageContent]
) -> None:
    """Refuse to continue a run for a function that, called again, makes another one in its place.

    Raises:
        NestedRunRefusedError: If the goal, or a message before it, is another one.
    """
    assert isinstance(begun, RunStarted), "a run begins with this fact"
    if not is_same_run(begun, goal=goal, messages=messages):
        raise NestedRunRefusedError(
            f"The function was called again, and makes another run than {begun.run_id}, which waited in it: for "
            f"{shown(goal or 'other messages')} instead of {shown(begun.goal or 'its messages')}. A function that is "
            "called again must make the same runs in the same order."
        )


def not_rendered(tab: Tab) -> Callable[..., Awaitable[str | None]]:
    """Make the instructions of an agent whose run is continued: the functions in them do not run again."""

    async def format_instructions(*_: Any, **__: Any) -> str | None:
        tab.unrendered = True
        return None

    return format_instructions


def without_rendering(
    function: KernelFunctionFromPrompt, tab: Tab
) -> KernelFunctionFromPrompt:
    """Copy a prompt whose run is continued, so that the functions in its template do not run again."""
    copied = function.model_copy()

    async def choose_service(
        context: FunctionInvocationContext, is_streaming: bool = False
    ) -> PromptRenderingResult:
        function.update_arguments_with_defaults(context.arguments)
        kinds = (TextCompletionClientBase, ChatCompletionClientBase)
        service, settings = context.kernel.select_ai_service(
            function=function,
            arguments=context.arguments,
            type=kinds if is_streaming else None,
        )
        tab.unrendered = True
        return PromptRenderingResult(
            rendered_prompt="", ai_service=service, execution_settings=settings
        )

    vars(copied)["_render_prompt"] = choose_service
    return copied


def continued_messages(
    tab: Tab, known: Sequence[Fact]
) -> list[ChatMessageContent] | None:
    """Return the messages that a run began with whose prompt was not rendered again; None of another run."""
    begun = known[0] if known else None
    if not tab.unrendered or not isinstance(begun, RunStarted):
        return None
    tab.unrendered = False
    return [load_message(message) for message in begun.messages]
