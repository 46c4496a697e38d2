"""The messages of a run on the page: who said, called and answered what, in which round trip, and what is wrong."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import cast

from planner_ext.compare.comparison import Comparison, Run, ShownCall, ShownMessage, ShownResult
from planner_ext.compare.words import counted, findings

__all__ = ["timeline"]

_ROLES = {"user": "user", "assistant": "model", "tool": "function", "system": "system"}
_LONGEST = 400
"""Characters of a text that are shown."""


def timeline(comparison: Comparison, run: Run) -> str:
    """Write one run, folded up: its heading says what is wrong, its messages why."""
    option = comparison.option(run.option)
    faults = findings(comparison, run)
    chips = "".join(f'<span class="chip {"bad" if grave else "poor"}">{escape(text)}</span>' for text, grave in faults)
    heading = (
        f'<span class="name">{escape(option.name)}</span><span class="chip">{counted(run.trips, "round trip")}</span>'
    )
    fine = "" if faults else '<span class="chip good">nothing wrong</span>'
    return (
        f'<details class="run"><summary>{heading}{chips}{fine}</summary>'
        f'<p class="about">{escape(option.about)}</p>{_remarks(run)}'
        f'<ol class="timeline">{"".join(_items(run))}</ol></details>'
    )


def _remarks(run: Run) -> str:
    remarks = [f"It failed: {run.error}"] if run.error else []
    if run.refused:
        remarks.append(
            f"OpenAI would refuse {len(run.refused)} of these {run.trips} requests, the first one so: {run.refused[0]}"
        )
    return "".join(f'<p class="remark">{escape(text)}</p>' for text in remarks)


def _items(run: Run) -> Iterator[str]:
    """Write the messages, and a line where the budget is used up."""
    over = False
    for place, message in enumerate(run.messages):
        yield _item(run, place, message, over=over or (message.trip or 0) > run.budget)
        if message.trip == run.budget and place + 1 < len(run.messages):
            over = True
            yield f'<li class="line">the budget of {counted(run.budget, "round trip")} is used up</li>'


def _item(run: Run, place: int, message: ShownMessage, *, over: bool) -> str:
    wrong = [violation.text for violation in run.violations if violation.place == place]
    classes = " ".join(("message", message.role, *(["over"] if over else []), *(["wrong"] if wrong else [])))
    trip = f"trip {message.trip}" if message.trip is not None else ""
    said = f'<p class="said">{escape(_short(message.text))}</p>' if message.text else ""
    done = "".join((*map(_call, message.calls), *map(_result, message.results), *map(_violation, wrong)))
    return (
        f'<li class="{classes}"><span class="place">{place}</span><span class="trip">{trip}</span>'
        f'<span class="role">{_ROLES.get(message.role, escape(message.role))}</span>'
        f'<div class="body">{said}{done}</div></li>'
    )


def _call(call: ShownCall) -> str:
    text = f"{call.name}({_arguments(call.arguments)})"
    return f'<p class="call">calls <code>{escape(_short(text))}</code> <small>{escape(call.id)}</small></p>'


def _result(result: ShownResult) -> str:
    return f'<p class="result">returns {escape(_short(result.text))} <small>{escape(result.call_id)}</small></p>'


def _violation(text: str) -> str:
    return f'<p class="violation">✗ {escape(text)}</p>'


def _arguments(written: str) -> str:
    """Write JSON arguments as a person reads a call; what is no JSON object stays as it is."""
    try:
        parsed: object = json.loads(written or "{}")
    except ValueError:
        return written
    if not isinstance(parsed, Mapping):
        return written
    values = cast("Mapping[str, object]", parsed)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
