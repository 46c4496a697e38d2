"""The timeline of a run as a self-contained HTML page without scripts, in light and dark, wide and narrow.

The templates escape every text and make invisible characters visible. They use no
``style`` attribute: a content security policy may forbid it. The inbox embeds the same
fragment.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any, Literal

from planner_ext.approval.decisions import DecisionRecord, json_object
from planner_ext.core.errors import PlannerExtError, counted
from planner_ext.core.state import ASK_USER
from planner_ext.core.text import one_line
from planner_ext.core.values import Usage
from planner_ext.engine.timeline import (
    CallOutcome,
    Spending,
    Timeline,
    TimelineCall,
    TimelineEvent,
    TimelineIteration,
)
from planner_ext.readable.parts import changes_of, parts_written
from planner_ext.readable.plain import arguments_line
from planner_ext.readable.text import exact, exact_json, visible

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def page_of(timelines: Sequence[Timeline], *, title: str = "") -> str:
    """Write one HTML file of one run, or of two side by side: a run and its fork. It fetches nothing.

    The title is by default the goal of the first run; of a fork, what it changes: after
    which iteration it begins, and with what instruction.

    Raises:
        PlannerExtError: If jinja2 is not installed.
        ValueError: If the number of timelines is neither one nor two.
    """
    if isinstance(timelines, Timeline) or len(timelines) not in (1, 2):
        given = (
            "a Timeline"
            if isinstance(timelines, Timeline)
            else f"{len(timelines)} timelines"
        )
        raise ValueError(
            f"A page shows one run, or two side by side: [timeline] or [timeline, fork]; got {given}."
        )
    goal = one_line(timelines[0].goal)
    title = title or _change(timelines) or goal or "Run"
    return (
        _templates()
        .get_template("page.html.jinja")
        .render(title=title, timelines=timelines)
    )


def _change(timelines: Sequence[Timeline]) -> str:
    """Say what a fork changes in its run; "" without a fork."""
    first, *others = timelines
    common = _same(timelines) if others else 0
    if not common:
        return ""
    new = others[0].iterations[common : common + 1]
    said = [
        message.text
        for one in new
        for message in one.messages
        if message.role == "user"
    ]
    instruction = f": {one_line(said[-1])}" if said else ""
    number = first.iterations[common - 1].number
    after = "the plan" if number < 0 else f"iteration {number}"
    return f"Fork after {after}{instruction}"


def fragment_of(timeline: Timeline, *, details: str = "") -> str:
    """Write one run as HTML for a page with the stylesheet ``planner_ext/timeline/style.css``.

    Args:
        timeline: The run.
        details: The address, up to the number of an iteration, at which that one's
            arguments, results and times are read; "" writes them here.

    Raises:
        PlannerExtError: If jinja2 is not installed.
    """
    template = _templates().get_template("fragment.html.jinja")
    return template.render(timeline=timeline, details=details)


def steps_of(timeline: Timeline, *, prefix: str) -> list[str]:
    """Write each iteration as an item of an ``ol.steps``; the prefix makes their ids unique.

    Raises:
        PlannerExtError: If jinja2 is not installed.
    """
    template: Any = _templates().get_template("timeline.html.jinja").module
    return [
        template.step(iteration, timeline, prefix) for iteration in timeline.iterations
    ]


@cache
def _templates() -> "Environment":
    try:
        from planner_ext.readable.html import templates_of  # noqa: PLC0415  (needs an extra)
    except ImportError as error:
        raise PlannerExtError(
            'A timeline page needs jinja2. Install it with: pip install "planner-ext[cli]"'
        ) from error
    templates = templates_of("planner_ext.timeline", "")
    templates.filters |= {  # pyright: ignore[reportUnknownMemberType]  (partially unknown in jinja2)
        "prose": _prose,
        "exact": exact,
        "exact_json": exact_json,
        "moment": _moment,
        "span": _span,
        "iso": _iso,
        "arguments": _arguments,
        "changes": _changes,
        "number": "{:,}".format,
    }
    templates.tests["edited"] = _is_edited  # pyright: ignore[reportUnknownMemberType]
    templates.globals |= {  # pyright: ignore[reportUnknownMemberType]
        "call_in_short": _call_in_short,
        "consumed": _consumed,
        "details": "",
        "counted": counted,
        "decided": _decided,
        "event_text": _event_text,
        "notes": _notes,
        "outcomes": _OUTCOMES,
        "is_noted": _is_noted,
        "own_events": _own_events,
        "pairs": _pairs,
        "same": _same,
        "spent": _spent,
        "statuses": _STATUSES,
        "overview": _overview,
        "tracks": _tracks,
    }
    return templates


# Time: idle periods are shortened.


class _Axis:
    """Maps times to percent of a width."""

    def __init__(
        self, start: float, end: float, gaps: Iterable[tuple[float, float]]
    ) -> None:
        """Shorten the gaps between start and end; gaps may overlap."""
        joined: list[tuple[float, float]] = []
        for left, right in sorted(
            (max(left, start), min(right, end)) for left, right in gaps
        ):
            if joined and left <= joined[-1][1]:
                first, last = joined[-1]
                joined[-1] = (first, max(right, last))
            elif left < right:
                joined.append((left, right))
        idle = sum(right - left for left, right in joined)
        worked = end - start - idle
        share = 0.0
        if joined:
            share = min(_WIDEST_GAP, 0.4 / len(joined))
        widest = 1.0
        if worked > 0:
            widest = worked * share / (1 - share * len(joined))
        self._times = [start]
        self._places = [0.0]
        for left, right in joined:
            self._step(left, left - self._times[-1])
            self._step(right, min(right - left, widest))
        self._step(end, end - self._times[-1])

    def _step(self, time: float, width: float) -> None:
        self._times.append(time)
        self._places.append(self._places[-1] + max(width, 0.0))

    def __call__(self, time: float) -> float:
        """Return the place of a time, from 0 to 100."""
        whole = self._places[-1]
        if whole <= 0:
            return 0.0
        before = bisect_right(self._times, time) - 1
        last = len(self._times) - 2
        place = min(max(before, 0), last)
        start = self._times[place]
        end = self._times[place + 1]
        share = 0.0
        if end > start:
            share = min(max((time - start) / (end - start), 0.0), 1.0)
        left = self._places[place]
        right = self._places[place + 1]
        return 100 * (left + share * (right - left)) / whole


_WIDEST_GAP = 0.06


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar of a track; its start and width are in percent."""

    kind: Literal["asked", "ran", "waits", "failed"]
    x: str
    width: str


