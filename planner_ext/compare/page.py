"""A comparison as one self-contained page: nothing to fetch, no script; light and dark, wide and narrow.

The template is ``page.html.jinja``, which escapes all text of models and functions.
"""

import json
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from planner_ext.compare.report import Comparison, ShownCall
from planner_ext.core.errors import counted, seconds
from planner_ext.testing.rules import is_object

__all__ = ["TEMPLATES", "page_of"]

TEMPLATES = Environment(
    loader=PackageLoader("planner_ext", ""),
    autoescape=select_autoescape(("html.jinja",)),
    undefined=StrictUndefined,
)
"""The templates of the package; those of pages escape the text of models and functions."""

_WIDTH, _LEFT, _CHARACTER = 360, 142, 7.6
"""Units of a chart, about a pixel each: its width, that of a telephone; where bars begin; the width of a digit."""


def page_of(comparison: Comparison) -> str:
    """Write the page."""
    template = TEMPLATES.get_template("compare/page.html.jinja")
    functions = {"scale": _scale, "signature": _signature, "counted": counted, "seconds": seconds}
    return template.render(
        comparison=comparison, first=comparison.scripts[0], width=_WIDTH, left=_LEFT, number="{:,}".format, **functions
    )


def _scale(totals: Sequence[int], excesses: Sequence[int], budget: int) -> float:
    """Return a bar's width per count: the longest bar fits beside the names, with the longest figure after it."""
    figures = (
        f"{total:,}" + (f" +{excess:,}" if excess else "") for total, excess in zip(totals, excesses, strict=True)
    )
    room = _WIDTH - _LEFT - 6 - _CHARACTER * max(map(len, figures), default=0)
    return room / max(budget, 1, *totals)


def _signature(call: ShownCall) -> str:
    """Format a call for a person; arguments that are not a JSON object stay as they are."""
    try:
        parsed: object = json.loads(call.arguments or "{}")
    except ValueError:
        parsed = None
    if not is_object(parsed):
        return f"{call.name}({call.arguments})"
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in parsed.items())
    return f"{call.name}({arguments})"
