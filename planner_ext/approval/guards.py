"""Who has a say in the calls of a run, written down when it begins and compared when another process continues it.

What is compared: policies as data; interceptors and callbacks by module and qualified name, a partial by the name of
what it wraps, an object by its class, each as often and in the order in which it was asked. What a function does, what
it closes over and what an object or partial was made with is not: a process that runs other code under the same name is
the application's own affair.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, cast

from planner_ext.approval.policy import ApprovalPolicy
from planner_ext.core.facts import Guards

__all__ = ["guard_name", "missing_guards"]

_STRICTER = ("approve", "defer", "deny")
_BY_DEFAULT = {"allow": "approve", "ask": "defer", "deny": "deny"}


def guard_name(guard: object) -> str:
    """Describe something that has a say: a policy by its normal form as JSON text, a callable by its name."""
    if type(guard) is ApprovalPolicy:
        return json.dumps(guard.normal_form(), sort_keys=True, separators=(",", ":"))
    if isinstance(guard, partial):
        return f"partial of {guard_name(cast('partial[Any]', guard).func)}"
    owner = getattr(guard, "__self__", guard)
    data = f" {json.dumps(owner.normal_form(), sort_keys=True)}" if isinstance(owner, ApprovalPolicy) else ""
    named = guard if hasattr(guard, "__qualname__") else type(guard)
    name: Any = getattr(named, "__qualname__", "")
    return f"{_module(getattr(named, '__module__', None))}.{name}{data}"


def _module(name: str | None) -> str:
    """Name a module as another process imports it, also where this process runs it as its program."""
    if name != "__main__":
        return name or "builtins"
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else Path(file).stem if file is not None else name


def missing_guards(before: Guards, now: Guards, offered: Collection[str]) -> list[str]:
    """List what had a say in a run's calls when it began and has none now; empty where nothing is missing.

    More than there was is fine, with one exception: an ``allow`` rule of a policy that the run did not begin with frees
    calls from what is asked after it. A changed policy counts as missing, whatever the change: whether one policy is
    stricter than another depends on calls that are yet to come. A function that is no longer marked with
    ``@requires_approval`` counts where it is still offered.

    Args:
        before: As the run began.
        now: Of the process that is to continue it.
        offered: Fully qualified names of the functions that it offers.
    """
    found = [
        *_lacking("interceptor", before.interceptors, now.interceptors),
        *_lacking("pre_invoke callback", before.pre_invoke, now.pre_invoke),
        *_lacking("check_for_intervention callback", before.checks, now.checks),
        *_lacking("ApprovalFilter of the kernel for", before.filters, now.filters),
    ]
    default = _default(before)
    if _STRICTER.index(_default(now)) < _STRICTER.index(default):
        found.append(f"calls that nothing decides are now {_default(now)!r} instead of {default!r} (unmatched)")
    if before.expires_in is not None and (now.expires_in is None or now.expires_in > before.expires_in):
        found.append(f"expires_in is now {now.expires_in} instead of {before.expires_in}")
    unmarked = sorted(set(before.marked) & set(offered) - set(now.marked))
    if unmarked:
        found.append(f"@requires_approval of {', '.join(unmarked)}")
    return found or list(_freed(before, now))


def _lacking(kind: str, before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    """List what is missing of one kind; where all is there in another order, that."""
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
    """Say where two policies differ first."""
    if before["default"] != now["default"]:
        return f"its default was {before['default']}, is {now['default']}"
    old, new = before["rules"], now["rules"]
    number = next((n for n, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), None)
    if number is not None:
        return f"its rule {number + 1} was {_short(old[number])}, is {_short(new[number])}"
    if len(old) > len(new):
        return f"its rule {len(new) + 1} was {_short(old[len(new)])}, is not there"
    return f"its rule {len(old) + 1}, {_short(new[len(old)])}, was not there"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _default(guards: Guards) -> str:
    """Read what happens to a call that nothing decides: the first policy's default comes before ``unmatched``."""
    first = next((name for name in guards.interceptors if _is_policy(name)), None)
    return guards.unmatched if first is None else _BY_DEFAULT[json.loads(first)["default"]]


def _freed(before: Guards, now: Guards) -> Iterator[str]:
    """List the allow rules that the run did not begin with, and that decide before something that had a say."""
    known = list(before.interceptors)
    for name in now.interceptors:
        if known and name == known[0]:
            del known[0]
        elif _is_policy(name):
            later = bool(known or before.pre_invoke or before.checks) or _default(before) != "approve"
            for number, rule in enumerate(json.loads(name)["rules"], start=1):
                if rule["action"] == "allow" and (later or any(map(_names(rule), before.marked))):
                    yield (
                        f"the say of what is asked later: rule {number} of a policy that the run did not begin with, "
                        f"{_short(rule)}, allows calls before that"
                    )


def _names(rule: Mapping[str, Any]) -> Callable[[str], bool]:
    """Say of a function's name whether a rule is for it."""

    def named(function: str) -> bool:
        plugin, _, own = function.rpartition("-")
        return fnmatchcase(plugin, rule.get("plugin", "*")) and fnmatchcase(own, rule.get("function", "*"))

    return named
