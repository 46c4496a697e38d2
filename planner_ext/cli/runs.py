"""``planner-ext runs``, ``workers`` and ``budgets``: commands on a store.

Those that drive no run import no Semantic Kernel.
"""

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.text import Text

from planner_ext.budgets import BudgetStore, BudgetUsage
from planner_ext.cli import options as cli
from planner_ext.cli.command import RUN, Exit, ExitCode, command
from planner_ext.cli.store import (
    acting,
    command_on,
    opened_client,
    print_page,
    print_rows,
    result_code,
    say,
    store_name,
)
from planner_ext.cli.text import (
    Terminal,
    json_document,
    moment_text,
    shortened,
    spent_line,
    warnings_shown,
)
from planner_ext.core.errors import (
    InvalidJournalError,
    InvalidLimitError,
    PlannerExtError,
    counted,
    shown,
)
from planner_ext.core.limits import Budget
from planner_ext.core.text import one_line, printable
from planner_ext.durable import RunRecord, RunResult, RunsClient, archive
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.chain import heads_in, verifier_of
from planner_ext.durable.listing import AT_REST, PARKED, UNFINISHED
from planner_ext.durable.sqlite import new_file
from planner_ext.durable.store import opened_store
from planner_ext.durable.verify import verify_archive, verify_store
from planner_ext.engine.document import read_file
from planner_ext.readable.text import exact

group = typer.Typer(rich_markup_mode=None)


@command(group, name="submit")
async def submit_run(args: cli.SubmitArgs, limits: cli.LimitArgs) -> None:
    """Queue a run for the workers of a store, and print its name; this needs neither kernel nor model.

    Limits replace those of the worker's planner; without one, its own hold. --policy,
    --ask-all and the hook of --app bind the run before anybody drives it: a worker that
    lacks them refuses it.

    Examples:
      planner-ext runs submit "Refund order 7." --store runs.db --create --run-id order-7
      planner-ext runs submit "Refund order 7." --store runs.db --argument tenant=acme --max-tool-calls 5
      planner-ext runs submit "Refund order 7." --store runs.db --policy policy.yaml
      planner-ext runs submit "Send the report." --store runs.db --not-before 2026-12-01T06:00 --priority 10
    """
    given = limits.given()
    budget = Budget(**given) if given else None
    async with acting(args, create=args.create) as client:
        submitted = await client.submit(
            args.goal,
            run_id=args.run_id,
            arguments=_arguments(args.argument or ()),
            budget=budget,
            tags=args.tag or (),
            priority=args.priority,
            not_before=args.not_before and args.not_before.astimezone(),
            reuse=args.reuse,
            **args.planner_options(),
        )
    print(submitted.run_id)
    say(f"Queued in {store_name(args.store)}, for a planner-ext worker. Its result:")
    Terminal(sys.stderr).print_command(
        command_on(args.store, "runs", "result", submitted.run_id, "--wait")
    )


def _arguments(given: Sequence[str]) -> dict[str, object]:
    """Read ``NAME=VALUE``; a value is JSON, or else text."""
    arguments: dict[str, object] = {}
    for item in given:
        name, sign, written = item.partition("=")
        if not sign or not name:
            raise InvalidLimitError(
                f"Expected --argument NAME=VALUE, such as tenant=acme; got {shown(item)}."
            )
        arguments[name] = cli.value_of(written)
    return arguments


RESULT_EXIT_CODES = """\
  0    answered
  1    ended without an answer, or has not ended
  2    the store or the run cannot be used
  3    failed, or in quarantine
  4    paused: calls wait for a decision, or questions for an answer
"""


@command(group, exit_codes=RESULT_EXIT_CODES, name="result")
async def show_result(
    run: cli.RunName, store: cli.Store, wait: bool = False, as_json: cli.Json = False
) -> int:
    """Print a run's answer; the rest of its result goes to stderr.

    Examples:
      planner-ext runs result order-7 --store runs.db --wait

    Options:
        wait: Wait until the run ends, or waits for a decision.
    """
    async with opened_client(store) as client:
        if wait:
            await client.wait(run)
        result = await client.result(run)
    if as_json:
        usage = {**asdict(result.usage), "total_tokens": result.usage.total_tokens}
        pending = [call.as_dict() for call in result.pending]
        print(json_document({**asdict(result), "usage": usage, "pending": pending}))
    else:
        _print_result(result, store)
    return result_code(result.status)


