"""``planner-ext run`` without a store, and ``planner-ext resume``: a run that ends here, or waits in a file.

The file is read and written whole, by one process at a time, with mode 0600, signed if the environment has a key: other
processes can read a command line.
"""

import json
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from planner_ext import ApprovalPolicy, ApprovalSettings, FunctionCallingStepwisePlanner
from planner_ext.approval.decisions import waiting_calls
from planner_ext.cli.ask import ApprovalPrompt, is_terminal
from planner_ext.cli.options import KEY_VARIABLES, GoalArgs, ResumeArgs, RunOptions, signing_key
from planner_ext.cli.run import CliRun, Result, goal_options, new_limits
from planner_ext.cli.show import print_pending
from planner_ext.cli.text import spent_line
from planner_ext.core.facts import CallFinished, CallStarted, RunStarted
from planner_ext.core.fold import fold, sticky_keys
from planner_ext.core.state import TRANSITIONS, State
from planner_ext.core.text import printable
from planner_ext.durable.errors import StoreError
from planner_ext.durable.sqlite import drop_lock, take_lock
from planner_ext.engine.activation import Activation
from planner_ext.engine.document import read_file
from planner_ext.engine.journal import cancellation_reason
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidCheckpointError,
    InvalidJournalError,
    PlannerInvalidConfigurationError,
)
from planner_ext.events import Fact
from planner_ext.hitl_manager import Approve, Checkpoint, Decision, Deny, PendingCall, Supply
from planner_ext.planner.run import result_of
from planner_ext.sk.approval import pending_calls
from planner_ext.sk.conversion import InvalidArguments, parse_object

__all__ = ["CheckpointFile", "resume_run", "run_goal"]


def run_goal(goal: GoalArgs, options: RunOptions) -> int:
    """Reach a goal; return the exit code."""
    file = None if goal.checkpoint is None else CheckpointFile(goal.checkpoint)
    with nullcontext() if file is None else file.locked():
        if goal.timeout is not None and not 0 < goal.timeout < math.inf:
            raise PlannerInvalidConfigurationError(
                f"--timeout must be a number of seconds above 0; got {goal.timeout:g}."
            )
        run = LocalRun(options, file, asks=file is None, timeout=goal.timeout)

        def first() -> Result:
            run.open(**goal_options(goal))
            if file is not None:
                return run.begin(goal.goal)
            if options.stream:
                return run.drive(run.progress.watch(run.planner.invoke_stream(run.kernel, goal.goal)))
            return run.drive(run.planner.invoke(run.kernel, goal.goal))

        return run.execute(first)


def resume_run(args: ResumeArgs, options: RunOptions) -> int:
    """Resume or cancel a run; return the exit code."""
    with CheckpointFile(args.file).locked() as file:
        checkpoint = file.read()
        state = checkpoint.state()
        decisions = _decisions(args, state, options.by)
        cut_short = (state.phase, "Resumed") not in TRANSITIONS  # its process was killed while calls of a batch ran
        if args.cancel is not None and decisions:
            raise PlannerInvalidConfigurationError(
                "--cancel ends the run; leave --approve, --deny, --edit and --answer out."
            )
        run = LocalRun(options, file, asks=not decisions and args.cancel is None, facts=checkpoint.facts)

        def first() -> Result:
            if args.cancel is not None:
                if cut_short:
                    return run.stopped(cancellation_reason(options.by or "", args.cancel))
                return FunctionCallingStepwisePlanner().cancel(checkpoint, by=options.by or "", reason=args.cancel)
            run.reopen(state, **_recorded_approval(options, checkpoint.facts))
            if cut_short:
                return run.recover(decisions)
            if pending_calls(state) and not decisions and args.max_iterations is None:
                return result_of(state, checkpoint.facts)
            return run.resume(decisions, max_iterations=args.max_iterations)

        return run.execute(first)


def _recorded_approval(options: RunOptions, facts: Sequence[Fact]) -> dict[str, Any]:
    """Return the planner's options for the policy, or the ``--ask-all``, that a run began with; empty if one is given.

    The record of a policy has no reasons for its rules.
    """
    begun = facts[0]
    given = options.ask_all or options.policy is not None
    if given or not isinstance(begun, RunStarted) or begun.guards is None:
        return {}
    policies = [ApprovalPolicy.from_dict(json.loads(name)) for name in begun.guards.interceptors]
    return {"interceptors": tuple(policies), "approval": ApprovalSettings(unmatched=begun.guards.unmatched)}


