"""``planner-ext approvals``: what waits in a store is listed, shown and decided.

Imports no Semantic Kernel.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal, cast

import typer
from rich.text import Text

from planner_ext.approval.decisions import Approve, Decision, Deny, Supply
from planner_ext.cli import options as cli
from planner_ext.cli.command import ExitCode, command
from planner_ext.cli.edit import changed_arguments
from planner_ext.cli.parts import drawn_parts, function_text, with_note
from planner_ext.cli.store import (
    acting,
    opened_client,
    print_page,
    print_rows,
    say,
    store_name,
)
from planner_ext.cli.text import Terminal, json_document, moment_text, warnings_shown
from planner_ext.core.errors import PlannerExtError
from planner_ext.durable import (
    ApprovalRefusedError,
    DecisionRecord,
    GrantRecord,
    PendingApproval,
)
from planner_ext.durable.inputs import SaidMessage
from planner_ext.engine.timeline import Timeline
from planner_ext.readable.parts import MOST_LINES, changes_of, folded, parts_of
from planner_ext.readable.text import exact, exact_json, visible, visible_line
from planner_ext.timeline.conversation import conversation_of, runs_around

group = typer.Typer(rich_markup_mode=None)

_ALONE = cli.GrantArgs()
"""A decision on one call alone."""

EXIT_CODES = """\
  0    done
  1    the call was decided before; nothing changed
  2    the store, the id or the decision cannot be used
