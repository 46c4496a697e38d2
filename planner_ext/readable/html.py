"""Templates of pages, and parts of a call drawn as HTML, with the classes of ``timeline/style.css``."""

import unicodedata
from collections.abc import Iterable
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from planner_ext.readable.parts import Line, Part, folded, marks_text, numbered
from planner_ext.readable.text import has_right_to_left, visible


def html_of(parts: Iterable[Part]) -> Markup:
    """Draw parts; every text is escaped."""
    return Markup(_template().render(parts=parts))  # noqa: S704  (escaped by the template)


def templates_of(package: str, folder: str = "templates") -> Environment:
    """Make the templates in a package's folder, which escape every text."""
    return Environment(
        loader=PackageLoader(package, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _template() -> Template:
    templates = templates_of("planner_ext.readable")
    templates.filters |= {  # pyright: ignore[reportUnknownMemberType]  (partially unknown in jinja2)
        "folded": folded,
        "mark_name": _mark_name,
        "marks_text": marks_text,
        "numbered": numbered,
        "visible": visible,
    }
    templates.tests |= {  # pyright: ignore[reportUnknownMemberType]
        "a_number": _is_number,
        "right_to_left": has_right_to_left,
    }
    return templates.get_template("parts.html.jinja")


def _is_number(cell: Line) -> bool:
    return {piece.kind for piece in cell} == {"number"}


_ESCAPE = len("\\u0000")


def _mark_name(mark: str) -> str:
    """Return the Unicode name of what a mark stands for."""
    if len(mark) != _ESCAPE or not mark.startswith("\\u"):
        return "blanks" if mark.endswith("blanks>") else "characters that are not drawn"
    code = mark.removeprefix("\\u")
    return unicodedata.name(chr(int(code, 16)), f"U+{code.upper()}")