def _print_result(result: RunResult, store: str) -> None:
    console = Terminal(sys.stderr)
    if result.final_answer:
        print(
            printable(result.final_answer)
            if sys.stdout.isatty()
            else result.final_answer,
            flush=True,
        )
    for text in filter(None, (result.reason, result.problem)):
        console.say(printable(text))
    if result.pending:
        console.say("It waits for a decision; these commands show on what:")
    for call in result.pending:
        console.print_command(command_on(store, "approvals", "show", call.id))
    console.say(spent_line(result), "dim")


RUNS_EXIT_CODES = """\
  0    done
  1    the run had ended before, or you said no; nothing changed
  2    the store or the run cannot be used; with filters: some of the runs
"""


async def _act(
    chosen: cli.ChosenArgs,
    act: Callable[[RunsClient, str], Awaitable[bool]],
    *,
    statuses: Sequence[str],
    done: str,
    unchanged: str,
) -> int:
    """Act on the chosen runs, as far as each is allowed.

    Args:
        chosen: The runs.
        act: Acts on one run; False if that changes nothing.
        statuses: Those on which it acts if none is given.
        done: What a run is then.
        unchanged: What it was if nothing changed.
    """
    async with acting(chosen) as client:
        if chosen.run is not None:
            changed = await act(client, chosen.run)
            what = f"is {done}." if changed else f"{unchanged}; nothing changed."
            say(f"{exact(chosen.run)} {what}")
            return ExitCode.ANSWERED if changed else ExitCode.NO_ANSWER
        filters = chosen.filters()
        status = chosen.status or statuses
        number = await client.count(status=status, **filters)
        if chosen.dry_run:
            print(f"{counted(number, 'run')} would be {done}.")
            return ExitCode.ANSWERED
        question = f"{counted(number, 'run')} will be {done}. Continue?"
        if number and not chosen.yes and not typer.confirm(question, err=True):
            return ExitCode.NO_ANSWER
        acted = 0
        refused = 0
        async for run_id in client.find(status=status, **filters):
            try:
                acted += await act(client, run_id)
            except PlannerExtError as error:
                refused += 1
                Terminal(sys.stderr).complain(str(error))
    print(f"{acted} of {counted(number, 'run')} {done}.")
    return ExitCode.UNUSABLE if refused else ExitCode.ANSWERED


@command(group, exit_codes=RUNS_EXIT_CODES, name="budget")
def set_budget(chosen: cli.ChosenArgs, limits: cli.LimitArgs) -> Exit:
    """Change limits of runs that have not ended, also while a worker drives them.

    A run's other limits stay; a queued one keeps those that it was submitted with. One
    submitted without limits then has only these, and no longer those of the worker's
    planner: give all that it needs. Its consumption still counts: a limit that is used
    up ends it before its next step.

    Examples:
      planner-ext runs budget order-7 --store runs.db --max-iterations 30
      planner-ext runs budget --store runs.db --tag nightly --max-cost 2
    """
    given = limits.given()
    if not given:
        raise InvalidLimitError(
            "Expected at least one limit, such as --max-iterations 30; got none."
        )

    async def change(client: RunsClient, run: str) -> bool:
        budget = replace(await client.limits(run), **given)
        await client.set_budget(run, budget, by=chosen.by)
        return True

    return _act(
        chosen,
        change,
        statuses=(*UNFINISHED, *PARKED),
        done="given another budget, which its worker takes before the next step",
        unchanged="",
    )


@command(group, name="say")
async def say_to_run(
    run: cli.RunName,
    text: Annotated[str, typer.Argument(metavar="TEXT", show_default=False)],
    args: cli.ActorArgs,
) -> None:
    """Say something to a run that has not ended: the model reads it in its next request.

    While calls wait for a decision it waits, too, and is shown to whoever decides.

    Examples:
      planner-ext runs say order-7 'The customer has moved to Oslo.' --store runs.db --by ann

    Options:
        text: What the model reads.
    """
    async with acting(args) as client:
        await client.say(run, text, by=args.by)
    say(f"{exact(run)} reads it before its next request.")