class LocalRun(CliRun):
    """A run that this process ends or leaves, and keeps in a file if it has one.

    Attributes:
        file: Stores the run while it is resumed, at each pause and at the end; None does not store it.
        prompt: Asks a person about the pending calls; None leaves them undecided.
    """

    def __init__(
        self,
        options: RunOptions,
        file: "CheckpointFile | None",
        *,
        asks: bool,
        facts: Sequence[Fact] = (),
        timeout: float | None = None,
    ) -> None:
        """Prepare a new run, or one with the facts of its journal; ``asks`` is whether a terminal asks."""
        super().__init__(options, facts=facts, stream=options.stream, timeout=timeout)
        self.file = file
        self._recorded: list[Fact] = []
        self.prompt = ApprovalPrompt(self.console, by=options.by) if asks and is_terminal() else None

    def begin(self, goal: str) -> Result:
        """Begin a run that is kept in the file, with its policy, which applies again when it is resumed.

        Raises:
            Exception: As `drive`.
        """
        return self._journaled(Activation(run_id=uuid4().hex, goal=goal, store=self))

    def resume(self, decisions: Mapping[str, Decision], *, max_iterations: int | None = None) -> Result:
        """Resume the run to the next pause, or the end; an interrupted run is recovered first.

        Args:
            decisions: Decisions on pending calls, by call id.
            max_iterations: Replaces the run's limit of round trips; None keeps it.

        Raises:
            DecisionRefusedError: If a decision is invalid; then no decision is taken, and nothing runs.
            Exception: As `drive`.
        """
        state = fold(self.facts)
        activation = Activation(
            run_id=state.run_id,
            goal=state.goal,
            store=self,
            facts=tuple(self.facts),
            decisions=decisions,
            budget=new_limits(state, max_iterations),
            reopen=True,
        )
        return self._journaled(activation)

    def _journaled(self, activation: Activation) -> Result:
        self._recorded = list(activation.facts)
        run = self.planner.journaled(self.kernel, activation, streaming=self.stream)
        return self.drive(self.progress.watch(run.events()) if self.stream else run.result())

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:  # noqa: ARG002  (the port's signature)
        """Append facts, and write the file if a call has started or ended: a function starts only once it is recorded.

        Implements `planner_ext.engine.ports.RunStore`.

        Raises:
            PlannerInvalidConfigurationError: If the file cannot be written; then the function does not run.
        """
        self._recorded[seq:] = facts
        if self.file is not None and any(isinstance(fact, CallStarted | CallFinished) for fact in facts):
            self.file.write(Checkpoint(tuple(self._recorded)))

    def recover(self, decisions: Mapping[str, Decision]) -> Result:
        """Recover a run whose process died during its calls: a started call that may not run again waits, in doubt.

        The command's decisions were made without that knowledge, and are not taken.
        """
        result = self.resume({})
        if decisions and result.pending:
            text = "This run was cut short while its calls ran; nothing that was decided now was taken. Decide again."
            self.console.say(text, "yellow")
        return result

    def finish(self, first: Callable[[], Result]) -> Result:
        """Drive the run until it ends, or until a call is left undecided."""
        try:
            result = self._kept(self._first(first))
            while result.status in ("paused", "asked") and (following := self._next(result)) is not None:
                result = self._kept(following)
        except Exception as fault:
            left: object = getattr(fault, "checkpoint", None)
            if self.file is not None and isinstance(left, Checkpoint) and left.facts:
                self.file.write(left)
            raise
        return result

    def interrupted(self) -> Result:
        """Stop the run, store it, and return its result."""
        return self._kept(self.stopped("Interrupted from the keyboard."))

    def explain_fault(self) -> None:
        """Print what the run spent."""
        self.console.say(spent_line(self.stopped(""), ended="failed"), "dim")

    def explain_pause(self, result: Result) -> None:
        """Print the pending calls, unless the person has just seen them, and the command that resumes the run."""
        console = self.console
        if self.prompt is None:
            for call in result.pending:
                print_pending(console, call)
        if self.file is not None:
            path = str(self.file.path)
            console.say(f"The run is kept in {printable(path)}. Resume it with:")
            console.print_command(shlex.join(["planner-ext", "resume", path, *self.resume_words()]))
            console.say(
                "Add --answer ID=TEXT for a question, --approve ID, --deny ID=REASON or --edit ID=JSON for a call, or "
                "--cancel REASON. Without these options a terminal asks."
            )
        elif self.prompt is None:
            console.say(
                "This is not a terminal, so these calls cannot be decided here; they did not run. Start again in a "
                "terminal, or with --checkpoint FILE, which keeps the run for planner-ext resume FILE."
            )
        else:
            console.say("Left undecided, and not kept. With --checkpoint FILE a run waits in a file instead.")

    def _kept(self, result: Result) -> Result:
        if self.file is not None and result.facts:
            self.file.write(result.checkpoint)
        return result

    def _first(self, first: Callable[[], Result]) -> Result:
        try:
            return first()
        except DecisionRefusedError as error:
            if error.changed:
                self._kept(self.resume({}))
            raise

    def _next(self, result: Result) -> Result | None:
        """Drive a paused run on; None if a call is left undecided.

        A person is asked about one call at a time, and the run resumed with the decision, so that each is recorded.
        """
        if any(call.expires_at is not None and datetime.now(UTC) >= call.expires_at for call in result.pending):
            return self.resume({})
        if self.prompt is None:
            return None
        call = next((one for one in result.pending if _is_approved_already(one, result)), None)
        if call is not None:
            decision = self.prompt.remembered(call)
        else:
            call = result.pending[0]
            decision = self.prompt.decide(call, more=len(result.pending) - 1)
        if decision is None:
            return None
        try:
            return self.resume({call.id: decision})
        except DecisionRefusedError as error:
            self.prompt.refuse(call, decision, str(error))
            return self.resume({}) if error.changed else result


