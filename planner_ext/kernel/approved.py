"""What a person approved runs as it was approved: a call whose function or arguments a filter changed is refused."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from semantic_kernel.filters.functions.function_invocation_context import FunctionInvocationContext
from semantic_kernel.functions import KernelFunction

from planner_ext.approval.fingerprint import digest_of
from planner_ext.core.values import Checked
from planner_ext.kernel.arguments import Parameters
from planner_ext.kernel.errors import PlannerException

__all__ = ["ApprovedArgumentsChangedError", "Unchanged", "bound", "watch"]

Unchanged: TypeAlias = Callable[[Mapping[str, Any]], bool]
"""Says whether arguments are still those that were approved."""


class ApprovedArgumentsChangedError(PlannerException):
    """A filter changed the function, or the model's arguments to it, after somebody had approved exactly these."""


def bound(function: KernelFunction, unchanged: Unchanged) -> KernelFunction:
    """Copy a function so that it refuses to run with other arguments than those approved, whatever filter changed them.

    ``_invoke_internal`` is what Semantic Kernel calls behind the last filter, and what each kind of function overrides;
    an attribute of the instance overrides it for this one call, and leaves class and metadata as filters expect them.
    """

    async def invoke_internal(context: FunctionInvocationContext) -> None:
        if not unchanged(context.arguments):
            raise ApprovedArgumentsChangedError("A filter changed arguments after they had been approved.")
        await function._invoke_internal(context)  # pyright: ignore[reportPrivateUsage]

    guarded = function.model_copy()
    vars(guarded)["_invoke_internal"] = invoke_internal
    return guarded


def watch(before: Mapping[str, Any], checked: Checked, parameters: Parameters) -> Unchanged:
    """Remember what was approved: the model's arguments by value, for a filter may change one in place."""
    digest = digest_of(checked.function, checked.arguments)
    absent = object()
    others = {name: before.get(name, absent) for name in parameters.by_name if name not in checked.arguments}

    def unchanged(now: Mapping[str, Any]) -> bool:
        if any(now.get(name, absent) is not value for name, value in others.items()):
            return False
        try:
            return digest_of(checked.function, {name: now.get(name) for name in checked.arguments}) == digest
        except (TypeError, ValueError, RecursionError):
            return False  # no longer JSON, so no longer what the model sent

    return unchanged
