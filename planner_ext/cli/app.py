"""The commands; each imports its implementation when it is called, since importing Semantic Kernel is slow."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

import planner_ext
from planner_ext.approval.decisions import Approve, Deny, Supply
from planner_ext.cli import options as cli
from planner_ext.cli.text import Terminal

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A bounded, interruptible, auditable agent loop for Semantic Kernel.",
)

runs = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, show, resume, fork, cancel, delete, move and back up runs."
)

approvals = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show and decide the calls and questions that wait in a store; needs no kernel and no functions.",
)

RUN_EXIT_CODES = """\
  0    answered
  1    ended without an answer: a limit, the timeout, a cancellation, a reply cut short
  2    something on the command line, in a file or in the kernel cannot be used
  3    a fault, such as a failed request
  4    paused: calls wait for a decision, or questions for an answer
  130  interrupted with Ctrl-C
"""

RUNS_EXIT_CODES = """\
  0    done
  1    the run had ended before; nothing changed
  2    the store or the run cannot be used
"""

DONE_OR_UNUSABLE = """\
  0    done
  2    the store, the run or an option cannot be used
"""

RESULT_EXIT_CODES = """\
  0    answered
  1    ended without an answer, or has not ended
  2    the store or the run cannot be used
  3    failed, or in quarantine
  4    paused: calls wait for a decision, or questions for an answer
"""

APPROVALS_EXIT_CODES = """\
  0    done
  1    the call was decided before; nothing changed
  2    the store, the id or the decision cannot be used
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"planner-ext {planner_ext.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


@cli.command(app)
def demo() -> cli.Exit:
    """Show what the package does: offline, no key, seconds.

    First a model that never stops calling functions: Semantic Kernel's own loop and this package's side by side. Then a
    goal with a plan, functions that run at the same time, a failure and the way around it. Last a refund that a person
    decides, in processes of their own, one of which is killed.

    Examples:
      planner-ext demo

    Exit codes:
      0    every number agrees
      1    a number does not
    """
    from planner_ext.cli.demo import run_demo  # noqa: PLC0415  (see above)

    return run_demo(Terminal())


@cli.command(app, exit_codes=RUN_EXIT_CODES)
def run(goal: cli.GoalArgs, options: cli.RunOptions, by: cli.By) -> cli.Exit:
    """Reach a GOAL with the functions of a kernel.

    Progress goes to stderr, the answer to stdout; without an answer, stdout stays empty. When calls wait for a
    decision, the terminal asks: approve, deny, edit, always or quit. The terminal asks the model's questions, too. What
    nobody decides here, a run with --store leaves in its store, with exit code 4.

    Examples:
      planner-ext run "What does a lamp cost?" --kernel shop:make_kernel --model gpt-4o
      planner-ext run "Refund order 7." --kernel shop:make_kernel --ask-all --store runs.db
    """
    if goal.store is not None:
        from planner_ext.cli.runs import start_run  # noqa: PLC0415  (see above)

        return start_run(goal, goal.store, options, by=by)
    if goal.run_id is not None:
        problem = f"it names a run in a store; give --store, too, or {cli.STORE_VARIABLE}."
        raise typer.BadParameter(problem, param_hint="--run-id")
    from planner_ext.cli.run import run_goal  # noqa: PLC0415  (see above)

    return run_goal(goal, options, by=by)


@cli.command(app)
def compare(args: cli.CompareArgs) -> cli.Exit:
    """Compare ways to limit a tool-calling loop: the options of Semantic Kernel's ADR as written, and corrected.

    Offline, in seconds: a scripted model behind a real HTTP server that counts requests. With a real model
    (--base-url, --model or --kernel) round trips are counted at the connector; retries inside an SDK are not seen.

    Examples:
      planner-ext compare --only never-ending --max-iterations 3
      planner-ext compare --kernel shop:make_kernel --goal "What does a lamp cost?" --html page.html

    Exit codes:
      0    no corrected option made a round trip too many, broke a history or failed
      1    one did; what the other options do does not matter
      2    something on the command line or in the kernel cannot be used
      130  interrupted with Ctrl-C
    """
    from planner_ext.cli.compare import run_compare  # noqa: PLC0415  (see above)

    return run_compare(args)