def _is_approved_already(call: PendingCall, result: Result) -> bool:
    """Whether an approval for the rest of the run covers this call, which waited before the approval was given."""
    state = result.checkpoint.state()
    fact = next(one.decided for one in waiting_calls(state) if one.request.id == call.id)
    keys = sticky_keys(fact.function, fact.digest, fact.signature, source=fact.source, roles=fact.roles)
    return not state.sticky.isdisjoint(keys.values())


def _decisions(args: ResumeArgs, state: State, by: str | None) -> dict[str, Decision]:
    """Read the decisions from the command line.

    Raises:
        DecisionRefusedError: If a call is decided twice, or edited arguments are not a JSON object.
    """
    waiting = [call.id for call in pending_calls(state)]

    def split(texts: Sequence[str] | None) -> list[tuple[str, str]]:
        return [_split(text, waiting) for text in texts or ()]

    given: list[tuple[str, Decision]] = [
        *((name, Approve(by=by)) for name in args.approve or ()),
        *((name, Deny(reason, by=by)) for name, reason in split(args.deny)),
        *((name, Supply(answer, by=by)) for name, answer in split(args.answer)),
        *((name, Approve(arguments=_arguments(name, written), by=by)) for name, written in split(args.edit)),
    ]
    decisions: dict[str, Decision] = {}
    for name, decision in given:
        if name in decisions:
            raise DecisionRefusedError(f"The call {name!r} is decided twice. Decide it once.")
        decisions[name] = decision
    return decisions


def _arguments(name: str, written: str) -> dict[str, object]:
    arguments = parse_object(written)
    if isinstance(arguments, InvalidArguments) or not written:
        problem = arguments.message if isinstance(arguments, InvalidArguments) else "are missing."
        raise DecisionRefusedError(f"--edit {name}=JSON: the arguments {problem}")
    return arguments


def _split(text: str, waiting: Sequence[str]) -> tuple[str, str]:
    """Split ``ID=REST``; the id of a pending call may contain an equals sign."""
    name = max((known for known in waiting if text.startswith(f"{known}=")), key=len, default=text.partition("=")[0])
    return name, text[len(name) + 1 :]


class CheckpointFile:
    """The file that a paused run waits in.

    Attributes:
        path: Its path, as given.
    """

    def __init__(self, path: Path) -> None:
        """Set the path; nothing is read or written yet."""
        self.path = path
        self._target = Path(os.path.realpath(path))  # so that a symbolic link is kept
        self._lock = self._target.with_name(f".{self._target.name}.lock")

    @contextmanager
    def locked(self) -> Generator[Self]:
        """Check that the run can be kept here, and lock the file against other processes.

        Raises:
            PlannerInvalidConfigurationError: If the file cannot be written, or another process has locked it.
        """
        folder = self._target.parent
        if self._target.is_dir():
            raise PlannerInvalidConfigurationError(f"{self.path} is a directory; name a file for the checkpoint.")
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise PlannerInvalidConfigurationError(
                f"The checkpoint cannot be written to {self.path}: {folder} is no directory that can be written to."
            )
        try:
            descriptor = take_lock(self._lock)
        except StoreError as error:
            raise PlannerInvalidConfigurationError(f"{self.path} cannot be locked. {error}") from None
        if descriptor is None:
            raise PlannerInvalidConfigurationError(
                f"{self.path} is in use: another process works on this run. Nothing was run here. Try again when it "
                "has ended."
            )
        try:
            yield self
        finally:
            drop_lock(self._lock, descriptor)

    def read(self) -> Checkpoint:
        """Read the run.

        Raises:
            PlannerInvalidConfigurationError: If the file cannot be read.
            InvalidCheckpointError: If it holds no checkpoint, an altered one, or one signed with another key.
        """
        variable, key = signing_key()
        try:
            checkpoint = Checkpoint.from_json(read_file(self._target, "checkpoint"), key)
        except OSError as error:
            raise PlannerInvalidConfigurationError(f"{self.path} cannot be read: {error.strerror}.") from None
        except InvalidJournalError as error:
            hint = f" The key is that of {variable}." if variable else ""
            raise InvalidCheckpointError(f"{self.path} cannot be used. {error}{hint}") from None
        if key is None and checkpoint.is_signed:
            raise InvalidCheckpointError(
                f"{self.path} is signed, and PLANNER_EXT_KEY is not set. Set {' or '.join(KEY_VARIABLES)} to the key "
                "that it was signed with."
            )
        return checkpoint

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the run atomically: a reader sees the old file or the new one; its mode is 0600.

        Raises:
            PlannerInvalidConfigurationError: If it cannot be written; then the old file is unchanged.
        """
        text = checkpoint.to_json(signing_key()[1])
        try:
            number, name = tempfile.mkstemp(dir=self._target.parent, prefix=f".{self._target.name}.")  # with mode 0600
            try:
                with open(number, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, self._target)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            problem = f"The checkpoint cannot be written to {self.path}: {error.strerror}."
            raise PlannerInvalidConfigurationError(problem) from None
