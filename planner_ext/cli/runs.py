"""One run in a store, from the command line: started, resumed, shown and cancelled."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from rich.text import Text

from planner_ext.cli.approvals import decision_text
from planner_ext.cli.ask import print_pending
from planner_ext.cli.options import STORE_VARIABLE, ExitCode, GoalArgs, RunOptions, StoredRunOptions
from planner_ext.cli.run import (
    CliRun,
    Job,
    Result,
    document,
    execute,
    goal_options,
    new_limits,
    print_result,
    run_words,
)
from planner_ext.cli.show import Progress, spent_line
from planner_ext.cli.store import command_on, opened_runs, store_name
from planner_ext.cli.text import exact, print_command, printable, say, stderr_console
from planner_ext.durable import Approvals, RunHandle, Runs, StoredRun, StoreError, UnknownRunError, writer
from planner_ext.durable.records import fold_journal
from planner_ext.durable.store import opened_store
from planner_ext.engine.concurrency import SystemClock
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.planner.result import result_of

__all__ = ["cancel_run", "resume_run", "show_run", "start_run"]


@dataclass(kw_only=True)
class StoreJob(Job):
    """A run that is kept in a store.

    Attributes:
        store: The store's path or address.
    """

    store: str

    def finish(self) -> Result:
        """Drive the run here to its next pause, or its end."""
        return self.first()

    def drive(self, begin: Callable[[Runs], Awaitable[RunHandle[Result]]]) -> Result:
        """Start or resume the open run in its store, and drive it."""
        return self.run.drive(self._driven(begin))

    def interrupted(self) -> None:
        """Print the command that resumes the run."""
        self.explain_fault()

    def explain_fault(self) -> None:
        """Print the command that resumes the run, if it is already in the store."""
        if self.run_id:
            say(self.run.console, "The run is kept. A planner-ext worker resumes it, or:")
            words = ("runs", "resume", self.run_id, *run_words(self.run.options))
            print_command(self.run.console, command_on(self.store, *words))

    def explain_pause(self, result: Result) -> None:
        """Print the pending calls, and the command that resumes the run."""
        asyncio.run(_print_waiting(self.run_id, result, self.store))
        self.explain_fault()

    async def _driven(self, begin: Callable[[Runs], Awaitable[RunHandle[Result]]]) -> Result:
        async with opened_runs(self.store) as runs:
            handle = await begin(runs)
            self.run_id = handle.run_id
            say(self.run.console, f"Run {exact(handle.run_id)}, kept in {store_name(self.store)}", "dim")
            return await handle.result()


def start_run(goal: GoalArgs, store: str, options: RunOptions) -> int:
    """Start a run in a store, or continue the one of this name; return the exit code."""
    for name, given in (("--checkpoint", goal.checkpoint), ("--timeout", goal.timeout)):
        if given is not None:
            raise PlannerInvalidConfigurationError(
                f"{name} and --store contradict each other: a kept run is not cut short, and needs no file. Leave "
                f"one of them out; {STORE_VARIABLE} in the environment counts as --store."
            )
    facts = ()
    if goal.run_id is not None:
        with suppress(StoreError, UnknownRunError):  # an unusable store raises when it is opened
            facts = asyncio.run(_stored(goal.run_id, store)).facts
    run = CliRun(options, facts=facts)

    def first() -> Result:
        run.open(**goal_options(goal))
        return job.drive(lambda runs: runs.start(run.planner, run.kernel, goal.goal, run_id=goal.run_id))

    job = StoreJob(run=run, first=first, store=store)
    return execute(job)


def resume_run(run_id: str, store: str, options: StoredRunOptions, *, max_iterations: int | None) -> int:
    """Resume a run of a store; return the exit code."""
    facts = asyncio.run(_stored(run_id, store)).facts
    state = fold_journal(run_id, facts)
    run = CliRun(options, facts=facts)

    def first() -> Result:
        if facts:
            run.reopen(state)
        else:
            run.open()
        return job.drive(
            lambda runs: runs.resume(run_id, run.planner, run.kernel, budget=new_limits(state, max_iterations))
        )

    job = StoreJob(run=run, first=first, store=store)
    return execute(job)


async def show_run(run_id: str, store: str, *, as_json: bool) -> int:
    """Print a run from its journal, without resuming it."""
    stored = await _stored(run_id, store)
    record, facts = stored.record, stored.facts
    result = result_of(fold_journal(run_id, facts), facts)
    async with Approvals.connect(store) as approvals:
        refused = await approvals.refused(run_id)
    if as_json:
        shown = {"run_id": run_id, "goal": record.goal, **document(result), "status": record.status}
        print(json.dumps({**shown, "refused": [one.as_dict() for one in refused]}, indent=2))
        return ExitCode.ANSWERED
    console = stderr_console()
    say(console, Text.assemble((exact(run_id), "bold"), f": {printable(record.goal)}"))
    with Progress(console) as progress:
        for fact in facts:
            progress.show(fact)
    for one in (*result.decisions, *refused):
        state = "Not taken" if one.refused else "Decided"
        what = " ".join(filter(None, (exact(one.call), exact(one.fully_qualified_name))))
        say(console, f"{state}, of {what}: {decision_text(one)}")
    if record.unfinished:
        await _print_waiting(run_id, result, store)
        say(console, spent_line(result, ended=record.status), "dim")
    else:
        print_result(result, sys.stdout, console, as_json=False)
    return ExitCode.ANSWERED


async def cancel_run(run_id: str, store: str, *, by: str | None, reason: str) -> int:
    """End a run of a store."""
    async with opened_store(store, create=False) as opened:
        ended = await writer.cancel_run(opened, run_id, by=by or "", reason=reason, clock=SystemClock())
    say(stderr_console(), f"{exact(run_id)} {'is cancelled.' if ended else 'had ended before; nothing changed.'}")
    return ExitCode.ANSWERED if ended else ExitCode.NO_ANSWER


async def _stored(run_id: str, store: str) -> StoredRun:
    async with opened_store(store, create=False) as opened:
        return await opened.load(run_id)


async def _print_waiting(run_id: str, result: Result, store: str) -> None:
    """Print the pending calls and questions, each with the command that decides it."""
    console = stderr_console()
    for call in result.pending:
        print_pending(console, call)
    if not result.pending:
        return
    async with Approvals.connect(store) as approvals:
        waiting = await approvals.pending(run_id, limit=len(result.pending))
    if waiting:
        say(console, "Decided from this or any other process; a call also with deny, edit or supply:")
    for item in waiting:
        words = ("supply", item.id, "ANSWER") if item.kind == "question" else ("approve", item.id)
        print_command(console, command_on(store, "approvals", *words))
