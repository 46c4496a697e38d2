"""The options compared: those of the ADR "Automatic tool calling controls" as written, the stock ones, and corrected.

The first three are literal ports. Semantic Kernel for Python has none of the hooks that the ADR adds to the .NET
connector, so the connector's loop is ported as well: a request, the functions one after the other, the next request.
The ADR defines these controls of that loop:

- ``attempts`` (option 1): tool rounds of one chat request. Once they are exceeded, functions are withdrawn and a
  regular chat response is requested: k attempts are k + 1 requests.
- ``Iterations`` in the metadata (option 2): the requests that were made, counted from 1.
- ``proceed`` (option 3): asked before a call is invoked, with the 1-based iteration of this chat request. The ADR does
  not say what happens at False. Here the loop ends and returns the message with its calls: no results are made up, and
  no calls are removed.

The planner around them follows the ADR's text, too. The ADR also leaves open how a final answer is recognised. This
port reads it most favourably: text is the answer, unless the model had no choice because its functions had been
withdrawn; such text closes the step. When the iterations are used up, the caller gets the text of the last step.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from operator import add
from typing import Literal, NamedTuple, TypeAlias

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior, PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.functions import KernelPlugin

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.compare.report import OptionInfo
from planner_ext.compare.scenarios import FINAL_ANSWER, Scenario
from planner_ext.core.limits import Ledger
from planner_ext.core.values import Usage
from planner_ext.events import ResultReady
from planner_ext.sk.errors import PlannerException
from planner_ext.sk.messages import calls_of
from planner_ext.sk.questions import own_function

__all__ = ["OPTIONS", "Option", "Trial"]

_ITERATIONS = "Iterations"
"""The metadata key that the ADR's option 2 adds."""

_NEXT_STEP = "Take the next step. When nothing is left to do, give the final answer."
"""The message that opens each step; the ADR calls it the stepwise user message."""

_NO_CALL = "That function call is invalid. Try something else!"
"""The removed planner's reply to a message without calls, word for word."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One run of one option: its inputs, and its report.

    Attributes:
        kernel: A copy for this run, with the functions and the service.
        service: The connector.
        settings: The settings of each request; not to be changed.
        scenario: The goal, and how the service replies.
        max_iterations: Round trips allowed.
        history: The history so far; it begins with the goal.
        charged: Round trips that the option itself has counted so far.
        status: How it ended: ``answered``, ``limit_reached`` or another end.
        answer: The text that the caller gets, or "".
        usage: The usage of the option's result; None if its only result is the last message.
    """

    kernel: Kernel
    service: ChatCompletionClientBase
    settings: PromptExecutionSettings
    scenario: Scenario
    max_iterations: int
    history: ChatHistory = field(default_factory=ChatHistory)
    charged: int = 0
    status: str = "limit_reached"
    answer: str = ""
    usage: Usage | None = None

    def __post_init__(self) -> None:
        self.history.add_user_message(self.scenario.info.goal)

    async def ask(self, *, functions: bool = True) -> ChatMessageContent:
        """Make one round trip; the option itself must run the calls in the reply.

        Args:
            functions: Whether the kernel's functions are offered.

        Raises:
            ServiceResponseException: If the endpoint refuses the request.
        """
        behavior = FunctionChoiceBehavior.Auto(auto_invoke=False) if functions else None  # pyright: ignore[reportUnknownMemberType]
        settings = self.settings.model_copy(update={"function_choice_behavior": behavior})
        if self.scenario.streaming:
            return reduce(add, await self.chunks(settings))
        return (await self.service.get_chat_message_contents(self.history, settings, kernel=self.kernel))[0]

    async def chunks(self, settings: PromptExecutionSettings) -> list[StreamingChatMessageContent]:
        """Collect a streamed reply; if the settings invoke functions, with the chunks of all round trips."""
        stream = self.service.get_streaming_chat_message_contents(self.history, settings, kernel=self.kernel)
        return [chunk async for chunks in stream for chunk in chunks]


