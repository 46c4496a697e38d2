"""The approval filters of the kernel that a run works on: they decide with the run's own gate, before any call runs.

So what a filter defers waits as the run's own, and a filter steps aside where its say has been heard. A filter that is
wrapped in a function of the application is not recognised: it decides when its call runs, as any filter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.functions import KernelFunction

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, Supply, ToolCall
from planner_ext.core.facts import CallDecided
from planner_ext.core.state import State
from planner_ext.engine.ports import Gate
from planner_ext.sk.approval_filter import ApprovalFilter
from planner_ext.sk.arguments import InvalidArguments, parameters_of, parse_arguments
from planner_ext.sk.execution import result_text

__all__ = ["FilteredGate", "approval_filters"]


def approval_filters(kernel: Kernel) -> tuple[ApprovalFilter, ...]:
    """List the approval filters of a kernel, under either type; of those with one policy and approver, one."""
    listed: Any = kernel  # its lists of filters are typed in part only
    found: list[ApprovalFilter] = []
    for _, one in [*reversed(listed.auto_function_invocation_filters), *reversed(listed.function_invocation_filters)]:
        if isinstance(one, ApprovalFilter) and not any(one.is_of_one_mind(other) for other in found):
            found.append(one)
    return tuple(found)


class FilteredGate:
    """Decides as another gate, with each filter's say after it; implements `planner_ext.engine.ports.Gate`.

    What the gate or a filter refuses or supplies stands. What the gate defers is refused where a filter's policy
    refuses it, and waits otherwise. What the gate lets run, each filter decides: by its policy, the function's own
    mark, and its approver; without an approver the call waits as the run's own.

    Args:
        gate: The run's own, which leaves the marks of functions to the filters.
        filters: See `approval_filters`.
        offered: The functions, by fully qualified name.
        expires_in: Seconds after which a filter's question is no longer open; None: never.
    """

    def __init__(
        self,
        gate: Gate,
        filters: Sequence[ApprovalFilter],
        *,
        offered: Callable[[], Mapping[str, KernelFunction]],
        expires_in: float | None,
    ) -> None:
        self._gate = gate
        self._filters = tuple(filters)
        self._offered = offered
        self._expires_in = expires_in
        self._reviewed: set[tuple[int, str]] = set()

    def watches(self, function: str) -> bool:
        """Whether a filter, or the gate, has a say about the calls of a function."""
        return bool(self._filters) or self._gate.watches(function)

    async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision | None]:
        """Decide each call, in order, before any of them runs."""
        decisions = list(await self._gate.review(calls, state))
        if not self._filters:
            return decisions
        for number, call in enumerate(calls):
            decisions[number] = await self._filtered(call, decisions[number], state)
            self._reviewed.add((call.iteration, call.id))
        return decisions

    async def _filtered(self, call: ToolCall, decision: Decision | None, state: State) -> Decision | None:
        edited = False
        for one in self._filters:
            edited = edited or (isinstance(decision, Approve) and decision.arguments is not None)
            decision = await self._with(one, call, decision, state)
        if edited and isinstance(decision, Defer):  # an edit does not wait: what waits, each policy has to see
            for one in self._filters:
                decision = await self._with(one, call, decision, state)
        return decision

    def decided(self, fact: CallDecided | None) -> Sequence[ApprovalFilter]:
        """List the filters that need not decide a call when it runs: this gate asked them, or a person decided."""
        if fact is not None and (fact.person or (fact.iteration, fact.call_id) in self._reviewed):
            return self._filters
        return ()

    async def _with(
        self, one: ApprovalFilter, call: ToolCall, decision: Decision | None, state: State
    ) -> Decision | None:
        if isinstance(decision, Deny | Supply):
            return decision
        function = self._offered()[call.fully_qualified_name]
        if isinstance(decision, Approve) and decision.arguments is not None:
            edited = parse_arguments(result_text(dict(decision.arguments)), parameters_of(function))
            if isinstance(edited, InvalidArguments):
                return decision  # which is refused where it is applied
            call = replace(call, arguments=edited)
        said = await one.decide(function, call, state, asks=not isinstance(decision, Defer))
        if isinstance(decision, Defer):
            return said if isinstance(said, Deny | Supply) else decision
        if said is None or (isinstance(said, Approve) and said.arguments is None and decision is not None):
            return decision
        if isinstance(said, Defer) and said.expires_in is None:
            return replace(said, expires_in=self._expires_in)
        return said
