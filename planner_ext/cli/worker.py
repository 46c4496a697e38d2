"""``planner-ext worker``: drives the runs of a store, and prints a line for each outcome."""

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

from rich.console import Console
from rich.text import Text
from semantic_kernel import Kernel

from planner_ext import ApprovalPolicy, FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerResult
from planner_ext.cli.kernels import awaited, start_factory
from planner_ext.cli.options import ExitCode, WorkerArgs
from planner_ext.cli.run import approval_options
from planner_ext.cli.show import spent_line
from planner_ext.cli.store import opened_runs, store_name
from planner_ext.cli.text import exact, one_line, say, stderr_console
from planner_ext.durable import RunFencedError, RunRefusedError
from planner_ext.durable.worker import Activation, ActivationRun
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.hitl_manager import ApprovalSettings, DecisionRefusedError

__all__ = ["work"]

Result = FunctionCallingStepwisePlannerResult
ArgumentsFor = Callable[[str], Any] | None
_Application = tuple[FunctionCallingStepwisePlanner, Kernel, ArgumentsFor]


def work(args: WorkerArgs) -> int:
    """Work until a signal ends the process, or with ``--once`` until no run is due; return the exit code.

    Raises:
        PlannerInvalidConfigurationError: If the application, ``--policy`` or ``--ask-all`` cannot be used.
        InvalidPolicyError: If the file holds no policy.
    """
    with redirect_stdout(sys.stderr):  # the output of functions is not a result
        made = start_factory(args.app, option="--app")
        return asyncio.run(_worked(args, made))


async def _worked(args: WorkerArgs, made: object) -> int:
    planner, kernel, arguments_for = _application(await awaited(made, args.app, option="--app"), args)
    watched = _WatchedPlanner(_with_options(planner, args), stderr_console())
    working = asyncio.create_task(_drive(args, watched, kernel, arguments_for))

    def end() -> None:
        if not working.cancelling():  # a second signal does not interrupt the cleanup
            working.cancel()

    with suppress(NotImplementedError):  # Windows has no signal handlers for event loops; Ctrl-C interrupts there
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        return await working
    except asyncio.CancelledError:
        return ExitCode.ANSWERED


def _application(made: object, args: WorkerArgs) -> _Application:
    """Read the factory's result as planner, kernel and arguments.

    Raises:
        PlannerInvalidConfigurationError: If it is of another shape.
    """
    parts = cast("tuple[object, ...]", made) if isinstance(made, tuple) else (made,)
    match parts:
        case (Kernel() as kernel,):
            return FunctionCallingStepwisePlanner(), kernel, None
        case (FunctionCallingStepwisePlanner() as planner, Kernel() as kernel):
            return planner, kernel, None
        case (FunctionCallingStepwisePlanner() as planner, Kernel() as kernel, arguments_for) if callable(
            arguments_for
        ):
            return planner, kernel, arguments_for
        case _:
            names = ", ".join(type(part).__name__ for part in parts) or "an empty tuple"
            raise PlannerInvalidConfigurationError(
                f"--app {args.app} must give (planner, kernel), (planner, kernel, arguments_for) or a kernel; got "
                f"{names}."
            )


def _with_options(planner: FunctionCallingStepwisePlanner, args: WorkerArgs) -> FunctionCallingStepwisePlanner:
    """Add ``--policy`` and ``--ask-all`` to a copy of a planner, whose own interceptors are asked first.

    Raises:
        PlannerInvalidConfigurationError: If ``--ask-all`` contradicts a policy, or the file cannot be read.
        InvalidPolicyError: If the file holds no policy.
    """
    if not (given := approval_options(args)):
        return planner
    options, settings = planner.options, planner.options.approval or ApprovalSettings()
    if args.ask_all and any(isinstance(one, ApprovalPolicy) for one in options.interceptors):
        raise PlannerInvalidConfigurationError(
            f"--ask-all and the policy of {args.app} contradict each other: a policy decides every call. Leave "
            "--ask-all out."
        )
    update: dict[str, Any] = {"interceptors": (*options.interceptors, *given.get("interceptors", ()))}
    if args.ask_all and settings.unmatched == "approve":
        update["approval"] = replace(settings, unmatched="defer")
    planner = copy(planner)
    planner.options = options.model_copy(update=update)
    return planner


async def _drive(args: WorkerArgs, planner: "_WatchedPlanner", kernel: Kernel, arguments_for: ArgumentsFor) -> int:
    """Drive runs until cancelled, or with ``--once`` until no run is due; a run with a fault is not taken twice."""
    async with opened_runs(args.store, worker_id=args.worker_id) as runs:
        say(planner.console, f"Worker {runs.worker_id} of {store_name(args.store)}", "dim")
        if not args.once:
            await runs.work(planner, kernel, arguments_for=arguments_for, max_concurrency=args.max_concurrency)
        codes = {ExitCode.ANSWERED}
        while taken := await runs.recover(planner, kernel, arguments_for=arguments_for):
            results = await asyncio.gather(*(handle.result() for handle in taken), return_exceptions=True)
            faults = [result for result in results if isinstance(result, BaseException)]
            codes |= {ExitCode.UNUSABLE if isinstance(fault, RunRefusedError) else ExitCode.FAULT for fault in faults}
        return max(codes)


@dataclass(frozen=True, slots=True)
class _WatchedPlanner:
    """A planner that prints lines about its runs; implements `planner_ext.durable.worker.DurablePlanner`."""

    planner: FunctionCallingStepwisePlanner
    console: Console

    def journaled(self, kernel: Kernel, activation: Activation, *, arguments: Any = None) -> ActivationRun[Result]:
        """Get ready to drive an activation."""
        return _WatchedRun(self, kernel, activation, arguments)


@dataclass(frozen=True, slots=True)
class _WatchedRun:
    watched: _WatchedPlanner
    kernel: Kernel
    activation: Activation
    arguments: Any

    async def result(self) -> Result:
        """Drive it."""
        self._say("is resumed" if self.activation.facts else "starts", "dim")
        try:
            run = self.watched.planner.journaled(self.kernel, self.activation, arguments=self.arguments)
            result = await run.result()
        except Exception as error:
            self._say(*_said(error))
            raise
        self._say(spent_line(result))
        return result

    def _say(self, text: str, style: str = "") -> None:
        name = exact(self.activation.run_id)
        self.watched.console.print(Text.assemble((name, "bold"), "  ", (text, style)), soft_wrap=True)


def _said(error: Exception) -> tuple[str, str]:
    """Return why a run stops here, and the style to print it in."""
    text = one_line(str(error))
    match error:
        case RunFencedError():
            return "continues elsewhere", "dim"
        case RunRefusedError():
            return f"is left to another worker: {text}", "red"
        case DecisionRefusedError():
            return f"waits again: {text}", "red"
        case _:
            return f"interrupted: {type(error).__name__}: {text}", "red"
