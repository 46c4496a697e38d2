"""The options compared: those of Semantic Kernel's ADR as written, stock ones, and corrected.

The first three are literal ports, with the .NET connector's loop, whose hooks Semantic
Kernel for Python lacks. Its controls:

- ``attempts`` (option 1): tool rounds of one chat request; k attempts are k + 1
  requests, the last of them without functions.
- ``Iterations`` in the metadata (option 2): the requests that were made, from 1.
- ``proceed`` (option 3): asked before a call, with the request's 1-based iteration. The
  ADR does not say what happens at False: here the message is returned with its calls.

Nor does it say how a final answer is recognised, so this port is favourable: text is
the answer, unless functions had been withdrawn; such text closes the step. When the
iterations are used up, the caller gets the last step's text.
"""

from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import reduce
from importlib import import_module
from itertools import count
from operator import add
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.contents import AuthorRole, ChatMessageContent
from semantic_kernel.filters import AutoFunctionInvocationContext, FilterTypes
from semantic_kernel.functions import FunctionResult, KernelPlugin

from planner_ext import (
    Approve,
    Budget,
    Defer,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
    Supply,
)
from planner_ext.compare.scenarios import FINAL_ANSWER
from planner_ext.compare.trial import Ability, Option, Trial, option, option_of
from planner_ext.core.values import Usage
from planner_ext.durable import Approvals, Runs
from planner_ext.events import ResultReady
from planner_ext.sk.errors import PlannerException
from planner_ext.sk.functions.questions import own_function
from planner_ext.sk.messages import calls_of

_ITERATIONS = "Iterations"
"""The metadata key that option 2 adds."""

_NEXT_STEP = "Take the next step. When nothing is left to do, give the final answer."
"""Opens each step: the ADR's stepwise user message."""

_Next: TypeAlias = Callable[[AutoFunctionInvocationContext], Awaitable[None]]

_NO_CALL = "That function call is invalid. Try something else!"
"""The removed planner's reply to a message without calls, word for word."""


@option("option-1", "option 1, as written", short="1")
async def _option_1(trial: Trial) -> None:
    """One tool round for each chat request, and a closing reply. A step is one such request, and charged as one."""
    await _take_steps(trial, lambda _: _chat_request(trial, attempts=1))


@option("option-2", "option 2, as written", short="2")
async def _option_2(trial: Trial) -> None:
    """As many tool rounds for a chat request as iterations remain; the response's metadata tell how many were made."""
    await _take_steps(
        trial,
        lambda remaining: _chat_request(
            trial, attempts=remaining, counted=trial.reports
        ),
    )


@option("option-3", "option 3, as written", short="3", offers=("veto",))
async def _option_3(trial: Trial) -> None:
    """A callback lets calls proceed while iterations remain. When it says no, the calls are returned as they are."""
    await _take_steps(
        trial,
        lambda remaining: _chat_request(trial, proceed=_callback(trial, remaining)),
    )


@option(
    "option-2-callback", "option 2 + callback", short="2 + callback", offers=("veto",)
)
async def _option_2_callback(trial: Trial) -> None:
    """Option 2's metadata, which tell how many round trips a chat request made, and option 3's callback."""

    async def step(remaining: int) -> _StepReply:
        return await _chat_request(
            trial, proceed=_callback(trial, remaining), counted=trial.reports
        )

    await _take_steps(trial, step)


@option("stock-loop", "stock loop", short="stock", offers=("veto",))
async def _stock_loop(trial: Trial) -> None:
    """Semantic Kernel's own loop with its default of 5 tool rounds, under a planner that cannot count inside it."""
    await _take_steps(trial, _stock_request(trial, FunctionChoiceBehavior.Auto()))  # pyright: ignore[reportUnknownMemberType]


@option("stock-loop-best", "stock loop, alone", short="stock alone", offers=("veto",))
async def _stock_loop_best(trial: Trial) -> None:
    """Semantic Kernel's own loop at its best: one chat request, with one tool round fewer than round trips allowed."""
    rounds = trial.max_iterations - 1
    behavior = FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=rounds)  # pyright: ignore[reportUnknownMemberType]
    message, free = await _stock_request(trial, behavior)(rounds)
    trial.charged = 1
    if message is None:
        return
    trial.history.add_message(message)
    trial.answer = message.content
    trial.status = "answered" if free else "limit_reached"