Strategy: TypeAlias = Callable[[Trial], Awaitable[None]]
"""Pursues the goal of a trial as one option does, and notes the outcome in it; the error of a request is raised."""


class Option(NamedTuple):
    """One of the options compared: its description, and its strategy."""

    info: OptionInfo
    strategy: Strategy


OPTIONS: dict[str, Option] = {}
"""By key, in the order in which they are shown."""


def _option(key: str, name: str, short: str, *, corrected: bool = False) -> Callable[[Strategy], Strategy]:
    """Add a strategy to `OPTIONS`; its docstring becomes the description."""

    def add_option(strategy: Strategy) -> Strategy:
        about = " ".join((strategy.__doc__ or "").split())
        info = OptionInfo(key=key, name=name, short=short, about=about, corrected=corrected)
        OPTIONS[key] = Option(info=info, strategy=strategy)
        return strategy

    return add_option


@_option("option-1", "option 1, as written", "1 as written")
async def _option_1(trial: Trial) -> None:
    """One tool round for each chat request, and a closing reply. A step is one such request, and charged as one."""
    await _take_steps(trial, lambda _: _chat_request(trial, attempts=1))


@_option("option-2", "option 2, as written", "2 as written")
async def _option_2(trial: Trial) -> None:
    """As many tool rounds for a chat request as iterations remain; the response's metadata tell how many were made."""
    await _take_steps(trial, lambda remaining: _chat_request(trial, attempts=remaining, counted=trial.scenario.reports))


@_option("option-3", "option 3, as written", "3 as written")
async def _option_3(trial: Trial) -> None:
    """A callback lets calls proceed while iterations remain. When it says no, the calls are returned as they are."""
    await _take_steps(trial, lambda remaining: _chat_request(trial, proceed=lambda iteration: iteration < remaining))


@_option("stock-loop", "stock loop", "stock loop")
async def _stock_loop(trial: Trial) -> None:
    """Semantic Kernel's own loop with its default of 5 tool rounds, under a planner that cannot count inside it."""
    behavior = FunctionChoiceBehavior.Auto()  # pyright: ignore[reportUnknownMemberType]
    settings = trial.settings.model_copy(update={"function_choice_behavior": behavior})

    async def step(_: int) -> _StepReply:
        known, message = len(trial.history.messages), None
        chunks = await trial.chunks(settings) if trial.scenario.streaming else []
        if not trial.scenario.streaming:
            message = await trial.service.get_chat_message_content(trial.history, settings, kernel=trial.kernel)
        rounds = sum(bool(calls_of(added)) for added in trial.history.messages[known:])
        if last := [one for one in chunks if (one.role, one.function_invoke_attempt) == (AuthorRole.ASSISTANT, rounds)]:
            message = reduce(add, last)
        return _StepReply(message, free=rounds < behavior.maximum_auto_invoke_attempts)

    await _take_steps(trial, step)


@_option("removed-planner", "removed planner", "removed planner")
async def _removed_planner(trial: Trial) -> None:
    """The planner that Semantic Kernel removed: one request for each iteration, answers by a function call only."""
    # Our own code that reproduces its behaviour, without the request for a plan, which no option makes here.
    trial.kernel.add_plugin(KernelPlugin("UserInteraction", functions=[own_function("SendFinalAnswer")]))
    while trial.charged < trial.max_iterations:
        trial.charged += 1
        trial.history.add_user_message(_NEXT_STEP)
        message = await trial.ask()
        trial.history.add_message(message)
        calls = calls_of(message)
        if final := next((call for call in calls if call.name == FINAL_ANSWER), None):
            # The answer is taken, and all calls of the message are left without results.
            trial.status, trial.answer = "answered", str((final.parse_arguments() or {}).get("answer", ""))
            return
        if not calls:
            trial.history.add_user_message(_NO_CALL)
        for call in calls:
            await trial.kernel.invoke_function_call(call, trial.history)


@_option("use_attempts", "option 1, corrected", "1 corrected", corrected=True)
async def _use_attempts(trial: Trial) -> None:
    """This package, control use_attempts: one tool round for each step.

    Every request is charged, and the last one reserved for the answer.
    """
    await _planner(trial, "use_attempts")


