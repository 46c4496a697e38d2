"""Commands on a store that need no kernel and do not import Semantic Kernel: they list, show, decide and cancel."""

import json
import os
import shlex
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Unpack

from rich.cells import cell_len
from rich.text import Text

from planner_ext.approval.decisions import Approve, Authorize, Decision, Supply
from planner_ext.cli.options import STORE_VARIABLE, DecisionArgs, ExitCode, ListArgs, RunListArgs, signing_key
from planner_ext.cli.text import Terminal, json_document, moment_text, shortened, warnings_shown
from planner_ext.core.errors import InvalidJournalError, counted, shown
from planner_ext.core.text import exact, exact_json, one_line, printable, visible
from planner_ext.durable import (
    ApprovalRefusedError,
    Approvals,
    DecisionRecord,
    PendingApproval,
    RunRecord,
    Runs,
    RunsClient,
    WorkerOptions,
    archive,
    heartbeat,
)
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.errors import is_address, redacted
from planner_ext.durable.listing import RunFilters
from planner_ext.durable.sqlite import new_file
from planner_ext.durable.store import opened_store
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.document import read_file


@asynccontextmanager
async def opened_runs(where: str, **options: Unpack[WorkerOptions]) -> AsyncGenerator[Runs, None]:
    """Open a store to drive runs in it; a missing SQLite file is created.

    Args:
        where: The file, or a ``postgresql://`` address.
        **options: See `WorkerOptions`.

    Raises:
        StoreError: If it cannot be used.
        WorkerInUseError: If a living worker has this name.
    """
    opening = Runs.postgres if is_address(where) else Runs.sqlite
    async with opening(where, **options) as opened:
        yield opened


def store_name(where: str) -> str:
    """Return a store's name, without the password in its address."""
    return printable(redacted(where))


def command_on(where: str, *words: str) -> str:
    """Build a shell command of this program on a store, without the password in its address."""
    known = os.environ.get(STORE_VARIABLE) == where
    option = [] if known else ["--store", store_name(where)]
    return shlex.join(["planner-ext", *words, *option])


Hooks = Callable[[], Awaitable[tuple[Authorize, ...]]]
"""Gives the ``authorize`` hooks of an application."""


def hooks_of_app(app: str | None) -> Hooks:
    """Start the application that ``--app`` names, before an event loop runs; without one there is no hook.

    Raises:
        PlannerInvalidConfigurationError: If it cannot be used.
    """
    if app is not None:
        from planner_ext.cli.application import started_hook  # noqa: PLC0415  (imports Semantic Kernel)

        return started_hook(app)

    async def none() -> tuple[Authorize, ...]:
        return ()

    return none


_P = ParamSpec("_P")
_Action = Coroutine[None, None, int]


def under_hooks(action: Callable[Concatenate[Hooks, _P], _Action]) -> Callable[Concatenate[str | None, _P], _Action]:
    """Let an action take what ``--app`` names in place of its hooks; see `hooks_of_app`."""

    @wraps(action)
    def begun(app: str | None, *args: _P.args, **kwargs: _P.kwargs) -> _Action:
        return action(hooks_of_app(app), *args, **kwargs)

    return begun


@asynccontextmanager
async def opened_client(where: str, hooks: Hooks, *, create: bool = False) -> AsyncGenerator[RunsClient]:
    """Open a store to act on its runs under the hooks of an application; a name given as ``--by`` is only typed."""
    doorkeeper = Doorkeeper(authorize=await hooks())
    async with opened_store(where, create=create) as store:
        yield RunsClient(store, doorkeeper=doorkeeper)


