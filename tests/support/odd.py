"""Values that no place of a document expects, at every place of it."""

import json
from collections.abc import Iterator
from typing import Any, cast

ODD: dict[str, str] = {
    "a huge number": "1" + "0" * 400,
    "digits without end": "9" * 5000,
    "more than a float": "1e999",
    "not a number": "NaN",
    "nested deeply": "[" * 400 + "]" * 400,
    "nested too deeply": "[" * 5000 + "]" * 5000,
    "half a character": '"\\ud800"',
    "nothing": "null",
    "a list": "[[]]",
    "an object": '{"a":{}}',
    "true": "true",
}
"""JSON text of values that a place of a document does not expect."""


def every_place(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the paths to all values of a document."""
    if path:
        yield path
    names: Any = (
        list(cast("dict[str, Any]", document)) if isinstance(document, dict) else ()
    )
    if isinstance(document, list):
        names = range(len(cast("list[Any]", document)))
    for name in names:
        yield from every_place(document[name], (*path, name))


def with_odd(text: str, path: tuple[Any, ...], odd: str) -> str:
    """Put a value, as JSON text, at one place of a document."""
    document: Any = json.loads(text)
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "<odd>"
    return json.dumps(document).replace('"<odd>"', odd)
