"""What ``planner-ext worker`` does: drives the runs of a store, and says in a line what came of each."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, redirect_stdout, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from semantic_kernel import Kernel

from planner_ext import ApprovalPolicy, FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerResult
from planner_ext.cli.applications import Application, application_of
from planner_ext.cli.console import ANSWERED, FAULT, UNUSABLE, say, stderr_console
from planner_ext.cli.durable_store import opened_runs, store_name
from planner_ext.cli.journey import approval_options
from planner_ext.cli.kernels import start_factory
from planner_ext.cli.show import spent_line
from planner_ext.cli.text import exact, one_line
from planner_ext.durable import RunFencedError, RunRefusedError, Runs
from planner_ext.durable.segment import Segment, SegmentRun
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.hitl_manager import ApprovalSettings, DecisionRefusedError

__all__ = ["Shift", "work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What a worker is to do, as it stands on the command line."""

    store: str = field(repr=False)
    app: str
    once: bool = False
    worker_id: str | None = None
    max_concurrency: int = 100
    policy: Path | None = None
    ask_all: bool = False


def work(shift: Shift) -> int:
    """Work until told to end, or until nothing is left to do; return the exit code.

    Raises:
        PlannerInvalidConfigurationError: If the application, ``--policy`` or ``--ask-all`` cannot be used.
        InvalidPolicyError: If the file holds no policy.
    """
    console = stderr_console()
    with redirect_stdout(sys.stderr):  # nothing was asked for: what functions print is noise beside the lines
        made = start_factory(shift.app, option="--app")
        return asyncio.run(_work(shift, made, console))


async def _work(shift: Shift, made: object, console: Console) -> int:
    application = _with_say(await application_of(made, shift.app), shift)
    async with _told_to_end() as ending, opened_runs(shift.store, worker_id=shift.worker_id) as runs:
        say(console, Text(f"Worker {runs.worker_id} of {store_name(shift.store)}", "dim"))
        deed = _drain(runs, application, console) if shift.once else _serve(runs, application, console, shift)
        working = asyncio.create_task(deed)
        waiting = asyncio.create_task(ending.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else ANSWERED
        finally:
            working.cancel()
            waiting.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)


def _with_say(application: Application, shift: Shift) -> Application:
    """Add what the command line has a say by to that of the application's planner, which is asked first."""
    given = approval_options(shift.policy, ask_all=shift.ask_all)
    if not given:
        return application
    planner = copy(application.planner)
    options, settings = planner.options, planner.options.approval or ApprovalSettings()
    if shift.ask_all and any(isinstance(one, ApprovalPolicy) for one in options.interceptors):
        raise PlannerInvalidConfigurationError(
            f"--ask-all and the policy of {shift.app} contradict each other: a policy decides every call. Leave "
            "--ask-all out."
        )
    update: dict[str, Any] = {"interceptors": (*options.interceptors, *given.get("interceptors", ()))}
    if shift.ask_all and settings.unmatched == "approve":
        update["approval"] = replace(settings, unmatched="defer")
    planner.options = options.model_copy(update=update)
    return replace(application, planner=planner)


@asynccontextmanager
async def _told_to_end() -> AsyncGenerator[asyncio.Event, None]:
    """Give what is set when the process is told to end; where there are no signals, Ctrl-C interrupts as ever."""
    loop, ending, numbers = asyncio.get_running_loop(), asyncio.Event(), (signal.SIGINT, signal.SIGTERM)
    with suppress(NotImplementedError):  # event loops on Windows have no signal handlers
        for number in numbers:
            loop.add_signal_handler(number, ending.set)
    try:
        yield ending
    finally:
        with suppress(NotImplementedError):  # event loops on Windows have no signal handlers
            for number in numbers:
                loop.remove_signal_handler(number)


async def _serve(runs: Runs, application: Application, console: Console, shift: Shift) -> int:
    await runs.work(
        _Told(application.planner, console),
        application.kernel,
        arguments_for=application.arguments_for,
        max_concurrency=shift.max_concurrency,
    )


async def _drain(runs: Runs, application: Application, console: Console) -> int:
    """Take what is due until nothing is; what a fault interrupted is not taken twice."""
    planner, codes = _Told(application.planner, console), {ANSWERED}
    while taken := await runs.recover(planner, application.kernel, arguments_for=application.arguments_for):
        results = await asyncio.gather(*(handle.result() for handle in taken), return_exceptions=True)
        codes |= {
            UNUSABLE if isinstance(result, RunRefusedError) else FAULT
            for result in results
            if isinstance(result, BaseException)
        }
    return max(codes)


@dataclass(frozen=True, slots=True)
class _Told:
    """A planner whose segments are told in lines; implements `planner_ext.durable.segment.DurablePlanner`."""

    planner: FunctionCallingStepwisePlanner
    console: Console

    def journaled(
        self, kernel: Kernel, segment: Segment, *, arguments: Any = None
    ) -> SegmentRun[FunctionCallingStepwisePlannerResult]:
        """Get ready to drive a segment."""
        return _ToldSegment(self, kernel, segment, arguments)


@dataclass(frozen=True, slots=True)
class _ToldSegment:
    told: _Told
    kernel: Kernel
    segment: Segment
    arguments: Any

    async def result(self) -> FunctionCallingStepwisePlannerResult:
        """Drive it."""
        self._say("goes on" if self.segment.facts else "starts", "dim")
        try:
            run = self.told.planner.journaled(self.kernel, self.segment, arguments=self.arguments)
            result = await run.result()
        except RunFencedError:
            self._say("continues elsewhere", "dim")
            raise
        except RunRefusedError as error:
            self._say(f"is left to another worker: {one_line(str(error))}", "red")
            raise
        except DecisionRefusedError as error:
            self._say(f"waits again: {one_line(str(error))}", "red")
            raise
        except Exception as error:
            self._say(f"interrupted: {type(error).__name__}: {one_line(str(error))}", "red")
            raise
        self._say(spent_line(result))
        return result

    def _say(self, text: str, style: str = "") -> None:
        name = exact(self.segment.run_id)
        self.told.console.print(Text.assemble((name, "bold"), "  ", (text, style)), soft_wrap=True)
