"""What ``planner-ext approvals`` does: shows calls exactly as they will run, and questions; keeps what was decided."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Literal, cast

from rich.console import Console
from rich.text import Text

from planner_ext.approval.decisions import Approve, Decision, Deny, Supply
from planner_ext.cli.console import ANSWERED, NO_ANSWER, complaints_of, say, stderr_console, stdout_console
from planner_ext.cli.durable_store import say_part, store_name
from planner_ext.cli.text import exact, exact_json, moment_text, one_line, printable, visible
from planner_ext.core.errors import shown
from planner_ext.durable import ApprovalRefusedError, Approvals, DecisionRecord, PendingApproval

__all__ = [
    "approve_call",
    "decision_text",
    "deny_call",
    "edit_call",
    "list_approvals",
    "show_approval",
    "supply_result",
]


async def list_approvals(where: str, *, limit: int, offset: int, as_json: bool) -> int:
    """Print what waits, and how much there is where this is not all; of an altered row it is said that it was."""
    async with Approvals.connect(where) as approvals:
        with complaints_of("planner_ext.durable"):
            waiting = await approvals.pending(limit=limit, offset=offset)
        total = await approvals.count()
        say_part(len(waiting), limit=limit, offset=offset, total=total)
    if as_json:
        print(_document([asdict(call) for call in waiting]))
        return ANSWERED
    if not total:
        say(stderr_console(), Text(f"Nothing waits in {store_name(where)}."))
    for call in waiting:
        _print_brief(stdout_console(), call)
    return ANSWERED


async def show_approval(where: str, id: str, *, as_json: bool) -> int:
    """Print one call in full."""
    async with Approvals.connect(where) as approvals:
        call = await approvals.show(id)
    if as_json:
        print(_document(asdict(call)))
    else:
        _print_whole(stdout_console(), call)
    return ANSWERED


async def approve_call(where: str, id: str, *, always: str | None, by: str | None) -> int:
    """Let a call run as it is."""
    kind = cast('Literal["function", "arguments"] | None', always)  # what is neither, the store refuses in words

    def approved(call: PendingApproval) -> Approve:
        _check_runs(call)
        return Approve(always=kind, by=by, fingerprint=call.fingerprint)

    return await _decide(where, id, approved)


async def deny_call(where: str, id: str, *, reason: str, by: str | None) -> int:
    """Refuse a call, or say that nobody answers a question."""
    return await _decide(where, id, lambda _: Deny(reason, by=by))


async def edit_call(where: str, id: str, changes: Sequence[str], *, by: str | None) -> int:
    """Let a call run with other arguments."""

    def edited(call: PendingApproval) -> Approve:
        _check_runs(call)
        return Approve(arguments=_edited(call.arguments, changes), by=by, fingerprint=call.fingerprint)

    return await _decide(where, id, edited)


async def supply_result(where: str, id: str, result: str, *, by: str | None) -> int:
    """Answer a question, or a call in its function's place."""
    return await _decide(where, id, lambda call: Supply(result if call.kind == "question" else _value(result), by=by))


def _check_runs(call: PendingApproval) -> None:
    """Refuse to let a question run.

    Raises:
        ApprovalRefusedError: If it is one.
    """
    if call.kind == "question":
        raise ApprovalRefusedError(
            f"{call.id} is a question of the model: there is nothing in it to approve. Answer it with supply, or deny "
            "it where nobody will."
        )


async def _decide(where: str, id: str, decide: Callable[[PendingApproval], Decision]) -> int:
    async with Approvals.connect(where) as approvals:
        call = await approvals.show(id)
        decision = decide(call)
        won = await approvals.decide(id, decision)
    if not won:
        say(stderr_console(), Text(f"{exact(id)} was decided already, by somebody else or before; nothing changed."))
        return NO_ANSWER
    say(stdout_console(), Text(f"{exact(id)} {_said(call, decision)}"))
    return ANSWERED


def _said(call: PendingApproval, decision: Decision) -> str:
    if call.kind == "question":
        supplied = isinstance(decision, Supply)
        return f"is answered: {visible(decision.result)}" if supplied else "is left without an answer"
    name = exact(call.fully_qualified_name)
    match decision:
        case Approve(arguments=None):
            return f"is approved as it was asked about: {name} will run with {exact_json(dict(call.arguments))}"
        case Approve(arguments=dict(arguments)):
            return (
                f"is edited, and not checked yet: {name} will run with {exact_json(arguments)} if a worker finds that "
                "they fit it, and wait again if not"
            )
        case Supply(result=result):
            return f"is answered: {name} will not run, its result is {exact_json(result)}"
        case _:
            return f"is denied: {name} will not run"