@cli.command(app)
def replay(args: cli.ReplayArgs) -> cli.Exit:
    """Replay a recorded run of a planner without its model, and print the differences.

    No model is called. Calls are decided as in the recorded run: one that did not run then does not run now, and one
    that a person approved then returns its recorded result without being called.

    Examples:
      planner-ext replay tests/cassettes/refund.json
      planner-ext replay tests/cassettes/refund.json --kernel shop:make_kernel

    Exit codes:
      0    as recorded
      1    a prompt, a function's schema or a result differs
      2    the cassette or the kernel cannot be used
      130  interrupted with Ctrl-C
    """
    from planner_ext.cli.replay import replay_cassette  # noqa: PLC0415  (see above)

    return replay_cassette(args)


@cli.command(app)
def worker(args: cli.WorkerArgs) -> cli.Exit:
    """Continue runs whose process died, that a fault interrupted, that were decided, or whose question has expired.

    As many workers as wanted share a store. When a worker ends, however it ends, the others take its runs. On SIGTERM
    or Ctrl-C its calls in flight end first; a second signal ends it at once. A run that began with --policy or
    --ask-all is continued by a worker that has them, too; any other worker leaves it as it is.

    Examples:
      planner-ext worker --store runs.db --app shop:make_app
      planner-ext worker --store postgresql://ann@host/runs --app shop:make_app --once

    Exit codes:
      0    stopped by SIGTERM or Ctrl-C; with --once, nothing is left to do
      2    the store, the application, the policy or the worker's name cannot be used; with --once, a run began under a
           policy, --ask-all or interceptors that this worker lacks, and is left as it is
      3    with --once: a fault interrupted a run, which is kept; a later worker tries it again
    """
    from planner_ext.cli.runs import work  # noqa: PLC0415  (see above)

    return work(args)


@cli.command(app, exit_codes=DONE_OR_UNUSABLE)
def workers(store: cli.Store, as_json: cli.Json = False) -> cli.Exit:
    """List the workers of a store: which of them live, where, and which runs each drives.

    A worker lives if its process holds its lock and showed itself within its lease. One that died is listed for a day.

    Examples:
      planner-ext workers --store runs.db
    """
    from planner_ext.cli.store import list_workers  # noqa: PLC0415  (see above)

    return list_workers(store, as_json=as_json)


@cli.command(app)
def serve(args: cli.ServeArgs) -> cli.Exit:
    """Serve the inbox of a store: web pages on which people decide waiting calls, and read runs.

    The printed address contains the token for signing in. The command needs no kernel and no functions.

    Examples:
      planner-ext serve --store runs.db
      planner-ext serve --store postgresql://ann@host/runs --host 0.0.0.0 --allow-host inbox.example.com

    Exit codes:
      0    stopped by SIGTERM or Ctrl-C
      2    the store, the address or an option cannot be used
    """
    from planner_ext.cli.serve import serve_inbox  # noqa: PLC0415  (see above)

    return serve_inbox(args.app, args)


RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="submit")
def submit_run(args: cli.SubmitArgs, limits: cli.LimitArgs) -> cli.Exit:
    """Queue a run for the workers of a store, and print its name; this needs neither kernel nor model.

    Limits replace those of the worker's planner; without one, its own hold. --policy, --ask-all and the hook of --app
    bind the run before anybody drives it: a worker that lacks them refuses it.

    Examples:
      planner-ext runs submit "Refund order 7." --store runs.db --run-id order-7
      planner-ext runs submit "Refund order 7." --store runs.db --argument tenant=acme --max-tool-calls 5
      planner-ext runs submit "Refund order 7." --store runs.db --policy policy.yaml
    """
    from planner_ext.cli import submit  # noqa: PLC0415  (see above)

    return submit.submit_run(args.app, args, limits)


@cli.command(runs, exit_codes=RESULT_EXIT_CODES, name="result")
def show_result(
    run: RunName, store: cli.Store, wait: Annotated[bool, typer.Option("--wait")] = False, as_json: cli.Json = False
) -> cli.Exit:
    """Print a run's answer; the rest of its result goes to stderr.

    Examples:
      planner-ext runs result order-7 --store runs.db --wait

    Options:
        wait: Wait until the run ends, or waits for a decision.
    """
    from planner_ext.cli import submit  # noqa: PLC0415  (see above)

    return submit.show_result(run, store, wait=wait, as_json=as_json)


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="budget")
def set_budget(run: RunName, store: cli.Store, limits: cli.LimitArgs, who: cli.ActorArgs) -> cli.Exit:
    """Change limits of a run that has not ended, also while a worker drives it.

    Its other limits stay; a queued run keeps those that it was submitted with. A run submitted without limits then has
    only these, and no longer those of the worker's planner: give all that it needs. Its consumption still counts: a
    limit that is used up ends it before its next step.

    Examples:
      planner-ext runs budget order-7 --store runs.db --max-iterations 30
    """
    from planner_ext.cli import submit  # noqa: PLC0415  (see above)

    return submit.set_budget(who.app, run, store, limits, by=who.by)


