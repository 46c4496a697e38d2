"""A name that the root of the package does not have: the error says where it is."""

import pytest

import planner_ext


def test_a_name_of_a_module_is_refused_with_its_module() -> None:
    """Imported or read, it is refused by the fitting error, which has the import to write."""
    way_out = "import it from its module: from planner_ext.hitl_manager import Question"
    with pytest.raises(ImportError, match=way_out):
        exec("from planner_ext import Question", {})
    with pytest.raises(AttributeError, match=way_out):
        _ = planner_ext.Question


@pytest.mark.parametrize("name", ["Nowhere", "_private"])
def test_a_name_of_no_module_is_refused_as_by_any_module(name: str) -> None:
    """Nothing is suggested where no module exports the name."""
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
        getattr(planner_ext, name)
