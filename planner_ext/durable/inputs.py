"""What a run is submitted with, as JSON: arguments that are data, and its budget.

A store holds data only: a value that JSON does not have, and a budget's price function, are refused by name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.limits import Budget
from planner_ext.durable.errors import StoreError, kernel_error

__all__ = ["RunInputs", "read_budget", "read_inputs", "stored_budget"]


@cache
def _budgets() -> TypeAdapter[Budget]:
    return TypeAdapter(Budget)


def stored_budget(budget: object) -> dict[str, Any]:
    """Convert a budget to JSON values.

    Raises:
        PlannerInvalidConfigurationError: If it is not a budget, or has a price function, which no store can hold.
    """
    if not isinstance(budget, Budget):
        raise _refused(f"budget must be of the class Budget; got {shown(budget)}.")
    if budget.price is not None:
        raise _refused(
            "budget.price is a function, which no store can hold. Leave it out, and give price= to the planner of the "
            "workers."
        )
    return _budgets().dump_python(budget, mode="json")


def read_budget(value: object) -> Budget:
    """Read what `stored_budget` returned.

    Raises:
        ValueError, InvalidLimitError: If it is damaged.
    """
    return _budgets().validate_python(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What a run was submitted with.

    Attributes:
        arguments: The application's arguments that are data, by name.
        budget: The run's limits in place of the planner's; None keeps those.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    budget: Budget | None = None

    def to_json(self) -> str | None:
        """Write the inputs as JSON text; None if there are none.

        Raises:
            PlannerInvalidConfigurationError: If an argument is not JSON, or the budget cannot be stored; names it.
        """
        if not isinstance(self.arguments, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (any caller's)
            raise _refused(f"arguments must map names to JSON values; got {shown(self.arguments)}.")
        values: dict[str, Any] = {}
        if self.arguments:
            values["arguments"] = {name: _json_value(name, value) for name, value in self.arguments.items()}
        if self.budget is not None:
            values["budget"] = stored_budget(self.budget)
        return json.dumps(values, sort_keys=True) if values else None


def read_inputs(run_id: str, text: object) -> RunInputs:
    """Read what `RunInputs.to_json` wrote.

    Raises:
        StoreError: If it is damaged.
    """
    if text is None:
        return RunInputs()
    try:
        values: dict[str, Any] = json.loads(str(text))
        budget = read_budget(values["budget"]) if "budget" in values else None
        return RunInputs(arguments=dict(values.get("arguments", {})), budget=budget)
    except (ValueError, TypeError, AttributeError, RecursionError, InvalidLimitError) as error:
        raise StoreError(
            f"The inputs of run {run_id!r} are damaged: {error}. Submit the run again under another name."
        ) from error


def _json_value(name: object, value: object) -> object:
    """Return an argument as it will be read again: only what JSON has, and names that are texts at every level."""
    if not isinstance(name, str):
        raise _refused(f"arguments must have texts as names; got {shown(name)}.")
    try:
        read = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(
            f"arguments[{name!r}] must be a JSON value, since a store holds data only: {error}. Submit data, from "
            "which the workers' arguments_for makes the value."
        ) from error
    if read != value:
        raise _refused(
            f"arguments[{name!r}] would be read as {shown(read)}; got {shown(value)}. Give JSON's own types."
        )
    return read


def _refused(problem: str) -> Exception:
    return kernel_error("PlannerInvalidConfigurationError", problem)
