"""What the pages show, as frozen values; texts of models, functions and people are fully visible.

Templates escape these texts for HTML and put nothing into them. No text that a person
decides on is cut; the middle of a long one is folded.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, unquote, urlencode

from starlette.requests import Request

from planner_ext.approval.decisions import DecisionRecord, digest_of
from planner_ext.core.values import frozen
from planner_ext.durable.listing import Hold
from planner_ext.durable.records import (
    PendingApproval,
    approval_path,
    question_digest,
)
from planner_ext.engine.timeline import Timeline
from planner_ext.inbox.forms import Field, drawn_form
from planner_ext.readable.parts import (
    MOST_LINES,
    Part,
    changes_of,
    parts_of,
)
from planner_ext.readable.text import duration_text, exact, exact_json, visible
from planner_ext.timeline.conversation import Turn, conversation_of

Kind: TypeAlias = Literal["call", "question", "in doubt"]
"""What is decided; "in doubt" is the outcome of an interrupted call."""

GRANT = ("expires_in", "uses", "arguments", "run_arguments")
"""The terms of a grant in a decision's form."""

TYPED = ("decision", "always", "reason", "answer", "result", *GRANT)
"""A decision's fields that a refused form shows again, beside the arguments."""

_LONGEST_IN_LIST = 4_000
"""Characters of arguments and question; a longer call is decided on its own page."""


@frozen
class Moment:
    """A time: for an HTML ``time`` element, in UTC, and from now, such as "3 minutes ago"."""

    iso: str
    text: str
    distance: str


@frozen
class Waiting:
    """A call or question in a list; addresses are relative to the application's root.

    Attributes:
        item: Its fingerprint and id, as the list's form returns them; see `item_of`.
        equal_to: What lists the calls that ask the same.
        equal: How many these are, this one included.
        about: The function's description.
        summary: What the call does, in the application's words.
        asked_by: The rule, mark or interceptor that asks.
        parts: The arguments; empty for a question.
        exact: They as JSON, which the fingerprint binds; "" for a question.
        question: The model's question, or the call's prompt.
        roles: Who may decide; empty for anyone.
        tally: How many of how many persons approve it, and who; "" where one decides.
        escalates_at: When it asks, or began to ask, ``escalates_to``; None: never.
        problem: Why the last decision was refused, or "".
        said: Who said what to the run meanwhile, and waits for the decision.
        is_long: Whether the list shows no arguments of it.
        selectable: Whether it may be decided with others: the list shows it in full.
    """

    item: str
    shown_id: str
    href: str
    equal_to: str
    equal: int
    run_id: str
    run_href: str
    kind: Kind
    function: str
    about: str
    summary: str
    asked_by: str
    parts: tuple[Part, ...]
    exact: str
    question: str
    goal: str
    asked_at: Moment
    expires_at: Moment | None
    roles: tuple[str, ...]
    tally: str
    escalates_at: Moment | None
    escalates_to: str
    is_escalated: bool
    problem: str
    said: tuple[tuple[str, str], ...]
    fingerprint: str
    is_long: bool
    selectable: bool


@frozen
class Decided:
    """A decision that was made.

    Attributes:
        kind: ``approve``, ``deny``, ``supply`` or ``expire``.
        changes: What it changed in the arguments.
        details: Its other parts by name, such as a reason.
        refused: Why it does not count, or "".
    """

    kind: str
    by: str
    at: Moment
    changes: tuple[Part, ...]
    details: tuple[tuple[str, str], ...]
    refused: str


