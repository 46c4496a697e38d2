"""``planner-ext run``: reaches a goal on the user's kernel, within a budget; and the code that running commands share.

Progress goes to stderr. Stdout gets only the answer, or with ``--json`` one JSON document; the output of the kernel's
own code goes to stderr, too. No event loop runs while a run is paused, so a person may take any time to decide, and
Ctrl-C works as in any program.
"""

import asyncio
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, TextIO

from rich.console import Console
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.exceptions import KernelException

from planner_ext import (
    ApprovalPolicy,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.approval.pending import waiting_calls
from planner_ext.cli.ask import ApprovalPrompt, print_pending, terminal_prompt
from planner_ext.cli.checkpoint_file import CheckpointFile, FileJournal, environment_key
from planner_ext.cli.kernels import SERVICE_ID, kernel_of, openai_service, start_factory, with_service
from planner_ext.cli.options import ApprovalArgs, ExitCode, GoalArgs, RunOptions, StoredRunOptions
from planner_ext.cli.show import Progress, print_answer, spent_line
from planner_ext.cli.text import complain, print_command, printable, say, stderr_console
from planner_ext.core.fold import fold, sticky_keys
from planner_ext.core.state import State
from planner_ext.core.termination import stopping_facts
from planner_ext.durable.worker import Activation
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidJournalError,
    PlannerExtError,
    PlannerInvalidConfigurationError,
)
from planner_ext.events import Fact
from planner_ext.hitl_manager import ApprovalSettings, Checkpoint, Decision, PendingCall
from planner_ext.planner.result import result_of

__all__ = [
    "CliRun",
    "Job",
    "Result",
    "approval_options",
    "document",
    "execute",
    "goal_options",
    "new_limits",
    "print_result",
    "run_goal",
    "run_words",
]

Result = FunctionCallingStepwisePlannerResult

_EXIT_CODES = {"answered": ExitCode.ANSWERED, "paused": ExitCode.PAUSED, "asked": ExitCode.PAUSED}
"""The exit code of each status; any other is `ExitCode.NO_ANSWER`."""


def run_goal(goal: GoalArgs, options: RunOptions) -> int:
    """Reach a goal; return the exit code."""
    file = None if goal.checkpoint is None else CheckpointFile(goal.checkpoint)
    with nullcontext() if file is None else file.locked():
        if goal.timeout is not None and not 0 < goal.timeout < math.inf:
            raise PlannerInvalidConfigurationError(
                f"--timeout must be a number of seconds above 0; got {goal.timeout:g}."
            )
        run = CliRun(options, stream=options.stream, timeout=goal.timeout, file=file)

        def first() -> Result:
            run.open(**goal_options(goal))
            return run.start(goal.goal)

        prompt = terminal_prompt(run.console, by=options.by) if file is None else None
        return execute(Job(run=run, first=first, prompt=prompt))


