"""Runs kept in a store, from the command line: started, gone on with, shown and cancelled."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text
from semantic_kernel import Kernel
from semantic_kernel.exceptions import KernelException

from planner_ext import Budget, FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerResult
from planner_ext.cli.ask import print_pending
from planner_ext.cli.conduct import CANNOT_BE_USED, setup_options, with_trips
from planner_ext.cli.console import (
    ANSWERED,
    FAULT,
    INTERRUPTED,
    NO_ANSWER,
    PAUSED,
    UNUSABLE,
    complain,
    say,
    stderr_console,
)
from planner_ext.cli.durable_approvals import decision_text
from planner_ext.cli.durable_store import command_on, opened_runs, opened_store, store_name
from planner_ext.cli.journey import Journey, Setup
from planner_ext.cli.options import STORE_VARIABLE
from planner_ext.cli.report import document, exit_code, tell
from planner_ext.cli.run import Goal
from planner_ext.cli.show import Progress, spent_line
from planner_ext.cli.text import exact, printable
from planner_ext.core.errors import InvalidJournalError
from planner_ext.core.state import State
from planner_ext.durable import (
    Approvals,
    DecisionRecord,
    PendingApproval,
    RunConflictError,
    RunHandle,
    RunRefusedError,
    Runs,
    StoredRun,
    StoreError,
    UnknownRunError,
)
from planner_ext.durable.cancelling import cancel_run
from planner_ext.durable.rows import fold_journal
from planner_ext.engine.concurrency import SystemClock
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import Fact
from planner_ext.planner.result import result_of

__all__ = ["Kept", "cancel_kept", "resume_kept", "show_run", "start_kept"]

_CANNOT_BE_USED = (
    *CANNOT_BE_USED,
    InvalidJournalError,
    RunConflictError,
    RunRefusedError,
    StoreError,
    UnknownRunError,
)

_Result = FunctionCallingStepwisePlannerResult
_Begin: TypeAlias = Callable[[Runs, FunctionCallingStepwisePlanner, Kernel], Awaitable[RunHandle[_Result]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where a run is kept, and its name; None has one made."""

    store: str = field(repr=False)
    run_id: str | None = None


def start_kept(goal: Goal, kept: Kept, setup: Setup) -> int:
    """Start a run in a store, or go on with the one of this name; return the exit code."""

    async def begin(runs: Runs, planner: FunctionCallingStepwisePlanner, kernel: Kernel) -> RunHandle[_Result]:
        return await runs.start(planner, kernel, goal.text, run_id=kept.run_id)

    def prepare(console: Console) -> tuple[Journey, Callable[[], None]]:
        for name, given in (("--checkpoint", goal.checkpoint), ("--timeout", goal.timeout)):
            if given is not None:
                raise PlannerInvalidConfigurationError(
                    f"{name} and --store contradict each other: a kept run is not cut short, and needs no file. Leave "
                    f"one of them out; {STORE_VARIABLE} in the environment counts as --store."
                )
        journey = Journey(setup, console, facts=asyncio.run(_known_facts(kept)))
        options: dict[str, Any] = {
            "plan": goal.plan,
            "max_iterations": goal.max_iterations,
            "budget": Budget(max_tool_calls=goal.max_tool_calls),
            "max_clarifications": goal.questions,
        }
        return journey, lambda: journey.open(**options)

    return _conduct(kept, setup, prepare, begin)


def resume_kept(kept: Kept, setup: Setup, *, max_iterations: int | None) -> int:
    """Go on with a run of a store; return the exit code."""
    run_id = kept.run_id or ""
    found: list[State] = []

    def prepare(console: Console) -> tuple[Journey, Callable[[], None]]:
        facts = asyncio.run(_stored(run_id, kept.store)).facts
        found.append(fold_journal(run_id, facts))
        journey = Journey(setup, console, facts=facts)
        return journey, (lambda: journey.reopen(found[0])) if facts else journey.open

    async def begin(runs: Runs, planner: FunctionCallingStepwisePlanner, kernel: Kernel) -> RunHandle[_Result]:
        return await runs.resume(run_id, planner, kernel, budget=with_trips(found[0], max_iterations))

    return _conduct(kept, setup, prepare, begin)


