"""One run on the user's kernel, watched, from its start or its checkpoint across every pause to its end.

A paused run executes no code: between two stretches no event loop runs, so whoever is asked may take all the time there
is, and Ctrl-C means what it means anywhere.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text
from semantic_kernel import Kernel

from planner_ext import (
    ApprovalPolicy,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.cli.checkpoint_file import CheckpointFile, FileJournal, environment_key
from planner_ext.cli.console import say
from planner_ext.cli.kernels import SERVICE_ID, kernel_of, openai_service, start_factory, with_service
from planner_ext.cli.show import Progress
from planner_ext.core.fold import fold
from planner_ext.core.state import State
from planner_ext.core.termination import stopping_facts
from planner_ext.durable.segment import Segment
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import Fact, PlannerEvent, ResultReady
from planner_ext.hitl_manager import ApprovalSettings, Decision
from planner_ext.planner.result import result_of
from planner_ext.sk.budget import price_in

__all__ = ["Journey", "Setup", "approval_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run works with, as it stands on the command line.

    Attributes:
        kernel: ``module:factory``; None is a kernel without functions.
        policy: A file with an approval policy.
        ask_all: Whether every call waits for a decision.
        by: Who decides, for the record; None where nobody is named.
    """

    kernel: str | None = None
    base_url: str | None = None
    model: str | None = None
    policy: Path | None = None
    ask_all: bool = False
    by: str | None = None
    stream: bool = True
    as_json: bool = False


