"""The guards of a run: written down when it begins, and compared when another process resumes it.

Policies are compared as data; interceptors and callbacks by module and qualified name, a partial by the name of what it
wraps, an object by its class, each as often and in the order in which it was asked. The code behind a name is not
compared: a process that runs other code under the same name is the application's responsibility.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from planner_ext.approval.decisions import Authorize, Decision, ToolCall, hooks_of
from planner_ext.core.facts import Guards

__all__ = ["Policy", "guard_name", "hook_names", "missing_guards"]


class Policy(ABC):
    """An interceptor that is data: it decides at once, and equal ones are equal in every process."""

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether `normal_form` says all that it does."""

    @abstractmethod
    def by_rule(self, call: ToolCall) -> Decision | None:
        """Decide a call by the rules alone; None if no rule is for it."""

    @abstractmethod
    def by_default(self) -> Decision:
        """Decide a call that no rule is for."""

    @abstractmethod
    def normal_form(self) -> dict[str, Any]:
        """Convert what the policy decides to JSON values, so that equal policies give equal values."""

    @abstractmethod
    def unused_rules(self, functions: Iterable[tuple[str, str]]) -> list[int]:
        """List the rules, from 1, that are for none of these functions, given as plugin and function name."""

    @abstractmethod
    def unknown_after(self, functions: Iterable[tuple[str, str]]) -> list[tuple[int, str]]:
        """List the patterns of ``after`` that are for none of these functions, each with its rule's number."""


_KINDS_OF_GUARDS = {
    "interceptors": "interceptor",
    "pre_invoke": "pre_invoke callback",
    "checks": "check_for_intervention callback",
    "filters": "ApprovalFilter of the kernel for",
}
_STRICTER = ("approve", "defer", "deny")
_BY_DEFAULT = {"allow": "approve", "ask": "defer", "deny": "deny"}


def guard_name(guard: object) -> str:
    """Describe a guard: a policy by its normal form as JSON text, a callable by its name."""
    if isinstance(guard, Policy) and guard.is_plain:
        return json.dumps(guard.normal_form(), sort_keys=True, separators=(",", ":"))
    if isinstance(guard, partial):
        return f"partial of {guard_name(cast('partial[Any]', guard).func)}"
    owner = getattr(guard, "__self__", guard)
    data = f" {json.dumps(owner.normal_form(), sort_keys=True)}" if isinstance(owner, Policy) else ""
    named = guard if hasattr(guard, "__qualname__") else type(guard)
    name: Any = getattr(named, "__qualname__", "")
    return f"{_module(getattr(named, '__module__', None))}.{name}{data}"


def hook_names(authorize: Authorize | Sequence[Authorize] | None) -> tuple[str, ...]:
    """Name the hooks that say who may decide; sorted, since each of them is asked."""
    return tuple(sorted({guard_name(hook) for hook in hooks_of(authorize)}))


def _module(name: str | None) -> str:
    """Name a module as another process imports it, also where this process runs it as its program."""
    if name != "__main__":
        return name or "builtins"
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else Path(file).stem if file is not None else name


def missing_guards(before: Guards, now: Guards, offered: Collection[str]) -> list[str]:
    """List the guards that a run began with and that are missing now; empty if none is.

    Additional guards are fine, with one exception: an ``allow`` rule of a policy that the run did not begin with frees
    calls from the guards after it. Any change makes a policy count as missing: whether one policy is
    stricter than another depends on future calls. A function that is no longer marked with ``@requires_approval``
    counts if the function is still offered.

    Args:
        before: As the run began.
        now: The guards of the process that continues it.
        offered: Fully qualified names of the functions that it offers.
    """
    found: list[str] = []
    for field, kind in _KINDS_OF_GUARDS.items():
        found += _missing_of_kind(kind, getattr(before, field), getattr(now, field))
    default = _default(before)
    if _STRICTER.index(_default(now)) < _STRICTER.index(default):
        found.append(f"calls that nothing decides are now {_default(now)!r} instead of {default!r} (unmatched)")
    if before.expires_in is not None and (now.expires_in is None or now.expires_in > before.expires_in):
        found.append(f"expires_in is now {now.expires_in} instead of {before.expires_in}")
    if unmarked := sorted(set(before.marked) & set(offered) - set(now.marked)):
        found.append(f"@requires_approval of {', '.join(unmarked)}")
    found += [f"the authorize hook {name}" for name in before.authorize if name not in now.authorize]
    found += [f"the shared budget {name!r}" for name in sorted({*before.shared_budgets} - {*now.shared_budgets})]
    return found or list(_newly_allowed(before, now))


def _missing_of_kind(kind: str, before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    """List the missing guards of one kind, or their order where only that changed."""
    missing, more = Counter(before) - Counter(now), Counter(now) - Counter(before)
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
    """Describe the first difference of two policies."""
    if before["default"] != now["default"]:
        return f"its default was {before['default']}, is {now['default']}"
    rules: list[tuple[Any, Any]] = list(zip_longest(before["rules"], now["rules"]))
    number, was, is_ = next((number, *both) for number, both in enumerate(rules, start=1) if both[0] != both[1])
    if was is None:
        return f"its rule {number}, {_short(is_)}, was not there"
    return f"its rule {number} was {_short(was)}, is {'not there' if is_ is None else _short(is_)}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _default(guards: Guards) -> str:
    """Return the default for a call that nothing decides: the first policy's default comes before ``unmatched``."""
    first = next((name for name in guards.interceptors if _is_policy(name)), None)
    return guards.unmatched if first is None else _BY_DEFAULT[json.loads(first)["default"]]


def _newly_allowed(before: Guards, now: Guards) -> Iterator[str]:
    """List the allow rules that the run did not begin with, and that decide before one of its guards."""
    known = list(before.interceptors)
    for name in now.interceptors:
        if known and name == known[0]:
            del known[0]
        elif _is_policy(name):
            later = bool(known or before.pre_invoke or before.checks) or _default(before) != "approve"
            for number, rule in enumerate(json.loads(name)["rules"], start=1):
                if rule["action"] == "allow" and (later or any(_names_function(rule, one) for one in before.marked)):
                    yield (
                        f"the say of what is asked later: rule {number} of a policy that the run did not begin with, "
                        f"{_short(rule)}, allows calls before that"
                    )


def _names_function(rule: Mapping[str, Any], function: str) -> bool:
    plugin, _, own = function.partition("-")
    return fnmatchcase(plugin, rule.get("plugin", "*")) and fnmatchcase(own, rule.get("function", "*"))