@command(group, name="list")
async def list_runs(args: cli.RunListArgs) -> None:
    """List runs, the latest change first, with their consumption and what they wait for.

    Examples:
      planner-ext runs list --store runs.db --status paused
      planner-ext runs list --store runs.db --status failed --status quarantined --newer-than 1d
    """
    filters = args.filters()
    status = args.status or None
    async with opened_client(args.store) as client:
        with warnings_shown():
            records = await client.list(
                status=status, limit=args.limit, offset=args.offset, **filters
            )
        total = await client.count(status=status, **filters)
    such = "such " if filters else ""
    named = f" is {' or '.join(status)}" if status else ""
    none = f"No {such}run{named} in {store_name(args.store)}."
    rows = [
        _with_moments(record, "wake_at", "created_at", "updated_at")
        for record in records
    ]
    print_page(args, rows, _run_lines(records, Terminal()), total=total, none=none)


def _with_moments(record: Any, *names: str) -> Mapping[str, object]:
    values = asdict(record)
    return values | {
        name: None if values[name] is None else _moment(values[name]) for name in names
    }


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


_RUN_HEAD = ("status", "iterations", "calls", "tokens", "cost", "changed", "run")
_NUMBERS = range(1, 5)
"""The right-aligned columns."""


def _run_lines(records: Sequence[RunRecord], console: Terminal) -> Iterable[Text]:
    """Lay out runs under the names of their columns: for a terminal in several lines each, else in one.

    The status comes first, and a name stays whole, on a line of its own where it is too
    long for the terminal.
    """
    rows = [_run_cells(record, short=console.is_terminal) for record in records]
    table = [_RUN_HEAD, *rows] if rows else []
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    more = () if console.is_terminal else ("why", "goal")
    for words in table[:1]:
        yield Text("  ".join((_aligned(words, widths), *more)).rstrip(), "dim")
    for record, cells in zip(records, rows, strict=True):
        *figures, name = cells
        line = _aligned(figures, widths[:-1])
        waits = one_line(record.waits_for or record.problem)
        goal = one_line(record.goal)
        if not console.is_terminal:
            padded = _aligned((name,), widths[-1:])
            yield Text(f"{line}  {padded}  {waits or '-'}  {goal}")
            continue
        fits = cell_len(line) + 2 + cell_len(name) <= console.width
        yield Text.assemble(line, "  " if fits else "\n", (name, "bold"))
        lead = "    waits for " if record.waits_for else "    "
        for text in filter(None, (lead + waits if waits else "", f"    {goal}")):
            yield Text(shortened(text, console.width, console.signs.more), "dim")


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    padding = [
        " " * (width - cell_len(cell))
        for cell, width in zip(cells, widths, strict=True)
    ]
    return "  ".join(
        padding[place] + cell if place in _NUMBERS else cell + padding[place]
        for place, cell in enumerate(cells)
    )


def _run_cells(record: RunRecord, *, short: bool) -> tuple[str, ...]:
    changed = moment_text(_moment(record.updated_at))
    return (
        record.status,
        f"{record.iterations:,}",
        f"{record.tool_calls:,}",
        f"{record.tokens:,}",
        "-" if record.cost is None else f"{record.cost:.4g}",
        changed.partition(", ")[2] if short else changed,
        exact(record.run_id),
    )


@command(group, name="stats")
async def print_stats(store: cli.Store, as_json: cli.Json = False) -> None:
    """Count the runs by status, those that wait for a retry, and show how long the oldest approval waits.

    Examples:
      planner-ext runs stats --store runs.db --json
    """
    async with opened_client(store) as client:
        stats = await client.stats()
    if as_json:
        print(json_document(asdict(stats)))
        return
    waits = stats.oldest_approval_seconds
    since = (
        "none"
        if waits is None
        else f"since {moment_text(datetime.now(UTC) - timedelta(seconds=waits))}"
    )
    numbers = {
        "runs": stats.total,
        **stats.by_status,
        "waiting for a retry": stats.retrying,
    }
    for name, number in numbers.items():
        Terminal().print_line((f"{name:<20}", "dim"), f"{number:,}")
    Terminal().print_line((f"{'oldest approval':<20}", "dim"), since)
    if stats.hold is not None:
        hold = stats.hold
        by = f" by {exact(hold.by)}" if hold.by else ""
        reason = f": {one_line(hold.reason)}" if hold.reason else ""
        text = f"since {moment_text(_moment(hold.at))}{by}{reason}"
        Terminal().print_line((f"{'all paused':<20}", "dim"), (text, "yellow"))