def _stock_request(
    trial: Trial, behavior: FunctionChoiceBehavior
) -> Callable[[int], Awaitable["_StepReply"]]:
    settings = trial.settings.model_copy(update={"function_choice_behavior": behavior})

    async def refuse(context: AutoFunctionInvocationContext, next: _Next) -> None:
        if context.function.fully_qualified_name != trial.vetoed:
            await next(context)
        else:
            context.function_result = FunctionResult(
                function=context.function.metadata, value="It may not run."
            )

    trial.kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, refuse)  # pyright: ignore[reportUnknownMemberType]

    async def step(_: int) -> _StepReply:
        known = len(trial.history.messages)
        message = None
        chunks = await trial.chunks(settings) if trial.streaming else []
        if not trial.streaming:
            message = await trial.service.get_chat_message_content(
                trial.history, settings, kernel=trial.kernel
            )
        rounds = sum(bool(calls_of(added)) for added in trial.history.messages[known:])
        replies = [one for one in chunks if one.role == AuthorRole.ASSISTANT]
        last = [one for one in replies if one.function_invoke_attempt == rounds]
        if last:
            message = reduce(add, last)
        return _StepReply(message, free=rounds < behavior.maximum_auto_invoke_attempts)

    return step


@option("removed-planner", "removed planner", short="old")
async def _removed_planner(trial: Trial) -> None:
    """The planner that Semantic Kernel removed: one request for each iteration, answers by a function call only."""
    # Our own code that reproduces its behaviour, without the request for a plan, which no option makes here.
    trial.kernel.add_plugin(
        KernelPlugin("UserInteraction", functions=[own_function("SendFinalAnswer")])
    )
    while trial.charged < trial.max_iterations:
        trial.charged += 1
        trial.history.add_user_message(_NEXT_STEP)
        message = await trial.ask()
        trial.history.add_message(message)
        calls = calls_of(message)
        final = next((call for call in calls if call.name == FINAL_ANSWER), None)
        if final:
            # The answer is taken, and all calls of the message are left without results.
            trial.status = "answered"
            trial.answer = str((final.parse_arguments() or {}).get("answer", ""))
            return
        if not calls:
            trial.history.add_user_message(_NO_CALL)
        for call in calls:
            await trial.kernel.invoke_function_call(call, trial.history)


@option("while-loop", "hand-written loop", short="loop")
async def _while_loop(trial: Trial) -> None:
    """The loop that people write themselves: it asks and runs what is called; the last request offers no functions."""
    while trial.charged < trial.max_iterations:
        trial.charged += 1
        message = await trial.ask(functions=trial.charged < trial.max_iterations)
        trial.history.add_message(message)
        if not (calls := calls_of(message)):
            trial.status = (
                "answered" if trial.charged < trial.max_iterations else "limit_reached"
            )
            trial.answer = message.content
            return
        for call in calls:
            await trial.kernel.invoke_function_call(call, trial.history)


_OURS: tuple[Ability, ...] = (
    "tool calls",
    "tokens",
    "time",
    "repeats",
    "approval",
    "recovery",
)
"""What this package offers under each control."""


@option(
    "option-1-corrected",
    "option 1, corrected",
    short="1 corr.",
    offers=_OURS,
    corrected=True,
)
async def _use_attempts(trial: Trial) -> None:
    """This package, control use_attempts: one tool round for each step.

    Every request is charged, and the last one reserved for the answer.
    """
    await _planner(trial, "use_attempts")


@option(
    "option-2-corrected",
    "option 2, corrected",
    short="2 corr.",
    offers=_OURS,
    corrected=True,
)
async def _iterations_metadata(trial: Trial) -> None:
    """This package's default, control iterations_metadata: tool rounds follow each other freely.

    Every request is charged, and the last one reserved for the answer.
    """
    await _planner(trial, "iterations_metadata")


@option(
    "option-3-corrected",
    "option 3, corrected",
    short="3 corr.",
    offers=(*_OURS, "veto"),
    corrected=True,
)
async def _pre_invoke(trial: Trial) -> None:
    """This package, control pre_invoke: the same budget, and the callback on top of it. A refused call is answered."""
    await _planner(trial, "pre_invoke", _callback(trial, trial.max_iterations))


@option("option-3-alone", "option 3, alone", short="3 alone", offers=("veto",))
async def _callback_alone(trial: Trial) -> None:
    """This package without its budget: the callback lets calls proceed while iterations are left, and nothing else."""
    await _planner(
        trial, "pre_invoke", _callback(trial, trial.max_iterations), limits=Budget()
    )


class _StepReply(NamedTuple):
    """The final reply to one chat request, after its function calls.

    Attributes:
        message: Not in the history yet; None if a stream ended without one.
        free: Whether the model could have called a function.
    """

    message: ChatMessageContent | None
    free: bool


