"""The interceptors of a run, asked in order before a call runs; the first decision wins."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from planner_ext.approval.decisions import (
    ApprovalSettings,
    Approve,
    Authorize,
    Decision,
    DecisionRequest,
    Defer,
    Deny,
    Interceptor,
    Supply,
    ToolCall,
    digest_of,
    hooks_of,
    problem_of,
)
from planner_ext.approval.policy import ApprovalPolicy
from planner_ext.core.errors import shown
from planner_ext.core.fold import sticky_keys
from planner_ext.core.state import State
from planner_ext.core.values import updated
from planner_ext.engine.authorization import refusal_of
from planner_ext.engine.concurrency import OUT_OF_TIME, Raised, called, caught, in_time, seconds_from_now

__all__ = ["Approver", "CheckForIntervention", "InterceptorChain", "PreInvoke", "asked_by", "with_approval"]

_logger = logging.getLogger(__name__)

PreInvoke = Callable[[int, str, Mapping[str, Any]], bool | Awaitable[bool]]
"""Called with the 1-based iteration, the function's name and its arguments; False refuses, True is no objection."""

CheckForIntervention = Callable[[ToolCall], bool | Awaitable[bool]]
"""Called with the call; True defers it to a person, False is no objection."""


Approver = Callable[[ToolCall], Decision | Awaitable[Decision | None] | None]
"""Asks a person about a call, and returns their decision; None or `Defer` leaves the question open."""

_UNMATCHED = {"approve": None, "defer": Defer(), "deny": Deny("Nobody approved it.", by="default")}
"""The decision on a call that no interceptor decided."""

_APPROVED_EARLIER = Approve(by="approved earlier in this run")


def with_approval(state: State, call: ToolCall, decision: Decision | None) -> State:
    """Add what is approved for the rest of the run, for the later calls of the batch; an edit may yet be refused."""
    if not isinstance(decision, Approve) or decision.always is None or decision.arguments is not None:
        return state
    return updated(state, sticky=state.sticky | {_keys_of(call)[decision.always]})


def _is_approved(call: ToolCall, state: State) -> bool:
    return bool(state.sticky) and not state.sticky.isdisjoint(_keys_of(call).values())


