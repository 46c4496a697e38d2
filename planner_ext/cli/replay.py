"""``planner-ext replay``: replays a recorded run of a planner, and prints the differences."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import asdict
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.exceptions import KernelException
from semantic_kernel.functions import (
    KernelFunctionFromMethod,
    KernelParameterMetadata,
    kernel_function,
)

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.approval.decisions import approval_required
from planner_ext.cli.command import ExitCode
from planner_ext.cli.kernels import kernel_of, start_factory
from planner_ext.cli.options import ReplayArgs, RunOptions
from planner_ext.cli.run import CliRun, Result, document, print_result
from planner_ext.core.facts import CallDecided, CallFinished, Clarified, RunStarted
from planner_ext.core.state import READ_RESULT
from planner_ext.core.text import printable
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Approve, Decision, Defer, Supply, ToolCall
from planner_ext.sk.functions.questions import OWN_PLUGIN
from planner_ext.sk.messages import part_of
from planner_ext.testing import ReplayDifferenceError, Tape, replay
from planner_ext.testing.cassette import Cassette


def replay_cassette(args: ReplayArgs) -> int:
    """Replay a cassette, and print the differences."""
    cassette = Cassette.read(args.file)
    functions = args.functions or ("recorded" if args.kernel is None else "live")
    if functions not in ("live", "recorded"):
        raise PlannerInvalidConfigurationError(
            f"--functions must be live or recorded; got {functions!r}."
        )
    run = _ReplayedRun(cassette, args)
    out = sys.stdout
    with (
        redirect_stdout(sys.stderr),
        closing(run),
        replay(args.file, functions=functions, on_difference="collect") as tape,
    ):
        run.open_on(tape)
        try:
            result = run.played()
        except ReplayDifferenceError:
            result = run.stopped("No reply is left on the cassette.")
        except Exception as error:  # as in the recorded run
            result = run.stopped(str(error))
    if args.as_json:
        found = {"differences": [asdict(one) for one in tape.differences]}
        out.write(json.dumps({**document(result), **found}, indent=2) + "\n")
    else:
        print_result(result, out, run.console, as_json=False)
    for one in tape.differences:
        run.console.say(printable(f"Different: {one}"), "red")
    if not tape.differences:
        run.console.say(f"As recorded: {len(cassette.exchanges)} requests.", "dim")
    return ExitCode.NO_ANSWER if tape.differences else ExitCode.ANSWERED


class _ReplayedRun(CliRun):
    """A cassette's first run, decided as recorded."""

    def __init__(self, cassette: Cassette, args: ReplayArgs) -> None:
        super().__init__(RunOptions(kernel=args.kernel, stream=False))
        recorded = ()
        if cassette.runs:
            recorded = cassette.runs[0]
        started = recorded[0] if recorded else None
        if not isinstance(started, RunStarted) or not started.goal:
            raise PlannerInvalidConfigurationError(
                f"{args.file} has no run of a planner; replay it in a test, with planner_ext.testing.replay."
            )
        rules = started.rules
        if (
            rules.structured
            or rules.checked
            or rules.clarifier
            or rules.close_on_denial
            or len(started.messages) > 1
        ):
            raise PlannerInvalidConfigurationError(
                f"The run of {args.file} had a clarifier, a response_format, a callback or a chat history, which no "
                "journal holds; replay it in a test, with planner_ext.testing.replay."
            )
        self._cassette = cassette
        self._started = started
        self._recorded = recorded
        done = (fact for fact in recorded if isinstance(fact, CallFinished))
        self._finished = {(fact.iteration, fact.index, fact.function) for fact in done}

    def open_on(self, tape: Tape) -> None:
        path = self.options.kernel
        started = self._started
        made = _stand_ins(self._cassette) if path is None else start_factory(path)
        self.kernel = tape.kernel(self._runner.run(kernel_of(made, path or "")))
        self._as_recorded = tape.as_recorded
        rules = started.rules
        service = (
            self._cassette.exchanges[0][0].service if self._cassette.exchanges else None
        )
        self.planner = FunctionCallingStepwisePlanner(
            service,
            FunctionCallingStepwisePlannerOptions(
                plan=rules.plan,
                charge_plan=rules.charge_plan,
                control="iterations_metadata"
                if rules.rounds_per_step is None
                else "use_attempts",
                max_iterations=rules.limits.max_iterations,
                budget=rules.limits,
                require_final_answer_function=rules.require_final_answer,
                max_clarifications=rules.max_clarifications,
                observers=(self.note,),
                interceptors=(self._decision,),
            ),
        )

    def played(self) -> Result:
        """Replay the run to its end, or to a pause after which it was not resumed."""
        result = self.drive(self.planner.invoke(self.kernel, self._started.goal))
        while decisions := self._answers(result):
            result = self.drive(
                self.planner.resume(self.kernel, result.checkpoint, decisions)
            )
        return result

    async def _decision(self, call: ToolCall) -> Decision | None:
        """Repeat the last recorded decision on a call.

        A file approves nothing: a call that a person decided, or whose function needs
        an approval, returns its recorded result, or waits.
        """
        place = call.iteration, call.index, call.fully_qualified_name
        facts = [
            fact for fact in reversed(self._recorded) if isinstance(fact, CallDecided)
        ]
        fact = next(
            (
                fact
                for fact in facts
                if (fact.iteration, fact.index, fact.function) == place
            ),
            None,
        )
        if fact is None:
            return None
        if fact.verdict in ("answer", "deny"):
            return Supply(fact.answer, by=fact.by)
        if fact.verdict != "run":
            return None
        if (
            fact.person
            or approval_required(
                self.kernel.get_function(call.plugin_name, call.function_name)
            )
            is not None
        ):
            if place not in self._finished:
                return Defer()
            self._as_recorded.add((self._started.run_id, call.iteration, call.index))
        return Approve(
            arguments=None if fact.edited is None else json.loads(fact.edited),
            by=fact.by,
        )

    def _answers(self, result: Result) -> Mapping[str, Decision]:
        answered = {
            fact.question: fact
            for fact in self._recorded
            if isinstance(fact, Clarified)
        }
        facts = {call.path: answered.get(call.prompt) for call in result.pending}
        return {
            name: Supply(fact.answer, by=fact.by)
            for name, fact in facts.items()
            if fact and fact.answer
        }


