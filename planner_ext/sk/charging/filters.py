"""The approval filters of a kernel as a run asks them, and calls that no reply holds, as a gate sees them."""

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.functions import KernelFunction, KernelFunctionMetadata

from planner_ext.approval.decisions import (
    ApprovalSettings,
    Authorize,
    Defer,
    Interceptor,
    ToolCall,
    digest_of,
    fingerprint_of,
    hooks_of,
)
from planner_ext.approval.guards import Policy
from planner_ext.core.state import path_of
from planner_ext.engine.gate import Approver, InterceptorChain
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object
from planner_ext.sk.functions.toolset import (
    Tool,
    convert_arguments,
    parse_edited,
    tool_of,
)

_logger = logging.getLogger(__name__)


class CallFilter:
    """What a run asks of a `planner_ext.ApprovalFilter` of its kernel."""

    def __init__(
        self, policy: Interceptor, approver: Approver | None, settings: ApprovalSettings
    ) -> None:
        self.policy = policy
        self._approver = approver
        self._settings = settings
        self._reported = False

    @property
    def authorize(self) -> tuple[Authorize, ...]:
        """@private The hooks that say who may decide."""
        return hooks_of(self._settings.authorize)

    def decides_as(self, other: object) -> bool:
        """@private Whether another filter has the same policy, approver and hooks."""
        return (
            isinstance(other, CallFilter)
            and _is_same(other.policy, self.policy)
            and _is_same(other._approver, self._approver)
            and other.authorize == self.authorize
        )

    def report_unused_rules(self, kernel: Kernel) -> None:
        """@private Log once which rules of the policy match no function."""
        if not self._reported:
            self._reported = True
            report_unused_rules(
                self.policy, kernel.get_full_list_of_function_metadata(), "kernel"
            )

    def chain(
        self, marked: Callable[[str], Defer | None], expires_in: float | None = None
    ) -> InterceptorChain:
        """@private Make the filter a part of a review."""
        return InterceptorChain(
            options=replace(self._settings, expires_in=expires_in),
            interceptors=(self.policy,),
            marked=marked,
            approver=self._approver,
            waits=False,
        )


def _is_same(one: object, other: object) -> bool:
    # Each lookup makes another method object.
    return one is other or (inspect.ismethod(one) and one == other)


def approval_filters(
    kernel: Kernel, *, once_invoked: bool = True
) -> tuple[CallFilter, ...]:
    """List a kernel's approval filters, without those that decide as another one.

    Those of function invocation come last, and are left out unless ``once_invoked``.
    """
    listed: Any = kernel  # its lists of filters are typed in part only
    found: list[CallFilter] = []
    once_called = [*reversed(listed.auto_function_invocation_filters)]
    for _, one in [
        *once_called,
        *(reversed(listed.function_invocation_filters) if once_invoked else ()),
    ]:
        if isinstance(one, CallFilter) and not any(
            one.decides_as(other) for other in found
        ):
            found.append(one)
    return tuple(found)


def refuse_without_store(interceptors: Iterable[Interceptor]) -> None:
    """Refuse a policy whose questions only a store can ask, where there is none.

    Raises:
        InvalidOptionError: If there is one.
    """
    for one in interceptors:
        if isinstance(one, Policy) and one.needs_store:
            raise InvalidOptionError(
                "A rule of the approval policy has a quorum or an escalation, for which votes and times are kept in a "
                "store. Run it with Runs.start or Runs.submit, or leave quorum and escalates_in out of the rule."
            )


def report_unused_rules(
    policy: Interceptor,
    functions: Iterable[KernelFunctionMetadata | KernelFunction],
    place: str,
) -> None:
    """Log the rules that match none of the functions: a misspelt name guards nothing."""
    if isinstance(policy, Policy):
        known = [(one.plugin_name or "", one.name) for one in functions]
        for number in policy.unused_rules(known):
            _logger.warning(
                "Rule %d of the approval policy is for no function of this %s.",
                number,
                place,
            )
        for number, name in policy.unknown_after(known):
            _logger.warning(
                "Rule %d of the approval policy is for calls after %s, which is no function of this %s: only a "
                "history, or a nested run, can have such a call.",
                number,
                name,
                place,
            )


def tool_call(
    function: KernelFunction,
    arguments: Mapping[str, Any],
    *,
    run_id: str,
    call_id: str,
    iteration: int,
    **more: Any,
) -> ToolCall:
    """Describe a call that no reply holds; its arguments may be an application's objects."""
    name = function.fully_qualified_name
    try:
        digest = digest_of(name, json.loads(json.dumps(arguments, default=str)))
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):
        # The arguments contain themselves, or have keys that are not text.
        digest = digest_of(name, {"": repr(arguments)})
    return ToolCall(
        id=call_id,
        path=path_of(call_id),
        plugin_name=function.plugin_name,
        function_name=function.name,
        fully_qualified_name=name,
        arguments=arguments,
        iteration=iteration,
        fingerprint=fingerprint_of(run_id, iteration, call_id, digest),
        **more,
    )


def edited_call(
    functions: Mapping[str, KernelFunction],
    run_id: str,
    call: ToolCall,
    arguments: Mapping[str, Any],
) -> ToolCall | str:
    """Return a call with other arguments, converted, or what is wrong with them."""
    name = call.fully_qualified_name
    edited = parse_edited(arguments, tool_of(functions[name]))
    if isinstance(edited, InvalidArguments):
        return edited.message
    fingerprint = fingerprint_of(
        run_id, call.iteration, call.id, digest_of(name, edited), call.signature
    )
    return replace(call, arguments=edited, fingerprint=fingerprint)


def converted_values(
    values: dict[str, Any], tool: Tool
) -> dict[str, Any] | InvalidArguments:
    """Convert what a model may have given, and no application's object."""
    shown = dict(values)
    for name, value in values.items():
        if name not in tool.parameters or not isinstance(
            value, str | int | float | list | dict | None
        ):
            continue
        try:
            given = parse_object(json.dumps({name: value}))
        except (TypeError, ValueError, RecursionError):
            continue
        converted = convert_arguments(
            given,
            replace(
                tool, parameters={name: tool.parameters[name]}, required=frozenset()
            ),
        )
        if isinstance(converted, InvalidArguments):
            return converted
        if converted is not given:
            shown[name] = converted[name]
    return shown