"""


@command(group, exit_codes=EXIT_CODES, name="list")
async def list_pending(args: cli.CallListArgs) -> None:
    """List the calls and questions that wait, the oldest first.

    Examples:
      planner-ext approvals list --store runs.db
      planner-ext approvals list --store runs.db --role treasurer --expires-in 1h
    """
    filters = args.filters()
    such = "such " if any((args.run_id, args.person, *filters.values())) else ""
    async with opened_client(args.store, args.hooks) as client:
        store = client.approvals()
        with warnings_shown():
            if args.person is None:
                waiting = await store.pending(
                    args.run_id, limit=args.limit, offset=args.offset, **filters
                )
                total = await store.count(args.run_id, **filters)
            else:
                found = await store.decidable(
                    args.run_id, person=args.person, **filters
                )
                waiting = found[args.offset : args.offset + args.limit]
                total = len(found)
    lines = (line for call in waiting for line in _call_lines(call))
    rows = [call.as_dict() for call in waiting]
    print_page(
        args,
        rows,
        lines,
        total=total,
        none=f"Nothing {such}waits in {store_name(args.store)}.",
    )


@command(group, exit_codes=EXIT_CODES, name="show")
async def show_pending(
    id: cli.CallId, store: cli.Store, as_json: cli.Json = False
) -> None:
    """Show one call in full: its function and arguments or its question, its decision, and its run so far.

    Examples:
      planner-ext approvals show order-7/1/call_2 --store runs.db
    """
    async with opened_client(store) as client:
        call = await client.approvals().show(id)
        if as_json:
            print(json_document(call.as_dict()))
            return
        console = Terminal()
        _print_whole(console, call)
        try:
            timeline = (await client.load(call.run_id)).timeline()
        except PlannerExtError as error:  # the decision binds to the fingerprint
            console.complain(f"The run cannot be read: {error}")
            return
    *outer, asking = runs_around(timeline, call.id)
    for run in outer:
        console.print_line((f"inside the run: {visible_line(run.goal)}", "dim"))
    _print_run(console, asking)


@command(group, exit_codes=EXIT_CODES)
async def approve(
    args: cli.DecisionArgs,
    terms: cli.GrantArgs,
    always: Annotated[str | None, typer.Option(metavar="function|arguments")] = None,
    fingerprint: cli.Fingerprint = None,
) -> int:
    """Approve a call with the arguments shown; a worker continues the run.

    Examples:
      planner-ext approvals approve order-7/1/call_2 --store runs.db
      planner-ext approvals approve order-7/1/call_2 --store runs.db --always function
      planner-ext approvals approve order-7/1/call_2 --store runs.db --for 1h --where '{"amount": {"le": 100}}'

    Options:
        always: For the rest of the run, approve this function, or this function with
            these arguments, without asking.
        fingerprint: That of the call which you read, as show prints it: another call,
            other arguments or a later question are refused. Default: the call as it is.
    """
    # The store refuses any other value.
    kind = cast('Literal["function", "arguments"] | None', always)

    def approved(call: PendingApproval) -> Approve:
        bound = fingerprint or call.fingerprint
        return Approve(always=kind, by=args.by, fingerprint=bound)

    return await _decide(args, approved, terms)


@command(group, exit_codes=EXIT_CODES)
async def deny(
    args: cli.DecisionArgs, terms: cli.GrantArgs, reason: cli.Reason = ""
) -> int:
    """Do not let a call run, or leave a question without an answer.

    Examples:
      planner-ext approvals deny order-7/1/call_2 --store runs.db --reason 'too much'
      planner-ext approvals deny order-7/1/call_2 --store runs.db --reason stocktaking --for 7d --later-only

    Options:
        reason: Why; the model reads it.
    """
    denied = Deny(reason, by=args.by)
    return await _decide(args, lambda _: denied, terms)


@command(group, exit_codes=EXIT_CODES)
async def edit(
    args: cli.DecisionArgs,
    changes: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE", show_default=False)
    ],
    fingerprint: cli.Fingerprint = None,
) -> int:
    """Approve a call with edited arguments.

    Arguments that do not fit the function's parameters are refused. A worker, which has
    the function, validates them again: if they are not valid, the call waits again and
    shows the problem.

    Examples:
      planner-ext approvals edit order-7/1/call_2 amount=24.5 --store runs.db
      planner-ext approvals edit order-7/1/call_2 message --store runs.db
      planner-ext approvals edit order-7/1/call_2 '{"order": "A-7", "amount": 24.5}' --store runs.db

    Options:
        changes: What to change; the value is JSON, or text. A NAME alone opens its
            value in the editor that EDITOR names. Or one JSON object in place of all
            arguments.
        fingerprint: As of approve.
    """

    def edited(call: PendingApproval) -> Approve:
        try:
            arguments = changed_arguments(call.arguments, changes)
        except ValueError as error:
            raise ApprovalRefusedError(str(error)) from None
        return Approve(
            arguments=arguments,
            by=args.by,
            fingerprint=fingerprint or call.fingerprint,
        )

    return await _decide(args, edited)


@command(group, exit_codes=EXIT_CODES)
async def supply(
    args: cli.DecisionArgs,
    result: Annotated[str, typer.Argument(metavar="RESULT", show_default=False)],
) -> int:
    """Answer a question of the model, or give the model this result in place of running a call.

    A result is useful, for instance, for a call in doubt that did take effect.

    Examples:
      planner-ext approvals supply order-7/1/call_2 'paid by hand' --store runs.db

    Options:
        result: JSON, or text; for a question, text.
    """

    def supplied(call: PendingApproval) -> Supply:
        value = result if call.kind == "question" else cli.value_of(result)
        return Supply(value, by=args.by)

    return await _decide(args, supplied)


@command(group, exit_codes=EXIT_CODES, name="grants")
async def list_grants(store: cli.Store, as_json: cli.Json = False) -> None:
    """List the grants that hold: what each answers, until when, and how often it did.

    Examples:
      planner-ext approvals grants --store runs.db
    """
    async with opened_client(store) as client:
        found = await client.approvals().grants()
    print_rows(
        [one.as_dict() for one in found],
        map(_grant_line, found),
        as_json=as_json,
        none=f"No grant holds in {store_name(store)}.",
    )


@command(group, exit_codes=EXIT_CODES)
async def revoke(args: cli.DecisionArgs) -> None:
    """Revoke the grant with this ID: it answers no further question.

    Examples:
      planner-ext approvals revoke 4f0c2a9be713 --store runs.db
    """
    async with acting(args) as client:
        await client.approvals().revoke(args.id, by=args.by)
    say(f"{exact(args.id)} is revoked.")


def _grant_line(grant: GrantRecord) -> Text:
    told = grant.as_dict()
    roles = "".join(f" for {exact(role)}" for role in grant.roles)
    return Text(
        f"{exact(grant.decision.fully_qualified_name)}{roles}: {decision_text(grant.decision)}; until "
        f"{told['expires_at']}, used {grant.used} times; {exact_json(told['terms'])}"
    )


async def _decide(
    args: cli.DecisionArgs,
    decision_on: Callable[[PendingApproval], Decision],
    terms: cli.GrantArgs = _ALONE,
) -> int:
    """Store a decision on the call as it stands now, or a grant alone, and print what follows."""
    granted = terms.grant()
    async with acting(args) as client:
        store = client.approvals()
        call = await store.show(args.id)
        decision = decision_on(call)
        if call.kind == "question" and isinstance(decision, Approve):
            raise ApprovalRefusedError(
                f"{args.id} is a question of the model: there is nothing in it to approve. Answer it with supply, or "
                "deny it if it gets no answer."
            )
        if terms.later_only:
            grant_id = await store.grant(args.id, decision, granted)
            say(f"Grant {grant_id} is given; {exact(args.id)} is not decided by it.")
            return ExitCode.ANSWERED
        counts = await store.decide(args.id, decision, grant=granted)
    if not counts:
        say(f"{exact(args.id)} was decided already; nothing changed.")
        return ExitCode.NO_ANSWER
    console = Terminal()
    console.say(f"{exact(args.id)} {_effect(call, decision)}")
    if isinstance(decision, Approve) and decision.arguments is not None:
        changes = changes_of(call.arguments, decision.arguments)
        for line in drawn_parts(console, changes):
            console.print_line(line)
    return ExitCode.ANSWERED


def _print_run(console: Terminal, timeline: Timeline) -> None:
    """Print a run's plan and turns; the middle of a long text is folded, as in the inbox."""
    if timeline.plan:
        console.print_line(("plan", "dim"))
        _print_text(console, visible(timeline.plan))
    for turn in conversation_of(timeline):
        when = ""
        if turn.at is not None:
            when = f", {moment_text(datetime.fromtimestamp(turn.at, UTC))}"
        console.print_line((f"{turn.speaker}{when}", "dim"))
        _print_text(console, turn.text)
        for call in turn.calls:
            console.print_line(f"  calls {call.function}")
            for line in drawn_parts(console, call.arguments, most=MOST_LINES):
                console.print_line(Text("    ") + line)