_THINNEST = 0.4
"""The least width of a bar, in percent of its track."""


def _bar(axis: _Axis, span: "_Span", thinnest: float = _THINNEST) -> _Bar:
    kind, start, end = span
    left = axis(start)
    right = axis(max(start, end))
    width = max(right - left, thinnest)
    return _Bar(kind, f"{min(left, 100 - width):.4g}", f"{width:.4g}")


_Span = tuple[Literal["asked", "ran", "waits", "failed"], float, float]


def _request_spans(iteration: TimelineIteration, until: float) -> list[_Span]:
    request = iteration.request
    failed: list[_Span] = [
        ("failed", one.started, one.started if one.lost else one.ended)
        for one in request.failed
    ]
    if request.ended is None:
        return [*failed, ("asked", request.started, until)]
    if iteration.reply is None:  # no attempt is under way
        return failed
    return [*failed, ("asked", request.started, request.ended)]


def _wait_of(call: TimelineCall, until: float) -> tuple[float, float] | None:
    if call.asked is None:
        return None
    if call.outcome in ("waiting", "in_doubt"):
        return call.asked, until
    decided = [
        record.at.timestamp()
        for record in call.decisions
        if record.at.timestamp() >= call.asked
    ]
    ended = decided[0] if decided else call.ended
    return call.asked, call.asked if ended is None else ended