def show_run(run_id: str, where: str, *, as_json: bool) -> int:
    """Tell a run from its journal, without going on with it."""
    stored = asyncio.run(_stored(run_id, where))
    record, facts = stored.record, stored.facts
    result = result_of(fold_journal(run_id, facts), facts)
    refused = asyncio.run(_refused(run_id, where))
    if as_json:
        told = {"run_id": run_id, "goal": record.goal, **document(result), "status": record.status}
        print(json.dumps({**told, "refused": [one.as_dict() for one in refused]}, indent=2))
        return ANSWERED
    console = stderr_console()
    say(console, Text.assemble((exact(run_id), "bold"), f": {printable(record.goal)}"))
    with Progress(console) as progress:
        for fact in facts:
            progress.show(fact)
    for one in (*result.decisions, *refused):
        state = "Not taken" if one.refused else "Decided"
        what = " ".join(filter(None, (exact(one.call), exact(one.fully_qualified_name))))
        say(console, Text(f"{state}, of {what}: {decision_text(one)}"))
    if record.unfinished:
        _tell_what_waits(console, result, where, asyncio.run(_waiting(run_id, result, where)))
        say(console, Text(spent_line(result, ended=record.status), "dim"))
    else:
        tell(result, sys.stdout, console, as_json=False)
    return ANSWERED


async def cancel_kept(run_id: str, where: str, *, by: str | None, reason: str) -> int:
    """End a run of a store."""
    async with opened_store(where) as store:
        ended = await cancel_run(store, run_id, by=by or "", reason=reason, clock=SystemClock())
    text = "is cancelled." if ended else "had ended before; nothing changed."
    say(stderr_console(), Text(f"{exact(run_id)} {text}"))
    return ANSWERED if ended else NO_ANSWER


async def _stored(run_id: str, where: str) -> StoredRun:
    async with opened_store(where) as store:
        return await store.load(run_id)


async def _refused(run_id: str, where: str) -> list[DecisionRecord]:
    async with Approvals.connect(where) as approvals:
        return await approvals.refused(run_id)


async def _known_facts(kept: Kept) -> tuple[Fact, ...]:
    """Read what happened so far in a run that may not be there yet; a store that cannot be used says so when opened."""
    try:
        return () if kept.run_id is None else (await _stored(kept.run_id, kept.store)).facts
    except (StoreError, UnknownRunError):
        return ()


def _conduct(
    kept: Kept, setup: Setup, prepare: Callable[[Console], tuple[Journey, Callable[[], None]]], begin: _Begin
) -> int:
    """Drive a run here to its next pause or end, and put whatever comes of it into words."""
    out, console = sys.stdout, stderr_console()
    names: list[str] = []
    waiting: list[PendingApproval] = []

    async def drive(planner: FunctionCallingStepwisePlanner, kernel: Kernel) -> _Result:
        async with opened_runs(kept.store) as runs:
            handle = await begin(runs, planner, kernel)
            names.append(handle.run_id)
            say(console, Text(f"Run {exact(handle.run_id)}, kept in {store_name(kept.store)}", "dim"))
            result = await handle.result()
            waiting.extend(await _waiting(handle.run_id, result, kept.store))
            return result

    with redirect_stdout(sys.stderr):
        try:
            journey, make_ready = prepare(console)
            with journey:
                make_ready()
                result = journey.drive(drive)
        except _CANNOT_BE_USED as error:
            complain(console, str(error))
            return UNUSABLE
        except KeyboardInterrupt:
            _tell_how_to_go_on(console, kept.store, names, setup)
            return INTERRUPTED
        except Exception as error:  # whatever it is, a command line says it in words
            complain(console, str(error) if isinstance(error, KernelException) else f"{type(error).__name__}: {error}")
            _tell_how_to_go_on(console, kept.store, names, setup)
            return FAULT
        if (code := exit_code(result)) == PAUSED:
            _tell_what_waits(console, result, kept.store, waiting)
            _tell_how_to_go_on(console, kept.store, names, setup)
    tell(result, out, console, as_json=setup.as_json, run_id=names[0])
    return code


async def _waiting(run_id: str, result: _Result, where: str) -> list[PendingApproval]:
    """List the rows of what a paused run waits with: their ids are the names that decisions go by."""
    if not result.pending:
        return []
    async with Approvals.connect(where) as approvals:
        return await approvals.pending(run_id, limit=len(result.pending))


def _tell_what_waits(console: Console, result: _Result, where: str, waiting: Sequence[PendingApproval]) -> None:
    """Show what waits, and for each the command that decides it."""
    for call in result.pending:
        print_pending(console, call)
    if waiting:
        say(console, Text("Decided from this or any other process; a call also with deny, edit or supply:"))
    for item in waiting:
        words = ("supply", item.id, "ANSWER") if item.kind == "question" else ("approve", item.id)
        console.print(Text(f"  {command_on(where, 'approvals', *words)}"), soft_wrap=True)


def _tell_how_to_go_on(console: Console, where: str, names: list[str], setup: Setup) -> None:
    """Say how a run that is kept and unfinished is resumed."""
    for run_id in names:
        say(console, Text("The run is kept. A planner-ext worker resumes it, or:"))
        words = ("runs", "resume", run_id, *setup_options(setup))
        console.print(Text(f"  {command_on(where, *words)}"), soft_wrap=True)
