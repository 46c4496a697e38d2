"""The names of a run's guards, written down when it begins; `planner_ext.engine.activation` compares them.

A policy is named by its data; an interceptor or callback by module and qualified name,
a partial by the name of what it wraps, an object by its class. The code behind a name
is not in it: a process that runs other code under the same name is the application's
responsibility.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from planner_ext.approval.decisions import Authorize, Decision, ToolCall, hooks_of


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
    def unknown_after(
        self, functions: Iterable[tuple[str, str]]
    ) -> list[tuple[int, str]]:
        """List the patterns of ``after`` that are for none of these functions, each with its rule's number."""


def guard_name(guard: object) -> str:
    """Describe a guard: a policy by its normal form as JSON text, a callable by its name."""
    if isinstance(guard, Policy) and guard.is_plain:
        return json.dumps(guard.normal_form(), sort_keys=True, separators=(",", ":"))
    if isinstance(guard, partial):
        return f"partial of {guard_name(cast('partial[Any]', guard).func)}"
    owner = getattr(guard, "__self__", guard)
    data = (
        f" {json.dumps(owner.normal_form(), sort_keys=True)}"
        if isinstance(owner, Policy)
        else ""
    )
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
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    return (
        spec.name if spec is not None else Path(file).stem if file is not None else name
    )
