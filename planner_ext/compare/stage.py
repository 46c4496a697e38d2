"""What an option is given for one run, what it gives back, and one request to the model: what all options share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeAlias

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    StreamingChatMessageContent,
)

from planner_ext.compare.comparison import OptionInfo
from planner_ext.sk.usage import read_usage

__all__ = ["Option", "Outcome", "Play", "Stage", "calls_of", "opened", "tokens_of", "why"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an option says of its own run.

    Attributes:
        status: ``answered``, ``limit_reached``, ``failed`` or another end.
        answer: The text that the caller gets, "" for none.
        charged: Round trips that it believes it made.
        tokens: What it tells its caller of tokens; None for nothing.
        history: What it leaves behind.
        error: Why it failed, "" where it did not.
    """

    status: str
    answer: str
    charged: int
    tokens: int | None
    history: ChatHistory
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where one run takes place; made for it alone.

    Attributes:
        kernel: Holds the functions, and the service.
        service: The connector.
        settings: Of each request; not to be changed.
        goal: What the model is asked.
        max_iterations: Round trips that are allowed.
        streaming: Whether replies are to be streamed.
        reports: Whether the service may report the round trips of a request.
    """

    kernel: Kernel
    service: ChatCompletionClientBase
    settings: PromptExecutionSettings
    goal: str
    max_iterations: int
    streaming: bool
    reports: bool

    async def ask(self, history: ChatHistory, *, functions: bool, kernel: Kernel | None = None) -> ChatMessageContent:
        """Make one round trip; calls in the reply are the caller's to run.

        Args:
            history: What is sent; not changed.
            functions: Whether the kernel's functions are offered.
            kernel: Whose functions; None is the stage's own.

        Raises:
            ServiceResponseException: The endpoint refused.
        """
        behavior = FunctionChoiceBehavior.Auto(auto_invoke=False) if functions else None  # pyright: ignore[reportUnknownMemberType]
        settings = self.settings.model_copy(update={"function_choice_behavior": behavior})
        kernel = kernel or self.kernel
        if not self.streaming:
            messages = await self.service.get_chat_message_contents(history, settings, kernel=kernel)
            return messages[0]
        pieces: list[StreamingChatMessageContent] = []
        async for chunks in self.service.get_streaming_chat_message_contents(history, settings, kernel=kernel):
            pieces += chunks
        return reduce(add, pieces)


Play: TypeAlias = Callable[[Stage], Awaitable[Outcome]]
"""Reaches for the goal as one option does. Whatever the endpoint does is told in the outcome, and not raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One of the options compared: what it is called, and how it plays."""

    info: OptionInfo
    play: Play


def opened(goal: str) -> ChatHistory:
    """Begin a history with the goal."""
    return ChatHistory(messages=[ChatMessageContent(role=AuthorRole.USER, content=goal)])


def calls_of(message: ChatMessageContent) -> list[FunctionCallContent]:
    """List the function calls in a message."""
    return [item for item in message.items if isinstance(item, FunctionCallContent)]


def tokens_of(metadata: dict[str, Any]) -> int | None:
    """Read what a message tells of tokens; None for nothing."""
    return read_usage(metadata.get("usage")).total_tokens or None


def why(error: BaseException) -> str:
    """Say why a request failed: what the client met, and not what was made of it on the way up."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