@command(group, exit_codes=RUNS_EXIT_CODES, name="retry")
def retry_runs(chosen: cli.ChosenArgs) -> Exit:
    """Let the workers of a store continue runs that failed or are in quarantine.

    Examples:
      planner-ext runs retry order-7 --store runs.db
      planner-ext runs retry --store runs.db --error 429 --newer-than 1d --dry-run
    """

    async def retry(client: RunsClient, run: str) -> bool:
        return await client.retry(run, by=chosen.by)

    return _act(
        chosen,
        retry,
        statuses=PARKED,
        done="left to a worker",
        unchanged="has not failed, and is not in quarantine",
    )


ALL_EXIT_CODES = """\
  0    done
  1    they were so before; nothing changed
  2    the store cannot be used, or the application refuses
"""


@command(group, exit_codes=ALL_EXIT_CODES, name="pause-all")
async def pause_all(args: cli.ActorArgs, reason: cli.Reason = "") -> int:
    """Drive no run of a store, in any process, until resume-all: for an incident.

    No further request or call starts; those in flight end and are recorded. Runs can be
    submitted, decided and cancelled meanwhile. runs stats says that they are paused.

    Examples:
      planner-ext runs pause-all --store runs.db --reason 'refunds go to the wrong account'

    Options:
        reason: Why, for the record.
    """
    async with acting(args) as client:
        changed = await client.pause_all(by=args.by, reason=reason)
    say("All runs are paused." if changed else "All runs were paused before.")
    return ExitCode.ANSWERED if changed else ExitCode.NO_ANSWER


@command(group, exit_codes=ALL_EXIT_CODES, name="resume-all")
async def resume_all(args: cli.ActorArgs) -> int:
    """Let workers drive the runs of a store again, after pause-all.

    Examples:
      planner-ext runs resume-all --store runs.db
    """
    async with acting(args) as client:
        changed = await client.resume_all(by=args.by)
    say("All runs are resumed." if changed else "The runs were not paused.")
    return ExitCode.ANSWERED if changed else ExitCode.NO_ANSWER


@command(group, exit_codes=RUNS_EXIT_CODES, name="cancel")
def cancel_runs(
    chosen: cli.ChosenArgs,
    reason: cli.Reason = "",
) -> Exit:
    """End runs for good, in whichever process; no waiting call runs.

    Examples:
      planner-ext runs cancel order-7 --store runs.db --reason 'too late'
      planner-ext runs cancel --store runs.db --status paused --function bank-pay --yes

    Options:
        reason: Why, for the record.
    """

    async def cancel(client: RunsClient, run: str) -> bool:
        return await client.cancel(run, by=chosen.by, reason=reason)

    return _act(
        chosen,
        cancel,
        statuses=(*UNFINISHED, *PARKED),
        done="cancelled",
        unchanged="had ended before",
    )


@command(group, exit_codes=RUNS_EXIT_CODES, name="delete")
def delete_runs(chosen: cli.ChosenArgs, force: bool = False) -> Exit:
    """Delete runs that have ended, failed or are in quarantine, with all their rows in the store.

    Examples:
      planner-ext runs delete order-7 --store runs.db
      planner-ext runs delete --store runs.db --status stopped --tag test --dry-run

    Options:
        force: Delete a paused run, too; its waiting calls are never decided.
    """

    async def delete(client: RunsClient, run: str) -> bool:
        await client.delete(run, force=force, by=chosen.by)
        return True

    statuses = (*AT_REST, "paused") if force else AT_REST
    return _act(chosen, delete, statuses=statuses, done="deleted", unchanged="")


