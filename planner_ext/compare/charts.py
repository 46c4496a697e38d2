"""Bar charts as inline SVG: what an option spent, split where its budget was used up.

Every bar is drawn against the same scale and says its numbers in words, so nothing depends on colour alone. Colours are
the page's, by class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["HATCHING", "Bar", "bar_chart"]

HATCHING = (
    '<svg class="defs" aria-hidden="true" focusable="false" width="0" height="0"><defs>'
    '<pattern id="over" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="over" width="6" height="6"/><rect class="stripe" width="2" height="6"/></pattern></defs></svg>'
)
"""Stands once on the page: the pattern of what is over budget."""

_WIDTH, _LABEL, _ROW, _BAR, _HEAD = 360, 142, 26, 14, 22
"""Units, about a pixel each: a chart is as wide as a telephone."""

_CHARACTER = 7.6
"""How wide a figure is at most, in units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar.

    Attributes:
        label: Beside it.
        within: How much was spent within the budget.
        over: How much after it was used up.
        ours: Whether it is a corrected option's.
    """

    label: str
    within: int
    over: int
    ours: bool


def bar_chart(title: str, bars: Sequence[Bar], *, key: str, note: str = "", budget: int | None = None) -> str:
    """Draw bars under a title.

    Args:
        title: What is counted.
        note: Small print beside the title.
        bars: From top to bottom.
        key: Makes the ids of this chart unique on the page.
        budget: Where to draw the line; None draws none, and only the change of each bar shows its end of budget.
    """
    most = max([budget or 0, 1, *(bar.within + bar.over for bar in bars)])
    room = _WIDTH - _LABEL - 6 - _CHARACTER * max((len(_value(bar)) for bar in bars), default=0)
    scale = room / most
    height = _HEAD + _ROW * len(bars) + 4
    rows = "".join(_row(bar, _HEAD + _ROW * place, scale) for place, bar in enumerate(bars))
    line = "" if budget is None else _line(_LABEL + budget * scale, height, f"budget {budget}")
    small = f" <small>{escape(note)}</small>" if note else ""
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{small}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{key}-title {key}-text">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-text">{escape(_text(bars))}</desc>'
        f"{rows}{line}</svg></figure>"
    )


def _row(bar: Bar, top: int, scale: float) -> str:
    within, over = bar.within * scale, bar.over * scale
    y, middle = top + (_ROW - _BAR) / 2, top + _ROW / 2 + 4
    name = "ours" if bar.ours else "theirs"
    total, _, excess = _value(bar).partition(" ")
    value = total + (f'<tspan class="excess"> {excess}</tspan>' if excess else "")
    parts = [
        f'<text class="label {name}" x="{_LABEL - 8}" y="{middle:g}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect class="{name}" x="{_LABEL}" y="{y:g}" width="{within:.1f}" height="{_BAR}"/>',
    ]
    if bar.over:
        x = _LABEL + within
        parts.append(f'<rect fill="url(#over)" x="{x:.1f}" y="{y:g}" width="{over:.1f}" height="{_BAR}"/>')
    parts.append(f'<text class="value" x="{_LABEL + within + over + 6:.1f}" y="{middle:g}">{value}</text>')
    return "".join(parts)


def _value(bar: Bar) -> str:
    return f"{bar.within + bar.over:,}" + (f" +{bar.over:,}" if bar.over else "")


def _line(x: float, height: int, label: str) -> str:
    return (
        f'<line class="budget" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 4}" y2="{height}"/>'
        f'<text class="budget" x="{x:.1f}" y="{_HEAD - 9}" text-anchor="middle">{escape(label)}</text>'
    )


def _text(bars: Sequence[Bar]) -> str:
    """Say the chart to who cannot see it."""
    return "; ".join(
        f"{bar.label}: {bar.within + bar.over:,}" + (f", {bar.over:,} of them over budget" if bar.over else "")
        for bar in bars
    )
