"""The three options of the ADR "Automatic tool calling controls", as it writes them: literal ports, uncorrected.

Semantic Kernel for Python has none of the hooks that the ADR adds to the .NET connector, so the connector's loop is
ported as well: a request, the functions one after the other, the next request. What the ADR says of the loop:

- ``attempts`` (option 1): tool rounds of one chat request. Once they are exceeded, functions are withdrawn and a
  regular chat response is asked for: k attempts are k + 1 requests.
- ``Iterations`` in the metadata (option 2): the requests that were made, counted from 1.
- ``proceed`` (option 3): asked before a call is invoked, with the 1-based iteration of this chat request. What is to
  happen at False is the ADR's open question. Here the loop bails out and returns the message with its calls, which is
  what remains if nothing is decided: neither results are made up nor calls taken away.

The planner around it is in `planner_loop`.
"""

from collections.abc import Callable
from itertools import count

from semantic_kernel.contents import ChatHistory

from planner_ext.compare.planner_loop import ITERATIONS, StepReply, run_planner_loop
from planner_ext.compare.stage import Outcome, Stage, calls_of

__all__ = ["option_1_as_written", "option_2_as_written", "option_3_as_written"]


async def option_1_as_written(stage: Stage) -> Outcome:
    """Option 1: one attempt a request, so that a step is a tool round and a closing reply; charged as one iteration."""

    async def request(history: ChatHistory, _: int) -> StepReply:
        return await _chat_request(stage, history, attempts=1)

    return await run_planner_loop(stage, request)


async def option_2_as_written(stage: Stage) -> Outcome:
    """Option 2: as many attempts as iterations remain, and the metadata tell how many requests that came to."""

    async def request(history: ChatHistory, charged: int) -> StepReply:
        attempts = stage.max_iterations - charged
        return await _chat_request(stage, history, attempts=attempts, counted=stage.reports)

    return await run_planner_loop(stage, request)


async def option_3_as_written(stage: Stage) -> Outcome:
    """Option 3: a callback that lets calls proceed while the iteration is below what remains; nothing is counted."""

    async def request(history: ChatHistory, charged: int) -> StepReply:
        remaining = stage.max_iterations - charged
        return await _chat_request(stage, history, proceed=lambda iteration: iteration < remaining)

    return await run_planner_loop(stage, request)


async def _chat_request(
    stage: Stage,
    history: ChatHistory,
    *,
    attempts: int | None = None,
    proceed: Callable[[int], bool] = lambda _: True,
    counted: bool = False,
) -> StepReply:
    """Loop inside one chat request, as the .NET connector does.

    Args:
        stage: Where it takes place.
        history: Gets the messages with calls and their results.
        attempts: Tool rounds; None is unlimited.
        proceed: Whether a call of this iteration is invoked.
        counted: Whether the metadata tell the iterations.
    """
    for iteration in count(1):
        free = attempts is None or iteration <= attempts
        message = await stage.ask(history, functions=free)
        if counted:
            message.metadata = {**message.metadata, ITERATIONS: iteration}
        calls = calls_of(message)
        if not calls or not all(proceed(iteration) for _ in calls):
            return StepReply(message=message, free=free)
        history.add_message(message)
        for call in calls:
            await stage.kernel.invoke_function_call(call, history)
    raise AssertionError("counting has no end")
