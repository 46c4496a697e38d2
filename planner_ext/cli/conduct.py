"""What ``run`` and ``resume`` have in common: decide or keep what waits, put every end into words, return its code.

Progress goes to stderr; stdout gets the answer, or with ``--json`` one JSON document, and nothing else: what the
kernel's own code prints goes to stderr, too.
"""

import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text
from semantic_kernel.exceptions import KernelException

from planner_ext import Budget, FunctionCallingStepwisePlannerResult
from planner_ext.approval.pending import waiting_calls
from planner_ext.cli.ask import Desk, print_pending
from planner_ext.cli.checkpoint_file import CheckpointFile
from planner_ext.cli.console import FAULT, INTERRUPTED, PAUSED, UNUSABLE, complain, say, stderr_console
from planner_ext.cli.journey import Journey, Setup
from planner_ext.cli.report import exit_code, tell
from planner_ext.cli.show import spent_line
from planner_ext.cli.text import printable
from planner_ext.core.fold import sticky_keys
from planner_ext.core.limits import Limits
from planner_ext.core.state import State
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidCheckpointError,
    InvalidPolicyError,
    PlannerInvalidConfigurationError,
)
from planner_ext.hitl_manager import Checkpoint, Decision, PendingCall

__all__ = ["CANNOT_BE_USED", "Work", "conduct", "is_terminal", "setup_options", "with_trips"]

CANNOT_BE_USED = (
    DecisionRefusedError,
    InvalidCheckpointError,
    InvalidPolicyError,
    PlannerInvalidConfigurationError,
)
"""What is wrong with the command line, a file or the kernel, and not with the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One command's share of a run.

    Attributes:
        first: The first stretch of it.
        file: Where the run is kept after each stretch, whatever came of it; None keeps it nowhere.
        desk: Who is asked about calls that wait; None asks nobody.
    """

    setup: Setup
    journey: Journey
    first: Callable[[], FunctionCallingStepwisePlannerResult]
    file: CheckpointFile | None
    desk: Desk | None

    def finish(self) -> FunctionCallingStepwisePlannerResult:
        """Go on until the run has ended, or nobody decides."""
        try:
            result = self.kept(self.first())
        except DecisionRefusedError as error:
            if error.changed:
                self.kept(self.journey.resume({}))
            raise
        while result.status in ("paused", "asked"):
            if any(_is_late(call) for call in result.pending):
                result = self.kept(self.journey.resume({}))
            elif (following := self._decided(result)) is not None:
                result = self.kept(following)
            else:
                break
        return result

    def kept(self, result: FunctionCallingStepwisePlannerResult) -> FunctionCallingStepwisePlannerResult:
        """Keep the run in its file as it stands now."""
        if self.file is not None and result.facts:
            self.file.write(result.checkpoint)
        return result

    def keep_after(self, fault: Exception) -> None:
        """Keep what a fault left of the run."""
        left: object = getattr(fault, "checkpoint", None)
        if self.file is not None and isinstance(left, Checkpoint) and left.facts:
            self.file.write(left)

    def _decided(self, result: FunctionCallingStepwisePlannerResult) -> FunctionCallingStepwisePlannerResult | None:
        """Have the next call decided and go on with that; one at a time, so that each answer is on the record."""
        if self.desk is None:
            return None
        call = next((one for one in result.pending if _is_remembered(one, result)), None)
        decision: Decision | None
        if call is not None:
            decision = self.desk.remembered(call)
        else:
            call = result.pending[0]
            decision = self.desk.decide(call, more=len(result.pending) - 1)
        if decision is None:
            return None
        try:
            return self.journey.resume({call.id: decision})
        except DecisionRefusedError as error:
            self.desk.refuse(call, decision, str(error))
            return self.journey.resume({}) if error.changed else result


