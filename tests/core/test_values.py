"""The values of the core are values: frozen, slotted, named when they are made."""

import dataclasses
import importlib
import pkgutil
from typing import Any

import planner_ext.core

MODULES = [
    importlib.import_module(f"planner_ext.core.{item.name}")
    for item in pkgutil.iter_modules(planner_ext.core.__path__)
]
VALUES: list[Any] = sorted(
    {
        item
        for module in MODULES
        for item in vars(module).values()
        if isinstance(item, type) and dataclasses.is_dataclass(item)
    },
    key=lambda item: item.__name__,
)


COPIED = {"Batch", "Call", "Usage", "State"}
"""What the fold copies for each fact, which goes by a dict of fields."""


def test_a_value_is_frozen_slotted_and_made_by_name() -> None:
    """A value cannot be changed or extended, and its fields cannot be given by position."""
    assert [
        value.__name__ for value in VALUES if not value.__dataclass_params__.frozen
    ] == []
    assert {
        value.__name__ for value in VALUES if "__slots__" not in vars(value)
    } == COPIED
    assert [
        value.__name__
        for value in VALUES
        if not all(item.kw_only for item in dataclasses.fields(value))
    ] == []


def test_a_value_holds_no_collection_that_can_change() -> None:
    """Collections in values are tuples, frozen sets and mappings, never lists, sets or dicts."""
    held = {
        f"{value.__name__}.{item.name}": str(item.type)
        for value in VALUES
        for item in dataclasses.fields(value)
    }
    assert [
        name for name, kind in held.items() if kind.startswith(("list", "set", "dict"))
    ] == []
