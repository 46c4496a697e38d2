"""What a person does to a run from its page, or to many: each asks the application's hook, and is recorded."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner_ext.core.errors import PlannerExtError
from planner_ext.core.limits import Budget
from planner_ext.core.values import frozen
from planner_ext.durable.listing import PARKED, UNFINISHED
from planner_ext.durable.runs import RunsClient
from planner_ext.inbox.forms import read_number
from planner_ext.inbox.security import Form

LIMITS = {
    "max_iterations": "Round trips",
    "max_tool_calls": "Function calls",
    "max_total_tokens": "Tokens",
    "max_cost": "Cost",
}
"""The limits that a page can change, and how it names them."""

CONTINUED = ("incomplete", "limit_reached", "stopped")
"""The statuses of runs that a budget continues."""


class RefusedActionError(PlannerExtError):
    """What was typed for an action cannot be used."""


@frozen
class Action:
    """One thing to do to a run.

    Attributes:
        act: Does it; returns whether that changed something, or the name of a new run.
        statuses: Those of the runs to which it is offered; empty for all.
        done: What a run is then.
        unchanged: Why nothing changed.
    """

    act: Callable[[RunsClient, str, Form, str], Awaitable[bool | str]]
    statuses: Sequence[str]
    done: str
    unchanged: str = ""


async def _resume(runs: RunsClient, run_id: str, form: Form, by: str) -> bool:
    budget = _limits_in(form, await runs.limits(run_id))
    return await runs.retry(run_id, budget=budget, by=by)


async def _set_budget(runs: RunsClient, run_id: str, form: Form, by: str) -> bool:
    budget = _limits_in(form, await runs.limits(run_id))
    await runs.set_budget(run_id, budget, by=by)
    return True


async def _say(runs: RunsClient, run_id: str, form: Form, by: str) -> bool:
    await runs.say(run_id, form.get("text", ""), by=by)
    return True


async def _fork(runs: RunsClient, run_id: str, form: Form, by: str) -> str:
    at = _number(form.get("at", ""), "The iteration")
    text = form.get("text", "")
    budget = _limits_in(form, await runs.limits(run_id))
    name = await runs.fork(run_id, at=int(at), instruction=text, by=by)
    await runs.retry(name, budget=budget, by=by)
    return name


async def _cancel(runs: RunsClient, run_id: str, form: Form, by: str) -> bool:
    if form.get("confirm") != "yes":
        raise RefusedActionError("Confirm that the run is to end. Nothing was changed.")
    reason = form.get("reason", "")
    return await runs.cancel(run_id, by=by, reason=reason)


def _limits_in(form: Form, before: Budget) -> Budget:
    """Replace the limits that were typed."""
    typed: dict[str, Any] = {
        name: _number(text, label)
        for name, label in LIMITS.items()
        if (text := form.get(name, "").strip())
    }
    return replace(before, **typed)


def _number(text: str, label: str) -> int | float:
    try:
        return read_number(text)
    except ValueError as error:
        raise RefusedActionError(f"{label}: {error}. Nothing was changed.") from None


ACTIONS: Mapping[str, Action] = {
    "retry": Action(
        act=lambda runs, run_id, _, by: runs.retry(run_id, by=by),
        statuses=PARKED,
        done="left to a worker",
        unchanged="The run has not failed, and is not in quarantine. Nothing was changed.",
    ),
    "resume": Action(
        act=_resume,
        statuses=CONTINUED,
        done="left to a worker",
        unchanged="The run was answered, or is not at rest. Nothing was changed.",
    ),
    "budget": Action(
        act=_set_budget,
        statuses=(*UNFINISHED, *PARKED),
        done="given another budget",
    ),
    "say": Action(act=_say, statuses=(*UNFINISHED, *PARKED), done="told"),
    "fork": Action(act=_fork, statuses=(), done="forked"),
    "cancel": Action(
        act=_cancel,
        statuses=(*UNFINISHED, *PARKED),
        done="cancelled",
        unchanged="The run had ended before. Nothing was changed.",
    ),
}