@cli.command(runs, exit_codes=RUNS_EXIT_CODES, name="list")
def list_(args: cli.RunListArgs) -> cli.Exit:
    """List runs, the latest change first, with their consumption and what they wait for.

    Examples:
      planner-ext runs list --store runs.db --status paused
      planner-ext runs list --store runs.db --status failed --status quarantined --newer-than 1d
    """
    from planner_ext.cli.store import list_runs  # noqa: PLC0415  (see above)

    return list_runs(args)


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="stats")
def print_stats(store: cli.Store, as_json: cli.Json = False) -> cli.Exit:
    """Count the runs by status, those that wait for a retry, and show how long the oldest approval waits.

    Examples:
      planner-ext runs stats --store runs.db --json
    """
    from planner_ext.cli import store as stored  # noqa: PLC0415  (see above)

    return stored.print_stats(store, as_json=as_json)


@cli.command(app, exit_codes=DONE_OR_UNUSABLE)
def budgets(args: cli.BudgetArgs) -> cli.Exit:
    """List what was used of the budgets that runs share, the newest periods first, or reset one of them.

    Examples:
      planner-ext budgets --store runs.db --budget 'per user'
      planner-ext budgets --store runs.db --budget 'per user' --key alice --reset
    """
    from planner_ext.cli.budgets import show_budgets  # noqa: PLC0415  (see above)

    return show_budgets(args)