class CliRun:
    """One run on the user's kernel, with progress and journal, from its start or its checkpoint to its end.

    Attributes:
        options: The options from the command line.
        console: Shows the progress.
        endpoint: A sentence that names the endpoint; "" for the kernel's own service.
        file: Stores the run, after each stretch and while it is resumed; None does not store it.
        planner: Set by `open`.
        kernel: Set by `open`.
    """

    planner: FunctionCallingStepwisePlanner
    kernel: Kernel

    def __init__(
        self,
        options: StoredRunOptions,
        *,
        stream: bool = False,
        timeout: float | None = None,
        facts: Sequence[Fact] = (),
        file: CheckpointFile | None = None,
    ) -> None:
        """Prepare a new run, or one with the facts of its journal."""
        self.options = options
        self.console = stderr_console()
        self.endpoint = ""
        self._stream = stream
        self._timeout = self._seconds_left = timeout
        self._facts = list(facts)
        self.file = file
        self._progress = Progress(self.console)
        self._progress.catch_up(facts)
        self._runner = asyncio.Runner()
        self._service: OpenAIChatCompletion | None = None

    def close(self) -> None:
        """Close the service that was made for the run, and the event loop."""
        with self._runner:
            if self._service is not None:
                self._runner.run(self._service.client.close())

    def open(self, *, plan: bool | None = None, **options: Any) -> None:
        """Make kernel, service and planner.

        Args:
            plan: None plans if the kernel has functions.
            **options: Further options of the planner.

        Raises:
            PlannerInvalidConfigurationError: If options, kernel or service cannot be used.
            InvalidPolicyError: If the policy cannot be read.
        """
        given, service_id = self.options, None
        approval = approval_options(given)
        made = Kernel() if given.kernel is None else start_factory(given.kernel)
        self.kernel = self._runner.run(kernel_of(made, given.kernel or ""))
        if given.kernel is None or given.base_url is not None or given.model is not None:
            self._service, service_id = openai_service(given.base_url, given.model), SERVICE_ID
            self.endpoint = f"The endpoint is {self._service.client.base_url}"
            self.kernel = with_service(self.kernel, self._service)
        if not self.kernel.services:
            raise PlannerInvalidConfigurationError(
                f"The kernel of {given.kernel} has no service: give --model (and --base-url), or add one in the "
                "factory."
            )
        self.planner = FunctionCallingStepwisePlanner(
            service_id,
            FunctionCallingStepwisePlannerOptions(
                plan=bool(self.kernel.plugins) if plan is None else plan,
                observers=(self._note,),
                checkpoint_key=environment_key(),
                **approval,
                **options,
            ),
        )
        self._warn(approval.get("interceptors", ()))

    def reopen(self, state: State) -> None:
        """Make kernel, service and planner for a run that is resumed, with the options in its rules.

        Raises:
            Exception: As `open`.
        """
        rules = state.rules
        self.open(
            plan=rules.plan,
            require_final_answer_function=rules.require_final_answer,
            max_clarifications=rules.max_clarifications,
        )

    def start(self, goal: str) -> Result:
        """Run to the first pause, or the end.

        Raises:
            KeyboardInterrupt: If Ctrl-C is pressed; the run is cancelled first.
            Exception: Any fault.
        """
        if self._stream:
            return self.drive(self._progress.watch(self.planner.invoke_stream(self.kernel, goal)))
        return self.drive(self.planner.invoke(self.kernel, goal))

    def resume(self, decisions: Mapping[str, Decision], *, max_iterations: int | None = None) -> Result:
        """Resume the run to the next pause, or the end; an interrupted run is recovered first.

        Args:
            decisions: Decisions on pending calls, by call id.
            max_iterations: Replaces the run's limit of round trips; None keeps it.

        Raises:
            DecisionRefusedError: If a decision is invalid; then no decision is taken, and nothing runs.
            Exception: As `start`.
        """
        state = fold(self._facts)
        activation = Activation(
            run_id=state.run_id,
            goal=state.goal,
            store=FileJournal(self.file, self._facts),
            facts=tuple(self._facts),
            decisions=decisions,
            budget=new_limits(state, max_iterations),
            reopen=True,
        )
        run = self.planner.journaled(self.kernel, activation, streaming=self._stream)
        return self.drive(self._progress.watch(run.events()) if self._stream else run.result())

    def drive(self, stretch: Coroutine[Any, Any, Result]) -> Result:
        """Await a stretch of the run and show its progress.

        Raises:
            KeyboardInterrupt: If Ctrl-C is pressed; the run is cancelled first.
            Exception: Any fault.
        """
        return self._runner.run(self._timed(stretch))

    def stopped(self, reason: str) -> Result:
        """Return a cancelled run's result: every call has an answer, and everything spent is counted."""
        if not self._facts:
            return Result(status="stopped", reason=reason)
        state = fold(self._facts)
        rest = () if state.ended is not None else stopping_facts(state, reason=reason, at=time.time())
        facts = (*self._facts, *rest)
        result = result_of(fold(facts), facts)
        return result.model_copy(update={"reason": reason}) if result.status == "stopped" and reason else result

    async def _timed(self, stretch: Coroutine[Any, Any, Result]) -> Result:
        """Await a stretch within the rest of the timeout; the time between two stretches does not count."""
        began, scope = time.monotonic(), asyncio.timeout(self._seconds_left)
        try:
            with self._progress:
                async with scope:
                    return await stretch
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            if self._seconds_left is not None:
                self._seconds_left -= time.monotonic() - began
        return self.stopped(f"The timeout of {self._timeout:g} s was reached.")

    def _warn(self, policies: Sequence[ApprovalPolicy]) -> None:
        """Warn of likely mistakes: a kernel without functions, or a rule that matches none of its functions."""
        if not self.kernel.plugins:
            say(self.console, "The kernel has no functions: the model can only talk. See --kernel.", "dim")
        known = [(each.plugin_name or "", each.name) for each in self.kernel.get_full_list_of_function_metadata()]
        for policy in policies:
            for number in policy.unused_rules(known):
                say(self.console, f"Rule {number} of the policy is for no function of this kernel.", "yellow")

    def _note(self, fact: Fact) -> None:
        self._facts.append(fact)
        if not self._stream:
            self._progress.show(fact)


