"""Promises of the fold's own ``updated``."""

import dataclasses
from typing import Any

import pytest

from planner_ext.core import facts, limits, state, values
from planner_ext.core.state import Batch, Call, State
from planner_ext.core.values import RequestedCall, Usage, updated
from support.values import each_of

CALL = Call(request=RequestedCall(id="c1", name="math-add", arguments="{}"))
BATCH = Batch(
    iteration=0, message=None, text="", calls=(CALL,), undecided=1, unanswered=1
)


@each_of(
    ("value", "changes"),
    [
        (State(), {"goal": "g", "at": 2.0}),
        (CALL, {"answer": "3"}),
        (BATCH, {"text": "t"}),
        (Usage(), {"tool_calls": 1}),
    ],
)
def test_a_copy_is_what_the_standard_librarys_would_be(
    value: Any, changes: dict[str, Any]
) -> None:
    """A copy equals the standard library's, shares what was not changed, and leaves the original as it was."""
    before = dataclasses.replace(value)
    copied = updated(value, **changes)
    assert copied == dataclasses.replace(value, **changes) != value
    assert type(copied) is type(value)
    assert value == before
    assert all(
        getattr(copied, name) is getattr(value, name)
        for name in vars(value)
        if name not in changes
    )


def test_a_copy_is_as_frozen_as_its_original() -> None:
    """A copy takes no assignment, and a copy of it does not reach back into it."""
    first = updated(State(), goal="g")
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.goal = "h"  # pyright: ignore[reportAttributeAccessIssue]  # frozen
    assert updated(first, goal="h").goal == "h"
    assert first.goal == "g"


def test_only_fields_can_be_changed() -> None:
    """An unknown field, such as a misspelt one, is an error that names it."""
    with pytest.raises(AttributeError, match="State has no gaol"):
        updated(State(), gaol="g")


def test_what_the_fold_copies_checks_nothing_when_it_is_made() -> None:
    """No value of the core but the limits has a ``__post_init__`` that a copy would pass over."""
    modules = (facts, limits, state, values)
    kinds = {
        kind
        for module in modules
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind)
    }
    assert [kind for kind in kinds if hasattr(kind, "__post_init__")] == [limits.Budget]
