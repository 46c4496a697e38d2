"""A decision on a call: whether it binds, and what the function gets."""

from typing import Any

import pytest

from planner_ext.core.facts import CallDecided
from planner_ext.core.values import RequestedCall

EDITED = {"arguments": '{"a": 1}', "edited": '{"a": 2}'}
REQUEST = RequestedCall(id="c0", name="f", arguments="{'a': 1}")


def a_decision(**more: Any) -> CallDecided:
    """Decide that a call runs."""
    return CallDecided(
        iteration=0,
        index=0,
        call_id="c0",
        function="f",
        kind="function",
        verdict="run",
        at=0.0,
        **more,
    )


@pytest.mark.parametrize("more", [{"approved": True}, {"edited": "{}"}], ids=str)
def test_a_call_that_was_approved_is_bound_to_its_decision(
    more: dict[str, Any],
) -> None:
    """Also one whose arguments were edited; one that nothing objected to is not bound."""
    assert a_decision(**more).binds
    assert not a_decision().binds


def test_a_function_gets_the_newest_form_of_its_arguments() -> None:
    """Edited ones before converted ones, and these before the model's own text."""
    assert a_decision(**EDITED).arguments_of(REQUEST) == '{"a": 2}'
    assert a_decision(arguments='{"a": 1}').arguments_of(REQUEST) == '{"a": 1}'
    assert a_decision().arguments_of(REQUEST) == "{'a': 1}"
