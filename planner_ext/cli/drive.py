"""Runs of a store that this process drives: started, resumed, shown, or taken by a worker."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from planner_ext import ApprovalPolicy, Budget, FunctionCallingStepwisePlanner
from planner_ext.cli.approvals import decision_text
from planner_ext.cli.command import ExitCode
from planner_ext.cli.health import answering_probes
from planner_ext.cli.kernels import Application, started_application
from planner_ext.cli.options import (
    STORE_VARIABLE,
    ActorArgs,
    ForkArgs,
    GoalArgs,
    Hooks,
    RunOptions,
    WorkerArgs,
    no_hooks,
)
from planner_ext.cli.run import (
    CliRun,
    Result,
    document,
    goal_options,
    print_result,
)
from planner_ext.cli.show import Progress, print_pending
from planner_ext.cli.store import (
    acting,
    command_on,
    opened_client,
    opened_runs,
    result_code,
    store_name,
)
from planner_ext.cli.streams import on_signals
from planner_ext.cli.text import Terminal, spent_line, worker_lines_shown
from planner_ext.core.errors import counted
from planner_ext.core.text import one_line, printable
from planner_ext.durable import (
    PendingApproval,
    RetryPolicy,
    RunFencedError,
    RunHandle,
    RunRefusedError,
    Runs,
    StoredRun,
    StoreError,
    UnknownRunError,
    WorkerOptions,
)
from planner_ext.durable.listing import PARKED, next_try
from planner_ext.durable.records import RunRecord, fold_journal
from planner_ext.durable.store import opened_store
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import Fact
from planner_ext.hitl_manager import ApprovalSettings, Decision, ToolCall
from planner_ext.planner.run import result_of
from planner_ext.readable.text import exact
from planner_ext.timeline import page_of

_POLL_SECONDS = 0.25
"""How often a followed run is read."""
_SIGNALS = 2
"""The signals that a worker takes: one drains it, the second cancels what is in flight."""


class StoreRun(CliRun):
    """A run in a store, driven here to its next pause, or its end."""

    def __init__(
        self,
        store: str,
        options: RunOptions,
        *,
        by: str,
        facts: Sequence[Fact] = (),
        hooks: Hooks = no_hooks,
    ) -> None:
        super().__init__(options, by=by, facts=facts)
        self.store = store
        self._hooks = hooks

    def drive_in_store(
        self, begin: Callable[[Runs], Awaitable[RunHandle[Result]]]
    ) -> Result:
        """Start or resume the run, and drive it."""
        return self.drive(self._driven(begin))

    def resume(self, result: Result, decisions: Mapping[str, Decision]) -> Result:  # noqa: ARG002  (it is in the store)
        """Resume the run with decisions, besides those that others have made."""
        return self.resume_in_store(self.run_id, decisions=decisions or None)

    def resume_in_store(self, run_id: str, **more: Any) -> Result:
        """Resume a run of the store; for further options see `Runs.resume`."""
        return self.drive_in_store(
            lambda runs: runs.resume(
                run_id,
                self.planner,
                self.kernel,
                by=self.by,
                streaming=self.options.stream,
                **more,
            )
        )

    def waiting(self, result: Result) -> Sequence[ToolCall]:
        """List the pending calls, as the store has them."""
        open_calls = asyncio.run(_open_calls(self.run_id, result, self.store))
        return open_calls or result.pending

    def interrupted(self) -> None:
        """Print the command that resumes the run."""
        self.explain_fault()

    def explain_fault(self) -> None:
        """Print the command that resumes the run, once it is in the store."""
        if self.run_id:
            status = asyncio.run(_stored(self.run_id, self.store)).record.status
            who = (
                "This resumes it"
                if status in PARKED
                else "A planner-ext worker resumes it, or"
            )
            self.console.say(f"The run is kept. {who}:")
            self.console.print_command(
                command_on(
                    self.store, "runs", "resume", self.run_id, *self.resume_words()
                )
            )

    def explain_pause(self, result: Result) -> None:
        """Print the pending calls, unless just seen, and the commands that continue the run."""
        asyncio.run(
            _print_waiting(
                self.run_id, result, self.store, is_seen=self.prompt is not None
            )
        )
        self.explain_fault()

    async def _driven(
        self, begin: Callable[[Runs], Awaitable[RunHandle[Result]]]
    ) -> Result:
        hooks = await self._hooks() or None
        # No grace: an interrupt does not wait.
        async with opened_runs(self.store, grace_seconds=0, authorize=hooks) as runs:
            handle = await begin(runs)
            if not self.run_id:
                self.console.say(
                    f"Run {exact(handle.run_id)}, kept in {store_name(self.store)}",
                    "dim",
                )
            self.run_id = handle.run_id
            return await self.progress.watch(
                handle.events(after=self.progress.followed)
            )


def start_run(goal: GoalArgs, store: str, options: RunOptions, *, by: str) -> int:
    """Start a run in a store, or continue the one of this name."""
    if goal.timeout is not None:
        raise PlannerInvalidConfigurationError(
            "--timeout and --store contradict each other: a kept run is not cut short. Leave one of them out; "
            f"{STORE_VARIABLE} in the environment counts as --store."
        )
    facts = ()
    if goal.run_id is not None:
        # An unusable store raises when it is opened.
        with suppress(StoreError, UnknownRunError):
            facts = asyncio.run(_stored(goal.run_id, store)).facts
    run = StoreRun(store, options, by=by, facts=facts)

    def first() -> Result:
        run.open(**goal_options(goal))
        return run.drive_in_store(
            lambda runs: runs.start(
                run.planner,
                run.kernel,
                goal.goal,
                run_id=goal.run_id,
                streaming=options.stream,
            )
        )

    return run.execute(first)


def resume_run(
    run_id: str,
    args: ActorArgs,
    options: RunOptions,
    *,
    max_iterations: int | None,
) -> int:
    """Resume a run of a store."""
    facts = asyncio.run(_stored(run_id, args.store)).facts
    limits = fold_journal(run_id, facts).rules.limits
    budget = None
    if max_iterations is not None:
        budget = replace(limits, max_iterations=max_iterations)
    run = StoreRun(args.store, options, by=args.by, facts=facts, hooks=args.hooks)
    return _resumed(run, run_id, budget)


def fork_run(run_id: str, args: ForkArgs, options: RunOptions) -> int:
    """Fork a run, and resume the fork if a kernel or model is given."""
    store = args.store
    console = Terminal(sys.stderr)
    name = asyncio.run(_forked(run_id, args))
    code: int = ExitCode.ANSWERED
    console.say(f"Forked after iteration {args.at}: {exact(name)}")
    if options.kernel is None and options.model is None and options.base_url is None:
        most = ("--max-iterations", str(args.max_iterations or 15))
        console.print_command(
            command_on(
                store, "runs", "resume", name, "--kernel", "MODULE:FACTORY", *most
            )
        )
    else:
        facts = asyncio.run(_stored(name, store)).facts
        limits = fold_journal(name, facts).rules.limits
        if args.max_iterations is not None:
            limits = replace(limits, max_iterations=args.max_iterations)
        run = StoreRun(store, options, by=args.by, facts=facts, hooks=args.hooks)
        code = _resumed(run, name, limits)
    if args.html is not None:
        both = [
            asyncio.run(_stored(one, store)).timeline(now=time.time())
            for one in (run_id, name)
        ]
        _write_page(args.html, page_of(both))
        console.say(f"Written: {printable(str(args.html))}", "dim")
    return code


async def _forked(run_id: str, args: ForkArgs) -> str:
    async with acting(args) as client:
        return await client.fork(
            run_id,
            at=args.at,
            new_run_id=args.run_id,
            instruction=args.instruction,
            by=args.by,
        )


def _resumed(run: StoreRun, run_id: str, budget: Budget | None) -> int:
    def first() -> Result:
        if run.facts:
            run.reopen(fold_journal(run_id, run.facts))
        else:
            run.open()
        return run.resume_in_store(run_id, budget=budget)

    return run.execute(first)


async def show_run(
    run_id: str, store: str, *, follow: bool, html: Path | None, as_json: bool
) -> int:
    """Print a run from its journal, without resuming it."""
    console = Terminal(sys.stderr)
    stored = await _stored(run_id, store)
    record = stored.record
    facts = stored.facts
    # A damaged journal is refused before anything of it is printed.
    fold_journal(run_id, facts)
    if follow or not as_json:
        console.say(
            Text.assemble((exact(run_id), "bold"), f": {one_line(record.goal)}")
        )
        with Progress(console) as progress:
            for fact in facts:
                progress.show(fact)
            if follow:
                record, facts = await _followed(stored, store, progress)
    await _print_run(record, facts, store, as_json=as_json)
    if html is not None:
        _write_page(
            html,
            page_of(
                [replace(stored, record=record, facts=facts).timeline(now=time.time())]
            ),
        )
        console.say(f"Written: {printable(str(html))}", "dim")
    return result_code(record.status) if follow else ExitCode.ANSWERED


def _write_page(file: Path, page: str) -> None:
    try:
        file.write_text(page, "utf-8")
    except OSError as error:
        raise PlannerInvalidConfigurationError(
            f"--html {file} cannot be written: {error}."
        ) from error


async def _followed(
    stored: StoredRun, store: str, progress: Progress
) -> tuple[RunRecord, tuple[Fact, ...]]:
    """Show new facts until the run ends, or waits for a decision."""
    record = stored.record
    facts = stored.facts
    continues = True
    problem = ""
    if record.status == "queued":
        progress.note("queued, waits for a worker")
    async with opened_store(store, create=False) as opened:
        while continues:
            record, continues, news = await opened.load_since(
                record.run_id, len(facts), now=time.time()
            )
            facts += news
            for fact in news:
                progress.show(fact)
            if continues:
                if record.problem not in ("", problem):
                    progress.note(_fault_text(record))
                problem = record.problem
                await asyncio.sleep(_POLL_SECONDS)
    return record, facts


def _fault_text(record: RunRecord) -> str:
    texts = filter(None, (next_try(record), one_line(record.problem)))
    return f"a fault; {': '.join(texts)}"


async def _print_run(
    record: RunRecord, facts: tuple[Fact, ...], store: str, *, as_json: bool
) -> None:
    """Print what progress does not show: decisions, problems, what waits, the result."""
    run_id = record.run_id
    console = Terminal(sys.stderr)
    result = result_of(fold_journal(run_id, facts), facts)
    async with opened_client(store) as client:
        refused = await client.approvals().refused(run_id)
    if as_json:
        shown = {"run_id": run_id, "goal": record.goal, **document(result)}
        shown |= {"status": record.status, "problem": record.problem}
        print(
            json.dumps(
                {**shown, "refused": [one.as_dict() for one in refused]}, indent=2
            )
        )
        return
    for one in (*result.decisions, *refused):
        state = "Decision not taken" if one.refused else "Decision"
        what = " ".join(
            filter(None, (exact(one.call), exact(one.fully_qualified_name)))
        )
        console.say(f"{state} on {what}: {decision_text(one)}")
    if record.problem:
        console.say(f"Problem: {printable(record.problem)}", "red")
    if then := next_try(record):
        console.say(f"Waits for {then}.", "dim")
    if record.unfinished or record.status in PARKED:
        await _print_waiting(run_id, result, store)
        console.say(spent_line(result, ended=record.status), "dim")
    else:
        print_result(result, sys.stdout, console, as_json=False)


async def _stored(run_id: str, store: str) -> StoredRun:
    async with opened_client(store) as client:
        return await client.load(run_id)


async def _open_calls(run_id: str, result: Result, store: str) -> list[PendingApproval]:
    async with opened_client(store) as client:
        return await client.approvals().pending(run_id, limit=len(result.pending))


async def _print_waiting(
    run_id: str, result: Result, store: str, *, is_seen: bool = False
) -> None:
    """Print the calls that the store still has waiting, unless just seen, and the command that decides each."""
    console = Terminal(sys.stderr)
    if not result.pending:
        return
    waiting = await _open_calls(run_id, result, store)
    for call in () if is_seen else waiting:
        print_pending(console, call)
    if rest := len(result.pending) - len(waiting):
        console.say(
            f"{counted(rest, 'call')} decided or expired meanwhile: a worker continues the run."
        )
    if waiting:
        console.say(
            "Decide with these commands, in any process; deny, edit or supply can take the place of approve:"
        )
    for item in waiting:
        words = (
            ("supply", item.id, "ANSWER")
            if item.kind == "question"
            else ("approve", item.id)
        )
        console.print_command(command_on(store, "approvals", *words))


def work(args: WorkerArgs) -> int:
    """Work until a signal, or with ``--once`` until no run is due."""
    # What functions print is not a result.
    with redirect_stdout(sys.stderr), worker_lines_shown(Terminal(sys.stderr)):
        application = started_application(args.app)
        return asyncio.run(_probed(args, application))


async def _probed(args: WorkerArgs, made: Callable[[], Awaitable[Application]]) -> int:
    console = Terminal(sys.stderr)
    probes = nullcontext()
    if args.health is not None:
        probes = answering_probes(args.health, asyncio.get_running_loop())
    with probes as address:
        if address is not None:
            console.say(f"Probes are answered at {address}", "dim")
        return await _worked(args, made, console)


async def _worked(
    args: WorkerArgs, made: Callable[[], Awaitable[Application]], console: Terminal
) -> int:
    application = await made()
    planner = application.planner
    if planner is None:
        console.say(
            f"--app {args.app} gives a kernel alone: its runs have a planner with default options.",
            "dim",
        )
        planner = FunctionCallingStepwisePlanner()
    working = asyncio.create_task(
        _drive(args, _with_options(planner, args), application)
    )

    def end() -> None:
        if not working.cancelling():
            console.say(
                f"Calls in flight have {args.grace:g} s to end; a second signal ends them at once.",
                "dim",
            )
        if working.cancelling() < _SIGNALS:
            working.cancel()

    on_signals(end)
    try:
        return await working
    except asyncio.CancelledError:
        return ExitCode.ANSWERED


def _with_options(
    planner: FunctionCallingStepwisePlanner, args: WorkerArgs
) -> FunctionCallingStepwisePlanner:
    """Add ``--policy`` and ``--ask-all`` to a copy of a planner, after its interceptors."""
    given = args.planner_options()
    if not given:
        return planner
    options = planner.options
    settings = planner.options.approval or ApprovalSettings()
    if args.ask_all and any(
        isinstance(one, ApprovalPolicy) for one in options.interceptors
    ):
        raise PlannerInvalidConfigurationError(
            f"--ask-all and the policy of {args.app} contradict each other: a policy decides every call. Leave "
            "--ask-all out."
        )
    update: dict[str, Any] = {
        "interceptors": (*options.interceptors, *given.get("interceptors", ()))
    }
    if args.ask_all and settings.unmatched == "approve":
        update["approval"] = replace(settings, unmatched="defer")
    planner = copy(planner)
    planner.options = options.model_copy(update=update)
    return planner


async def _drive(
    args: WorkerArgs, planner: FunctionCallingStepwisePlanner, application: Application
) -> int:
    kernel = application.kernel
    arguments_for = application.arguments_for
    options: WorkerOptions = {
        "worker_id": args.worker_id,
        "retry": RetryPolicy(attempts=args.retries + 1),
        "max_deaths": args.max_deaths,
        "lease_seconds": args.lease,
        "grace_seconds": args.grace,
        "authorize": application.authorize,
        "notify": args.notify,
        "notify_key": os.environ.get("PLANNER_EXT_NOTIFY_KEY") or None,
        "heads": args.heads,
        "heads_key": os.environ.get("PLANNER_EXT_HEADS_KEY") or None,
    }
    async with opened_runs(args.store, **options) as runs:
        Terminal(sys.stderr).say(
            f"Worker {runs.worker_id} of {store_name(args.store)}", "dim"
        )
        text = planner.unguarded(kernel)
        if text is not None:
            Terminal(sys.stderr).say(text, "yellow")
        if not args.once:
            await runs.work(
                planner,
                kernel,
                arguments_for=arguments_for,
                max_concurrency=args.max_concurrency,
            )
        codes = {ExitCode.ANSWERED}
        while taken := await runs.recover(planner, kernel, arguments_for=arguments_for):
            results = await asyncio.gather(
                *(handle.result() for handle in taken), return_exceptions=True
            )
            faults = [
                one
                for one in results
                if isinstance(one, BaseException)
                and not isinstance(one, RunFencedError)
            ]
            codes |= {
                ExitCode.UNUSABLE
                if isinstance(fault, RunRefusedError)
                else ExitCode.FAULT
                for fault in faults
            }
        return max(codes)
