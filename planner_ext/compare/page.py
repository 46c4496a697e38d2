"""A comparison as a document: an HTML page, and the tables as Markdown, which is the same each time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from planner_ext.compare.report import Comparison, Run, ShownResult
from planner_ext.core.errors import counted, seconds
from planner_ext.timeline import (
    ModelRequest,
    Timeline,
    TimelineCall,
    TimelineEvent,
    TimelineIteration,
    TimelineMessage,
)
from planner_ext.timeline.page import steps_of

_TEMPLATES = Environment(
    loader=PackageLoader("planner_ext", ""),
    autoescape=select_autoescape(("html.jinja",)),
    undefined=StrictUndefined,
)


_WIDTH = 360
_LABELS = (142, 190)
_CHARACTER = 7.6
"""Units of a chart, about a pixel each: its width, the least and most for names, a character."""


def page_of(comparison: Comparison) -> str:
    """Write the page."""
    template = _TEMPLATES.get_template("compare/page.html.jinja")
    least, most = _LABELS
    left = min(
        max(
            least,
            round(_CHARACTER * max(len(option.name) for option in comparison.options)),
        ),
        most,
    )
    functions = {
        "scale": partial(_scale, left),
        "steps": _steps,
        "counted": counted,
        "seconds": seconds,
    }
    return template.render(
        comparison=comparison,
        first=comparison.scripts[0],
        width=_WIDTH,
        left=left,
        number="{:,}".format,
        **functions,
    )


def _scale(
    left: int, totals: Sequence[int], excesses: Sequence[int], budget: int
) -> float:
    """Return a bar's width per count: the longest bar fits between names and figures."""
    figures = (
        f"{total:,}" + (f" +{excess:,}" if excess else "")
        for total, excess in zip(totals, excesses, strict=True)
    )
    room = _WIDTH - left - 6 - _CHARACTER * max(map(len, figures), default=0)
    return room / max(budget, 1, *totals)


def _steps(run: Run) -> list[Markup]:
    """Draw a run's round trips as a timeline, whose templates escape what a model wrote."""
    steps = steps_of(timeline_of_run(run), prefix=f"{run.script}-{run.option}-")
    return [Markup(step) for step in steps]  # noqa: S704  (see above)


def timeline_of_run(run: Run) -> Timeline:
    """Make a timeline of a history, without times; its iterations are round trips, from 1."""
    iterations: list[TimelineIteration] = []
    sent: list[TimelineMessage] = []
    for place, message in enumerate(run.messages):
        if message.trip is not None:
            calls = (
                TimelineCall(
                    index=index,
                    id=call.id,
                    function=call.name,
                    requested=call.arguments,
                    arguments=call.arguments,
                )
                for index, call in enumerate(message.calls)
            )
            reply = TimelineMessage(role="assistant", text=message.text)
            iterations.append(
                _iteration(message.trip, sent, reply=reply, calls=tuple(calls))
            )
            sent = []
        elif message.results and iterations:
            for result in message.results:
                iterations[-1] = _with_result(iterations[-1], result)
        else:
            sent.append(TimelineMessage(role=message.role, text=message.text))
        if run.violation is not None and run.violation.place == place and iterations:
            event = TimelineEvent(at=0.0, kind="violation", text=run.violation.text)
            iterations[-1] = replace(
                iterations[-1], events=(*iterations[-1].events, event)
            )
    if sent:
        iterations.append(_iteration(len(iterations) + 1, sent))
    return Timeline(answer=run.answer, iterations=tuple(iterations))


def _iteration(
    trip: int, sent: Sequence[TimelineMessage], **more: Any
) -> TimelineIteration:
    return TimelineIteration(
        number=trip,
        messages=tuple(sent),
        request=ModelRequest(started=0.0),
        ended=0.0,
        **more,
    )


def _with_result(
    iteration: TimelineIteration, result: ShownResult
) -> TimelineIteration:
    """Give a result to the first call with its id that has none."""
    calls = list(iteration.calls)
    open_calls = (
        index
        for index, call in enumerate(calls)
        if call.id == result.call_id and call.outcome == "requested"
    )
    index = next(open_calls, None)
    if index is not None:
        calls[index] = replace(calls[index], outcome="ok", result=result.text)
    return replace(iteration, calls=tuple(calls))


TABLE_BEGINS = "<!-- table: planner-ext compare -->"
TABLE_ENDS = "<!-- /table -->"


def markdown_of(comparison: Comparison) -> str:
    """Write the tables, without wall times."""
    return _TEMPLATES.get_template("compare/table.md.jinja").render(
        comparison=comparison
    )


def with_table(document: str, table: str) -> str:
    """Put a table between the markers of a document.

    Raises:
        ValueError: If the document does not have both markers, in order.
    """
    head, begins, rest = document.partition(TABLE_BEGINS)
    _, ends, tail = rest.partition(TABLE_ENDS)
    if not begins or not ends:
        raise ValueError(
            f"expected a document with the lines {TABLE_BEGINS} and {TABLE_ENDS}, in this order"
        )
    return f"{head}{begins}\n\n{table}\n\n{ends}{tail}"