@command(group, name="prune")
async def prune_runs(
    args: cli.ActorArgs,
    older_than: cli.Age,
    status: Annotated[str, typer.Option(metavar="STATUS")],
    dry_run: bool = False,
) -> None:
    """Delete all runs with a status that have not changed for some time.

    Workers continue meanwhile. An SQLite file does not shrink, its space is used again;
    VACUUM of the sqlite3 tool shrinks it, while no worker runs.

    Examples:
      planner-ext runs prune --older-than 30d --status answered --store runs.db --dry-run

    Options:
        older_than: The time since a run last changed (updated_at in the list): 30d,
            12h, 90m or 45s.
        status: Runs that are answered, incomplete, limit_reached, stopped, failed or
            quarantined.
        dry_run: Only say how many there are.
    """
    async with acting(args) as client:
        count = await client.prune(
            older_than=older_than, status=status, dry_run=dry_run, by=args.by
        )
    print(f"{counted(count, 'run')} {'would be deleted' if dry_run else 'deleted'}.")


@command(group, name="forget")
async def forget_person(
    key: Annotated[str, typer.Option(metavar="KEY")],
    args: cli.ActorArgs,
    rewrite: bool = True,
) -> None:
    """Take a person's texts out of a store: delete the runs with the tag KEY, and replace KEY in shared budgets.

    What was used of a shared budget stays used: a digest replaces the key until the
    period has ended. The files are rewritten, for which writers wait; the rights on the
    database must allow that. Not reached are backups, exports, logs and other stores,
    and of PostgreSQL its log (WAL) and its archive.

    Examples:
      planner-ext runs forget --key user-7 --store runs.db

    Options:
        key: The tag of the person's runs, and the key in shared budgets.
        rewrite: Rewrite the files, so that they do not contain what was deleted.
    """
    async with acting(args) as client:
        count = await client.forget(key, rewrite=rewrite, by=args.by)
    print(f"{counted(count, 'run')} deleted.")


@command(group, name="export")
async def export_run(
    run: cli.RunName, store: cli.Store, output: cli.File = None
) -> None:
    """Write a run as one JSON document: its journal, and the decisions on its calls. It stays in the store.

    If PLANNER_EXT_CHECKPOINT_KEY (or PLANNER_EXT_KEY) is set, the document is signed
    with it.

    Examples:
      planner-ext runs export order-7 --store runs.db --output order-7.json

    Options:
        output: A new file. Default: stdout.
    """
    async with opened_store(store, create=False) as opened:
        text = await archive.export_run(opened, run, key=cli.signing_key())
    if output is None:
        print(text)
        return
    with new_file(output), output.open("w", encoding="ascii") as file:
        file.write(text)


@command(group, name="import")
async def import_run(file: cli.InFile, args: cli.ActorArgs) -> None:
    """Add an exported run to a store, under its name.

    An unfinished run continues in this store. Delete or cancel it in its first store,
    else both stores continue it, and its functions run twice. If
    PLANNER_EXT_CHECKPOINT_KEY (or PLANNER_EXT_KEY) is set, a file without this
    signature is refused. Without a key, anyone who can write the file can put an
    approval in it.

    Examples:
      planner-ext runs import order-7.json --store other.db

    Options:
        file: What runs export wrote.
    """
    text = _exported(file)
    doorkeeper = Doorkeeper(authorize=await args.hooks())
    async with opened_store(args.store) as opened:
        key = cli.signing_key()
        name = await archive.import_run(
            opened, text, key=key, doorkeeper=doorkeeper, by=args.by
        )
    say(f"{exact(name)} is in {store_name(args.store)}.")


