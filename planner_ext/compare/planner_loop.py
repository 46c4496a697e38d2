"""The planner loop of the ADR "Automatic tool calling controls": step by step, charging what the metadata say.

Our own code after the ADR's text. The options differ only in the chat request that they make for a step, which is
handed in. Where the ADR leaves out how a final answer is recognised, the reading here is the kindest one: text is the
answer, unless the model had no choice, because its functions had been withdrawn; such text closes the step. When the
iterations are used up, the text of the last step is what the caller gets.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent

from planner_ext.compare.stage import Outcome, Stage, calls_of, opened, tokens_of, why

__all__ = ["ITERATIONS", "NEXT_STEP", "ChatRequest", "StepReply", "left_behind", "run_planner_loop"]

ITERATIONS = "Iterations"
"""The metadata key that the ADR's option 2 adds."""

NEXT_STEP = "Take the next step. When nothing is left to do, give the final answer."
"""What opens each step; the ADR calls its message the stepwise user message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReply:
    """What one chat request brought back, after the functions that it ran on the way.

    Attributes:
        message: The reply, which is not in the history yet; None where a stream ended without any.
        free: Whether the model could have called a function instead.
    """

    message: ChatMessageContent | None
    free: bool


ChatRequest: TypeAlias = Callable[[ChatHistory, int], Awaitable[StepReply]]
"""Makes one chat request on a history, to which it adds what happens on the way; told the iterations charged so far."""


async def run_planner_loop(stage: Stage, request: ChatRequest) -> Outcome:
    """Take steps until there is an answer or ``max_iterations`` are charged; what a step costs, its metadata says."""
    history, charged = opened(stage.goal), 0
    try:
        while charged < stage.max_iterations:
            history.add_user_message(NEXT_STEP)
            reply = await request(history, charged)
            if reply.message is not None:
                history.add_message(reply.message)
            charged += _iterations(reply.message)
            if reply.message is not None and reply.free and not calls_of(reply.message):
                return left_behind(history, "answered", charged)
    except Exception as error:  # whatever an endpoint does to an option is a finding
        return left_behind(history, "failed", charged, error=error)
    return left_behind(history, "limit_reached", charged)


def left_behind(history: ChatHistory, status: str, charged: int, *, error: Exception | None = None) -> Outcome:
    """Tell of a run by the history that it leaves: its last words are the answer, and its usage all that is known."""
    last = history.messages[-1]
    spoke = last.role == AuthorRole.ASSISTANT and not calls_of(last) and error is None
    replies = [message for message in history.messages if message.role == AuthorRole.ASSISTANT]
    return Outcome(
        status=status,
        answer=last.content if spoke else "",
        charged=charged,
        tokens=tokens_of(replies[-1].metadata) if replies else None,
        history=history,
        error="" if error is None else why(error),
    )


def _iterations(message: ChatMessageContent | None) -> int:
    """Read the metadata as the ADR does: a number, or else one."""
    value: Any = None if message is None else message.metadata.get(ITERATIONS)
    return value if isinstance(value, int) else 1
