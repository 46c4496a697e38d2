"""An activation: what drives a kept run once, from its start or a decision to the next pause or end.

A store makes activations, a planner drives them; neither needs to know the other.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

from planner_ext.approval.decisions import (
    AuthorizeHooks,
    MadeDecision,
    ToolCall,
)
from planner_ext.approval.waiting import InDoubt
from planner_ext.core.errors import RunRefusedError
from planner_ext.core.facts import Fact, Guards
from planner_ext.core.limits import Budget
from planner_ext.core.state import State
from planner_ext.core.values import Message, frozen
from planner_ext.engine.batch import BudgetHandle
from planner_ext.engine.ports import Emit, RunStore

R_co = TypeVar("R_co", covariant=True)


ArgumentsFor = Callable[[str], Any]
"""Returns the application's arguments for a run, by its name: no store keeps them."""


@frozen
class Activation:
    """A run's journal, and the decisions and options to continue it with.

    Attributes:
        store: Records each fact before the run acts on it.
        facts: The journal so far; empty starts the run.
        decisions: Decisions on pending calls, by call id.
        budget: Replaces the run's limits; ``new_budget`` does while the run is driven.
        arguments: What the run was submitted with, by name; `ArgumentsFor` takes
            precedence.
        before: The conversation before a run that begins.
        authorize: Says who may decide, besides the planner's own hook; ``described``
            shows it a call as the store lists it.
        guards: What a submitted run demands of the process that begins it.
        emit: Takes the text of streamed replies as it arrives, and each fact; None does
            not stream.
    """

    run_id: str
    goal: str
    store: RunStore
    facts: Sequence[Fact] = ()
    decisions: Mapping[str, MadeDecision] = field(
        default_factory=dict[str, MadeDecision]
    )
    budget: Budget | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    before: Sequence[Message] = ()
    in_doubt: InDoubt = "person"
    new_budget: BudgetHandle | None = None
    authorize: AuthorizeHooks = None
    described: Callable[[ToolCall, State], ToolCall] | None = None
    guards: Guards | None = None
    emit: Emit | None = None


class ActivationRun(Protocol[R_co]):
    """An activation that is ready to run."""

    async def result(self) -> R_co:
        """Drive the run to its next pause or end; one that has ended returns its result without a request.

        Raises:
            InvalidDecisionError: If a decision cannot be taken, with its ``call_id``;
                nothing was recorded.
            Exception: On a fault; the journal holds everything before it.
        """
        ...


class DurablePlanner(Protocol[R_co]):
    """A planner whose runs can be kept in a store."""

    def journaled(
        self, kernel: Any, activation: Activation, /, *, arguments: Any = None
    ) -> ActivationRun[R_co]:
        """@private Prepare an activation with a kernel and the application's arguments, which are not stored."""
        ...


_KINDS_OF_GUARDS = {
    "interceptors": "interceptor",
    "pre_invoke": "pre_invoke callback",
    "checks": "check_for_intervention callback",
    "filters": "ApprovalFilter of the kernel for",
    "answers": "check_answer hook",
}


_STRICTER = ("approve", "defer", "deny")


_BY_DEFAULT = {"allow": "approve", "ask": "defer", "deny": "deny"}


def check_guards(
    run_id: str, before: Guards | None, now: Guards, offered: Collection[str]
) -> None:
    """Refuse to continue a run that began with guards that are missing now; see `missing_guards`.

    Raises:
        RunRefusedError: Naming what is missing.
    """
    missing = ()
    if before is not None:
        missing = missing_guards(before, now, offered)
    if missing:
        raise RunRefusedError(
            f"Run {run_id!r} cannot be continued here: it began under what this process lacks: {'; '.join(missing)}. "
            "Nothing ran and nothing was recorded. Continue it with a planner that has this; on the command line, "
            "--policy and --ask-all add guards, and the factory of --app gives the hook."
        )


