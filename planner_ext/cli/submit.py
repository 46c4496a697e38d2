"""Commands for runs that workers drive: submit one, read its result, set its budget; import no Semantic Kernel."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from planner_ext.cli.options import ExitCode, LimitArgs, SubmitArgs
from planner_ext.cli.policies import approval_options
from planner_ext.cli.store import Hooks, command_on, opened_client, store_name, under_hooks, value_of
from planner_ext.cli.text import Terminal, json_document, spent_line
from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.limits import Budget
from planner_ext.core.text import exact, printable
from planner_ext.durable import RunResult, RunsClient
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.records import fold_journal
from planner_ext.durable.store import opened_store


@under_hooks
async def submit_run(hooks: Hooks, args: SubmitArgs, limits: LimitArgs) -> int:
    """Queue a run in a store, which is created if it is a missing file, and print the run's name.

    Raises:
        PlannerInvalidConfigurationError: If ``--policy``, ``--ask-all`` or ``--app`` cannot be used.
        InvalidPolicyError: If the file holds no policy.
    """
    given = _limits(limits)
    async with opened_client(args.store, hooks, create=True) as runs:
        submitted = await runs.submit(
            args.goal,
            run_id=args.run_id,
            arguments=_arguments(args.argument or ()),
            budget=Budget(**given) if given else None,
            **approval_options(args),
        )
    print(submitted.run_id)
    console = Terminal(sys.stderr)
    console.say(f"Queued in {store_name(args.store)}, for a planner-ext worker. Its result:")
    console.print_command(command_on(args.store, "runs", "result", submitted.run_id, "--wait"))
    return ExitCode.ANSWERED


async def show_result(run_id: str, store: str, *, wait: bool, as_json: bool) -> int:
    """Print how a run ended, what it waits for, or how far it is; return the exit code for that."""
    async with opened_store(store, create=False) as opened:
        runs = RunsClient(opened)
        if wait:
            await runs.wait(run_id)
        result = await runs.result(run_id)
    if as_json:
        usage = {**asdict(result.usage), "total_tokens": result.usage.total_tokens}
        print(json_document({**asdict(result), "usage": usage}))
    else:
        _print_result(result, store)
    return result_code(result.status)


def result_code(status: str) -> ExitCode:
    """Return the exit code for the status of a kept run."""
    codes = {"answered": ExitCode.ANSWERED, "paused": ExitCode.PAUSED}
    faults = dict.fromkeys(("failed", "quarantined"), ExitCode.FAULT)
    return {**codes, **faults}.get(status, ExitCode.NO_ANSWER)


@under_hooks
async def set_budget(hooks: Hooks, run_id: str, store: str, limits: LimitArgs, *, by: str | None) -> int:
    """Change some limits of a run; its other limits stay."""
    if not (given := _limits(limits)):
        raise InvalidLimitError("Expected at least one limit, such as --max-iterations 30; got none.")
    doorkeeper = Doorkeeper(authorize=await hooks())
    async with opened_store(store, create=False) as opened:
        runs = RunsClient(opened, doorkeeper=doorkeeper)
        stored, new, _ = await opened.load_driven(run_id)
        if new is not None:
            limits_before = new.limits
        elif stored.facts:
            limits_before = fold_journal(run_id, stored.facts).rules.limits
        else:
            limits_before = stored.inputs.budget or Budget()
        await runs.set_budget(run_id, replace(limits_before, **given), by=by or "")
    Terminal(sys.stderr).say(f"{exact(run_id)} has another budget. A worker takes it before the run's next step.")
    return ExitCode.ANSWERED


def _limits(args: LimitArgs) -> dict[str, Any]:
    return {name: value for name, value in asdict(args).items() if value is not None}


def _arguments(given: Sequence[str]) -> dict[str, object]:
    """Read ``NAME=VALUE``; a value is JSON, or else text.

    Raises:
        InvalidLimitError: If the name is missing.
    """
    arguments: dict[str, object] = {}
    for item in given:
        name, sign, written = item.partition("=")
        if not sign or not name:
            raise InvalidLimitError(f"Expected --argument NAME=VALUE, such as tenant=acme; got {shown(item)}.")
        arguments[name] = value_of(written)
    return arguments


def _print_result(result: RunResult, store: str) -> None:
    """Print the answer on stdout; the rest, and the commands that decide what waits, on stderr."""
    console = Terminal(sys.stderr)
    if result.final_answer:
        sys.stdout.write((printable(result.final_answer) if sys.stdout.isatty() else result.final_answer) + "\n")
        sys.stdout.flush()
    for text in filter(None, (result.reason, result.problem)):
        console.say(printable(text))
    for call in result.pending:
        console.print_command(command_on(store, "approvals", "show", call.id))
    console.say(spent_line(result), "dim")