@command(group, name="verify")
async def verify_runs(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", show_default=False)
    ] = None,
    store: cli.MaybeStore = None,
    heads: cli.File = None,
    public_key: cli.File = None,
) -> int:
    """Name, for each run, the first fact that was changed, left out, added or put elsewhere; changes nothing.

    The links of a journal show careless changes. Whoever can write to the store can
    compute them anew: only heads that were kept outside it show that, up to the last
    one of each run.

    Examples:
      planner-ext runs verify --store runs.db --heads heads.log
      planner-ext runs verify order-7.json --heads heads.log --public-key heads.pub

    Options:
        file: An exported run in place of a store. PLANNER_EXT_CHECKPOINT_KEY checks its
            signature.
        store: The store, which may be a copy.
        heads: Any text with heads, such as what worker --heads wrote, or notices.
        public_key: Only heads that were signed with its private key count. A PEM file.

    Exit codes:
      0    every fact is the one that was written, as far as the heads say
      1    some are not
      2    the store, the file or the key cannot be used
    """
    if file is None and store is None:
        raise typer.BadParameter("give a store, or a file.", param_hint="FILE")
    is_signed = None
    if public_key is not None:
        is_signed = verifier_of(_text_of(public_key))
    known = heads_in("" if heads is None else _text_of(heads), is_signed)
    if file is not None:
        key = cli.signing_key()
        verified = verify_archive(_exported(file), known, key=key)
    else:
        assert store is not None
        async with opened_store(store, create=False) as opened:
            verified = await verify_store(opened, known)
    for run, defect in verified.defects.items():
        print(f"{exact(run)}: {defect}.")
    seen = f"{counted(verified.journals, 'journal')}, {counted(verified.deleted, 'deletion')}"
    without = f"{counted(len(verified.unseen), 'journal')} without a head"
    print(f"{seen}, {counted(len(verified.defects), 'defect')}; {without}.")
    return ExitCode.NO_ANSWER if verified.defects else ExitCode.ANSWERED


def _exported(file: Path) -> str:
    try:
        return read_file(file, "run")
    except OSError as error:
        raise InvalidJournalError(
            f"{file} cannot be read as an exported run: {error}."
        ) from error


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError as error:
        raise InvalidLimitError(f"{file} cannot be read: {error.strerror}.") from error


@command(group, name="backup")
async def back_up(file: cli.InFile, store: cli.Store) -> None:
    """Copy an SQLite store into a new FILE, while workers write; a PostgreSQL database is copied by pg_dump.

    A copy is one moment of the store. What its unfinished runs did afterwards is not in
    it, and a worker of the copy does that again: before one starts, cancel or check the
    runs that were unfinished.

    Examples:
      planner-ext runs backup runs-2026-11-22.db --store runs.db

    Options:
        file: The copy, which is a store, too.
    """
    async with opened_store(store, create=False) as opened:
        await opened.database.backup(file)
    say(f"{store_name(store)} is copied into {printable(str(file))}.")


@command(group, name="show")
def show_run(
    run: cli.RunName,
    store: cli.Store,
    follow: bool = False,
    html: cli.File = None,
    as_json: cli.Json = False,
) -> Exit:
    """Show a run's events, its waiting calls, and its answer.

    Examples:
      planner-ext runs show order-7 --store runs.db
      planner-ext runs show order-7 --store runs.db --follow
      planner-ext runs show order-7 --store runs.db --html order-7.html

    Options:
        follow: Also print new events, whichever process drives the run, until it ends
            or waits for a decision. Ctrl-C ends only the view.
        html: Also write a page with the run's timeline: requests, calls, decisions, and
            every message.

    Exit codes:
      0    done; with --follow: answered
      1    with --follow: ended without an answer
      2    the store or the run cannot be used
      3    with --follow: failed, or in quarantine
      4    with --follow: paused: calls wait for a decision, or questions for an answer
      130  interrupted with Ctrl-C; the run continues
    """
    from planner_ext.cli import drive  # noqa: PLC0415  (imports Semantic Kernel)

    return drive.show_run(run, store, follow=follow, html=html, as_json=as_json)


@command(group, exit_codes=RUN, name="resume")
def resume_run(
    run: cli.RunName,
    args: cli.ActorArgs,
    options: cli.RunOptions,
    max_iterations: cli.MoreIterations = None,
) -> Exit:
    """Continue a run in this process, with the decisions made meanwhile.

    Give it the kernel and the --policy or --ask-all that it began with: without these
    it is refused, and nothing runs.

    Examples:
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel --max-iterations 30
    """
    from planner_ext.cli import drive  # noqa: PLC0415  (imports Semantic Kernel)

    return drive.resume_run(run, args, options, max_iterations=max_iterations)