@dataclass(kw_only=True)
class Job:
    """One command's part of a run: drives it, stores it in a file if there is one, and explains how to continue it.

    Attributes:
        run: The run.
        first: Opens the run and drives its first stretch.
        prompt: Asks a person about the pending calls; None leaves them undecided.
        run_id: The run's name, if it is in a store.
    """

    run: CliRun
    first: Callable[[], Result]
    prompt: ApprovalPrompt | None = None
    run_id: str = ""

    def finish(self) -> Result:
        """Drive the run until it ends, or until a call is left undecided."""
        try:
            result = self._kept(self.first())
        except DecisionRefusedError as error:
            if error.changed:
                self._kept(self.run.resume({}))
            raise
        while result.status in ("paused", "asked"):
            if any(call.expires_at is not None and datetime.now(UTC) >= call.expires_at for call in result.pending):
                result = self._kept(self.run.resume({}))
            elif (following := self._decided(result)) is not None:
                result = self._kept(following)
            else:
                break
        return result

    def interrupted(self) -> Result | None:
        """Stop the run and store it; return its result, or None if it is left as it is."""
        return self._kept(self.run.stopped("Interrupted from the keyboard."))

    def keep(self, fault: Exception) -> None:
        """Write the fault's checkpoint to the file."""
        left: object = getattr(fault, "checkpoint", None)
        if self.run.file is not None and isinstance(left, Checkpoint) and left.facts:
            self.run.file.write(left)

    def explain_fault(self) -> None:
        """Print what the run spent."""
        say(self.run.console, spent_line(self.run.stopped(""), ended="failed"), "dim")

    def explain_pause(self, result: Result) -> None:
        """Print the pending calls, unless the person has just seen them, and the command that resumes the run."""
        console = self.run.console
        if self.prompt is None:
            for call in result.pending:
                print_pending(console, call)
        if self.run.file is not None:
            say(console, f"The run is kept in {printable(str(self.run.file.path))}. Resume it with:")
            print_command(
                console, shlex.join(["planner-ext", "resume", str(self.run.file.path), *run_words(self.run.options)])
            )
            say(
                console,
                "Add --answer ID=TEXT for a question, --approve ID, --deny ID=REASON or --edit ID=JSON for a call, or "
                "--cancel REASON; with none of them a terminal asks.",
            )
        elif self.prompt is None:
            say(
                console,
                "This is not a terminal, so these calls cannot be decided here; they did not run. Start again in a "
                "terminal, or with --checkpoint FILE, which keeps the run for planner-ext resume FILE.",
            )
        else:
            say(console, "Left undecided, and not kept. With --checkpoint FILE a run waits in a file instead.")

    def _kept(self, result: Result) -> Result:
        if self.run.file is not None and result.facts:
            self.run.file.write(result.checkpoint)
        return result

    def _decided(self, result: Result) -> Result | None:
        """Ask about the next call, and resume with the decision; one call at a time, so that each one is recorded."""
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
            return self.run.resume({call.id: decision})
        except DecisionRefusedError as error:
            self.prompt.refuse(call, decision, str(error))
            return self.run.resume({}) if error.changed else result


def execute(job: Job) -> int:
    """Execute a command's part of a run, print its result, and return the exit code."""
    out, run = sys.stdout, job.run
    with redirect_stdout(sys.stderr), closing(run):
        try:
            result = job.finish()
            code = _EXIT_CODES.get(result.status, ExitCode.NO_ANSWER)
        except KeyboardInterrupt:
            result, code = job.interrupted(), ExitCode.INTERRUPTED
        except Exception as error:
            job.keep(error)
            if _is_unusable(error):
                raise
            text = str(error) if isinstance(error, KernelException) else f"{type(error).__name__}: {error}"
            complain(run.console, f"{text} {run.endpoint}".strip())
            job.explain_fault()
            return ExitCode.FAULT
        if code == ExitCode.PAUSED and result is not None:
            job.explain_pause(result)
    if result is not None:
        print_result(result, out, run.console, as_json=run.options.as_json, run_id=job.run_id)
    return code


