"""The arguments and limits that a run is submitted with, a new budget, and what is said to it, as JSON."""

import json
from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from typing import Any
from uuid import uuid4

from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.facts import Guards
from planner_ext.core.limits import Budget
from planner_ext.core.values import frozen
from planner_ext.durable.database import adapter, read_values
from planner_ext.durable.errors import reading_row


def _dump_budget(budget: object) -> dict[str, Any]:
    if not isinstance(budget, Budget):
        raise _refused(f"budget must be of the class Budget; got {shown(budget)}.")
    return adapter(Budget).dump_python(budget, mode="json")


@frozen
class RunInputs:
    """What a run was submitted with.

    Attributes:
        arguments: The application's arguments that are data, by name.
        budget: Replaces the planner's limits; None keeps them.
        guards: What the worker's planner must have; None demands nothing.
        before: The messages of the conversation before it, as JSON values.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    budget: Budget | None = None
    guards: Guards | None = None
    before: tuple[Any, ...] = ()

    def to_json(self) -> str | None:
        """@private Write the inputs as JSON text; None without inputs.

        Raises:
            PlannerInvalidConfigurationError: If an argument is not JSON, or the budget
                cannot be stored; names it.
        """
        if not isinstance(self.arguments, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (any caller's)
            raise _refused(
                f"arguments must map names to JSON values; got {shown(self.arguments)}."
            )
        values: dict[str, Any] = {}
        if self.arguments:
            values["arguments"] = {
                name: _json_value(name, value) for name, value in self.arguments.items()
            }
        if self.budget is not None:
            values["budget"] = _dump_budget(self.budget)
        if self.guards is not None:
            values["guards"] = adapter(Guards).dump_python(
                self.guards, mode="json", exclude_defaults=True
            )
        if self.before:
            values["before"] = self.before
        if values:
            return json.dumps(values, sort_keys=True)
        return None


def read_inputs(run_id: str, text: str | None) -> RunInputs:
    """Read the text of `RunInputs.to_json`; raise `StoreError` if it is damaged."""
    if text is None:
        return RunInputs()
    with reading_row(f"The inputs of run {run_id!r} are"):
        return read_values(RunInputs, json.loads(text))


def hooks_in(run_id: str, *texts: str | None) -> tuple[str, ...]:
    """List the ``authorize`` hooks in the texts of a run's inputs and first fact; raise `StoreError` if damaged."""
    found: set[str] = set()
    for text in texts:
        if text is None or '"authorize"' not in text:
            continue
        with reading_row(f"The guards of run {run_id!r} are"):
            guards: dict[str, Any] = json.loads(text).get("guards") or {}
            found.update(map(str, guards.get("authorize", ())))
    return tuple(sorted(found))


@frozen
class NewBudget:
    """A new budget that no worker has taken yet; ``text`` is as the store holds it."""

    limits: Budget
    by: str
    text: str


def new_budget_text(budget: object, *, by: str, at: float) -> str:
    """Write a run's new budget as JSON text, which its time makes unique."""
    return json.dumps({"limits": _dump_budget(budget), "by": by, "at": at})


def read_new_budget(run_id: str, text: str | None) -> NewBudget | None:
    """Read the text of `new_budget_text`; raise `StoreError` if it is damaged."""
    if text is None:
        return None
    with reading_row(f"The new budget of run {run_id!r} is"):
        values: dict[str, Any] = json.loads(text)
        return read_values(NewBudget, {**values, "text": text})


@frozen
class SaidMessage:
    """A message that was said to a run, and that no worker has taken yet.

    Attributes:
        by: Who said it; "" without a name.
        at: In UTC.
    """

    text: str
    by: str
    at: datetime

    def as_dict(self) -> dict[str, str]:
        """Convert the message to JSON values."""
        return {"text": self.text, "by": self.by, "at": self.at.isoformat()}


def said_line(text: object, *, by: str, at: float) -> str:
    """Write a message for a run as a line of JSON, which no other line equals."""
    if not isinstance(text, str) or not text.strip():
        raise _refused(f"Expected the text of a message; got {shown(text)}.")
    line = json.dumps({"text": text, "by": by, "at": at, "id": uuid4().hex})
    return f"{line}\n"


def read_said(run_id: str, lines: str | None) -> tuple[SaidMessage, ...]:
    """Read lines of `said_line`, the oldest first; raise `StoreError` if one is damaged."""
    with reading_row(f"What was said to run {run_id!r} is"):
        read = [json.loads(line) for line in (lines or "").splitlines()]
        return tuple(read_values(SaidMessage, one) for one in read)


def _json_value(name: object, value: object) -> object:
    """Return an argument as it will be read again; refuse other values than JSON's."""
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
    return InvalidLimitError(problem)