def _call_spans(call: TimelineCall, until: float) -> list[_Span]:
    wait = _wait_of(call, until)
    spans: list[_Span] = [] if wait is None else [("waits", *wait)]
    bad = call.outcome in ("failed", "timed_out", "cancelled")
    for attempt in call.attempts:
        lasts = call.outcome in ("running", "waiting") and attempt is call.attempts[-1]
        end = attempt.ended
        lost = end is None and not lasts
        if end is None:
            end = until if lasts else attempt.started
        kind = "waits" if call.outcome == "waiting" else "ran"
        if bad or lost:
            kind = "failed"
        spans.append((kind, attempt.started, end))
    return spans


def _rows(iteration: TimelineIteration, until: float) -> Iterator[list[_Span]]:
    yield _request_spans(iteration, until)
    for call in iteration.calls:
        yield _call_spans(call, until)


def _gaps(iteration: TimelineIteration, until: float) -> Iterator[tuple[float, float]]:
    for gap in iteration.gaps:
        yield gap.started, until if gap.ended is None else gap.ended
    for call in iteration.calls:
        wait = _wait_of(call, until)
        if wait is not None:
            yield wait


def _end_of(iteration: TimelineIteration, until: float) -> float:
    open_gap = any(gap.ended is None for gap in iteration.gaps)
    running = any(call.outcome == "running" for call in iteration.calls)
    unfinished = open_gap or running or iteration.request.ended is None
    return until if unfinished else iteration.ended


def _tracks(iteration: TimelineIteration, until: float) -> list[list[_Bar]]:
    end = _end_of(iteration, until)
    axis = _Axis(iteration.started, end, _gaps(iteration, until))
    return [[_bar(axis, span) for span in row] for row in _rows(iteration, until)]


def _overview(timeline: Timeline) -> list[_Bar]:
    until = timeline.until if timeline.ended is None else timeline.ended
    gaps = [gap for iteration in timeline.iterations for gap in _gaps(iteration, until)]
    axis = _Axis(timeline.started or 0.0, until, gaps)
    spans = [
        span
        for iteration in timeline.iterations
        for row in _rows(iteration, until)
        for span in row
    ]
    thinnest = 0.0
    if spans:
        thinnest = min(_THINNEST, 20 / len(spans))
    return [_bar(axis, span, thinnest) for span in spans]


# Words.


def _prose(text: str) -> str:
    """Make a text that is only read, not decided on, visible, with its indents."""
    return visible(text, blanks=16)


def _moment(at: float, day_of: float | None = None) -> str:
    moment = datetime.fromtimestamp(at, UTC)
    if (
        day_of is not None
        and moment.date() == datetime.fromtimestamp(day_of, UTC).date()
    ):
        return f"{moment:%H:%M:%S}"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def _span(seconds: float) -> str:
    """Write a duration with its two greatest units: ``340 ms``, ``3 min 12 s``, ``2 d 4 h``."""
    seconds = max(seconds, 0.0)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    left = round(seconds)
    parts = list[str]()
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        parts.append(f"{count} {unit}" if count else "")
    first = next(place for place, part in enumerate(parts) if part)
    return " ".join(filter(None, parts[first : first + 2]))


def _arguments(written: str) -> "Markup":
    """Draw a call's arguments."""
    from planner_ext.readable.html import html_of  # noqa: PLC0415  (needs an extra)

    return html_of(parts_written(written))


def _changes(call: TimelineCall) -> "Markup":
    """Draw what was changed in the arguments that the model asked for."""
    from planner_ext.readable.html import html_of  # noqa: PLC0415  (needs an extra)

    before = json_object(call.requested) or {}
    after = json_object(call.arguments) or {}
    return html_of(changes_of(before, after))


def _is_edited(call: TimelineCall) -> bool:
    return json_object(call.requested) != json_object(call.arguments)


_LONGEST = 160
"""The most characters of a call or text on one line."""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _call_in_short(call: TimelineCall) -> str:
    return _short(arguments_line(call.arguments))


def _tokens(usage: Usage) -> str:
    cost = "" if usage.cost is None else f", ${usage.cost:.4g}"
    return f"{counted(usage.total_tokens, 'token')}{cost}"