async def list_runs(args: RunListArgs) -> int:
    """Print the runs of a store; a damaged row is reported as an error."""
    now = SystemClock().now()
    filters: RunFilters = {
        "goal": args.goal,
        "worker": args.worker,
        "created_after": None if args.created_after is None else args.created_after.timestamp(),
        "created_before": None if args.created_before is None else args.created_before.timestamp(),
        "updated_after": None if args.newer_than is None else now - args.newer_than.total_seconds(),
        "updated_before": None if args.older_than is None else now - args.older_than.total_seconds(),
    }
    async with opened_store(args.store, create=False) as store:
        with warnings_shown("planner_ext.durable"):
            records = await store.runs(
                now=now, limit=args.limit, offset=args.offset, status=args.status or None, **filters
            )
        total = await store.count_runs(status=args.status or None, **filters)
    status = f" is {' or '.join(args.status)}" if args.status else ""
    others = any(given is not None for given in filters.values())
    none = f"No {'such ' if others else ''}run{status} in {store_name(args.store)}."
    return _print_list(args, map(_run_row, records), _run_lines(records, Terminal()), total=total, none=none)


async def print_stats(store: str, *, as_json: bool) -> int:
    """Print the numbers of a store."""
    async with opened_store(store, create=False) as opened:
        stats = await opened.stats(SystemClock().now())
    if as_json:
        print(json_document(asdict(stats)))
        return ExitCode.ANSWERED
    waits = stats.oldest_approval_seconds
    since = "" if waits is None else f"since {moment_text(datetime.now(UTC) - timedelta(seconds=waits))}"
    lines = {
        "runs": stats.total,
        **stats.by_status,
        "waiting for a retry": stats.retrying,
        "oldest approval": since or "none",
    }
    for name, value in lines.items():
        Terminal().print_line((f"{name:<20}", "dim"), f"{value:,}" if isinstance(value, int) else value)
    return ExitCode.ANSWERED


async def list_workers(store: str, *, as_json: bool) -> int:
    """Print the workers of a store."""
    async with opened_store(store, create=False) as opened:
        found = await heartbeat.list_workers(opened)
    if as_json:
        times = ("started_at", "seen_at")
        print(
            json_document([{**asdict(one), **{name: _moment(getattr(one, name)) for name in times}} for one in found])
        )
    elif not found:
        Terminal(sys.stderr).say(f"No worker is in {store_name(store)}.")
    names = max((len(exact(one.name)) for one in found), default=0)
    for one in () if as_json else found:
        place = f"  {one_line(one.host)}, process {one.pid}, seen {moment_text(_moment(one.seen_at))}"
        limit = "" if one.concurrency is None else f" of {one.concurrency}"
        state = (f"  {one.status if one.alive else 'dead':<7}", "" if one.alive else "red")
        driven = f"  drives {len(one.runs)}{limit} {', '.join(map(exact, one.runs))}".rstrip()
        Terminal().print_line((f"{exact(one.name):<{names}}", "bold"), state, driven, (place, "dim"))
    return ExitCode.ANSWERED


async def list_pending(args: ListArgs) -> int:
    """Print the calls and questions that wait in a store; a damaged row is reported as an error."""
    async with Approvals.connect(args.store) as store:
        with warnings_shown("planner_ext.durable"):
            waiting = await store.pending(limit=args.limit, offset=args.offset)
        total = await store.count()
    none = f"Nothing waits in {store_name(args.store)}."
    lines = (line for call in waiting for line in _call_lines(call))
    return _print_list(args, map(asdict, waiting), lines, total=total, none=none)


async def show_pending(id: str, store: str, *, as_json: bool) -> int:
    """Print one call or question in full."""
    async with Approvals.connect(store) as opened:
        call = await opened.show(id)
    if as_json:
        print(json_document(asdict(call)))
    else:
        _print_whole(Terminal(), call)
    return ExitCode.ANSWERED


