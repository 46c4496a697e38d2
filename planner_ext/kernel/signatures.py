"""What a function takes, as a text to compare: one of the same name that takes something else is another function."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, cast

from semantic_kernel.functions import KernelFunction

__all__ = ["signature_of"]


def signature_of(function: KernelFunction) -> str:
    """Write ``name=digest`` of each parameter, joined by commas; of type, schema and default, without descriptions."""
    return ",".join(
        f"{one.name}="
        + _digest(
            [
                one.type_,
                one.is_required,
                one.include_in_function_choices,
                _undescribed(one.schema_data),
                one.default_value,
            ]
        )
        for one in function.parameters
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_named)
    return sha256(text.encode()).hexdigest()[:16]


def _undescribed(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        items = cast("Mapping[str, Any]", schema).items()
        return {key: _undescribed(value) for key, value in items if key != "description" or not isinstance(value, str)}
    if isinstance(schema, list):
        return [_undescribed(one) for one in cast("list[Any]", schema)]
    return schema


def _named(value: object) -> str:
    """Write a default that is not JSON by its type: its ``repr`` may hold an address, which differs in each process."""
    return type(value).__qualname__