def _consumed(spent: Usage) -> str:
    words = [
        counted(spent.iterations, "round trip"),
        counted(spent.tool_calls, "function call"),
        _tokens(spent),
    ]
    return ", ".join(words)


_LIMITS = {
    "max_iterations": "round trips",
    "max_tool_calls": "function calls",
    "max_total_tokens": "tokens",
    "max_cost": "cost",
    "max_active_seconds": "active time",
    "deadline": "time to the deadline",
    "max_calls_per_function": "calls of ",
    "max_consecutive_errors": "errors in a row",
    "max_repeated_calls": "the same call",
    "max_repeated_denials": "denials in a row",
}


@dataclass(frozen=True, slots=True)
class _Spent:
    label: str
    text: str
    own: float
    nested: float
    used_up: bool


def _spent(spending: Spending) -> _Spent:
    def amount(value: float) -> str:
        if spending.name in ("max_active_seconds", "deadline"):
            return _span(value)
        return f"${value:.4g}" if spending.name == "max_cost" else f"{value:,.0f}"

    nested = f", {amount(spending.nested)} nested" if spending.nested else ""
    whole = max(spending.limit, spending.used) or 1.0
    own = max(spending.used - spending.nested, 0)
    inside = min(spending.nested, spending.used)
    return _Spent(
        label=_LIMITS[spending.name] + exact(spending.function),
        text=f"{amount(spending.used)} of {amount(spending.limit)}{nested}",
        own=round(100 * own / whole, 2),
        nested=round(100 * inside / whole, 2),
        used_up=spending.used >= spending.limit,
    )


_OUTCOMES: dict[CallOutcome, tuple[str, str]] = {
    "requested": ("no result", ""),
    "ready": ("not started", ""),
    "waiting": ("waits", "poor"),
    "in_doubt": ("in doubt", "bad"),
    "running": ("runs", ""),
    "ok": ("ok", "good"),
    "failed": ("failed", "bad"),
    "timed_out": ("timed out", "bad"),
    "cancelled": ("cancelled", "bad"),
    "denied": ("denied", "poor"),
    "expired": ("expired", "poor"),
    "answered": ("answered", "good"),
    "unknown": ("unknown", "bad"),
    "invalid": ("invalid", "bad"),
    "withheld": ("not run", "poor"),
    "final_answer": ("answer", "good"),
    "returned": ("returned", ""),
}
"""The word for each outcome, and the class of its chip."""

_STATUSES = {
    "answered": "good",
    "paused": "poor",
    "asked": "poor",
    "incomplete": "poor",
    "limit_reached": "poor",
    "stopped": "poor",
    "failed": "bad",
    "quarantined": "bad",
}
"""The class of the chip of each status."""

_DECIDED = {
    "approve": "approved",
    "deny": "denied",
    "supply": "answered",
    "expire": "expired",
    "edit": "edited",
}


def _decided(record: DecisionRecord, call: TimelineCall) -> str:
    what = _DECIDED[record.kind]
    if record.kind == "approve" and record.arguments != record.requested:
        what += " with edited arguments"
    text = f"{what} by {exact(record.by)}" if record.by else what
    at = record.at.timestamp()
    if call.asked is not None and at > call.asked:
        text += f" after {_span(at - call.asked)}"
    if record.always is not None:
        text += f", for the rest of the run: {record.always}"
    return f"{text}: {_short(exact(record.reason))}" if record.reason else text


_EVENTS = {
    "paused": "paused",
    "resumed": "resumed",
    "crashed": "the process ended",
    "stopped": "stopped",
    "budget": "the budget was changed",
    "refused": "a shared budget allowed nothing more",
    "question": "the model asked",
    "check": "the answer was refused",
    "said": "said",
    "callback": "the iteration callback ended the run",
    "ended": "ended",
}


