"""One run on the user's kernel, decided at the terminal. `drive` keeps one in a store.

Stdout gets only the answer, or with ``--json`` one document; progress and the output of
the kernel's own code go to stderr. No event loop runs while a run is paused, so a
person may take any time to decide.
"""

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TextIO

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
from planner_ext.approval.waiting import waiting_everywhere
from planner_ext.cli.ask import ApprovalPrompt, is_terminal
from planner_ext.cli.command import ExitCode
from planner_ext.cli.kernels import (
    SERVICE_ID,
    kernel_of,
    openai_service,
    start_factory,
    with_service,
)
from planner_ext.cli.options import GoalArgs, RunOptions
from planner_ext.cli.show import Progress, print_answer, print_pending
from planner_ext.cli.text import Terminal, spent_line
from planner_ext.core.errors import described
from planner_ext.core.fold import fold, sticky_keys
from planner_ext.core.state import State
from planner_ext.core.text import printable
from planner_ext.engine.journal import stopping_facts
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidJournalError,
    PlannerExtError,
    PlannerInvalidConfigurationError,
)
from planner_ext.events import Fact
from planner_ext.hitl_manager import Decision, ToolCall
from planner_ext.planner.run import result_of

Result = FunctionCallingStepwisePlannerResult

_EXIT_CODES = {
    "answered": ExitCode.ANSWERED,
    "paused": ExitCode.PAUSED,
    "asked": ExitCode.PAUSED,
}
"""Of each status; any other has `ExitCode.NO_ANSWER`."""

_KEPT_OPTIONS = ("kernel", "base_url", "model", "policy")
"""Options that the command which continues a run repeats, beside ``--ask-all``."""


def run_goal(goal: GoalArgs, options: RunOptions, *, by: str) -> int:
    """Reach a goal."""
    if goal.timeout is not None and not 0 < goal.timeout < math.inf:
        raise PlannerInvalidConfigurationError(
            f"--timeout must be a number of seconds above 0; got {goal.timeout:g}."
        )
    run = CliRun(options, by=by, timeout=goal.timeout)

    def first() -> Result:
        run.open(observers=(run.note,), **goal_options(goal))
        return run.begin(goal.goal)

    return run.execute(first)


