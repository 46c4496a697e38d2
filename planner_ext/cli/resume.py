"""``planner-ext resume``: goes on with a run that waits in a file, in whatever process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from planner_ext import Budget, FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerResult
from planner_ext.cli.ask import Desk
from planner_ext.cli.checkpoint_file import CheckpointFile
from planner_ext.cli.conduct import Work, conduct, is_terminal, with_trips
from planner_ext.cli.console import say
from planner_ext.cli.journey import Journey, Setup
from planner_ext.core.state import TRANSITIONS, State
from planner_ext.core.termination import cancellation_reason
from planner_ext.errors import DecisionRefusedError, PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Approve, Checkpoint, Decision, Deny, Supply
from planner_ext.planner.result import result_of
from planner_ext.sk.approval import pending_calls
from planner_ext.sk.arguments import InvalidArguments, parse_object

__all__ = ["Continuation", "resume_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What is said of a run in a file, as it stands on the command line.

    Attributes:
        approve: Ids of calls.
        deny: ``ID=REASON``, or an id alone.
        edit: ``ID=JSON``.
        answer: ``ID=TEXT``.
        cancel: Why the run is to end; None goes on.
        max_iterations: Round trips in place of the run's; None keeps those.
    """

    file: Path
    approve: Sequence[str] = ()
    deny: Sequence[str] = ()
    edit: Sequence[str] = ()
    answer: Sequence[str] = ()
    cancel: str | None = None
    max_iterations: int | None = None


def resume_run(continuation: Continuation, setup: Setup) -> int:
    """Resume a run, print what there is to print, and return the exit code."""
    file = CheckpointFile(continuation.file)

    def begin(console: Console) -> Work:
        checkpoint = file.read()
        file.check_place()
        decisions = _decisions(continuation, checkpoint.state(), setup.by)
        journey = Journey(setup, console, facts=checkpoint.facts, file=file)
        stretch = _Stretch(continuation, setup, journey, checkpoint, decisions, console)
        asks = not decisions and continuation.cancel is None and is_terminal()
        desk = Desk(console, by=setup.by) if asks else None
        return Work(setup=setup, journey=journey, first=stretch.first, file=file, desk=desk)

    return conduct(setup, begin, file)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The first stretch of a run that is gone on with."""

    continuation: Continuation
    setup: Setup
    journey: Journey
    checkpoint: Checkpoint
    decisions: dict[str, Decision]
    console: Console

    def first(self) -> FunctionCallingStepwisePlannerResult:
        """End the run, or resume it as far as it goes; what only waits is left as it is."""
        if self.continuation.cancel is not None:
            return self._cancel(self.continuation.cancel)
        state, budget = self.checkpoint.state(), self._budget()
        self.journey.reopen(state)
        if _is_cut_short(state):
            return self._recover()
        if pending_calls(state) and not self.decisions and budget is None:
            return result_of(state, self.checkpoint.facts)
        return self.journey.resume(self.decisions, budget=budget)

    def _cancel(self, reason: str) -> FunctionCallingStepwisePlannerResult:
        if self.decisions:
            raise PlannerInvalidConfigurationError(
                "--cancel ends the run; leave --approve, --deny, --edit and --answer out."
            )
        if _is_cut_short(self.checkpoint.state()):
            return self.journey.stopped(cancellation_reason(self.setup.by or "", reason))
        return FunctionCallingStepwisePlanner().cancel(self.checkpoint, by=self.setup.by or "", reason=reason)

    def _recover(self) -> FunctionCallingStepwisePlannerResult:
        """Resume a run whose process died amid its calls: one that had started and may not run again waits, in doubt.

        Decisions that were given with the command were made without knowing that, and are not taken.
        """
        result = self.journey.resume({})
        if self.decisions and result.pending:
            text = "This run was cut short while its calls ran; nothing that was decided now was taken. Decide again."
            say(self.console, Text(text, "yellow"))
        return result

    def _budget(self) -> Budget | None:
        return with_trips(self.checkpoint.state(), self.continuation.max_iterations)


def _is_cut_short(state: State) -> bool:
    """Whether a run stops amid the calls of a batch, as a process leaves it that was killed."""
    return (state.phase, "Resumed") not in TRANSITIONS


def _decisions(given: Continuation, state: State, by: str | None) -> dict[str, Decision]:
    """Read the decisions off the command line.

    Raises:
        DecisionRefusedError: If a call is decided twice, or edited arguments are no JSON object.
    """
    waiting = [call.id for call in pending_calls(state)]
    decisions: dict[str, Decision] = {}

    def decide(name: str, decision: Decision) -> None:
        if name in decisions:
            raise DecisionRefusedError(f"The call {name!r} is decided twice. Decide it once.")
        decisions[name] = decision

    for name in given.approve:
        decide(name, Approve(by=by))
    for text in given.deny:
        name, reason = _split(text, waiting)
        decide(name, Deny(reason, by=by))
    for text in given.answer:
        name, reply = _split(text, waiting)
        decide(name, Supply(reply, by=by))
    for text in given.edit:
        name, written = _split(text, waiting)
        arguments = parse_object(written)
        if isinstance(arguments, InvalidArguments) or not written:
            problem = arguments.message if isinstance(arguments, InvalidArguments) else "are missing."
            raise DecisionRefusedError(f"--edit {name}=JSON: the arguments {problem}")
        decide(name, Approve(arguments=arguments, by=by))
    return decisions


def _split(text: str, waiting: Sequence[str]) -> tuple[str, str]:
    """Take ``ID=REST`` apart; an id that waits may have the sign in itself."""
    name = max((known for known in waiting if text.startswith(f"{known}=")), key=len, default=text.partition("=")[0])
    return name, text[len(name) + 1 :]