class Journey:
    """One run, and its journal as far as it came, whatever became of it.

    Attributes:
        endpoint: Where the requests go, in words; "" where the kernel's own service knows it.
    """

    def __init__(
        self, setup: Setup, console: Console, *, facts: Sequence[Fact] = (), file: CheckpointFile | None = None
    ) -> None:
        """Set out, anew or with the facts of a checkpoint, which its file keeps up to date while the run is resumed."""
        self.endpoint = ""
        self._file = file
        self._setup = setup
        self._console = console
        self._facts = list(facts)
        self._progress = Progress(console)
        self._progress.catch_up(facts)
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._planner: FunctionCallingStepwisePlanner | None = None
        self._kernel = Kernel()
        self._seconds_left: float | None = None
        self._timeout = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._runner:
            if self._planner is not None:
                self._runner.run(self._stack.aclose())

    def open(self, *, timeout: float | None = None, plan: bool | None = None, **options: Any) -> None:
        """Make kernel, service and planner.

        Args:
            timeout: Seconds that the run may work; None is no timeout.
            plan: None plans where there are functions to plan with.
            **options: Further options of the planner.

        Raises:
            PlannerInvalidConfigurationError: If options, kernel or service cannot be used.
            InvalidPolicyError: If the policy cannot be read.
        """
        approval = approval_options(self._setup.policy, ask_all=self._setup.ask_all)
        made = Kernel() if self._setup.kernel is None else start_factory(self._setup.kernel)
        service_id = self._runner.run(self._open(made))
        if not self._kernel.services:
            raise PlannerInvalidConfigurationError(
                f"The kernel of {self._setup.kernel} has no service: give --model (and --base-url), or add one in the "
                "factory."
            )
        self._planner = FunctionCallingStepwisePlanner(
            service_id,
            FunctionCallingStepwisePlannerOptions(
                plan=bool(self._kernel.plugins) if plan is None else plan,
                observers=(self._note,),
                checkpoint_key=environment_key(),
                **approval,
                **options,
            ),
        )
        self._seconds_left, self._timeout = timeout, timeout or 0.0
        self._warn(approval.get("interceptors", ()))

    def reopen(self, state: State) -> None:
        """Make kernel, service and planner for a run that goes on, with the options that its rules tell of.

        Raises:
            Exception: As `open`.
        """
        rules = state.rules
        self.open(
            plan=rules.plan,
            require_final_answer_function=rules.require_final_answer,
            max_clarifications=rules.max_clarifications,
        )

    def start(self, goal: str) -> FunctionCallingStepwisePlannerResult:
        """Run to the first pause, or the end.

        Raises:
            KeyboardInterrupt: If somebody pressed Ctrl-C; what ran is cancelled.
            Exception: Any fault.
        """
        planner, kernel = self._ready()
        return self._go(lambda: planner.invoke(kernel, goal), lambda: planner.invoke_stream(kernel, goal))

    def resume(
        self, decisions: Mapping[str, Decision], *, budget: Budget | None = None
    ) -> FunctionCallingStepwisePlannerResult:
        """Resume the run to the next pause, or the end; one that was cut short is recovered first.

        Raises:
            DecisionRefusedError: If a decision cannot be taken; then none is, and nothing runs.
            Exception: As `start`.
        """
        planner, kernel = self._ready()
        state = fold(self._facts)
        segment = Segment(
            run_id=state.run_id,
            goal=state.goal,
            store=FileJournal(self._file, self._facts),
            facts=tuple(self._facts),
            decisions=decisions,
            budget=budget,
            price=price_in(budget),
            reopen=True,
        )
        return self._go(
            lambda: planner.journaled(kernel, segment).result(),
            lambda: planner.journaled(kernel, segment, streaming=True).events(),
        )

    def drive(
        self,
        stretch: Callable[[FunctionCallingStepwisePlanner, Kernel], Awaitable[FunctionCallingStepwisePlannerResult]],
    ) -> FunctionCallingStepwisePlannerResult:
        """Let something else, such as a store, drive the planner with the kernel, and watch what the planner does.

        Raises:
            KeyboardInterrupt: If somebody pressed Ctrl-C; what ran is cancelled.
            Exception: Any fault.
        """
        planner, kernel = self._ready()
        return self._runner.run(self._plain(lambda: stretch(planner, kernel)))

    def stopped(self, reason: str) -> FunctionCallingStepwisePlannerResult:
        """Make a result of a run that was cancelled: every call answered, everything spent on the record."""
        if not self._facts:
            return FunctionCallingStepwisePlannerResult(status="stopped", reason=reason)
        state = fold(self._facts)
        rest = () if state.ended is not None else stopping_facts(state, reason=reason, at=time.time())
        facts = (*self._facts, *rest)
        result = result_of(fold(facts), facts)
        return result.model_copy(update={"reason": reason}) if result.status == "stopped" and reason else result

    async def _open(self, made: object) -> str | None:
        """Make the kernel ready; return the service to ask, or None for the kernel's own choice."""
        setup = self._setup
        self._kernel = await kernel_of(made, setup.kernel or "")
        if setup.kernel is not None and setup.base_url is None and setup.model is None:
            return None
        service = openai_service(setup.base_url, setup.model)
        self._stack.push_async_callback(service.client.close)
        self.endpoint = f"The endpoint is {service.client.base_url}"
        self._kernel = with_service(self._kernel, service)
        return SERVICE_ID

    def _warn(self, policies: Sequence[ApprovalPolicy]) -> None:
        """Say what is likely a mistake: no functions at all, or a rule for none of them."""
        if not self._kernel.plugins:
            say(self._console, Text("The kernel has no functions: the model can only talk. See --kernel.", "dim"))
        known = [(each.plugin_name or "", each.name) for each in self._kernel.get_full_list_of_function_metadata()]
        for policy in policies:
            for number in policy.unused_rules(known):
                say(self._console, Text(f"Rule {number} of the policy is for no function of this kernel.", "yellow"))

    def _ready(self) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
        assert self._planner is not None, "open() comes first"
        return self._planner, self._kernel

    def _go(
        self,
        plain: Callable[[], Awaitable[FunctionCallingStepwisePlannerResult]],
        streamed: Callable[[], AsyncGenerator[PlannerEvent, None]],
    ) -> FunctionCallingStepwisePlannerResult:
        return self._runner.run(self._timed(self._streamed(streamed) if self._setup.stream else self._plain(plain)))

    async def _timed(
        self, stretch: Awaitable[FunctionCallingStepwisePlannerResult]
    ) -> FunctionCallingStepwisePlannerResult:
        """Let one stretch use of the timeout what the ones before it left; waiting for a person costs nothing."""
        began, scope = time.monotonic(), asyncio.timeout(self._seconds_left)
        try:
            async with scope:
                return await stretch
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            if self._seconds_left is not None:
                self._seconds_left -= time.monotonic() - began
        return self.stopped(f"The timeout of {self._timeout:g} s was reached.")

    async def _plain(
        self, plain: Callable[[], Awaitable[FunctionCallingStepwisePlannerResult]]
    ) -> FunctionCallingStepwisePlannerResult:
        with self._progress:
            return await plain()

    async def _streamed(
        self, streamed: Callable[[], AsyncGenerator[PlannerEvent, None]]
    ) -> FunctionCallingStepwisePlannerResult:
        with self._progress:
            async with aclosing(streamed()) as events:
                async for event in events:
                    self._progress.show(event)
                    if isinstance(event, ResultReady):
                        return event.result
        raise AssertionError("a stream ends with its result")

    def _note(self, fact: Fact) -> None:
        self._facts.append(fact)
        if not self._setup.stream:
            self._progress.show(fact)


def approval_options(policy: Path | None, *, ask_all: bool) -> dict[str, Any]:
    """Read who has a say in calls, as options of a planner; without ``--policy`` and ``--ask-all``, none.

    Raises:
        PlannerInvalidConfigurationError: If the two contradict each other, or the file cannot be read.
        InvalidPolicyError: If it holds no policy.
    """
    if policy is None:
        return {"approval": ApprovalSettings(unmatched="defer")} if ask_all else {}
    if ask_all:
        raise PlannerInvalidConfigurationError(
            "--ask-all and --policy contradict each other: a policy decides every call. Leave one of them out; a "
            "policy with only `default: ask` is --ask-all."
        )
    try:
        return {"interceptors": (ApprovalPolicy.from_yaml(policy),)}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlannerInvalidConfigurationError(f"--policy {policy} cannot be read: {reason}.") from None