def _edited(arguments: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Apply ``NAME=VALUE`` to arguments, or read one JSON object in their place.

    What is text stays text, so that an order named 7 becomes no number; other values are JSON, or else text.

    Raises:
        ApprovalRefusedError: If a change is neither.
    """
    if len(changes) == 1 and changes[0].lstrip().startswith("{"):
        return _object(changes[0])
    edited = dict(arguments)
    for change in changes:
        name, sign, written = change.partition("=")
        if not sign or not name:
            raise ApprovalRefusedError(
                f"Expected NAME=VALUE, such as amount=20, or one JSON object with all arguments; got {shown(change)}."
            )
        edited[name] = written if isinstance(arguments.get(name), str) else _value(written)
    return edited


def _object(written: str) -> dict[str, Any]:
    try:
        value: object = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ApprovalRefusedError(
            f"Expected the arguments as one JSON object: {error}. Quote it for the shell."
        ) from None
    assert isinstance(value, dict), "what starts with { and is JSON is an object"
    return cast("dict[str, Any]", value)


def _value(written: str) -> object:
    """Read a value: as JSON where it is some, else as the text that it is."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


def _print_brief(console: Console, call: PendingApproval) -> None:
    """Print a call in a few lines; what it will run with is never cut."""
    doubt = "  IN DOUBT: it may have run already" if call.in_doubt else ""
    lines = [
        Text.assemble((exact(call.id), "bold"), (doubt, "bold red")),
        Text(f"    {_asked(call) or f'{exact(call.fully_qualified_name)} {exact_json(dict(call.arguments))}'}"),
    ]
    if call.prompt and call.kind == "function":
        lines.append(Text(f"    {visible(call.prompt)}"))
    if call.problem:
        lines.append(Text(f"    not taken: {one_line(call.problem)}", "red"))
    until = "" if call.expires_at is None else f"; open until {moment_text(call.expires_at)}"
    lines.append(Text(f"    waits since {moment_text(call.asked_at)}{until}", "dim"))
    for line in lines:
        console.print(line, soft_wrap=True)


def _asked(call: PendingApproval) -> str:
    """Say what the model asks, as the fingerprint has it; "" for a call."""
    if call.kind == "function":
        return ""
    question = call.arguments.get("question")
    return f"The model asks: {visible(question) if isinstance(question, str) else exact_json(question)}"


def _print_whole(console: Console, call: PendingApproval) -> None:
    asks = call.kind == "question"
    if asks:
        console.print(Text(_asked(call), "bold"), soft_wrap=True)
    rows = {
        "run": exact(call.run_id),
        "goal": printable(call.goal),
        "question": "" if asks else visible(call.prompt),
        "arguments": "" if asks else exact_json(dict(call.arguments), indent=2),
        "function": "" if asks else exact(call.fully_qualified_name),
        "call": exact(call.id),
        "in doubt": "it had started when its process died, and may have taken effect" if call.in_doubt else "",
        "not taken": printable(call.problem),
        "status": call.status + (f", decided {moment_text(call.decided_at)}" if call.decided_at else ""),
        "decided": "" if call.decision is None else decision_text(call.decision),
        "refused": "\n".join(decision_text(one) for one in call.refused),
        "waits since": moment_text(call.asked_at),
        "open until": moment_text(call.expires_at) if call.expires_at else "",
        "fingerprint": exact(call.fingerprint),
    }
    for name, value in rows.items():
        if value:
            text = value.replace("\n", "\n" + " " * 13)
            console.print(Text.assemble((f"{name:<13}", "dim"), text), soft_wrap=True)


def decision_text(record: DecisionRecord) -> str:
    """Say who decided what and when, with which arguments, and why it was refused where it was."""
    said = f"{record.kind} by {exact(record.by) or 'nobody named'}, {moment_text(record.at)}"
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


def _document(value: object) -> str:
    return json.dumps(value, indent=2, default=datetime.isoformat)
