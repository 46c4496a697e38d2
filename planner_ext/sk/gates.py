"""The gate of a run over a kernel: the interceptors of the run and of the runs around it, and the approval filters.

The kernel's approval filters decide before any call runs, so what a filter defers waits as the run's own call, and the
filter does not ask again when the call runs. A filter that is wrapped in a function of the application is not
recognised: it decides when its call runs, as any filter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.functions import KernelFunction

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, Supply, ToolCall
from planner_ext.core.accounts import Account
from planner_ext.core.facts import CallDecided
from planner_ext.core.state import State
from planner_ext.engine.gate import InterceptorChain
from planner_ext.sk.approval_filter import ApprovalFilter
from planner_ext.sk.arguments import InvalidArguments, parameters_of, parse_arguments
from planner_ext.sk.execution import result_text
from planner_ext.sk.toolset import mark_of

__all__ = ["RunGate", "approval_filters"]


def approval_filters(kernel: Kernel) -> tuple[ApprovalFilter, ...]:
    """List the approval filters of a kernel, of either type; those with the same policy and approver once."""
    listed: Any = kernel  # its lists of filters are typed in part only
    found: list[ApprovalFilter] = []
    for _, one in [*reversed(listed.auto_function_invocation_filters), *reversed(listed.function_invocation_filters)]:
        if isinstance(one, ApprovalFilter) and not any(one.decides_as(other) for other in found):
            found.append(one)
    return tuple(found)


class RunGate:
    """Decides the calls of a run; implements `planner_ext.engine.ports.Gate`.

    The chains are asked first, the outermost run's first, each about what those before it approved. A function's own
    ``@requires_approval`` counts once, in the outermost chain. What the chains refuse or supply stands. What they defer
    is refused where a filter's policy refuses it, and waits otherwise. What they let run, each filter decides: by its
    policy, the function's mark, and its approver; without an approver the call waits as the run's own.

    Args:
        chains: Each with its run's account; None is the account of the run that is reviewed.
        filters: See `approval_filters`.
        functions: Gives the functions, by fully qualified name.
        expires_in: Seconds after which a filter's question expires; None: never.
        marked: Whether ``@requires_approval`` counts here; where the kernel has approval filters, it counts there.
        can_wait: Whether calls may wait for a person. A run inside a function cannot: there they are denied, by name.
    """

    def __init__(
        self,
        chains: Sequence[tuple[InterceptorChain, Account | None]],
        filters: Sequence[ApprovalFilter],
        *,
        functions: Callable[[], Mapping[str, KernelFunction]],
        expires_in: float | None = None,
        marked: bool,
        can_wait: bool,
    ) -> None:
        if marked:
            (outermost, account), *others = chains
            chains = [(replace(outermost, marked=partial(_mark, functions)), account), *others]
        self._chains = chains
        self._filters = tuple(filters)
        self._functions = functions
        self._expires_in = expires_in
        self._can_wait = can_wait
        self._reviewed: set[tuple[int, str]] = set()

    def watches(self, function: str) -> bool:
        """Whether a filter or a chain decides the calls of a function."""
        return bool(self._filters) or any(chain.watches(function) for chain, _ in self._chains)

    async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision | None]:
        """Decide each call, in order, before any of them runs."""
        decisions = [await self._by_chains(call, state) for call in calls]
        if self._filters:
            for number, call in enumerate(calls):
                decisions[number] = await self._by_filters(call, decisions[number], state)
                self._reviewed.add((call.iteration, call.id))
        if self._can_wait:
            return decisions
        return [
            _denied(call) if isinstance(decision, Defer) else decision
            for call, decision in zip(calls, decisions, strict=True)
        ]

    def decided_by(self, fact: CallDecided | None) -> Sequence[ApprovalFilter]:
        """List the filters that do not decide a call when it runs: this gate asked them, or a person decided."""
        if fact is not None and (fact.person or (fact.iteration, fact.call_id) in self._reviewed):
            return self._filters
        return ()

    async def _by_chains(self, call: ToolCall, state: State) -> Decision | None:
        decided: Approve | None = None
        for chain, account in self._chains:
            if not chain.watches(call.fully_qualified_name):
                continue
            (decision,) = await chain.review([call], state if account is None else account.state)
            if not isinstance(decision, Approve | None):
                return decision
            if decision is not None:
                decided = _both(decided, decision)
                call = call if decided.arguments is None else replace(call, arguments=decided.arguments)
        return decided

    async def _by_filters(self, call: ToolCall, decision: Decision | None, state: State) -> Decision | None:
        edited = False
        for one in self._filters:
            edited = edited or (isinstance(decision, Approve) and decision.arguments is not None)
            decision = await self._by_filter(one, call, decision, state)
        if edited and isinstance(decision, Defer):  # an edit does not wait: each policy has to see the call that waits
            for one in self._filters:
                decision = await self._by_filter(one, call, decision, state)
        return decision

    async def _by_filter(
        self, one: ApprovalFilter, call: ToolCall, decision: Decision | None, state: State
    ) -> Decision | None:
        if isinstance(decision, Deny | Supply):
            return decision
        function = self._functions()[call.fully_qualified_name]
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


def _mark(functions: Callable[[], Mapping[str, KernelFunction]], name: str) -> Defer | None:
    return mark_of(functions().get(name))


def _both(first: Approve | None, then: Approve) -> Approve:
    """Merge two approvals of a call: the last edit of its arguments, and the last approver's name."""
    if first is None:
        return then
    edited = first.arguments if then.arguments is None else then.arguments
    return replace(then, arguments=edited, by=then.by or first.by)


def _denied(call: ToolCall) -> Deny:
    return Deny(
        f"{call.fully_qualified_name} needs a person's decision, and a run inside a function cannot wait for one. "
        "Go on without it."
    )
