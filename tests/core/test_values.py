"""The values of the core are values: frozen, slotted, named when they are made."""

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest

import planner_ext.core

MODULES = [
    importlib.import_module(f"planner_ext.core.{item.name}") for item in pkgutil.iter_modules(planner_ext.core.__path__)
]
VALUES = sorted(
    {
        item
        for module in MODULES
        for item in vars(module).values()
        if isinstance(item, type) and dataclasses.is_dataclass(item)
    },
    key=lambda item: item.__name__,
)


COPIED = {"Batch", "Call", "Consumption", "Ledger", "State"}
"""What the fold copies for each fact, which goes by a dict of fields."""


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_a_value_is_frozen_slotted_and_made_by_name(value: Any) -> None:
    """Nobody changes a value, adds to it, or mistakes the order of its fields."""
    assert value.__dataclass_params__.frozen
    assert ("__slots__" in vars(value)) is (value.__name__ not in COPIED)
    assert all(item.kw_only for item in dataclasses.fields(value))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_a_value_holds_no_collection_that_can_change(value: Any) -> None:
    """Collections in values are tuples, frozen sets and mappings, never lists, sets or dicts."""
    for item in dataclasses.fields(value):
        annotation = str(item.type)
        assert not annotation.startswith(("list", "set", "dict")), f"{value.__name__}.{item.name}: {annotation}"