@under_hooks
async def decide(hooks: Hooks, args: DecisionArgs, decision_on: Callable[[PendingApproval], Decision]) -> int:
    """Store a decision on a call or question, and print what follows from it.

    Args:
        hooks: Say who may decide.
        args: The call, its store, and who decides.
        decision_on: Makes the decision for the call as it is stored.

    Raises:
        ApprovalRefusedError: If the decision does not fit the call, or there is no such call.
        NotAuthorizedError: If the application's hook refuses, or is missing.
    """
    async with opened_client(args.store, hooks) as client:
        store = client.approvals()
        call = await store.show(args.id)
        decision = decision_on(call)
        if call.kind == "question" and isinstance(decision, Approve):
            raise ApprovalRefusedError(
                f"{args.id} is a question of the model: there is nothing in it to approve. Answer it with supply, or "
                "deny it if it gets no answer."
            )
        counts = await store.decide(args.id, decision)
    if not counts:
        Terminal(sys.stderr).say(f"{exact(args.id)} was decided already; nothing changed.")
        return ExitCode.NO_ANSWER
    Terminal().say(f"{exact(args.id)} {_effect(call, decision)}")
    return ExitCode.ANSWERED


@under_hooks
async def cancel_run(hooks: Hooks, run_id: str, store: str, *, by: str | None, reason: str) -> int:
    """End a run of a store."""
    async with opened_client(store, hooks) as client:
        ended = await client.cancel(run_id, by=by or "", reason=reason)
    Terminal(sys.stderr).say(f"{exact(run_id)} {'is cancelled.' if ended else 'had ended before; nothing changed.'}")
    return ExitCode.ANSWERED if ended else ExitCode.NO_ANSWER


@under_hooks
async def delete_run(hooks: Hooks, run_id: str, store: str, *, force: bool, by: str | None) -> int:
    """Delete a run of a store."""
    async with opened_client(store, hooks) as client:
        await client.delete(run_id, force=force, by=by or "")
    Terminal(sys.stderr).say(f"{exact(run_id)} is deleted.")
    return ExitCode.ANSWERED


@under_hooks
async def prune_runs(
    hooks: Hooks, store: str, *, older_than: timedelta, status: str, dry_run: bool, by: str | None
) -> int:
    """Delete the old runs of a store, and print their number."""
    async with opened_client(store, hooks) as client:
        count = await client.prune(older_than=older_than, status=status, dry_run=dry_run, by=by or "")
    print(f"{counted(count, 'run')} {'would be deleted' if dry_run else 'deleted'}.")
    return ExitCode.ANSWERED


async def export_run(run_id: str, store: str, output: Path | None) -> int:
    """Print a run as JSON, or write it into a new file; signed if there is a key."""
    async with opened_store(store, create=False) as opened:
        text = await archive.export_run(opened, run_id, key=signing_key())
    if output is None:
        print(text)
        return ExitCode.ANSWERED
    with new_file(output), output.open("w", encoding="ascii") as file:
        file.write(text)
    return ExitCode.ANSWERED


@under_hooks
async def import_run(hooks: Hooks, file: Path, store: str, *, by: str | None) -> int:
    """Add an exported run to a store; checked if there is a key.

    Raises:
        InvalidJournalError: If the file cannot be read, or holds no run.
        NotAuthorizedError: If the application's hook refuses, or is missing.
    """
    text = _archive_in(file)
    doorkeeper = Doorkeeper(authorize=await hooks())
    async with opened_store(store) as opened:
        name = await archive.import_run(opened, text, key=signing_key(), doorkeeper=doorkeeper, by=by or "")
    Terminal(sys.stderr).say(f"{exact(name)} is in {store_name(store)}.")
    return ExitCode.ANSWERED


def _archive_in(file: Path) -> str:
    try:
        return read_file(file, "run")
    except OSError as error:
        raise InvalidJournalError(f"{file} cannot be read as an exported run: {error}.") from error


async def back_up(file: Path, store: str) -> int:
    """Copy a store into a new file."""
    async with opened_store(store, create=False) as opened:
        await opened.database.backup(file)
    Terminal(sys.stderr).say(f"{store_name(store)} is copied into {printable(str(file))}.")
    return ExitCode.ANSWERED


