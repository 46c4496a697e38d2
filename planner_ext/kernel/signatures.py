"""What a function takes, as one digest: a function of the same name that takes something else is another function."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, cast

from semantic_kernel.functions import KernelFunction

__all__ = ["is_still", "parameter_digests", "signature_of"]


def signature_of(function: KernelFunction) -> str:
    """Digest all parameters of a function."""
    return _digest(parameter_digests(function))


def parameter_digests(function: KernelFunction) -> dict[str, str]:
    """Digest each parameter of a function by name: its type, schema and default, and not its description."""
    return {
        str(one.name): _digest(
            [
                one.type_,
                one.is_required,
                one.include_in_function_choices,
                _undescribed(one.schema_data),
                one.default_value,
            ]
        )
        for one in function.parameters
    }


def is_still(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether a function takes nothing but what it took when it was asked about; it may have lost a parameter."""
    return all(before.get(name) == digest for name, digest in now.items())


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_named)
    return sha256(text.encode()).hexdigest()


def _undescribed(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        items = cast("Mapping[str, Any]", schema).items()
        return {key: _undescribed(value) for key, value in items if key != "description" or not isinstance(value, str)}
    if isinstance(schema, list):
        return [_undescribed(one) for one in cast("list[Any]", schema)]
    return schema


def _named(value: object) -> str:
    """Write a default that is no JSON by its type: its ``repr`` may hold an address, which differs in each process."""
    return type(value).__qualname__