@_option("iterations_metadata", "option 2, corrected", "2 corrected", corrected=True)
async def _iterations_metadata(trial: Trial) -> None:
    """This package's default, control iterations_metadata: tool rounds follow each other freely.

    Every request is charged, and the last one reserved for the answer.
    """
    await _planner(trial, "iterations_metadata")


@_option("pre_invoke", "option 3, corrected", "3 corrected", corrected=True)
async def _pre_invoke(trial: Trial) -> None:
    """This package, control pre_invoke: the same budget, and the callback on top of it. A refused call is answered."""
    await _planner(trial, "pre_invoke", lambda iteration, _name, _arguments: iteration < trial.max_iterations)


class _StepReply(NamedTuple):
    """The final reply to one chat request, after its function calls.

    Attributes:
        message: Not in the history yet; None if a stream ended without a reply.
        free: Whether the model could have called a function instead.
    """

    message: ChatMessageContent | None
    free: bool


async def _take_steps(trial: Trial, step: Callable[[int], Awaitable[_StepReply]]) -> None:
    """Take steps until there is an answer or ``max_iterations`` are charged; a step's cost is read from the metadata.

    Args:
        trial: The run.
        step: Makes one chat request, given the iterations that remain.
    """
    while trial.charged < trial.max_iterations:
        trial.history.add_user_message(_NEXT_STEP)
        message, free = await step(trial.max_iterations - trial.charged)
        if message is None:
            trial.charged, trial.answer = trial.charged + 1, ""
            continue
        trial.history.add_message(message)
        trial.charged += message.metadata.get(_ITERATIONS, 1)
        calls = calls_of(message)
        trial.answer = "" if calls else message.content
        if free and not calls:
            trial.status = "answered"
            return


async def _chat_request(
    trial: Trial,
    *,
    attempts: int | None = None,
    proceed: Callable[[int], bool] = lambda _: True,
    counted: bool = False,
) -> _StepReply:
    """Loop inside one chat request, as the .NET connector does.

    Args:
        trial: Its history gets the messages with calls and their results.
        attempts: Maximum number of tool rounds; None means no limit.
        proceed: Whether a call of this iteration is invoked.
        counted: Whether the metadata report the iterations.
    """
    for iteration in count(1):
        free = attempts is None or iteration <= attempts
        message = await trial.ask(functions=free)
        if counted:
            message.metadata = {**message.metadata, _ITERATIONS: iteration}
        calls = calls_of(message)
        if not calls or not proceed(iteration):
            return _StepReply(message, free)
        trial.history.add_message(message)
        for call in calls:
            await trial.kernel.invoke_function_call(call, trial.history)
    raise AssertionError("counting has no end")


async def _planner(
    trial: Trial,
    control: Literal["use_attempts", "iterations_metadata", "pre_invoke"],
    pre_invoke: Callable[[int, str, object], bool] | None = None,
) -> None:
    """Run this package's planner under one of its controls; it makes no plan, so the work is the same."""
    options = FunctionCallingStepwisePlannerOptions(
        max_iterations=trial.max_iterations, control=control, plan=False, pre_invoke=pre_invoke
    )
    planner = FunctionCallingStepwisePlanner(trial.service.service_id, options)
    goal = trial.scenario.info.goal
    try:
        if trial.scenario.streaming:
            async with aclosing(planner.invoke_stream(trial.kernel, goal)) as events:
                (result,) = [event.result async for event in events if isinstance(event, ResultReady)]
        else:
            result = await planner.invoke(trial.kernel, goal)
    except PlannerException as error:
        ledger = error.checkpoint.state().ledger if error.checkpoint is not None else Ledger()
        trial.charged, trial.usage = ledger.iterations, ledger.usage
        trial.history = error.chat_history or trial.history
        raise
    trial.status, trial.answer = result.status, result.final_answer
    trial.charged, trial.usage = result.iterations, result.usage
    trial.history = result.chat_history or trial.history
