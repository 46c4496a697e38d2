"""How many examples are tried of each property: a few, all, or as many others as are asked for."""

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings

__all__ = ["some_of", "tried"]

_ASKED = os.environ.get("PLANNER_EXT_EXAMPLES", "few")
"""``few``, ``all``, or a number of examples that are others each time."""
_SHARE = 4
_Value = TypeVar("_Value")


def some_of(values: Iterable[_Value]) -> Sequence[_Value]:
    """Take every fourth of many values of which one promise holds; all of them unless few are asked for."""
    return [*values][:: _SHARE if _ASKED == "few" else 1]


def tried(count: int) -> settings:
    """Try so many examples, the same each time; where few are asked for, the first quarter of them."""
    is_number = _ASKED.isdigit()
    few = -(-count // _SHARE)
    return settings(
        max_examples=int(_ASKED) if is_number else count if _ASKED == "all" else few,
        derandomize=not is_number,
        deadline=None,
        phases=list(Phase) if is_number else [Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