def _event_text(event: TimelineEvent) -> str:
    if event.kind == "violation":
        return f"✗ {_short(one_line(_prose(event.text)))}"
    by = ""
    if event.by and event.kind != "question":
        by = f" by {exact(event.by)}"
    answer = (
        ""
        if event.answer is None
        else f" ({exact(event.by) or 'answer'}: {_short(exact(event.answer))})"
    )
    return f"{_EVENTS[event.kind]}{by}{': ' if event.text else ''}{_short(one_line(_prose(event.text)))}{answer}"


@dataclass(frozen=True, slots=True)
class _Note:
    iteration: int
    level: str
    text: str


def _notes(timeline: Timeline) -> list[_Note]:
    return [
        _Note(iteration.number, level, text)
        for iteration in timeline.iterations
        for level, text in _noted(iteration)
    ]


_BAD_ENDS = {
    "length": "the reply was cut short: length",
    "content_filter": "the reply was cut short: content_filter",
    "refusal": "the model refused to answer",
}


def _noted(iteration: TimelineIteration) -> Iterator[tuple[str, str]]:
    request = iteration.request
    for failed in request.failed:
        if not failed.lost:
            yield "bad", f"a request failed: {_short(one_line(_prose(failed.reason)))}"
    if request.withheld is not None:
        yield "poor", f"no functions were offered: {request.withheld}"
    if request.finish_reason in _BAD_ENDS:
        yield "bad", _BAD_ENDS[request.finish_reason]
    for call in iteration.calls:
        yield from _noted_call(call)
    for event in iteration.events:
        if event.kind not in ("paused", "resumed", "violation", "ended"):
            yield "bad" if event.kind == "crashed" else "", _event_text(event)


_IN_FULL: dict[CallOutcome, str] = {
    "unknown": "unknown function",
    "invalid": "invalid arguments",
}
"""The words for outcomes in a note, where they differ from those on a chip."""

_LIVELY = (
    "failed",
    "timed_out",
    "cancelled",
    "unknown",
    "invalid",
    "withheld",
    "waiting",
    "in_doubt",
)


def _noted_call(call: TimelineCall) -> Iterator[tuple[str, str]]:
    name = exact(call.function)
    for record in call.decisions:
        if _is_noted(record, call):
            yield (
                ("" if record.kind in ("approve", "supply") else "poor"),
                f"{name} {_decided(record, call)}",
            )
    # A question that waits is an event, too.
    asks = call.outcome == "waiting" and call.function == ASK_USER
    if call.outcome in _LIVELY and not asks:
        word, level = _OUTCOMES[call.outcome]
        word = _IN_FULL.get(call.outcome, word)
        asked = call.prompt if call.outcome == "waiting" else ""
        why = call.error or asked
        reason = (
            f" ({_short(one_line(_prose(why)))})"
            if why not in ("", call.outcome)
            else ""
        )
        yield level, f"{name}: {word}{reason}"


def _is_noted(record: DecisionRecord, call: TimelineCall) -> bool:
    """Whether a decision has a line; an approval by an interceptor or policy alone has none."""
    return record.kind != "approve" or call.asked is not None


# Two runs side by side.


def _same(timelines: Sequence[Timeline]) -> int:
    """Count the common iterations at the start of a run and its fork."""
    one, other = (timeline.iterations for timeline in timelines)
    pairs = zip(map(_without_times, one), map(_without_times, other), strict=False)
    common = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len([*common])


def _without_times(iteration: TimelineIteration) -> TimelineIteration:
    """Leave out what a fork may add to its last common iteration."""
    return replace(iteration, events=(), gaps=(), ended=0.0)


def _own_events(timelines: Sequence[Timeline], last: int) -> list[list[TimelineEvent]]:
    one, other = ([*timeline.iterations[last].events] for timeline in timelines)
    return [
        [event for event in one if event not in other],
        [event for event in other if event not in one],
    ]


def _pairs(
    timelines: Sequence[Timeline], after: int
) -> list[tuple[TimelineIteration | None, TimelineIteration | None]]:
    one, other = (timeline.iterations[after:] for timeline in timelines)
    return list(zip_longest(one, other))
