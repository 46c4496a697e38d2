"""The JSON schema of a function's parameters, for a person who reads or edits a call.

Semantic Kernel's own schema has neither the constraints of ``Annotated[int,
Field(ge=1)]`` nor the values of a ``Literal``, and says a bare ``object`` for a date:
pydantic writes those.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import TypeAdapter

_PLAIN = (str, int, float, bool, list, dict, NoneType, Any, object)
"""Types of which Semantic Kernel's schema says all."""


def shown_schema(
    method: Callable[..., Any] | None, offer: Any, defaults: Mapping[str, str]
) -> str:
    """Write the schema with the function's description and the defaults, as JSON text.

    Args:
        method: The function; None if there is no Python function.
        offer: Semantic Kernel's description of it.
        defaults: The JSON texts of the defaults.

    Returns:
        "" if it cannot be written.
    """
    hints: Mapping[str, Any] = {}
    if method is not None:
        with suppress(Exception):  # a name that is not defined, for instance
            hints = get_type_hints(method, include_extras=True)
    schema = offer["parameters"]
    properties: dict[str, Any] = {**schema["properties"]}
    for name, own in properties.items():
        if own is None:  # without a schema
            continue
        written = _by_pydantic(hints.get(name)) or {**own}
        if isinstance(described := own.get("description"), str):
            written["description"] = described
        if name in defaults:
            written["default"] = json.loads(defaults[name])
        properties[name] = written
    shown = {**schema, "properties": properties, "description": offer["description"]}
    try:
        return json.dumps(shown, separators=(",", ":"), allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return ""


def _by_pydantic(hint: Any) -> dict[str, Any]:
    """Describe a type by pydantic; empty if Semantic Kernel does, or pydantic cannot."""
    kind = hint
    constraints: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        kind, *_ = get_args(hint)
        constraints = hint.__metadata__
    if all(isinstance(one, str) for one in constraints) and _is_plain(kind):
        return {}
    with suppress(Exception):
        written = TypeAdapter(hint).json_schema()
        return _inlined(written, written.get("$defs", {}))
    return {}


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType, list, dict):
        return all(map(_is_plain, get_args(kind)))
    return kind is None or kind in _PLAIN


def _inlined(part: Any, models: Mapping[str, Any]) -> Any:
    """Write models in place of references to them, without titles; `RecursionError` if one contains itself."""
    if isinstance(part, list):
        return [_inlined(one, models) for one in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    own = cast("dict[str, Any]", part)
    if isinstance(reference := own.get("$ref"), str):
        rest = {name: value for name, value in own.items() if name != "$ref"}
        model = models[reference.rpartition("/")[2]]
        return _inlined({**model, **rest}, models)
    return {
        name: _inlined(value, models)
        for name, value in own.items()
        if name != "$defs" and not (name == "title" and isinstance(value, str))
    }
