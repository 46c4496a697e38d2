"""What there is without the ADR: Semantic Kernel's stock loop under a planner, and the planner that it removed.

The latter is our own code after its behaviour when it was removed, without the request for a plan, which no option
makes here.
"""

from dataclasses import replace
from functools import reduce
from operator import add

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.functions import KernelPlugin

from planner_ext.compare.kernels import copy_of
from planner_ext.compare.planner_loop import NEXT_STEP, StepReply, left_behind, run_planner_loop
from planner_ext.compare.scripts import FINAL_ANSWER
from planner_ext.compare.stage import Outcome, Stage, calls_of, opened
from planner_ext.sk.questions import own_function

__all__ = ["removed_planner", "stock_loop"]

_NO_CALL = "That function call is invalid. Try something else!"
"""What the removed planner says to a reply that calls nothing: the text of it, word for word, is its behaviour."""


async def stock_loop(stage: Stage) -> Outcome:
    """Let Semantic Kernel's own loop take each step, with its default of 5 tool rounds a request, plain or streamed."""
    behavior = FunctionChoiceBehavior.Auto()  # pyright: ignore[reportUnknownMemberType]
    settings = stage.settings.model_copy(update={"function_choice_behavior": behavior})

    async def request(history: ChatHistory, _: int) -> StepReply:
        known = len(history.messages)
        message: ChatMessageContent | None = None
        if stage.streaming:
            pieces: list[StreamingChatMessageContent] = []
            async for chunks in stage.service.get_streaming_chat_message_contents(
                history, settings, kernel=stage.kernel
            ):
                pieces += (chunk for chunk in chunks if chunk.role == AuthorRole.ASSISTANT)
        else:
            pieces = []
            message = await stage.service.get_chat_message_content(history, settings, kernel=stage.kernel)
        rounds = sum(bool(calls_of(added)) for added in history.messages[known:])
        if last := [piece for piece in pieces if piece.function_invoke_attempt == rounds]:
            message = reduce(add, last)
        return StepReply(message=message, free=rounds < behavior.maximum_auto_invoke_attempts)

    return await run_planner_loop(stage, request)


async def removed_planner(stage: Stage) -> Outcome:
    """Play as the removed planner does: one request an iteration, and no plain reply is ever an answer."""
    history, charged = opened(stage.goal), 0
    plugin = KernelPlugin("UserInteraction", functions=[own_function("SendFinalAnswer")])
    kernel = copy_of(stage.kernel, plugins={"UserInteraction": plugin})
    try:
        for charged in range(1, stage.max_iterations + 1):
            history.add_user_message(NEXT_STEP)
            message = await stage.ask(history, functions=True, kernel=kernel)
            history.add_message(message)
            if (answer := await _act(kernel, history, message)) is not None:
                return replace(left_behind(history, "answered", charged), answer=answer)
    except Exception as error:  # whatever an endpoint does to an option is a finding
        return left_behind(history, "failed", charged, error=error)
    return left_behind(history, "limit_reached", charged)


async def _act(kernel: Kernel, history: ChatHistory, message: ChatMessageContent) -> str | None:
    """Run the calls of a reply. A final answer among them is taken, and they are all left without results."""
    calls = calls_of(message)
    if not calls:
        history.add_user_message(_NO_CALL)
        return None
    if final := next((call for call in calls if call.name == FINAL_ANSWER), None):
        return str((final.parse_arguments() or {}).get("answer", ""))
    for call in calls:
        await kernel.invoke_function_call(call, history)
    return None