async def _take_steps(
    trial: Trial, step: Callable[[int], Awaitable[_StepReply]]
) -> None:
    """Take steps, of one chat request each, until there is an answer or no iteration is left.

    A reply's metadata have the cost of its step.
    """
    while trial.charged < trial.max_iterations:
        trial.history.add_user_message(_NEXT_STEP)
        message, free = await step(trial.max_iterations - trial.charged)
        if message is None:
            trial.charged += 1
            trial.answer = ""
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
    proceed: Callable[[int, str, object], bool] = lambda _turn, _name, _arguments: True,
    counted: bool = False,
) -> _StepReply:
    """Loop inside one chat request, as the .NET connector does.

    Args:
        trial: Its history gets the messages with calls and their results.
        attempts: The most tool rounds, if limited.
        proceed: Whether a call of this iteration, function and arguments is invoked.
        counted: Whether the metadata report the iterations.
    """
    for iteration in count(1):
        free = attempts is None or iteration <= attempts
        message = await trial.ask(functions=free)
        if counted:
            message.metadata = {**message.metadata, _ITERATIONS: iteration}
        calls = calls_of(message)
        proceeds = all(
            proceed(iteration, call.name or "", call.arguments) for call in calls
        )
        if not proceeds or not calls:
            return _StepReply(message, free)
        trial.history.add_message(message)
        for call in calls:
            await trial.kernel.invoke_function_call(call, trial.history)
    raise AssertionError("counting has no end")


def _callback(trial: Trial, remaining: int) -> Callable[[int, str, object], bool]:
    """Make option 3's callback: calls proceed while iterations remain, unless forbidden."""
    return lambda iteration, name, _: iteration < remaining and name != trial.vetoed


async def _planner(
    trial: Trial,
    control: Literal["use_attempts", "iterations_metadata", "pre_invoke"],
    pre_invoke: Callable[[int, str, object], bool] | None = None,
    *,
    limits: Budget | None = None,
) -> None:
    """Run this package's planner under one of its controls, without a plan."""
    budget = limits or trial.budget
    options = FunctionCallingStepwisePlannerOptions(
        max_iterations=budget.max_iterations,
        budget=budget,
        control=control,
        plan=False,
        pre_invoke=pre_invoke,
        interceptors=(
            lambda call: Defer() if call.fully_qualified_name == trial.gated else None,
        ),
    )
    planner = FunctionCallingStepwisePlanner(trial.service.service_id, options)
    try:
        result = await _result_of(planner, trial)
    except (PlannerException, CancelledError) as error:
        checkpoint = getattr(error, "checkpoint", None)
        history = getattr(error, "chat_history", None)
        used = checkpoint.state().usage if checkpoint is not None else Usage()
        trial.charged = used.iterations
        trial.usage = used
        trial.history = history or trial.history
        raise
    trial.status = result.status
    trial.answer = result.final_answer
    trial.charged = result.iterations
    trial.usage = result.usage
    trial.history = result.chat_history or trial.history


async def _result_of(
    planner: FunctionCallingStepwisePlanner, trial: Trial
) -> FunctionCallingStepwisePlannerResult:
    if trial.folder is not None:
        return await _kept(planner, trial, trial.folder / "runs.db")
    if not trial.streaming:
        return await planner.invoke(trial.kernel, trial.goal)
    async with aclosing(planner.invoke_stream(trial.kernel, trial.goal)) as events:
        (result,) = [
            event.result async for event in events if isinstance(event, ResultReady)
        ]
        return result


async def _kept(
    planner: FunctionCallingStepwisePlanner, trial: Trial, file: Path
) -> FunctionCallingStepwisePlannerResult:
    """Begin a run that survives its process, or continue it after a person's decision."""
    async with Runs.sqlite(file) as runs, Approvals.connect(file) as approvals:
        if trial.life == 1:
            handle = await runs.start(planner, trial.kernel, trial.goal)
            return await handle.result()
        await _decide(approvals, trial)
        (handle,) = await runs.recover(planner, trial.kernel)
        result = await handle.result()
        while result.status == "paused" and not trial.gated:
            await _decide(approvals, trial)
            result = await handle.result()
        return result


async def _decide(approvals: Approvals, trial: Trial) -> None:
    """Decide as a person would, who looks up whether what is in doubt was done."""
    for call in await approvals.pending():
        await approvals.decide(
            call.id,
            Supply("It is done.", by="a person")
            if call.in_doubt and trial.is_made
            else Approve(by="a person"),
        )


OPTIONS: dict[str, Option] = {
    one.info.key: one for one in tuple(vars().values()) if isinstance(one, Option)
}
"""By key, as they are shown."""


def load_option(path: str) -> Option:
    """Find an option by its key, or import it as ``module:name``."""
    if path in OPTIONS:
        return OPTIONS[path]
    module, _, name = path.partition(":")
    return option_of(getattr(import_module(module), name), path)