def _stand_ins(cassette: Cassette) -> Kernel:
    """Make the offered functions again; they cannot be called."""
    try:
        return _described_kernel(
            tool for asked, _ in cassette.exchanges for tool in asked.tools
        )
    except (AttributeError, TypeError, ValueError, KernelException) as error:
        problem = f"The functions cannot be rebuilt from the cassette ({error}); give --kernel."
        raise PlannerInvalidConfigurationError(problem) from error


def _described_kernel(tools: Iterable[Any]) -> Kernel:
    kernel = Kernel()
    for tool in tools:
        described: Any = part_of(tool, "function") or {}
        called = str(described.get("name", ""))
        plugin, _, name = called.partition("-")
        is_own = plugin == OWN_PLUGIN or called == READ_RESULT
        if (
            not name
            or is_own
            or (plugin in kernel.plugins and name in kernel.plugins[plugin])
        ):
            continue
        schema: Mapping[str, Any] = described.get("parameters") or {}
        required = schema.get("required", ())
        parameters = [
            KernelParameterMetadata.model_validate(
                {
                    "name": key,
                    "is_required": key in required,
                    "type_": str(part.get("type")),
                    "schema_data": part,
                }
            )
            for key, part in schema.get("properties", {}).items()
        ]
        method = _absent(name, described.get("description"))
        kernel.add_function(
            plugin, KernelFunctionFromMethod(method, plugin, parameters=parameters)
        )
    return kernel


def _absent(name: str, description: str | None) -> Callable[..., Any]:
    async def absent(**_: Any) -> str:
        raise LookupError(
            "The cassette has only this function's schema: give --kernel."
        )

    return kernel_function(name=name, description=description)(absent)
