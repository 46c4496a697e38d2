"""The names of a run's guards, written down when it begins; `planner_ext.engine.activation` compares them.

A policy is named by its data, a callable by module and qualified name, a partial as
what it wraps, an object by its class. The code behind a name is the application's
responsibility.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

from planner_ext.approval.decisions import (
    AuthorizeHooks,
    Decision,
    ToolCall,
    hooks_of,
)


class Policy(ABC):
    """An interceptor that is data: equal ones are equal in every process."""

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether `normal_form` says all that it does."""

    @property
    @abstractmethod
    def needs_store(self) -> bool:
        """Whether only a store can ask its questions: of several persons, or of others later."""

    @abstractmethod
    def by_rule(self, call: ToolCall) -> Decision | None:
        """Decide a call by the rules alone."""

    @abstractmethod
    def by_default(self) -> Decision:
        """Decide a call that no rule is for."""

    @abstractmethod
    def normal_form(self) -> dict[str, Any]:
        """Convert what the policy decides to JSON values."""

    @abstractmethod
    def unused_rules(self, functions: Iterable[tuple[str, str]]) -> list[int]:
        """List the rules, from 1, that are for none of these plugin and function names."""

    @abstractmethod
    def unknown_after(
        self, functions: Iterable[tuple[str, str]]
    ) -> list[tuple[int, str]]:
        """List, by rule, the patterns of ``after`` that are for none of these functions."""


def guard_name(guard: object) -> str:
    """Name a guard: a policy by its normal form as JSON text, a callable by its name."""
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


def hook_names(authorize: AuthorizeHooks) -> tuple[str, ...]:
    """Name the hooks that say who may decide, sorted."""
    return tuple(sorted({guard_name(hook) for hook in hooks_of(authorize)}))


def _module(name: str | None) -> str:
    """Name a module as another process imports it, also the program that this one runs."""
    if name != "__main__":
        return name or "builtins"
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    return (
        spec.name if spec is not None else Path(file).stem if file is not None else name
    )