class CliRun:
    """One run on the user's kernel, with its progress, decided at the terminal.

    Attributes:
        by: Who decides, for the record.
        prompt: None without a terminal.
        run_id: The run's name, if it is in a store.
        planner: Set by `open`, as the kernel is.
    """

    planner: FunctionCallingStepwisePlanner
    kernel: Kernel

    def __init__(
        self,
        options: RunOptions,
        *,
        by: str = "",
        facts: Sequence[Fact] = (),
        timeout: float | None = None,
    ) -> None:
        self.options = options
        self.by = by
        self.console = Terminal(sys.stderr)
        self.facts = list(facts)
        self.run_id = ""
        self.prompt = ApprovalPrompt(self.console, by=by) if is_terminal() else None
        self._timeout = self._seconds_left = timeout
        self.progress = Progress(self.console)
        self.progress.catch_up(facts)
        self._runner = asyncio.Runner()
        self._working = False
        self._service: OpenAIChatCompletion | None = None

    def open(self, *, plan: bool | None = None, **options: Any) -> None:
        """Make kernel, service and planner; ``plan`` None plans if the kernel has functions."""
        given = self.options
        service_id = None
        approval = given.planner_options()
        made = Kernel() if given.kernel is None else start_factory(given.kernel)
        self.kernel = self._runner.run(kernel_of(made, given.kernel or ""))
        if (
            given.kernel is None
            or given.base_url is not None
            or given.model is not None
        ):
            self._service = openai_service(given.base_url, given.model)
            service_id = SERVICE_ID
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
                **approval,
                **options,
            ),
        )
        self._warn(approval.get("interceptors", ()))

    def reopen(self, state: State) -> None:
        """Make the same for a run that is resumed, with the options in its rules."""
        rules = state.rules
        self.open(
            plan=rules.plan,
            require_final_answer_function=rules.require_final_answer,
            max_clarifications=rules.max_clarifications,
        )

    def begin(self, goal: str) -> Result:
        """Drive a new run to its first pause, or its end."""
        if self.options.stream:
            return self.drive(
                self.progress.watch(self.planner.invoke_stream(self.kernel, goal))
            )
        return self.drive(self.planner.invoke(self.kernel, goal))

    def resume(self, result: Result, decisions: Mapping[str, Decision]) -> Result:
        """Drive a paused run on; if a decision is refused, none is taken."""
        if self.options.stream:
            return self.drive(
                self.progress.watch(
                    self.planner.resume_stream(
                        self.kernel, result.checkpoint, decisions
                    )
                )
            )
        return self.drive(
            self.planner.resume(self.kernel, result.checkpoint, decisions)
        )

    def close(self) -> None:
        """Close the service and the event loop, unless the run still works in it."""
        if self._working:
            return
        with self._runner:
            if self._service is not None:
                self._runner.run(self._service.client.close())

    def drive(self, part: Coroutine[Any, Any, Result]) -> Result:
        """Await a part of the run, within the rest of the timeout, and show its progress."""
        return self._runner.run(self._timed(part))

    def execute(self, first: Callable[[], Result]) -> int:
        """Open and drive the run with ``first``, then decide, resume and print it."""
        out = sys.stdout
        with redirect_stdout(sys.stderr), closing(self):
            try:
                result = first()
                while (following := self._next(result)) is not None:
                    result = following
                code = _EXIT_CODES.get(result.status, ExitCode.NO_ANSWER)
            except KeyboardInterrupt:
                # The rest is short, and stores the run.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                result = self.interrupted()
                code = ExitCode.INTERRUPTED
            except Exception as error:
                if _is_unusable(error):
                    raise
                self.console.complain(self._fault_text(error))
                self.explain_fault()
                return ExitCode.FAULT
            if code == ExitCode.PAUSED and result is not None:
                self.explain_pause(result)
        if result is not None:
            print_result(
                result,
                out,
                self.console,
                as_json=self.options.as_json,
                run_id=self.run_id,
            )
        # A second Ctrl-C came while a call did not let itself be cancelled.
        if self._working:
            sys.stderr.flush()
            os._exit(code)
        return code

    def interrupted(self) -> Result | None:
        """Return the result of a run that Ctrl-C stops, or None if it is kept."""
        return self.stopped("Interrupted from the keyboard.")

    def explain_fault(self) -> None:
        """Print what was spent."""
        self.console.say(spent_line(self.stopped(""), ended="failed"), "dim")

    def explain_pause(self, result: Result) -> None:
        """Print the pending calls, unless just seen, and how such a run is kept."""
        if self.prompt is not None:
            self.console.say(
                "Left undecided, and not kept. With --store FILE a run waits in a store instead."
            )
            return
        for call in result.pending:
            print_pending(self.console, call)
        self.console.say(
            "This is not a terminal, so these calls cannot be decided here; they did not run. Start again in a "
            "terminal, or with --store FILE, which keeps the run for planner-ext approvals."
        )

    def waiting(self, result: Result) -> Sequence[ToolCall]:
        """List the pending calls, under the ids by which they can be decided elsewhere, too."""
        return result.pending

    def resume_words(self) -> list[str]:
        """Return options for the command that continues the run."""
        given = {
            f"--{name.replace('_', '-')}": getattr(self.options, name)
            for name in _KEPT_OPTIONS
        }
        words = [
            word
            for name, value in given.items()
            if value is not None
            for word in (name, str(value))
        ]
        if self.options.ask_all:
            return ["--ask-all", *words]
        return words

    def stopped(self, reason: str) -> Result:
        """Return a cancelled run's result: every call is answered, everything spent is counted."""
        if not self.facts:
            return Result(status="stopped", reason=reason)
        state = fold(self.facts)
        rest = (
            ()
            if state.ended is not None
            else stopping_facts(state, reason=reason, at=time.time())
        )
        facts = (*self.facts, *rest)
        result = result_of(fold(facts), facts)
        return (
            result.model_copy(update={"reason": reason})
            if result.status == "stopped" and reason
            else result
        )

    def _next(self, result: Result) -> Result | None:
        """Resume a paused run; None if it has ended, or a call is left undecided.

        Each decision is recorded before the next question.
        """
        if result.status not in ("paused", "asked"):
            return None
        if any(
            call.expires_at is not None and datetime.now(UTC) >= call.expires_at
            for call in result.pending
        ):
            return self.resume(result, {})
        if self.prompt is None:
            return None
        waiting = self.waiting(result)
        call = next((one for one in waiting if _is_approved_already(one, result)), None)
        if call is not None:
            decision = self.prompt.remembered(call)
        else:
            call = waiting[0]
            decision = self.prompt.decide(call, more=len(waiting) - 1)
        if decision is None:
            return None
        try:
            return self.resume(result, {call.path: decision})
        except DecisionRefusedError as error:
            self.prompt.refuse(call, decision, str(error))
            return self.resume(result, {})

    async def _timed(self, part: Coroutine[Any, Any, Result]) -> Result:
        """Await a part within the rest of the timeout; the time between parts does not count."""
        began = time.monotonic()
        scope = asyncio.timeout(self._seconds_left)
        if self._seconds_left is not None:
            self.progress.until = time.time() + self._seconds_left
        self._working = True
        try:
            with self.progress:
                async with scope:
                    return await part
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._working = False
            if self._seconds_left is not None:
                self._seconds_left -= time.monotonic() - began
        return self.stopped(f"The timeout of {self._timeout:g} s was reached.")

    def _warn(self, policies: Sequence[ApprovalPolicy]) -> None:
        if not self.kernel.plugins:
            self.console.say(
                "The kernel has no functions: the model can only talk. See --kernel.",
                "dim",
            )
        known = [
            (each.plugin_name or "", each.name)
            for each in self.kernel.get_full_list_of_function_metadata()
        ]
        for policy in policies:
            for number in policy.unused_rules(known):
                self.console.say(
                    f"Rule {number} of the policy is for no function of this kernel.",
                    "yellow",
                )
            for number, name in policy.unknown_after(known):
                self.console.say(
                    f"Rule {number} of the policy is for calls after {name}: no such function.",
                    "yellow",
                )

    def note(self, fact: Fact) -> None:
        """Observe a run that is not kept."""
        self.facts.append(fact)
        if not self.options.stream:
            self.progress.show(fact)

    def _fault_text(self, error: Exception) -> str:
        text = str(error) if isinstance(error, KernelException) else described(error)
        return (
            text
            if self._service is None
            else f"{text} The endpoint is {self._service.client.base_url}"
        )