def _is_unusable(error: Exception) -> bool:
    """Whether an error concerns the command line, a file, a store or the kernel, and not the run itself."""
    if isinstance(error, KernelException):
        return isinstance(error, DecisionRefusedError | InvalidJournalError | PlannerInvalidConfigurationError)
    return isinstance(error, PlannerExtError)


def _is_approved_already(call: PendingCall, result: Result) -> bool:
    """Whether an approval for the rest of the run covers this call, which waited before the approval was given."""
    state = result.checkpoint.state()
    fact = next(one.decided for one in waiting_calls(state) if one.request.id == call.id)
    return not state.sticky.isdisjoint(sticky_keys(fact.function, fact.digest, fact.signature).values())


def print_result(result: Result, out: TextIO, console: Console, *, as_json: bool, run_id: str = "") -> None:
    """Print the answer on stdout, framed for a person, and the run's summary on stderr."""
    if as_json:
        named = {"run_id": run_id} if run_id else {}
        out.write(json.dumps({**named, **document(result)}, indent=2) + "\n")
    elif result.final_answer and out.isatty():
        print_answer(Console(file=out, markup=False, highlight=False, emoji=False), result)
    elif result.final_answer:
        out.write(result.final_answer + "\n")
    out.flush()
    if result.reason:
        say(console, printable(result.reason))
    say(console, spent_line(result), "dim")


def document(result: Result) -> dict[str, object]:
    """Convert a result to plain JSON values, with the messages in the format of OpenAI's API."""
    return {
        "status": result.status,
        "final_answer": result.final_answer,
        "iterations": result.iterations,
        "tool_calls": result.tool_calls,
        "usage": {**asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "limit": result.limit,
        "reason": result.reason,
        "pending": [call.as_dict() for call in result.pending],
        "decisions": [record.as_dict() for record in result.decisions],
        "plan": result.plan,
        "chat_history": [message.to_dict() for message in result.chat_history or ()],
    }


def goal_options(goal: GoalArgs) -> dict[str, Any]:
    """Return the planner's options for a new run.

    Raises:
        PlannerInvalidConfigurationError: If a limit is not valid.
    """
    return {
        "plan": goal.plan,
        "max_iterations": goal.max_iterations,
        "budget": Budget(max_tool_calls=goal.max_tool_calls),
        "max_clarifications": goal.questions,
    }


def approval_options(given: ApprovalArgs) -> dict[str, Any]:
    """Return the planner's options for ``--policy`` and ``--ask-all``; empty without them.

    Raises:
        PlannerInvalidConfigurationError: If the two contradict each other, or the file cannot be read.
        InvalidPolicyError: If the file's policy is invalid.
    """
    if given.policy is None:
        return {"approval": ApprovalSettings(unmatched="defer")} if given.ask_all else {}
    if given.ask_all:
        raise PlannerInvalidConfigurationError(
            "--ask-all and --policy contradict each other: a policy decides every call. Leave one of them out; a "
            "policy with only `default: ask` is --ask-all."
        )
    try:
        return {"interceptors": (ApprovalPolicy.from_yaml(given.policy),)}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlannerInvalidConfigurationError(f"--policy {given.policy} cannot be read: {reason}.") from None


def run_words(options: StoredRunOptions) -> list[str]:
    """Return a run's original options as command-line words, for the command that continues it."""
    given = {
        "--kernel": options.kernel,
        "--base-url": options.base_url,
        "--model": options.model,
        "--policy": options.policy,
    }
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return ["--ask-all", *words] if options.ask_all else words


def new_limits(state: State, max_iterations: int | None) -> Budget | None:
    """Return a run's limits with a new limit of round trips; None if there is no new one, which keeps all limits."""
    return None if max_iterations is None else replace(state.rules.limits, max_iterations=max_iterations)