def missing_guards(before: Guards, now: Guards, offered: Collection[str]) -> list[str]:
    """List the guards that a run began with and that are missing now.

    Additional guards are fine, but for an ``allow`` rule of a new policy, which frees
    calls from the guards after it. A changed policy is missing, and so is
    ``@requires_approval`` of a function that is still offered.
    """
    found: list[str] = []
    for name, kind in _KINDS_OF_GUARDS.items():
        found += _missing_of_kind(kind, getattr(before, name), getattr(now, name))
    default = _default(before)
    if _STRICTER.index(_default(now)) < _STRICTER.index(default):
        found.append(
            f"calls that nothing decides are now {_default(now)!r} instead of {default!r} (unmatched)"
        )
    if before.expires_in is not None and (
        now.expires_in is None or now.expires_in > before.expires_in
    ):
        found.append(
            f"expires_in is now {now.expires_in} instead of {before.expires_in}"
        )
    unmarked = sorted(set(before.marked) & set(offered) - set(now.marked))
    if unmarked:
        found.append(f"@requires_approval of {', '.join(unmarked)}")
    found += [
        f"the authorize hook {name}"
        for name in before.authorize
        if name not in now.authorize
    ]
    found += [
        f"the shared budget {name!r}"
        for name in sorted({*before.shared_budgets} - {*now.shared_budgets})
    ]
    return found or list(_newly_allowed(before, now))


def _missing_of_kind(
    kind: str, before: Sequence[str], now: Sequence[str]
) -> Iterator[str]:
    """List the missing guards of one kind, or say that only their order changed."""
    missing = Counter(before) - Counter(now)
    more = Counter(now) - Counter(before)
    changed = [json.loads(name) for name in more if _is_policy(name)]
    for name in missing.elements():
        if not _is_policy(name):
            yield f"the {kind} {name}"
        elif changed:
            yield f"the approval policy as it was: {_difference(json.loads(name), changed.pop(0))}"
        else:
            yield f"the approval policy {_short(json.loads(name))}"
    following = iter(now)
    if not missing and not all(name in following for name in before):
        yield f"the order of the {kind}s: it was {', then '.join(_short(name) for name in before)}"


def _is_policy(name: str) -> bool:
    return name.startswith("{")


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if before["default"] != now["default"]:
        return f"its default was {before['default']}, is {now['default']}"
    rules: list[tuple[Any, Any]] = list(zip_longest(before["rules"], now["rules"]))
    number, was, is_ = next(
        (number, *both)
        for number, both in enumerate(rules, start=1)
        if both[0] != both[1]
    )
    if was is None:
        return f"its rule {number}, {_short(is_)}, was not there"
    return f"its rule {number} was {_short(was)}, is {'not there' if is_ is None else _short(is_)}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _default(guards: Guards) -> str:
    """Return the default for an undecided call: the first policy's, else ``unmatched``."""
    first = next((name for name in guards.interceptors if _is_policy(name)), None)
    return (
        guards.unmatched if first is None else _BY_DEFAULT[json.loads(first)["default"]]
    )


def _newly_allowed(before: Guards, now: Guards) -> Iterator[str]:
    """List the new allow rules that decide before one of the run's guards."""
    known = list(before.interceptors)
    for name in now.interceptors:
        if known and name == known[0]:
            del known[0]
        elif _is_policy(name):
            later = (
                bool(known or before.pre_invoke or before.checks)
                or _default(before) != "approve"
            )
            for number, rule in enumerate(json.loads(name)["rules"], start=1):
                if rule["action"] == "allow" and (
                    later or any(_names_function(rule, one) for one in before.marked)
                ):
                    yield (
                        f"the say of what is asked later: rule {number} of a policy that the run did not begin with, "
                        f"{_short(rule)}, allows calls before that"
                    )


def _names_function(rule: Mapping[str, Any], function: str) -> bool:
    plugin, _, own = function.partition("-")
    return fnmatchcase(plugin, rule.get("plugin", "*")) and fnmatchcase(
        own, rule.get("function", "*")
    )
