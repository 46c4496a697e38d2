"""``planner-ext run``: one goal on the user's kernel, watched, within a budget.

Progress goes to stderr; stdout gets the answer, or with ``--json`` one JSON document, and nothing else: what the
kernel's own code prints goes to stderr, too.
"""

import asyncio
import json
import math
import sys
import time
from contextlib import AsyncExitStack, aclosing, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TextIO

from rich.console import Console
from rich.text import Text
from semantic_kernel import Kernel
from semantic_kernel.exceptions import KernelException

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.cli.kernels import SERVICE_ID, kernel_of, openai_service, start_factory, with_service
from planner_ext.cli.show import Progress, print_answer, spent_line
from planner_ext.cli.text import printable
from planner_ext.core.fold import fold
from planner_ext.core.settle import stopping_facts
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import Fact, ResultReady
from planner_ext.planner_result import result_of

__all__ = ["Goal", "run_goal"]

_ANSWERED, _NO_ANSWER, _UNUSABLE, _FAULT, _INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked of one run, as it stands on the command line.

    Attributes:
        kernel: ``module:factory``; None is a kernel without functions.
        plan: None plans where there are functions to plan with.
        timeout: Seconds; None is no timeout.
    """

    text: str
    kernel: str | None = None
    base_url: str | None = None
    model: str | None = None
    max_iterations: int = 15
    max_tool_calls: int | None = None
    plan: bool | None = None
    stream: bool = True
    timeout: float | None = None


def run_goal(goal: Goal, *, as_json: bool) -> int:
    """Reach a goal, print what there is to print, and return the exit code."""
    out, console = sys.stdout, stderr_console()
    with redirect_stdout(sys.stderr):
        run = _Run(goal, console)
        try:
            result = run.finish()
            code = _ANSWERED if result.status == "answered" else _NO_ANSWER
        except KeyboardInterrupt:
            result, code = run.stopped("Interrupted from the keyboard."), _INTERRUPTED
        except PlannerInvalidConfigurationError as error:
            _complain(console, str(error))
            return _UNUSABLE
        except Exception as error:  # whatever it is, a command line says it in words
            text = str(error) if isinstance(error, KernelException) else f"{type(error).__name__}: {error}"
            _complain(console, f"{text} {run.endpoint}".strip())
            _say(console, Text(spent_line(run.stopped(""), ended="failed"), "dim"))
            return _FAULT
    _tell(result, out, console, as_json=as_json)
    return code


def stderr_console() -> Console:
    """Make the console for everything that is not the answer."""
    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False)


class _Run:
    """One run, and its journal as far as it came, whatever became of it.

    Attributes:
        endpoint: Where the requests go, in words; "" where the kernel's own service knows it.
    """

    def __init__(self, goal: Goal, console: Console) -> None:
        self._goal = goal
        self._console = console
        self._progress = Progress(console)
        self._facts: list[Fact] = []
        self.endpoint = ""

    def finish(self) -> FunctionCallingStepwisePlannerResult:
        """Run until there is a result: an answer, a limit, the timeout.

        Raises:
            PlannerInvalidConfigurationError: If options, kernel or service cannot be used.
            KeyboardInterrupt: If somebody pressed Ctrl-C; what ran is cancelled.
            Exception: Any fault.
        """
        if self._goal.timeout is not None and not 0 < self._goal.timeout < math.inf:
            raise PlannerInvalidConfigurationError(
                f"--timeout must be a number of seconds above 0; got {self._goal.timeout:g}."
            )
        return asyncio.run(self._reach(Kernel() if self._goal.kernel is None else start_factory(self._goal.kernel)))

    def stopped(self, reason: str) -> FunctionCallingStepwisePlannerResult:
        """Make a result of a run that was cancelled: every call answered, everything spent on the record."""
        if not self._facts:
            return FunctionCallingStepwisePlannerResult(status="stopped", reason=reason)
        state = fold(self._facts)
        rest = () if state.ended is not None else stopping_facts(state, reason=reason, at=time.time())
        facts = (*self._facts, *rest)
        return result_of(fold(facts), facts)

    async def _reach(self, made: object) -> FunctionCallingStepwisePlannerResult:
        goal = self._goal
        async with AsyncExitStack() as stack:
            kernel = await kernel_of(made, goal.kernel or "")
            own_service = goal.kernel is None or goal.base_url is not None or goal.model is not None
            if own_service:
                service = openai_service(goal.base_url, goal.model)
                stack.push_async_callback(service.client.close)
                self.endpoint = f"The endpoint is {service.client.base_url}"
                kernel = with_service(kernel, service)
            planner = self._planner(kernel, SERVICE_ID if own_service else None)
            if not kernel.plugins:
                _say(self._console, Text("The kernel has no functions: the model can only talk. See --kernel.", "dim"))
            scope = asyncio.timeout(goal.timeout)
            try:
                async with scope:
                    return await self._watch(planner, kernel)
            except TimeoutError:
                if not scope.expired():
                    raise
        return self.stopped(f"The timeout of {goal.timeout:g} s was reached.")

    def _planner(self, kernel: Kernel, service_id: str | None) -> FunctionCallingStepwisePlanner:
        goal = self._goal
        if not kernel.services:
            raise PlannerInvalidConfigurationError(
                f"The kernel of {goal.kernel} has no service: give --model (and --base-url), or add one in the factory."
            )
        return FunctionCallingStepwisePlanner(
            service_id,
            FunctionCallingStepwisePlannerOptions(
                max_iterations=goal.max_iterations,
                budget=Budget(max_tool_calls=goal.max_tool_calls),
                plan=bool(kernel.plugins) if goal.plan is None else goal.plan,
                observers=(self._note,),
            ),
        )

    def _note(self, fact: Fact) -> None:
        self._facts.append(fact)
        if not self._goal.stream:
            self._progress.show(fact)

    async def _watch(
        self, planner: FunctionCallingStepwisePlanner, kernel: Kernel
    ) -> FunctionCallingStepwisePlannerResult:
        with self._progress:
            if not self._goal.stream:
                return await planner.invoke(kernel, self._goal.text)
            async with aclosing(planner.invoke_stream(kernel, self._goal.text)) as events:
                async for event in events:
                    self._progress.show(event)
                    if isinstance(event, ResultReady):
                        return event.result
        raise AssertionError("a stream ends with its result")


def _complain(console: Console, text: str) -> None:
    _say(console, Text.assemble(("Error: ", "bold red"), printable(text)))


def _say(console: Console, text: Text) -> None:
    """Print a paragraph; only a terminal gets it wrapped, so that a log can be searched."""
    console.print(text, soft_wrap=not console.is_terminal)


def _tell(result: FunctionCallingStepwisePlannerResult, out: TextIO, console: Console, *, as_json: bool) -> None:
    """Say how it went on stderr, and the answer on stdout: framed for a person, as it is for a pipe."""
    if as_json:
        out.write(json.dumps(_document(result), indent=2) + "\n")
    elif result.final_answer and out.isatty():
        print_answer(Console(file=out, markup=False, highlight=False, emoji=False), result)
    elif result.final_answer:
        out.write(result.final_answer + "\n")
    out.flush()
    if result.reason:
        _say(console, Text(printable(result.reason)))
    _say(console, Text(spent_line(result), "dim"))


def _document(result: FunctionCallingStepwisePlannerResult) -> dict[str, object]:
    """Write a result as plain JSON values; the messages as OpenAI's API has them."""
    return {
        "status": result.status,
        "final_answer": result.final_answer,
        "iterations": result.iterations,
        "tool_calls": result.tool_calls,
        "usage": {**asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "limit": result.limit,
        "reason": result.reason,
        "pending": [call.as_dict() for call in result.pending],
        "plan": result.plan,
        "chat_history": [message.to_dict() for message in result.chat_history or ()],
    }