def _print_text(console: Terminal, text: str) -> None:
    lines = [Text(line) for line in text.splitlines()]
    head, middle, tail = folded(lines)
    for line in with_note(head, len(middle), tail, "lines"):
        console.print_line(Text("  ") + line)


def _effect(call: PendingApproval, decision: Decision) -> str:
    name = exact(call.fully_qualified_name)
    match decision:
        case Supply(result=answer) if call.kind == "question":
            return f"is answered: {visible(answer)}"
        case _ if call.kind == "question":
            return "is left without an answer"
        case Approve(arguments=None):
            return f"is approved with the arguments shown: {name} will run with {exact_json(dict(call.arguments))}"
        case Approve() if call.quorum > 1:
            return "is edited, and not checked yet: it will wait anew, without votes"
        case Approve(arguments=arguments):
            return (
                f"is edited, and not checked yet: {name} will run with {exact_json(arguments)} if a worker finds that "
                "they fit it, and wait again if not"
            )
        case Supply(result=result):
            return (
                f"is answered: {name} will not run, its result is {exact_json(result)}"
            )
        case _:
            return f"is denied: {name} will not run"


def decision_text(record: DecisionRecord) -> str:
    """Describe a decision."""
    said = f"{record.kind} by {exact(record.by) or 'an unnamed person'}, {moment_text(record.at)}"
    if record.arguments is not None and record.arguments != record.requested:
        before = (
            ""
            if record.requested is None
            else f" in place of {exact_json(dict(record.requested))}"
        )
        said += f", with {exact_json(dict(record.arguments))}{before}"
    if record.reason:
        said += f", because: {exact(record.reason)}"
    if record.kind == "supply":
        said += f", with {exact_json(record.result)}"
    if record.always is not None:
        said += f", for the rest of the run: {record.always}"
    if record.grant:
        said += f", by grant {exact(record.grant)}"
    return (
        f"{said}; refused: {visible_line(record.refused)}" if record.refused else said
    )


