"""How the pages show what a store holds: what their templates call, and lists and exports as values.

A template makes each text that it writes visible, and escapes it. What goes back into
the field where it was typed passes through ``e`` and stays as it is. No text that a
person decides on is cut; the middle of a long one is folded.
"""

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote, urlencode

from jinja2 import Environment
from markupsafe import Markup, escape
from starlette.requests import Request

from planner_ext.approval.decisions import DecisionRecord, digest_of
from planner_ext.core.values import frozen
from planner_ext.durable.listing import Hold, next_try, time_text
from planner_ext.durable.records import (
    PendingApproval,
    approval_path,
    question_digest,
)
from planner_ext.inbox.forms import drawn_form
from planner_ext.readable.html import html_of, templates_of
from planner_ext.readable.parts import (
    MOST_LINES,
    Part,
    changes_of,
    parts_of,
)
from planner_ext.readable.text import (
    duration_text,
    exact,
    exact_json,
    visible,
    visible_line,
)
from planner_ext.timeline.conversation import conversation_of

GRANT = ("expires_in", "uses", "arguments", "run_arguments")
"""The terms of a grant in a decision's form."""

_LONGEST_IN_LIST = 4_000
"""Characters of arguments and question; a longer call is decided on its own page."""


_LONGEST_WORDS = 100
"""Characters that tell one call from others in a list of links."""


def environment() -> Environment:
    """Make the environment of the templates."""
    templates = templates_of("planner_ext.inbox")
    templates.finalize = _made_visible
    templates.filters |= {  # pyright: ignore[reportUnknownMemberType]  (partially unknown in jinja2)
        "call_href": approval_path,
        "details": _details,
        "edits": _edits,
        "exact": exact,
        "item": item,
        "json": _json,
        "line": visible_line,
        "moment": _moment,
        "next_try": next_try,
        "parts": html_of,
        "parts_of": _parts_of,
        "question": question_of,
        "quoted": quote,
        "run_href": run_href,
        "time": _time,
        "turns": conversation_of,
        "words": _first_words,
    }
    templates.tests |= {  # pyright: ignore[reportUnknownMemberType]
        "editable": is_editable,
        "long": _is_long,
        "selectable": is_selectable,
    }
    templates.globals |= {  # pyright: ignore[reportUnknownMemberType]
        "changes_of": changes_of,
        "drawn_form": drawn_form,
        "edit_digest": edit_digest,
    }
    return templates


def _made_visible(value: object) -> object:
    """Make a text visible; what a macro or filter has written is."""
    return visible(value) if type(value) is str else value


@frozen
class Outcome:
    """The outcome of one of many decisions or actions."""

    id: str
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


def hold_text(hold: Hold | None) -> str:
    """Say that no run is driven, by whose order, and why; "" if runs are."""
    if hold is None:
        return ""
    by = f" by {exact(hold.by)}" if hold.by else ""
    reason = f": {visible(hold.reason)}" if hold.reason else ""
    since = time_text(hold.at)
    paused = f"All runs of this store are paused since {since}{by}{reason}."
    return f"{paused} What is decided is taken when they are resumed."


def paging_of(
    request: Request, *, size: int, offset: int, shown: int, total: int
) -> Paging:
    """Number a part of a list, with the addresses of the parts around it."""
    root = request.scope.get("root_path", "")
    path = request.url.path.removeprefix(root).lstrip("/")
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


def _seconds(at: datetime | float) -> float:
    return at.timestamp() if isinstance(at, datetime) else at


def _moment(at: datetime | float) -> str:
    return time_text(_seconds(at))


def _time(at: datetime | float) -> Markup:
    """Write a time as an element that shows how far from now it is, such as "3 minutes ago"."""
    then = _seconds(at)
    seconds = then - time.time()
    span = duration_text(abs(seconds))
    return Markup('<time data-ages datetime="{}" title="{}">{}</time>').format(
        datetime.fromtimestamp(then, UTC).isoformat(timespec="seconds"),
        time_text(then),
        f"in {span}" if seconds > 0 else f"{span} ago",
    )


