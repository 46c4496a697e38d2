"""The decorator of facts and values: equal to a frozen dataclass in all but its speed."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from planner_ext.core.facts import CallDecided, CallFinished
from planner_ext.core.limits import Budget
from planner_ext.core.values import RequestedCall, frozen


@frozen
class Point:
    x: int
    y: int = 2
    seen: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError(self.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    x: int
    y: int = 2
    seen: bool = field(default=False, compare=False, repr=False)


def test_it_is_a_frozen_dataclass_with_slots() -> None:
    """Fields, comparison, hash, text and signature are a dataclass's; nothing can be set, added or deleted."""
    point = Point(x=1, seen=True)
    assert point == Point(x=1)
    assert hash(point) == hash(Point(x=1))
    assert repr(point) == "Point(x=1, y=2)"
    assert [one.name for one in fields(point)] == ["x", "y", "seen"]
    assert inspect.signature(Point) == inspect.signature(Plain)
    assert type(point) is Point
    assert not hasattr(point, "__dict__")
    for name in ("x", "other"):
        with pytest.raises((FrozenInstanceError, TypeError)):
            setattr(point, name, 3)
    with pytest.raises(FrozenInstanceError):
        delattr(point, "x")


def test_it_is_made_copied_and_checked_as_a_dataclass_is() -> None:
    """Wrong arguments are refused, `replace` and pickle keep the class, and ``__post_init__`` runs."""
    make: Any = Point
    for wrong in ({}, {"x": 1, "z": 1}):
        with pytest.raises(TypeError):
            make(**wrong)
    with pytest.raises(TypeError):
        make(1)
    with pytest.raises(ValueError, match="-1"):
        Point(x=-1)
    with pytest.raises(ValueError, match="-2"):
        replace(Point(x=1), x=-2)
    point = replace(Point(x=1), y=5)
    for same in (point, copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert same == Point(x=1, y=5)
        assert type(same) is Point


def test_a_subclass_has_its_own_layout() -> None:
    """A class without slots, and another frozen one, can be derived from it."""

    class Loose(Point):
        pass

    @frozen
    class Deep(Point):
        z: int

    loose: Any = Loose(x=1)
    object.__setattr__(loose, "more", 1)
    assert (loose.x, loose.more) == (1, 1)
    assert Deep(x=1, z=3).z == 3
    assert type(Deep(x=1, z=3)) is Deep
    assert not hasattr(Deep(x=1, z=3), "__dict__")


@pytest.mark.parametrize("kind", [CallDecided, CallFinished, RequestedCall, Budget])
def test_values_of_the_core_can_be_weighed_and_matched(kind: Any) -> None:
    """A fact made from its fields is equal to itself, and matches by its fields' names."""
    required = [
        name
        for name, one in inspect.signature(kind).parameters.items()
        if one.default is one.empty
    ]
    made = kind(**dict.fromkeys(required))
    assert made == replace(made)
    assert all(getattr(made, name) is None for name in required)