def escalation_text(call: PendingApproval) -> str:
    """Say when a call asks others, or that it does; "" if it never will."""
    if call.escalates_at is None:
        return ""
    to = ", ".join(map(exact, call.escalates_to))
    return f"{'since' if call.is_escalated else 'at'} {moment_text(call.escalates_at)}, to {to}"


def said_text(message: SaidMessage) -> str:
    """Show what was said to the run while its call waits."""
    by = exact(message.by) or "an unnamed person"
    return f"said by {by}, {moment_text(message.at)}: {visible(message.text)}"


def _call_lines(call: PendingApproval) -> Iterable[Text]:
    """Format a call; the middle of long arguments is folded."""
    doubt = "  IN DOUBT: it may have run already" if call.in_doubt else ""
    until = (
        ""
        if call.expires_at is None
        else f"; open until {moment_text(call.expires_at)}"
    )
    parts = [] if _question(call) else _arguments(call, MOST_LINES)
    lines = [
        Text.assemble((exact(call.id), "bold"), (doubt, "bold red")),
        Text(f"    {_question(call) or exact(call.fully_qualified_name)}"),
        *(Text(f"    {text}") for text in _words(call)),
        *(Text("      ") + line for line in parts),
        Text(
            f"    for {', '.join(map(exact, call.roles))} to decide"
            if call.roles
            else ""
        ),
        Text(f"    approved by {exact(call.tally)}" if call.tally else ""),
        *(Text(f"    {said_text(one)}") for one in call.said),
        Text(
            f"    not taken: {visible_line(call.problem)}" if call.problem else "",
            "red",
        ),
        Text(f"    waits since {moment_text(call.asked_at)}{until}", "dim"),
    ]
    return filter(None, lines)


def _arguments(call: PendingApproval, most: int | None = None) -> list[Text]:
    parts = parts_of(call.arguments, call.parameters)
    return drawn_parts(Terminal(), parts, most=most)


def _words(call: PendingApproval) -> list[str]:
    """Return what the call does, and what is asked about it, in the application's words."""
    prompt = "" if call.kind == "question" else call.prompt
    return [visible(text) for text in (call.summary, prompt) if text]


def _question(call: PendingApproval) -> str:
    """Return the model's question; "" for a call."""
    if call.kind == "function":
        return ""
    question = call.arguments.get("question")
    return f"The model asks: {visible(question) if isinstance(question, str) else exact_json(question)}"


def _print_whole(console: Terminal, call: PendingApproval) -> None:
    question = _question(call)
    for text in filter(None, (question, *_words(call))):
        console.print_line((text, "bold"))
    if not question:
        for line in _arguments(call) or [Text("no arguments", "dim")]:
            console.print_line(line)
    rows = {
        "function": "" if question else function_text(call),
        "goal": visible(call.goal),
        "run": exact(call.run_id),
        "call": exact(call.id),
        "rule": exact(call.asked_by),
        "roles": ", ".join(map(exact, call.roles)),
        "approved by": exact(call.tally),
        "escalates": escalation_text(call),
        "in doubt": "it had started when its process died, and may have taken effect"
        if call.in_doubt
        else "",
        "meanwhile": "\n".join(map(said_text, call.said)),
        "not taken": visible(call.problem),
        "status": call.status,
        "decided": "" if call.decision is None else decision_text(call.decision),
        "refused": "\n".join(map(decision_text, call.refused)),
        "waits since": moment_text(call.asked_at),
        "open until": moment_text(call.expires_at) if call.expires_at else "",
        "fingerprint": exact(call.fingerprint),
    }
    for name, value in rows.items():
        if value:
            console.print_line((f"{name:<13}", "dim"), value, indent=13)