@cli.command(runs, name="show")
def show_run(
    run: RunName,
    store: cli.Store,
    follow: Annotated[bool, typer.Option("--follow")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    as_json: cli.Json = False,
) -> cli.Exit:
    """Show a run's events, its waiting calls, and its answer.

    Examples:
      planner-ext runs show order-7 --store runs.db
      planner-ext runs show order-7 --store runs.db --follow
      planner-ext runs show order-7 --store runs.db --html order-7.html

    Options:
        follow: Also print new events, whichever process drives the run, until it ends or waits for a decision. Ctrl-C
            ends only the view.
        html: Also write a page with the run's timeline: requests, calls, decisions, and every message.

    Exit codes:
      0    done; with --follow: answered
      1    with --follow: ended without an answer
      2    the store or the run cannot be used
      3    with --follow: failed, or in quarantine
      4    with --follow: paused: calls wait for a decision, or questions for an answer
      130  interrupted with Ctrl-C; the run continues
    """
    from planner_ext.cli import runs as stored  # noqa: PLC0415  (see above)

    return stored.show_run(run, store, follow=follow, html=html, as_json=as_json)


@cli.command(runs, exit_codes=RUN_EXIT_CODES, name="resume")
def resume_run(
    run: RunName,
    store: cli.Store,
    options: cli.RunOptions,
    who: cli.ActorArgs,
    max_iterations: cli.MoreIterations = None,
) -> cli.Exit:
    """Continue a run in this process, with the decisions made meanwhile.

    Give it the kernel and the --policy or --ask-all that it began with: without these it is refused, and nothing runs.

    Examples:
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel --max-iterations 30
    """
    from planner_ext.cli import runs as stored  # noqa: PLC0415  (see above)

    return stored.resume_run(run, store, options, max_iterations=max_iterations, by=who.by, app=who.app)


@cli.command(runs, exit_codes=RUN_EXIT_CODES, name="fork")
def fork_run(run: RunName, args: cli.ForkArgs, options: cli.RunOptions) -> cli.Exit:
    """Continue from an iteration of a run as a new run, with another model, instruction, budget or policy.

    The fork keeps the results and the consumption of RUN up to that iteration. Functions of later iterations run again
    and take effect again; later decisions are not kept. Give the kernel and the --policy or --ask-all that RUN began
    with. Without --kernel, --model and --base-url the fork is only stored, and waits to be resumed.

    Examples:
      planner-ext runs fork order-7 --at 1 --store runs.db --kernel shop:make_kernel --instruction 'Refund half of it.'
      planner-ext runs fork order-7 --at 1 --store runs.db --kernel shop:make_kernel --model gpt-5 --html fork.html
    """
    from planner_ext.cli import runs as stored  # noqa: PLC0415  (see above)

    return stored.fork_run(run, args, options)


@cli.command(runs, exit_codes=RUNS_EXIT_CODES, name="cancel")
def cancel_run(
    run: RunName,
    store: cli.Store,
    who: cli.ActorArgs,
    reason: Annotated[str, typer.Option(metavar="TEXT")] = "",
) -> cli.Exit:
    """End a run for good, in whichever process; no waiting call runs.

    Examples:
      planner-ext runs cancel order-7 --store runs.db --reason 'too late'

    Options:
        reason: Why, for the record.
    """
    from planner_ext.cli import store as stored  # noqa: PLC0415  (see above)

    return stored.cancel_run(who.app, run, store, by=who.by, reason=reason)


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="delete")
def delete_run(
    run: RunName,
    store: cli.Store,
    who: cli.ActorArgs,
    force: Annotated[bool, typer.Option("--force")] = False,
) -> cli.Exit:
    """Delete a run that has ended, failed or is in quarantine, with all its rows in the store.

    Examples:
      planner-ext runs delete order-7 --store runs.db

    Options:
        force: Delete a paused run, too; its waiting calls are never decided.
    """
    from planner_ext.cli.store import delete_run  # noqa: PLC0415  (see above)

    return delete_run(who.app, run, store, force=force, by=who.by)


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="prune")
def prune_runs(
    store: cli.Store,
    older_than: cli.Age,
    status: Annotated[str, typer.Option(metavar="STATUS")],
    who: cli.ActorArgs,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
) -> cli.Exit:
    """Delete all runs with a status that have not changed for some time.

    Workers continue meanwhile. An SQLite file does not shrink, its space is used again; VACUUM of the sqlite3 tool
    shrinks it, while no worker runs.

    Examples:
      planner-ext runs prune --older-than 30d --status answered --store runs.db --dry-run

    Options:
        older_than: The time since a run last changed (updated_at in the list): 30d, 12h, 90m or 45s.
        status: Runs that are answered, incomplete, limit_reached, stopped, failed or quarantined.
        dry_run: Only say how many there are.
    """
    from planner_ext.cli.store import prune_runs  # noqa: PLC0415  (see above)

    return prune_runs(who.app, store, older_than=older_than, status=status, dry_run=dry_run, by=who.by)


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="export")
def export_run(
    run: RunName, store: cli.Store, output: Annotated[Path | None, typer.Option(metavar="FILE")] = None
) -> cli.Exit:
    """Write a run as one JSON document: its journal, and the decisions on its calls. It stays in the store.

    If PLANNER_EXT_CHECKPOINT_KEY (or PLANNER_EXT_KEY) is set, the document is signed with it.

    Examples:
      planner-ext runs export order-7 --store runs.db --output order-7.json

    Options:
        output: A new file. Default: stdout.
    """
    from planner_ext.cli.store import export_run  # noqa: PLC0415  (see above)

    return export_run(run, store, output)


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="import")
def import_run(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    store: cli.Store,
    who: cli.ActorArgs,
) -> cli.Exit:
    """Add an exported run to a store, under its name.

    An unfinished run continues in this store. Delete or cancel it in its first store, else both stores continue it, and
    its functions run twice. If PLANNER_EXT_CHECKPOINT_KEY (or PLANNER_EXT_KEY) is set, a file without this signature is
    refused. Without a key, anyone who can write the file can put an approval in it.

    Examples:
      planner-ext runs import order-7.json --store other.db

    Options:
        file: What runs export wrote.
    """
    from planner_ext.cli.store import import_run  # noqa: PLC0415  (see above)

    return import_run(who.app, file, store, by=who.by)


@cli.command(runs, exit_codes=DONE_OR_UNUSABLE, name="backup")
def back_up(file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)], store: cli.Store) -> cli.Exit:
    """Copy an SQLite store into a new FILE, while workers write; a PostgreSQL database is copied by pg_dump.

    A copy is one moment of the store. What its unfinished runs did afterwards is not in it, and a worker of the copy
    does that again: before one starts, cancel or check the runs that were unfinished.

    Examples:
      planner-ext runs backup runs-2026-11-22.db --store runs.db

    Options:
        file: The copy, which is a store, too.
    """
    from planner_ext.cli.store import back_up  # noqa: PLC0415  (see above)

    return back_up(file, store)