@command(group, exit_codes=RUN, name="fork")
def fork_run(run: cli.RunName, args: cli.ForkArgs, options: cli.RunOptions) -> Exit:
    """Continue from an iteration of a run as a new run, with another model, instruction, budget or policy.

    The fork keeps the results and the consumption of RUN up to that iteration.
    Functions of later iterations run again and take effect again; later decisions are
    not kept. Give the kernel and the --policy or --ask-all that RUN began with. Without
    --kernel, --model and --base-url the fork is only stored, and waits to be resumed.

    Examples:
      planner-ext runs fork order-7 --at 1 --store runs.db --kernel shop:make_kernel --instruction 'Refund half of it.'
      planner-ext runs fork order-7 --at 1 --store runs.db --kernel shop:make_kernel --model gpt-5 --html fork.html
    """
    from planner_ext.cli import drive  # noqa: PLC0415  (imports Semantic Kernel)

    return drive.fork_run(run, args, options)


async def list_workers(store: cli.Store, as_json: cli.Json = False) -> None:
    """Print the workers of a store."""
    async with opened_client(store) as client:
        found = await client.workers()
    names = max((len(exact(one.name)) for one in found), default=0)
    lines: list[Text] = []
    for one in found:
        limit = "" if one.concurrency is None else f" of {one.concurrency}"
        driven = f"  drives {len(one.runs)}{limit} {', '.join(map(exact, one.runs))}".rstrip()
        place = f"  {one_line(one.host)}, process {one.pid}, seen {moment_text(_moment(one.seen_at))}"
        state = (f"  {one.status:<7}", "") if one.alive else ("  dead   ", "red")
        lines.append(
            Text.assemble(
                (f"{exact(one.name):<{names}}", "bold"), state, driven, (place, "dim")
            )
        )
    rows = [_with_moments(one, "started_at", "seen_at") for one in found]
    print_rows(
        rows, lines, as_json=as_json, none=f"No worker is in {store_name(store)}."
    )


async def show_budgets(args: cli.BudgetArgs) -> None:
    """Print what was used of shared budgets; ``reset`` forgets it first."""
    async with BudgetStore(args.store, create=False) as store:
        if args.reset:
            if args.budget is None:
                raise typer.BadParameter(
                    "it resets one budget; give --budget, too.", param_hint="--reset"
                )
            if not await store.reset(
                args.budget, key=args.key or "", period=args.period
            ):
                problem = f"nothing was used of {exact(args.budget)} by {exact(args.key or '') or 'no key'}."
                raise typer.BadParameter(
                    f"{problem} List the budgets to see their keys.",
                    param_hint="--reset",
                )
        found = await store.usage(
            args.budget, key=args.key, period=args.period, limit=args.limit
        )
    lines = (line for row in found for line in _budget_lines(row))
    none = f"Nothing was used of a shared budget in {store_name(args.store)}."
    print_rows([asdict(row) for row in found], lines, as_json=args.as_json, none=none)


_PARTS: Mapping[str, tuple[str, str]] = {
    "max_iterations": ("iterations", "round trips {:,}"),
    "max_tool_calls": ("tool_calls", "calls {:,}"),
    "max_total_tokens": ("tokens", "tokens {:,}"),
    "max_cost": ("cost", "cost ${:,.4f}"),
}
"""The part of what is used that each limit bounds, and its format."""


def _budget_lines(row: BudgetUsage) -> Iterable[Text]:
    """Format a row; users choose names and keys, so these are escaped."""
    key = f"  {exact(row.key)}" if row.key else ""
    reached = "" if row.reached is None else f"  {exact(row.reached)} reached"
    yield Text.assemble(
        (exact(row.period), "dim"),
        "  ",
        (exact(row.budget), "bold"),
        key,
        (reached, "yellow"),
    )
    used: list[str] = []
    for name, (part, text) in _PARTS.items():
        limit = row.limits.get(name)
        used.append(
            text.format(getattr(row, part))
            + ("" if limit is None else f" of {limit:,}")
        )
    yield Text(f"    {', '.join(used)}")