@frozen
class ApprovalPage:
    """A call or question with everything that its approver must see.

    Attributes:
        status: ``open``; ``decided``, until a worker takes the decision; ``closed``.
        who: Who may decide, and whether that is checked here.
        query: The filters of the list from which the visitor came.
        siblings: The other calls that have to be decided before the run continues.
        refused: Decisions that were refused, the oldest first.
        unreadable: Why plan and conversation cannot be shown, or "".
        fields: The form; empty if the arguments cannot be edited.
        changes: What the visitor's edit changes; None before they have looked at it.
        looked_at: Digest of the edit that `changes` shows.
        problem: Why this visitor's decision was refused, or "".
        typed: This visitor's input, by the names in `TYPED`.
    """

    call: Waiting
    status: str
    is_open: bool
    decision: Decided | None
    who: str
    query: str
    siblings: tuple[Waiting, ...]
    refused: tuple[Decided, ...]
    plan: str
    conversation: tuple[tuple[Turn, Moment | None], ...]
    unreadable: str = ""
    fields: tuple[Field, ...] = ()
    changes: tuple[Part, ...] | None = None
    looked_at: str = ""
    problem: str = ""
    typed: Mapping[str, str]


@frozen
class DecisionRow:
    """A decided call in the list of decisions; ``ran``: the arguments that count, and what was changed in them."""

    href: str
    shown_id: str
    run_id: str
    run_href: str
    function: str
    parts: tuple[Part, ...]
    decided: Decided


@frozen
class Outcome:
    """The outcome of one of many decisions."""

    shown_id: str
    href: str
    taken: bool
    text: str


@frozen
class Paging:
    """The shown part of a list.

    Attributes:
        first: The number of the first entry, from 1; 0 for an empty part.
        last: The number of the last entry.
        before: The address of the previous part, relative to the root; None for the
            first.
        after: The address of the next part, or None.
    """

    first: int
    last: int
    total: int
    before: str | None
    after: str | None


def hold_text(hold: Hold | None, now: float) -> str:
    """Say that no run is driven, by whose order, and why; "" if runs are."""
    if hold is None:
        return ""
    by = f" by {exact(hold.by)}" if hold.by else ""
    reason = f": {visible(hold.reason)}" if hold.reason else ""
    since = moment_of(hold.at, now).text
    paused = f"All runs of this store are paused since {since}{by}{reason}."
    return f"{paused} What is decided is taken when they are resumed."


def paging_of(
    request: Request, *, size: int, offset: int, shown: int, total: int
) -> Paging:
    """Number a part of a list, with the addresses of the parts around it."""
    path = request.url.path.removeprefix(request.scope.get("root_path", "")).lstrip("/")
    given = [
        (name, value)
        for name, value in request.query_params.multi_items()
        if name != "offset"
    ]

    def part(start: int) -> str:
        return f"{path}?{urlencode([*given, ('offset', start)])}"

    last = offset + shown
    return Paging(
        first=offset + 1 if shown else 0,
        last=last,
        total=total,
        before=part(max(offset - size, 0)) if offset else None,
        after=part(offset + size) if offset + size < total else None,
    )


def moment_of(at: datetime | float, now: float) -> Moment:
    """Show a time."""
    moment = at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)
    moment = moment.astimezone(UTC)
    seconds = moment.timestamp() - now
    span = duration_text(abs(seconds))
    return Moment(
        iso=moment.isoformat(timespec="seconds"),
        text=f"{moment:%Y-%m-%d %H:%M:%S} UTC",
        distance=f"in {span}" if seconds > 0 else f"{span} ago",
    )


def _moment(at: datetime | None, now: float) -> Moment | None:
    return None if at is None else moment_of(at, now)


def item_of(text: str) -> tuple[str, str]:
    """Return the fingerprint and the id in `Waiting.item`."""
    fingerprint, _, id = text.partition(" ")
    return fingerprint, unquote(id)


def outcome_of(id: str, *, href: str, taken: bool, text: str) -> Outcome:
    """Show the outcome of one of many decisions or actions."""
    return Outcome(shown_id=exact(id), href=href, taken=taken, text=visible(text))


