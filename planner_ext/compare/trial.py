"""A trial: one run of one option in one situation. This is the protocol for loops of your own.

A strategy, one async function of a `Trial`, pursues the goal within the budget and
notes how it ended; everything else is counted outside:

    async def plain_loop(trial: Trial) -> None:
        "Asks until the model calls nothing more."
        while trial.charged < trial.budget.max_iterations:
            reply = await trial.ask()
            trial.charged += 1
            trial.history.add_message(reply)
            if not (calls := [item for item in reply.items if isinstance(item, FunctionCallContent)]):
                trial.status, trial.answer = "answered", reply.content
                return
            for call in calls:
                await trial.kernel.invoke_function_call(call, trial.history)

    planner-ext compare --option my_loops:plain_loop

It declares what else it offers: ``option("mine", offers=("tool calls",))(plain_loop)``.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import (
    FunctionChoiceBehavior,
    PromptExecutionSettings,
)
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    StreamingChatMessageContent,
)

from planner_ext.compare.report import OptionInfo
from planner_ext.core.limits import Budget
from planner_ext.core.values import Usage
from planner_ext.sk.errors import PlannerInvalidConfigurationError

Ability: TypeAlias = Literal[
    "tool calls", "tokens", "time", "repeats", "veto", "approval", "recovery"
]
"""What a situation can ask of a loop beyond a budget of round trips.

A limit of function calls, tokens, time or repeated calls (``Trial.budget``);
``Trial.vetoed``; ``Trial.gated``; a run that survives its process.
"""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One run of one option: its inputs, and its report.

    Attributes:
        kernel: A copy for this run, with the functions and the service.
        settings: The settings of each request; not to be changed.
        goal: The history begins with it.
        budget: ``max_iterations``, and the limits that the situation adds.
        streaming: Whether replies are to be streamed.
        reports: Whether replies carry metadata: the number of round trips, and of
            tokens.
        vetoed: The function that must not run, fully qualified, or "".
        gated: The function that needs a person's consent, or "": the run waits for it,
            until another process continues.
        life: 2 in the process that continues what the first one left in ``folder``.
        is_made: Whether the call during which the first process was killed took effect,
            as a person would look up.
        folder: Where a run is kept; None in a situation of one process.
        charged: Round trips that the option itself has counted so far.
        status: ``answered``, ``limit_reached``, ``paused`` or another end.
        answer: The text that the caller gets, or "".
        usage: Of the option's result; None if that is only the last message.
    """

    kernel: Kernel
    service: ChatCompletionClientBase
    settings: PromptExecutionSettings
    goal: str
    budget: Budget
    streaming: bool = False
    reports: bool = True
    vetoed: str = ""
    gated: str = ""
    life: int = 1
    is_made: bool = False
    folder: Path | None = None
    history: ChatHistory = field(default_factory=ChatHistory)
    charged: int = 0
    status: str = "limit_reached"
    answer: str = ""
    usage: Usage | None = None

    def __post_init__(self) -> None:
        self.history.add_user_message(self.goal)

    @property
    def max_iterations(self) -> int:
        """Round trips allowed."""
        assert self.budget.max_iterations is not None
        return self.budget.max_iterations

    async def ask(self, *, functions: bool = True) -> ChatMessageContent:
        """Make one round trip; the option itself must run the calls in the reply.

        Args:
            functions: Whether the kernel's functions are offered.

        Raises:
            ServiceResponseException: If the endpoint refuses the request.
        """
        behavior = FunctionChoiceBehavior.Auto(auto_invoke=False) if functions else None  # pyright: ignore[reportUnknownMemberType]
        settings = self.settings.model_copy(
            update={"function_choice_behavior": behavior}
        )
        if self.streaming:
            return reduce(add, await self.chunks(settings))
        return (
            await self.service.get_chat_message_contents(
                self.history, settings, kernel=self.kernel
            )
        )[0]

    async def chunks(
        self, settings: PromptExecutionSettings
    ) -> list[StreamingChatMessageContent]:
        """Collect a streamed reply; if the settings invoke functions, of all round trips."""
        stream = self.service.get_streaming_chat_message_contents(
            self.history, settings, kernel=self.kernel
        )
        return [chunk async for chunks in stream for chunk in chunks]


Strategy: TypeAlias = Callable[[Trial], Awaitable[None]]
"""Pursues a trial's goal, and notes the outcome in it; a request's error is raised."""


class Option(NamedTuple):
    """One of the options compared.

    Attributes:
        strategy: None if it runs in another environment.
        command: The program that runs one process of a trial; empty is this package's.
    """

    info: OptionInfo
    strategy: Strategy | None
    command: tuple[str, ...] = ()


def option(
    key: str,
    name: str = "",
    *,
    short: str = "",
    offers: tuple[Ability, ...] = (),
    corrected: bool = False,
) -> Callable[[Strategy], Option]:
    """Make an option of a strategy, whose docstring becomes the description.

    Args:
        key: The option's name on the command line.
        name: Its name in tables. Default: the key.
        short: Its name in narrow tables. Default: the name.
        offers: What it offers beyond a budget of round trips; situations that need more
            do not run it.
        corrected: Whether the comparison fails if it exceeds its budget or breaks a
            history.

    Raises:
        PlannerInvalidConfigurationError: If ``offers`` names something else.
    """
    for ability in offers:
        if ability not in get_args(Ability):
            raise PlannerInvalidConfigurationError(
                f"Option {key!r} offers {ability!r}; expected some of {', '.join(get_args(Ability))}."
            )

    def make(strategy: Strategy) -> Option:
        about = " ".join((strategy.__doc__ or "").split())
        label = name or key
        info = OptionInfo(
            key=key,
            name=label,
            short=short or label,
            about=about,
            corrected=corrected,
            offers=offers,
            code=inspect.getsource(strategy),
        )
        return Option(info, strategy)

    return make


def option_of(found: object, path: str) -> Option:
    """Read an option, or make one of a strategy, whose name becomes the key.

    Raises:
        PlannerInvalidConfigurationError: If it is neither.
    """
    if not isinstance(found, Option):
        if not inspect.iscoroutinefunction(found):
            raise PlannerInvalidConfigurationError(
                f"{path} must be an async function of a planner_ext.compare.Trial, or an Option; "
                f"got {type(found).__name__}."
            )
        found = option(found.__name__.replace("_", "-"))(found)
    return found._replace(
        command=(sys.executable, "-m", "planner_ext.compare.life", path)
    )