def _is_approved_already(call: ToolCall, result: Result) -> bool:
    """Whether an approval for the rest of the run, given later, covers this call."""
    run, waiting = waiting_everywhere(result.checkpoint.state())[call.path]
    fact = waiting.decided_fact
    keys = sticky_keys(
        fact.function, fact.digest, fact.signature, source=fact.source, roles=fact.roles
    )
    return not run.state.sticky.isdisjoint(keys.values())


def _is_unusable(error: Exception) -> bool:
    """Whether an error is not the run's, but of the command line, a file, a store or the kernel."""
    if isinstance(error, KernelException):
        return isinstance(
            error,
            DecisionRefusedError
            | InvalidJournalError
            | PlannerInvalidConfigurationError,
        )
    return isinstance(error, PlannerExtError)


def print_result(
    result: Result, out: TextIO, console: Terminal, *, as_json: bool, run_id: str = ""
) -> None:
    """Print the answer on stdout, the summary on stderr."""
    if as_json:
        named = {"run_id": run_id} if run_id else {}
        out.write(json.dumps({**named, **document(result)}, indent=2) + "\n")
    elif result.final_answer and out.isatty():
        print_answer(Terminal(out), result)
    elif result.final_answer:
        out.write(result.final_answer + "\n")
    out.flush()
    if result.reason:
        console.say(printable(result.reason))
    console.say(spent_line(result), "dim")


def document(result: Result) -> dict[str, object]:
    """Convert a result to JSON values, with messages in OpenAI's format."""
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
    """Return the planner's options for a new run."""
    return {
        "plan": goal.plan,
        "max_iterations": goal.max_iterations,
        "budget": Budget(max_tool_calls=goal.max_tool_calls),
        "max_clarifications": goal.questions,
    }