@cli.command(approvals, exit_codes=APPROVALS_EXIT_CODES, name="list")
def list_pending_calls(args: cli.ListArgs) -> cli.Exit:
    """List the calls and questions that wait, the oldest first.

    Examples:
      planner-ext approvals list --store runs.db
    """
    from planner_ext.cli.store import list_pending  # noqa: PLC0415  (see above)

    return list_pending(args)


@cli.command(approvals, exit_codes=APPROVALS_EXIT_CODES, name="show")
def show_call(id: cli.CallId, store: cli.Store, as_json: cli.Json = False) -> cli.Exit:
    """Show one call in full: its function and arguments or its question, and its decision.

    Examples:
      planner-ext approvals show order-7/1/call_2 --store runs.db
    """
    from planner_ext.cli.store import show_pending  # noqa: PLC0415  (see above)

    return show_pending(id, store, as_json=as_json)


@cli.command(approvals, exit_codes=APPROVALS_EXIT_CODES, name="approve")
def approve_call(
    args: cli.DecisionArgs, always: Annotated[str | None, typer.Option(metavar="function|arguments")] = None
) -> cli.Exit:
    """Approve a call with the arguments shown; a worker continues the run.

    Examples:
      planner-ext approvals approve order-7/1/call_2 --store runs.db
      planner-ext approvals approve order-7/1/call_2 --store runs.db --always function

    Options:
        always: For the rest of the run, approve this function, or this function with these arguments, without asking.
    """
    from planner_ext.cli.store import decide  # noqa: PLC0415  (see above)

    kind = cast('Literal["function", "arguments"] | None', always)  # the store refuses any other value
    return decide(args.app, args, lambda call: Approve(always=kind, by=args.by, fingerprint=call.fingerprint))


@cli.command(approvals, exit_codes=APPROVALS_EXIT_CODES, name="deny")
def deny_call(args: cli.DecisionArgs, reason: Annotated[str, typer.Option(metavar="TEXT")] = "") -> cli.Exit:
    """Do not let a call run, or leave a question without an answer.

    Examples:
      planner-ext approvals deny order-7/1/call_2 --store runs.db --reason 'too much'

    Options:
        reason: Why; the model reads it.
    """
    from planner_ext.cli.store import decide  # noqa: PLC0415  (see above)

    return decide(args.app, args, lambda _: Deny(reason, by=args.by))


@cli.command(approvals, exit_codes=APPROVALS_EXIT_CODES, name="edit")
def edit_call(
    args: cli.DecisionArgs, changes: Annotated[list[str], typer.Argument(metavar="NAME=VALUE", show_default=False)]
) -> cli.Exit:
    """Approve a call with edited arguments.

    Arguments that do not fit the function's parameters are refused. A worker, which has the function, validates them
    again: if they are not valid, the call waits again and shows the problem.

    Examples:
      planner-ext approvals edit order-7/1/call_2 amount=24.5 --store runs.db
      planner-ext approvals edit order-7/1/call_2 '{"order": "A-7", "amount": 24.5}' --store runs.db

    Options:
        changes: What to change; the value is JSON, or text. Or one JSON object in place of all arguments.
    """
    from planner_ext.cli.store import decide, edited  # noqa: PLC0415  (see above)

    return decide(
        args.app,
        args,
        lambda call: Approve(arguments=edited(call.arguments, changes), by=args.by, fingerprint=call.fingerprint),
    )


@cli.command(approvals, exit_codes=APPROVALS_EXIT_CODES, name="supply")
def supply_result(
    args: cli.DecisionArgs, result: Annotated[str, typer.Argument(metavar="RESULT", show_default=False)]
) -> cli.Exit:
    """Answer a question of the model, or give the model this result in place of running a call.

    A result is useful, for instance, for a call in doubt that did take effect.

    Examples:
      planner-ext approvals supply order-7/1/call_2 'paid by hand' --store runs.db

    Options:
        result: JSON, or text; for a question, text.
    """
    from planner_ext.cli.store import decide, value_of  # noqa: PLC0415  (see above)

    return decide(
        args.app, args, lambda call: Supply(result if call.kind == "question" else value_of(result), by=args.by)
    )


app.add_typer(runs, name="runs")
app.add_typer(approvals, name="approvals")
