"""What an object that lives long remembers does not grow for ever."""

from planner_ext.core.values import Newest


def test_the_newest_values_are_remembered_and_no_more() -> None:
    """Beyond its number the oldest is forgotten; a value that is discarded makes room."""
    newest = Newest[str](2)
    for name in ("a", "b", "c"):
        newest.add(name)
    assert "a" not in newest
    assert "b" in newest
    assert "c" in newest
    assert len(newest) == 2
    newest.discard("b")
    newest.add("d")
    assert "b" not in newest
    assert "c" in newest
    assert "d" in newest
