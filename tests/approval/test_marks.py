"""What a function is marked with, and what cannot be marked."""

from typing import Any

import pytest

from planner_ext import requires_approval
from planner_ext.durable import effect
from planner_ext.errors import InvalidLimitError, NotAFunctionError


@pytest.mark.parametrize("given", ["x", 7, object(), [], type], ids=["text", "number", "object", "list", "class"])
def test_only_functions_can_be_marked(given: Any) -> None:
    """Anything else is refused in a sentence that says how it is written."""
    for mark in (requires_approval, requires_approval(prompt="Sure?"), requires_approval(expires_in=1)):
        with pytest.raises(NotAFunctionError, match=r"marks a function; got .*@requires_approval\(prompt="):
            mark(given)
    with pytest.raises(NotAFunctionError, match="marks a function"):
        effect("once")(given)


def test_a_prompt_is_a_text() -> None:
    """Another one is refused when the function is marked."""
    with pytest.raises(InvalidLimitError, match="prompt must be a text"):
        requires_approval(prompt=7)  # pyright: ignore[reportArgumentType]  # junk, on purpose