def waiting_of(
    call: PendingApproval, now: float, equal: Mapping[str, int] | None = None
) -> Waiting:
    """Show a call or question that waits; ``equal``: numbers of equal calls, as of `Approvals.equal_calls`."""
    same = question_digest(call.fully_qualified_name, call.arguments, call.prompt)
    asks = call.kind == "question"
    question = call.arguments.get("question") if asks else call.prompt
    shown = visible(question) if isinstance(question, str) else exact_json(question)
    parts = ()
    if not asks:
        parts = parts_of(call.arguments, call.parameters)
    in_full = all(part.size <= MOST_LINES for part in parts)
    size = len(exact_json(dict(call.arguments))) + len(shown)
    kind: Kind = "question" if asks else "in doubt" if call.in_doubt else "call"
    return Waiting(
        item=f"{call.fingerprint} {quote(call.id)}",
        shown_id=exact(call.id),
        href=approval_path(call.id),
        equal_to=same,
        equal=(equal or {}).get(same, 1),
        run_id=exact(call.run_id),
        run_href=run_href(call.run_id),
        kind=kind,
        function=exact(call.fully_qualified_name),
        about=visible((call.parameters or {}).get("description") or ""),
        summary=visible(call.summary),
        asked_by=visible(call.asked_by),
        parts=parts,
        exact="" if asks else exact_json(dict(call.arguments), indent=2),
        question=shown,
        goal=visible(call.goal),
        asked_at=moment_of(call.asked_at, now),
        expires_at=_moment(call.expires_at, now),
        roles=tuple(map(exact, call.roles)),
        tally=exact(call.tally),
        escalates_at=_moment(call.escalates_at, now),
        escalates_to=", ".join(map(exact, call.escalates_to)),
        is_escalated=call.is_escalated,
        problem=visible(call.problem),
        said=tuple(
            (exact(one.by) or "an unnamed person", visible(one.text))
            for one in call.said
        ),
        fingerprint=call.fingerprint,
        is_long=size > _LONGEST_IN_LIST,
        selectable=kind == "call" and in_full and size <= _LONGEST_IN_LIST,
    )


def decision_of(call: PendingApproval, now: float) -> DecisionRow:
    """Show a decided call."""
    assert call.decision is not None, "it was decided"
    asks = call.kind == "question"
    return DecisionRow(
        href=approval_path(call.id),
        shown_id=exact(call.id),
        run_id=exact(call.run_id),
        run_href=run_href(call.run_id),
        function="" if asks else exact(call.fully_qualified_name),
        parts=parts_of(call.arguments, call.parameters),
        decided=_decided(call.decision, now),
    )


def _exported(call: PendingApproval) -> dict[str, Any]:
    """Return a decided call as JSON values."""
    record = call.decision
    assert record is not None, "it was decided"
    return {
        "at": record.at.isoformat(),
        "by": record.by,
        "decision": record.kind,
        "function": call.fully_qualified_name,
        "run": call.run_id,
        "call": call.id,
        "requested": call.arguments,
        "arguments": record.arguments,
        "reason": record.reason,
        "result": record.result,
        "grant": record.grant,
    }


def _as_json(calls: Sequence[PendingApproval], *, is_first: bool) -> str:
    """Write a part of a JSON array; an empty part ends it."""
    written = [json.dumps(_exported(call)) for call in calls]
    lead = "[" if is_first else ("," if calls else "")
    return f"{lead}{','.join(written)}{'' if calls else ']'}"


def _as_csv(calls: Sequence[PendingApproval], *, is_first: bool) -> str:
    """Write lines of CSV; a cell that a spreadsheet would take for a formula begins with an apostrophe."""
    lines = io.StringIO()
    writer = csv.writer(lines)
    if is_first:
        writer.writerow(_COLUMNS)
    for call in calls:
        values = _exported(call).values()
        texts = [one if isinstance(one, str) else json.dumps(one) for one in values]
        writer.writerow(f"'{one}" if one[:1] in _FORMULA else one for one in texts)
    return lines.getvalue()


