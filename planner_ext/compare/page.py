"""A comparison as one self-contained page: nothing to fetch, no script; light and dark, wide and narrow.

The page is written in ``page.html.jinja``, which escapes everything that a model or a function said.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from jinja2 import Environment, PackageLoader, StrictUndefined

from planner_ext.compare.history import ShownCall
from planner_ext.compare.report import Comparison, OptionInfo, ScriptInfo
from planner_ext.core.errors import counted, seconds

__all__ = ["page_of"]

_COLUMNS = (
    *("option", "round trips", "over budget", "charged", "functions run", "past budget"),
    *("tokens summed", "tokens told", "status", "answer", "history", "seconds"),
)
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

_WIDTH, _LEFT = 360, 142
"""Units of a chart, about a pixel each: it is as wide as a telephone, and its bars begin beside the names."""

_CHARACTER = 7.6
"""The width of a figure at most, in units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    option: OptionInfo
    total: int
    over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """Bars under a title.

    Attributes:
        key: Makes the ids of this chart unique on the page.
        title: What is counted.
        note: Small print beside the title.
        budget: Where the line of the budget is drawn; None draws none.
        scale: The width of one that is counted.
    """

    key: str
    title: str
    note: str
    budget: int | None
    bars: Sequence[_Bar]
    scale: float


def page_of(comparison: Comparison) -> str:
    """Write the page."""
    # The script that shows most is the one with the greatest excess.
    worst = max(comparison.scripts, key=lambda script: max(run.over_budget for run in comparison.of_script(script.key)))
    environment = Environment(
        loader=PackageLoader("planner_ext.compare", ""), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= _FILTERS
    return environment.get_template("page.html.jinja").render(
        comparison=comparison,
        worst=worst,
        overview=_trips(comparison, worst, "overview"),
        charts={script.key: _charts(comparison, script) for script in comparison.scripts},
        columns=_COLUMNS,
        worded=("status", "answer", "history"),
        roles={"user": "user", "assistant": "model", "tool": "function", "system": "system"},
        chart_width=_WIDTH,
        chart_left=_LEFT,
    )


def _charts(comparison: Comparison, script: ScriptInfo) -> Sequence[_Chart]:
    runs = comparison.of_script(script.key)
    tools = [(run.tools_run, run.tools_past_budget) for run in runs]
    tokens = [(run.tokens_summed, run.tokens_past_budget) for run in runs]
    return (
        _trips(comparison, script, "trips"),
        _chart(comparison, script, "tools", "Functions run", tools, note="striped: no trip left to read the result"),
        _chart(comparison, script, "tokens", "Tokens", tokens, note="striped: in trips over the budget"),
    )


def _trips(comparison: Comparison, script: ScriptInfo, key: str) -> _Chart:
    trips = [(run.trips, run.over_budget) for run in comparison.of_script(script.key)]
    return _chart(comparison, script, key, "Round trips", trips, budget=comparison.max_iterations)


def _chart(
    comparison: Comparison,
    script: ScriptInfo,
    key: str,
    title: str,
    amounts: Sequence[tuple[int, int]],
    *,
    note: str = "",
    budget: int | None = None,
) -> _Chart:
    """Draw the amounts of each option, in all and over the budget; the longest bar fits with its figure."""
    figures = (f"{total:,}" + (f" +{over:,}" if over else "") for total, over in amounts)
    room = _WIDTH - _LEFT - 6 - _CHARACTER * max(map(len, figures), default=0)
    most = max([budget or 0, 1, *(total for total, _ in amounts)])
    options = [comparison.option(run.option) for run in comparison.of_script(script.key)]
    bars = [_Bar(option=one, total=total, over=over) for one, (total, over) in zip(options, amounts, strict=True)]
    return _Chart(key=f"{script.key}-{key}", title=title, note=note, budget=budget, bars=bars, scale=room / most)


def _in_words(number: int, noun: str) -> str:
    return f"{_NUMBERS[number] if number < len(_NUMBERS) else number} {noun}{'' if number == 1 else 's'}"


def _signature(call: ShownCall) -> str:
    """Write a call as a person reads it; arguments that are not a JSON object stay as they are."""
    try:
        parsed: object = json.loads(call.arguments or "{}")
    except ValueError:
        parsed = None
    if not isinstance(parsed, Mapping):
        return f"{call.name}({call.arguments})"
    values = cast("Mapping[str, object]", parsed)
    return (
        f"{call.name}({', '.join(f'{name}={json.dumps(value, ensure_ascii=False)}' for name, value in values.items())})"
    )


_FILTERS: dict[str, Callable[..., str]] = {
    "counted": counted,
    "in_words": _in_words,
    "number": "{:,}".format,
    "seconds": seconds,
    "signature": _signature,
}