def edited(arguments: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Apply ``NAME=VALUE`` to arguments, or replace them all by one JSON object.

    An argument that is text stays text, so that an order named 7 does not become a number; other values are read as
    JSON, or else as text.

    Raises:
        ApprovalRefusedError: If a change is neither ``NAME=VALUE`` nor a JSON object.
    """
    if len(changes) == 1 and changes[0].lstrip().startswith("{"):
        try:
            return json.loads(changes[0])
        except (ValueError, RecursionError) as error:
            problem = f"Expected the arguments as one JSON object: {error}. Quote it for the shell."
            raise ApprovalRefusedError(problem) from None
    changed = dict(arguments)
    for change in changes:
        name, sign, written = change.partition("=")
        if not sign or not name:
            raise ApprovalRefusedError(
                f"Expected NAME=VALUE, such as amount=20, or one JSON object with all arguments; got {shown(change)}."
            )
        changed[name] = written if isinstance(arguments.get(name), str) else value_of(written)
    return changed


def value_of(written: str) -> object:
    """Read a value as JSON, or else as text."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


def decision_text(record: DecisionRecord) -> str:
    """Describe a decision: author, time, arguments, and the reason if it was refused."""
    said = f"{record.kind} by {exact(record.by) or 'an unnamed person'}, {moment_text(record.at)}"
    if record.arguments is not None and record.arguments != record.requested:
        before = "" if record.requested is None else f" in place of {exact_json(dict(record.requested))}"
        said += f", with {exact_json(dict(record.arguments))}{before}"
    if record.reason:
        said += f", because: {exact(record.reason)}"
    if record.kind == "supply":
        said += f", with {exact_json(record.result)}"
    if record.always is not None:
        said += f", for the rest of the run: {record.always}"
    return f"{said}; refused: {one_line(record.refused)}" if record.refused else said


def _print_list(
    args: ListArgs, rows: Iterable[Mapping[str, object]], lines: Iterable[Text], *, total: int, none: str
) -> int:
    """Print a part of a list as JSON or as lines, and on stderr which part it is, unless it is the whole list."""
    documents = list(rows)
    errors = Terminal(sys.stderr)
    if len(documents) != total:
        after = f", after the first {args.offset}" if args.offset else ""
        rest = args.offset + args.limit
        more = f"; --offset {rest} shows the next" if rest < total else ""
        errors.say(f"{len(documents)} of {total}{after}{more}.")
    if args.as_json:
        print(json_document(documents))
    elif not total:
        errors.say(none)
    else:
        console = Terminal()
        for line in lines:
            console.print_line(line)
    return ExitCode.ANSWERED


_RUN_HEAD = ("run", "status", "iterations", "calls", "tokens", "cost", "changed")
_NUMBERS = range(2, 6)
"""The columns that are aligned to the right."""


def _run_lines(records: Sequence[RunRecord], console: Terminal) -> Iterable[Text]:
    """Lay out runs: for a terminal a table with what each waits for and its goal below, else a line for each."""
    rows = [_run_cells(record, short=console.is_terminal) for record in records]
    head = [_RUN_HEAD] if console.is_terminal and rows else []
    widths = [max(map(cell_len, column)) for column in zip(*head, *rows, strict=True)]
    for words in head:
        yield Text(_aligned(words, widths), "dim")
    for record, cells in zip(records, rows, strict=True):
        line = _aligned(cells, widths)
        waits = one_line(record.waits_for or record.problem)
        goal = one_line(record.goal)
        name = len(cells[0])
        if not console.is_terminal:
            yield Text.assemble((line[:name], "bold"), line[name:], f"  {waits or '-'}  {goal}")
            continue
        yield Text.assemble((line[:name], "bold"), line[name:].rstrip())
        lead = "    waits for " if record.waits_for else "    "
        for text in filter(None, (lead + waits if waits else "", f"    {goal}")):
            yield Text(shortened(text, console.width, console.signs.more), "dim")


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    padding = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(
        padding[place] + cell if place in _NUMBERS else cell + padding[place] for place, cell in enumerate(cells)
    )


def _run_cells(record: RunRecord, *, short: bool) -> tuple[str, ...]:
    changed = moment_text(_moment(record.updated_at))
    return (
        exact(record.run_id),
        record.status,
        f"{record.iterations:,}",
        f"{record.tool_calls:,}",
        f"{record.tokens:,}",
        "-" if record.cost is None else f"{record.cost:.4g}",
        changed.partition(", ")[2] if short else changed,
    )


def _run_row(record: RunRecord) -> dict[str, object]:
    times = {name: getattr(record, name) for name in ("wake_at", "created_at", "updated_at")}
    return {**asdict(record), **{name: None if at is None else _moment(at) for name, at in times.items()}}


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _effect(call: PendingApproval, decision: Decision) -> str:
    name = exact(call.fully_qualified_name)
    match decision:
        case Supply(result=answer) if call.kind == "question":
            return f"is answered: {visible(answer)}"
        case _ if call.kind == "question":
            return "is left without an answer"
        case Approve(arguments=None):
            return f"is approved with the arguments shown: {name} will run with {exact_json(dict(call.arguments))}"
        case Approve(arguments=arguments):
            return (
                f"is edited, and not checked yet: {name} will run with {exact_json(arguments)} if a worker finds that "
                "they fit it, and wait again if not"
            )
        case Supply(result=result):
            return f"is answered: {name} will not run, its result is {exact_json(result)}"
        case _:
            return f"is denied: {name} will not run"


def _call_lines(call: PendingApproval) -> Iterable[Text]:
    """Format a call in a few lines; its arguments are never cut."""
    doubt = "  IN DOUBT: it may have run already" if call.in_doubt else ""
    until = "" if call.expires_at is None else f"; open until {moment_text(call.expires_at)}"
    called = f"{exact(call.fully_qualified_name)} {exact_json(dict(call.arguments))}"
    lines = [
        Text.assemble((exact(call.id), "bold"), (doubt, "bold red")),
        Text(f"    {_question(call) or called}"),
        Text(f"    {visible(call.prompt)}" if call.kind == "function" and call.prompt else ""),
        Text(f"    for {', '.join(map(exact, call.roles))} to decide" if call.roles else ""),
        Text(f"    not taken: {one_line(call.problem)}" if call.problem else "", "red"),
        Text(f"    waits since {moment_text(call.asked_at)}{until}", "dim"),
    ]
    return filter(None, lines)


def _question(call: PendingApproval) -> str:
    """Return the model's question, as the fingerprint covers it; "" for a call."""
    if call.kind == "function":
        return ""
    question = call.arguments.get("question")
    return f"The model asks: {visible(question) if isinstance(question, str) else exact_json(question)}"


def _print_whole(console: Terminal, call: PendingApproval) -> None:
    if question := _question(call):
        console.print_line((question, "bold"))
    called = {
        "question": visible(call.prompt),
        "arguments": exact_json(dict(call.arguments), indent=2),
        "function": exact(call.fully_qualified_name),
    }
    rows = {
        "run": exact(call.run_id),
        "goal": printable(call.goal),
        **({} if question else called),
        "call": exact(call.id),
        "roles": ", ".join(map(exact, call.roles)),
        "in doubt": "it had started when its process died, and may have taken effect" if call.in_doubt else "",
        "not taken": printable(call.problem),
        "status": call.status + (f", decided {moment_text(call.decided_at)}" if call.decided_at else ""),
        "decided": "" if call.decision is None else decision_text(call.decision),
        "refused": "\n".join(map(decision_text, call.refused)),
        "waits since": moment_text(call.asked_at),
        "open until": moment_text(call.expires_at) if call.expires_at else "",
        "fingerprint": exact(call.fingerprint),
    }
    for name, value in rows.items():
        if value:
            console.print_line((f"{name:<13}", "dim"), value, indent=13)