def _keys_of(call: ToolCall) -> dict[str, str]:
    name = call.fully_qualified_name
    return sticky_keys(name, digest_of(name, call.arguments), call.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterceptorChain:
    """Implements `planner_ext.engine.ports.Gate`.

    The order: interceptors as given (of a policy, its rules), the function's own ``@requires_approval``,
    ``pre_invoke``, ``check_for_intervention``, a policy's default, and what is set for undecided calls. An interceptor
    that raises, hangs, or returns something other than a decision, denies. A deferred call of a marked function keeps
    the roles of the mark, unless the ``Defer`` names others.

    Attributes:
        marked: Gives a function's own mark by its fully qualified name, or None.
        approver: Asked by `asked`, about a call that was deferred.
    """

    options: ApprovalSettings
    interceptors: Sequence[Interceptor] = ()
    pre_invoke: Sequence[PreInvoke] = ()
    checks: Sequence[CheckForIntervention] = ()
    marked: Callable[[str], Defer | None] = lambda _: None
    approver: Approver | None = None

    def watches(self, function: str) -> bool:
        """Return whether a call of this function could be decided by an interceptor, a mark or a setting."""
        asked = self.interceptors or self.pre_invoke or self.checks or self.options.unmatched != "approve"
        return bool(asked) or self.marked(function) is not None

    async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision | None]:
        """Decide each call, in order, before any of them runs; None if no interceptor decided and that approves."""
        return [self._final(await self._decide(call), call, state) for call in calls]

    async def asked(self, call: ToolCall, question: Defer, state: State) -> Decision:
        """Ask the approver about a deferred call while the question is open; returns the question if it stays open.

        It does if the ``authorize`` hook refuses the answer. Without a hook the approver, which is shown the roles, is
        the application's own check of them.
        """
        assert self.approver is not None, "only a chain that has an approver is asked"
        if _is_approved(call, state):
            return _APPROVED_EARLIER
        waiting = replace(self, options=replace(self.options, interceptor_timeout=question.expires_in))
        shown = replace(call, prompt=question.prompt or "", roles=tuple(question.roles))
        approver = asked_by(self.approver, self.options.authorize, state.run_id)
        answer = await waiting._ask(approver, shown)
        return question if answer is None or isinstance(answer, Defer) else answer

    async def _decide(self, call: ToolCall) -> Decision | None:
        for interceptor in self.interceptors:
            ask = interceptor.by_rule if isinstance(interceptor, ApprovalPolicy) else interceptor
            if (decision := await self._ask(ask, call)) is not None:
                return decision
        if (mark := self.marked(call.fully_qualified_name)) is not None:
            return mark
        return await self._call_callbacks(call) or self._defaults()

    async def _call_callbacks(self, call: ToolCall) -> Decision | None:
        for pre_invoke in self.pre_invoke:
            verdict = await self._outcome_of(
                pre_invoke, call.iteration + 1, call.fully_qualified_name, deepcopy(dict(call.arguments))
            )
            if isinstance(verdict, Deny):
                return verdict
            if verdict is not True:
                return Deny("The application's pre-invoke callback did not let it run.", by=_name(pre_invoke))
        for check in self.checks:
            if (decision := await self._ask(check, call)) is not None:
                return decision
        return None

    def _defaults(self) -> Decision | None:
        for interceptor in self.interceptors:
            if isinstance(interceptor, ApprovalPolicy):
                return interceptor.by_default()
        return _UNMATCHED[self.options.unmatched]

    async def _ask(self, interceptor: Callable[[ToolCall], Any], call: ToolCall) -> Decision | None:
        # A copy for each: one interceptor's changes to the arguments are not seen by the next.
        answer = await self._outcome_of(interceptor, replace(call, arguments=deepcopy(dict(call.arguments))))
        if answer is None or answer is False:
            return None
        if answer is True:
            return Defer()
        if not isinstance(answer, Approve | Deny | Supply | Defer):
            problem = "it is no decision"
        elif isinstance(answer, Approve) and answer.fingerprint not in (None, call.fingerprint):
            problem = "its fingerprint is that of another call"
        elif (problem := problem_of(answer)) is None:
            return answer
        name = _name(interceptor)
        _logger.error("%s answered %s, but %s; the call is denied.", name, shown(answer), problem)
        return Deny("It could not be decided.", by=name)

    async def _outcome_of(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Call one interceptor; an exception or a timeout denies. A synchronous one runs in a thread.

        A policy, which is quick, runs at once, and has no timeout.
        """
        is_policy = isinstance(getattr(ask, "__self__", None), ApprovalPolicy)
        seconds = None if is_policy else self.options.interceptor_timeout
        asked = _evaluated(ask, *arguments) if is_policy else called(ask, *arguments)
        answer = await caught(asked if seconds is None else in_time(asked, seconds_from_now(seconds)))
        if isinstance(answer, Raised):
            _logger.error("%s failed; the call is denied.", _name(ask), exc_info=answer.error)
            return Deny("It could not be decided.", by=_name(ask))
        if answer is OUT_OF_TIME:
            _logger.error("%s did not decide in time; the call is denied.", _name(ask))
            return Deny("It was not decided in time.", by=_name(ask))
        return answer

    def _final(self, decision: Decision | None, call: ToolCall, state: State) -> Decision | None:
        """Replace a question, never a denial, by a sticky approval; or set until when the question is open."""
        if not isinstance(decision, Defer):
            return decision
        if _is_approved(call, state):
            return _APPROVED_EARLIER
        mark, seconds = self.marked(call.fully_qualified_name), decision.expires_in
        return replace(
            decision,
            expires_in=self.options.expires_in if seconds is None else seconds,
            roles=decision.roles or (mark.roles if mark is not None else ()),
        )


def asked_by(approver: Approver, authorize: Authorize | Sequence[Authorize] | None, run_id: str) -> Approver:
    """Return an approver whose decisions the hook allows; one that it refuses is logged, and leaves the question open.

    Without a hook it is the approver itself: the application's own function, which is shown the roles.
    """
    if not hooks_of(authorize):
        return approver

    async def ask(call: ToolCall) -> Decision | None:
        answer = await called(approver, call)
        if not isinstance(answer, Approve | Deny | Supply):
            return answer
        by = answer.by if isinstance(answer.by, str) else ""
        request = DecisionRequest(action="decide", by=by, run_id=run_id, call=call, decision=answer)
        if (refusal := await refusal_of(authorize, request)) is None:
            return answer
        _logger.warning("%s The call still waits.", refusal)
        return None

    ask.__qualname__ = _name(approver)
    return ask


async def _evaluated(rule: Callable[..., Any], *arguments: Any) -> Any:
    return rule(*arguments)


def _name(ask: object) -> str:
    return str(getattr(ask, "__qualname__", type(ask).__qualname__))