def conduct(setup: Setup, begin: Callable[[Console], Work], file: CheckpointFile | None = None) -> int:
    """Do a command's work, print what there is to print, and return the exit code; its file is locked meanwhile."""
    out, console = sys.stdout, stderr_console()
    with redirect_stdout(sys.stderr):
        try:
            with file or nullcontext():
                work = begin(console)
                with work.journey:
                    result, code = _outcome(work, console)
        except CANNOT_BE_USED as error:
            complain(console, str(error))
            return UNUSABLE
        if result is None:
            return code
        if code == PAUSED:
            _tell_how_to_go_on(console, result, work)
    tell(result, out, console, as_json=setup.as_json)
    return code


def is_terminal() -> bool:
    """Whether somebody sits there who sees a question and can answer it."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]  (None without a console)


def _outcome(work: Work, console: Console) -> tuple[FunctionCallingStepwisePlannerResult | None, int]:
    """Finish the work, come what may: a result and its code, or None where there is nothing more to tell."""
    try:
        result = work.finish()
        return result, exit_code(result)
    except KeyboardInterrupt:
        return work.kept(work.journey.stopped("Interrupted from the keyboard.")), INTERRUPTED
    except Exception as error:  # whatever it is, a command line says it in words
        work.keep_after(error)
        if isinstance(error, CANNOT_BE_USED):
            raise
        text = str(error) if isinstance(error, KernelException) else f"{type(error).__name__}: {error}"
        complain(console, f"{text} {work.journey.endpoint}".strip())
        say(console, Text(spent_line(work.journey.stopped(""), ended="failed"), "dim"))
        return None, FAULT


def _tell_how_to_go_on(console: Console, result: FunctionCallingStepwisePlannerResult, work: Work) -> None:
    """Say what waits, unless it was just shown, and with which command it can be decided."""
    if work.desk is None:
        for call in result.pending:
            print_pending(console, call)
    if work.file is not None:
        say(console, Text(f"The run is kept in {printable(str(work.file.path))}. Resume it with:"))
        console.print(Text(f"  {_command(work.setup, work.file)}"), soft_wrap=True)
        text = (
            "Add --answer ID=TEXT for a question, --approve ID, --deny ID=REASON or --edit ID=JSON for a call, or "
            "--cancel REASON; with none of them a terminal asks."
        )
    elif work.desk is None:
        text = (
            "Nobody can be asked, this is no terminal; none of these calls was run. Start again in a terminal, or with "
            "--checkpoint FILE, which keeps the run for planner-ext resume FILE."
        )
    else:
        text = "Left undecided, and not kept. With --checkpoint FILE a run waits in a file instead."
    say(console, Text(text))


def _command(setup: Setup, file: CheckpointFile) -> str:
    """Write the command that goes on with a run as it was begun."""
    return printable(shlex.join(["planner-ext", "resume", str(file.path), *setup_options(setup)]))


def setup_options(setup: Setup) -> list[str]:
    """Write the options that a run was begun with, for the command that goes on with it."""
    given = {
        "--kernel": setup.kernel,
        "--base-url": setup.base_url,
        "--model": setup.model,
        "--policy": None if setup.policy is None else str(setup.policy),
    }
    options = [part for name, value in given.items() if value is not None for part in (name, value)]
    return [*(["--ask-all"] if setup.ask_all else []), *options]


def with_trips(state: State, max_iterations: int | None) -> Budget | None:
    """Replace the round trips of a run alone, every other limit stays; None keeps them all.

    Raises:
        PlannerInvalidConfigurationError: If that is no number of round trips.
    """
    if max_iterations is None:
        return None
    kept: dict[str, Any] = {item.name: getattr(state.rules.limits, item.name) for item in fields(Limits)}
    kept["max_iterations"] = max_iterations
    return Budget(**kept)


def _is_late(call: PendingCall) -> bool:
    return call.expires_at is not None and datetime.now(UTC) >= call.expires_at


def _is_remembered(call: PendingCall, result: FunctionCallingStepwisePlannerResult) -> bool:
    """Whether an approval for the rest of the run is for this call, too, which began to wait before it was given."""
    state = result.checkpoint.state()
    fact = next(one.decided for one in waiting_calls(state) if one.request.id == call.id)
    return not state.sticky.isdisjoint(sticky_keys(fact.function, fact.digest, fact.signature).values())
