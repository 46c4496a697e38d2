"""Promises of the fold's own ``replace``."""

import dataclasses

import pytest

from planner_ext.core import facts, limits, state, values
from planner_ext.core.change import replace
from planner_ext.core.state import Call, State
from planner_ext.core.values import RequestedCall, Usage


def test_a_copy_is_what_the_standard_librarys_would_be() -> None:
    """A copy equals the standard library's, shares what was not changed, and leaves the original as it was."""
    call = Call(request=RequestedCall(id="c1", name="math-add", arguments="{}"))
    for value, changes in ((State(), {"goal": "g", "at": 2.0}), (call, {"answer": "3"}), (Usage(), {"cost": 1.0})):
        before = dataclasses.replace(value)
        copied = replace(value, **changes)
        assert copied == dataclasses.replace(value, **changes)
        assert type(copied) is type(value)
        assert value == before
    assert replace(call, answer="3").request is call.request


def test_only_fields_can_be_changed() -> None:
    """A change of what is no field is an error, as a misspelt one is."""
    with pytest.raises(AttributeError):
        replace(State(), gaol="g")


def test_what_the_fold_copies_checks_nothing_when_it_is_made() -> None:
    """No value of the core but the limits has a ``__post_init__`` that a copy would pass over."""
    modules = (facts, limits, state, values)
    kinds = {kind for module in modules for kind in vars(module).values() if dataclasses.is_dataclass(kind)}
    assert [kind for kind in kinds if hasattr(kind, "__post_init__")] == [limits.Limits]