_COLUMNS = (
    *("at", "by", "decision", "function", "run", "call"),
    *("requested", "arguments", "reason", "result", "grant"),
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
WRITERS = {
    "json": ("application/json", _as_json),
    "csv": ("text/csv; charset=utf-8", _as_csv),
}
"""How decisions are exported: the media type, and what writes a part; the last part is empty."""


def edit_digest(call: PendingApproval, edited: Mapping[str, Any]) -> str:
    """Digest an edit that was looked at: another one is looked at first."""
    return digest_of(call.fully_qualified_name, edited)


def who_decides(call: PendingApproval, *, why_not: str, is_checked: bool) -> str:
    """Say whether the visitor may approve or answer, and what checks that."""
    if why_not:
        verb = "answer" if call.kind == "question" else "approve"
        return f"You may not {verb} this here: {visible(why_not)}"
    if is_checked:
        return "You may: the application's hook allows it."
    return "Whoever is signed in: no hook of the application checks it here."


def is_editable(call: PendingApproval) -> bool:
    """Whether arguments may be edited: not of a call that may have taken effect."""
    return call.kind == "function" and not call.in_doubt


def approval_page(
    call: PendingApproval,
    timeline: Timeline,
    now: float,
    *,
    who: str = "",
    query: str = "",
    siblings: Sequence[PendingApproval] = (),
    unreadable: str = "",
    fields: tuple[Field, ...] | None = None,
    edited: Mapping[str, Any] | None = None,
    problem: str = "",
    typed: Mapping[str, str] | None = None,
) -> ApprovalPage:
    """Show a call or question with the conversation of its run.

    Args:
        call: The call or question.
        timeline: Empty if the run's journal cannot be read.
        now: Seconds since the epoch.
        who: As in the page.
        query: As in the page.
        siblings: What else the run waits for.
        unreadable: Why the journal cannot be read.
        fields: The form with the person's input; None draws it from the call.
        edited: The person's valid edit, to look at.
        problem: Why the person's decision was refused.
        typed: The person's input.
    """
    expired = call.expires_at is not None and call.expires_at.timestamp() <= now
    return ApprovalPage(
        call=waiting_of(call, now),
        status="expired" if expired and call.status == "open" else call.status,
        is_open=call.status == "open" and not expired,
        decision=None if call.decision is None else _decided(call.decision, now),
        who=who,
        query=query,
        siblings=tuple(waiting_of(one, now) for one in siblings),
        refused=tuple(_decided(one, now) for one in call.refused),
        plan=visible(timeline.plan),
        conversation=tuple(
            (turn, None if turn.at is None else moment_of(turn.at, now))
            for turn in conversation_of(timeline)
        ),
        unreadable=visible(unreadable),
        fields=(
            drawn_form(call.parameters, call.arguments) if fields is None else fields
        )
        if is_editable(call)
        else (),
        changes=None if edited is None else changes_of(call.arguments, edited),
        looked_at="" if edited is None else edit_digest(call, edited),
        problem=visible(problem),
        typed={name: (typed or {}).get(name, "") for name in TYPED},
    )


def run_href(run_id: str) -> str:
    """Return the address of a run's page, relative to the application's root."""
    return f"runs/{quote(run_id, safe='')}"


def _decided(record: DecisionRecord, now: float) -> Decided:
    changes = (
        ()
        if record.arguments is None
        else changes_of(record.requested or {}, record.arguments)
    )
    details = {
        "reason": visible(record.reason),
        "result": exact_json(record.result, indent=2)
        if record.kind == "supply"
        else "",
        "for the rest of the run": {
            "function": "this function",
            "arguments": "these arguments",
        }.get(record.always or "", ""),
        "by grant": exact(record.grant),
    }
    return Decided(
        kind=exact(record.kind),
        by=exact(record.by) or "an unnamed person",
        at=moment_of(record.at, now),
        changes=changes,
        details=tuple((name, text) for name, text in details.items() if text),
        refused=visible(record.refused),
    )