def item(call: PendingApproval) -> str:
    """Return a call's fingerprint and id, as the form of a list returns them; see `items_of`."""
    return f"{call.fingerprint} {quote(call.id)}"


def items_of(text: str) -> Iterator[tuple[str, str]]:
    """Return the fingerprint and the id of each `item` in a text."""
    words = text.split(" ")
    for fingerprint, id in zip(words[::2], words[1::2], strict=False):
        yield fingerprint, unquote(id)


def question_of(call: PendingApproval) -> str:
    """Return what is asked about the call: the digest that equal calls have in common."""
    return question_digest(call.fully_qualified_name, call.arguments, call.prompt)


def grouped(calls: Sequence[PendingApproval]) -> list[list[PendingApproval]]:
    """Group the calls that ask the same of the same people, the largest group first."""
    groups: dict[object, list[PendingApproval]] = {}
    for call in calls:
        whom = tuple(call.roles), call.tally, tuple(call.escalates_to)
        state = call.in_doubt, call.problem, call.said
        groups.setdefault((question_of(call), whom, state), []).append(call)
    return sorted(groups.values(), key=len, reverse=True)


def told_apart(
    calls: Sequence[PendingApproval],
) -> list[tuple[PendingApproval, str]]:
    """Give each call what tells it from the others of its function: its summary, an argument, or else its id."""
    shared = Counter(
        (call.fully_qualified_name, one) for call in calls for one in _words_of(call)
    )

    def own(call: PendingApproval) -> str:
        name = call.fully_qualified_name
        words = (one for one in _words_of(call) if shared[name, one] == 1)
        return next(words, exact(call.id))

    return [(call, own(call)) for call in calls]


def _first_words(call: PendingApproval) -> str:
    return next(_words_of(call), "")


def _words_of(call: PendingApproval) -> Iterator[str]:
    arguments = call.arguments.items()
    texts = [f"{exact(name)}: {exact_json(value)}" for name, value in arguments]
    if call.kind == "question":
        texts = [visible_line(str(call.arguments.get("question")))]
    for text in filter(None, (visible_line(call.summary), *texts)):
        is_long = len(text) > _LONGEST_WORDS
        yield f"{text[:_LONGEST_WORDS]}…" if is_long else text


def _parts_of(call: PendingApproval) -> tuple[Part, ...]:
    return parts_of(call.arguments, call.parameters)


def _json(value: Any) -> Markup:
    return escape(exact_json(value, indent=2))


def _is_long(call: PendingApproval) -> bool:
    """Whether a list shows no arguments of the call."""
    size = len(exact_json(dict(call.arguments))) + len(call.prompt)
    return size > _LONGEST_IN_LIST


def is_selectable(call: PendingApproval) -> bool:
    """Whether a call may be decided with others: the list shows it in full."""
    if not is_editable(call) or _is_long(call):
        return False
    return all(part.size <= MOST_LINES for part in _parts_of(call))


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
        if call.roles and not is_checked:
            return f"Nobody can {verb} this here: this inbox does not check who has which role."
        return f"You may not {verb} this here: {visible(why_not)}"
    if is_checked:
        return "You may: the application allows it."
    return "Whoever is signed in: this inbox does not check who may."


def is_editable(call: PendingApproval) -> bool:
    """Whether arguments may be edited: not of a call that may have taken effect."""
    return call.kind == "function" and not call.in_doubt


def run_href(run_id: str) -> str:
    """Return the address of a run's page, relative to the application's root."""
    return f"runs/{quote(run_id, safe='')}"


def _edits(record: DecisionRecord) -> tuple[Part, ...]:
    """List what a decision changed in the arguments."""
    if record.arguments is None:
        return ()
    return changes_of(record.requested or {}, record.arguments)


def _details(record: DecisionRecord) -> Iterator[tuple[str, object]]:
    """Name the other parts of a decision, such as its reason."""
    yield "reason", record.reason
    if record.kind == "supply":
        yield "result", _json(record.result)
    always = {"function": "this function", "arguments": "these arguments"}
    yield "for the rest of the run", always.get(record.always or "", "")
    yield "by grant", exact(record.grant)
