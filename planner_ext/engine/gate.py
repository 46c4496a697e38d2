"""The interceptors of a run, asked in order before a call runs; the first decision wins.

`planner_ext.engine.review` asks the chains of the runs around, and the approvers.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeAlias

from planner_ext.approval.decisions import (
    ApprovalSettings,
    Approve,
    AuthorizeHooks,
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
    source_of,
)
from planner_ext.approval.guards import Policy, guard_name
from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.fold import sticky_keys
from planner_ext.core.state import State
from planner_ext.core.values import frozen
from planner_ext.engine.authorization import refusal_of
from planner_ext.engine.concurrency import (
    OUT_OF_TIME,
    Raised,
    called,
    caught,
    in_time,
    seconds_from_now,
)

_logger = logging.getLogger(__name__)

PreInvoke = Callable[[int, str, Mapping[str, Any]], bool | Awaitable[bool]]
"""Called with the 1-based iteration, the function's name and its arguments; False
refuses."""

CheckForIntervention = Callable[[ToolCall], bool | Awaitable[bool]]
"""Called with the call; True defers it to a person."""


Approver = Callable[[ToolCall], Decision | Awaitable[Decision | None] | None]
"""Asks a person about a call; None or `Defer` leaves the question open."""

Edit: TypeAlias = Callable[[ToolCall, Mapping[str, Any]], ToolCall | str]
"""Checks and converts edited arguments; returns the call with them, or what is
wrong."""

_UNMATCHED = {
    "approve": None,
    "defer": Defer(source="unmatched", asked_by="default of the run"),
    "deny": Deny("Nobody approved it.", by="default"),
}

APPROVED_EARLIER = Approve(by="approved earlier in this run")


def is_approved(call: ToolCall, question: Defer, state: State) -> bool:
    """Return whether this question about a call was answered for the rest of the run."""
    return bool(state.sticky) and not state.sticky.isdisjoint(
        keys_of(call, question).values()
    )


def keys_of(call: ToolCall, question: Defer) -> dict[str, str]:
    """List what an approval of this question may be for, as `State.sticky` has it."""
    name = call.fully_qualified_name
    digest = digest_of(name, call.arguments)
    return sticky_keys(
        name, digest, call.signature, source=question.source, roles=question.roles
    )


@frozen
class InterceptorChain:
    """The interceptors of one run, or of one filter.

    The order: interceptors (of a policy, its rules), the function's own
    ``@requires_approval``, ``pre_invoke``, ``check_for_intervention``, a policy's
    default, and ``unmatched``. An interceptor that raises or hangs denies; an answer
    that is no decision is an error. A deferred call keeps the roles of the function's
    mark, unless the ``Defer`` names others.

    Attributes:
        waits: Whether a question that the approver leaves open stays open; else the
            call is denied, and the approver has only an interceptor's time.
    """

    options: ApprovalSettings
    interceptors: Sequence[Interceptor] = ()
    pre_invoke: Sequence[PreInvoke] = ()
    checks: Sequence[CheckForIntervention] = ()
    marked: Callable[[str], Defer | None] = lambda _: None
    approver: Approver | None = None
    waits: bool = True

    @property
    def answers_alone(self) -> bool:
        """Whether its own approver alone answers its questions."""
        return self.approver is not None and not self.waits

    def watches(self, function: str) -> bool:
        """Return whether anything here could decide a call of this function."""
        asked = (
            self.interceptors
            or self.pre_invoke
            or self.checks
            or self.options.unmatched != "approve"
        )
        return bool(asked) or self.marked(function) is not None

    async def decide(self, call: ToolCall, state: State) -> Decision | None:
        """Decide a call before it runs; None approves it undecided.

        What was approved in the run replaces a question, never a denial.
        """
        decision = await self._decide(call)
        if not isinstance(decision, Defer):
            return decision
        mark = self.marked(call.fully_qualified_name)
        seconds = decision.expires_in
        question = replace(
            decision,
            expires_in=self.options.expires_in if seconds is None else seconds,
            roles=decision.roles or (mark.roles if mark is not None else ()),
            summary=_summary(decision.summary or (mark and mark.summary), call),
        )
        return APPROVED_EARLIER if is_approved(call, question, state) else question

    async def asked(self, call: ToolCall, question: Defer, run_id: str) -> Decision:
        """Ask the approver about a deferred call; returns the question if it stays open.

        It does if the ``authorize`` hook refuses the answer; without one, the approver
        is trusted.
        """
        assert self.approver is not None, "only a chain that has an approver is asked"
        seconds = (
            question.expires_in if self.waits else self.options.interceptor_timeout
        )
        waiting = replace(
            self, options=replace(self.options, interceptor_timeout=seconds)
        )
        shown = replace(
            call,
            prompt=question.prompt or "",
            summary=question.summary,
            asked_by=question.asked_by,
            roles=tuple(question.roles),
        )
        answer = await waiting._ask(
            _asked_by(self.approver, self.options.authorize, run_id), shown
        )
        if answer is not None and not isinstance(answer, Defer):
            return answer
        return question if self.waits else Deny("Nobody decided.")

    async def _decide(self, call: ToolCall) -> Decision | None:
        for place, interceptor in enumerate(self.interceptors):
            ask = (
                interceptor.by_rule if isinstance(interceptor, Policy) else interceptor
            )
            decision = await self._ask(ask, call)
            if decision is not None:
                return _with_source(decision, self.interceptors, place)
        mark = self.marked(call.fully_qualified_name)
        if mark is not None:
            source = source_of("mark", mark.prompt, mark.roles)
            return replace(mark, source=source, asked_by="@requires_approval")
        return await self._call_callbacks(call) or self._defaults()

    async def _call_callbacks(self, call: ToolCall) -> Decision | None:
        for pre_invoke in self.pre_invoke:
            verdict = await self._outcome_of(
                pre_invoke,
                call.iteration + 1,
                call.fully_qualified_name,
                deepcopy(dict(call.arguments)),
            )
            if isinstance(verdict, Deny):
                return verdict
            if not isinstance(verdict, bool):
                raise _no_decision(pre_invoke, verdict, "True or False")
            if not verdict:
                return Deny(
                    "The application's pre-invoke callback did not let it run.",
                    by=_name(pre_invoke),
                )
        for place, check in enumerate(self.checks):
            decision = await self._ask(check, call, is_check=True)
            if decision is not None:
                return _with_source(decision, self.checks, place)
        return None

    def _defaults(self) -> Decision | None:
        for interceptor in self.interceptors:
            if isinstance(interceptor, Policy):
                return interceptor.by_default()
        return _UNMATCHED[self.options.unmatched]

    async def _ask(
        self,
        interceptor: Callable[[ToolCall], Any],
        call: ToolCall,
        *,
        is_check: bool = False,
    ) -> Decision | None:
        """Ask one interceptor, or a check.

        Raises:
            InvalidLimitError: If its answer is not a decision.
        """
        # A copy: one interceptor's changes to the arguments are not seen by the next.
        answer = await self._outcome_of(
            interceptor, replace(call, arguments=deepcopy(dict(call.arguments)))
        )
        if is_check and isinstance(answer, bool):
            return Defer() if answer else None
        if answer is None:
            return None
        if not isinstance(answer, Approve | Deny | Supply | Defer):
            raise _no_decision(
                interceptor, answer, "True or False" if is_check else "a decision"
            )
        if isinstance(answer, Approve) and answer.fingerprint not in (
            None,
            call.fingerprint,
        ):
            problem = "its fingerprint is that of another call"
        elif (problem := problem_of(answer)) is None:
            return answer
        name = _name(interceptor)
        _logger.error(
            "%s answered %s, but %s; the call is denied.", name, shown(answer), problem
        )
        return Deny("It could not be decided.", by=name)

    async def _outcome_of(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Call one interceptor, a synchronous one in a thread; an exception or a timeout denies.

        A policy runs at once, without a timeout.
        """
        is_policy = isinstance(getattr(ask, "__self__", None), Policy)
        seconds = None if is_policy else self.options.interceptor_timeout
        asked = _evaluated(ask, *arguments) if is_policy else called(ask, *arguments)
        answer = await caught(
            asked if seconds is None else in_time(asked, seconds_from_now(seconds))
        )
        if isinstance(answer, Raised):
            _logger.error(
                "%s failed; the call is denied.", _name(ask), exc_info=answer.error
            )
            return Deny("It could not be decided.", by=_name(ask))
        if answer is OUT_OF_TIME:
            _logger.error("%s did not decide in time; the call is denied.", _name(ask))
            return Deny("It was not decided in time.", by=_name(ask))
        return answer


def _summary(template: str | None, call: ToolCall) -> str:
    """Write what a call does; "" if that fails, and the call is shown without."""
    try:
        return (template or "").format_map(call.arguments)
    except Exception:
        _logger.warning(
            "The summary %s does not fit a call's arguments.", shown(template)
        )
        return ""


def _with_source(decision: Decision, asked: Sequence[object], place: int) -> Decision:
    """Say where a question comes from: a policy's rule, or the interceptor by name and prompt.

    Interceptors with one name are distinguished by their order.
    """
    interceptor = asked[place]
    if not isinstance(decision, Defer) or (
        decision.source and isinstance(interceptor, Policy)
    ):
        return decision
    name = guard_name(interceptor)
    number = sum(guard_name(other) == name for other in asked[:place])
    return replace(
        decision,
        source=source_of("interceptor", name, number, decision.prompt, decision.source),
        asked_by=_name(interceptor),
    )


def _asked_by(approver: Approver, authorize: AuthorizeHooks, run_id: str) -> Approver:
    """Return an approver whose decisions the hook allows; a refused one leaves the question open."""
    if not hooks_of(authorize):
        return approver

    async def ask(call: ToolCall) -> Decision | None:
        answer = await called(approver, call)
        if not isinstance(answer, Approve | Deny | Supply):
            return answer
        by = ""
        if isinstance(answer.by, str):
            by = answer.by
        request = DecisionRequest(
            action="decide", by=by, run_id=run_id, call=call, decision=answer
        )
        refusal = await refusal_of(authorize, request)
        if refusal is None:
            return answer
        _logger.warning("%s The call still waits.", refusal)
        return None

    ask.__qualname__ = _name(approver)
    return ask


def _no_decision(
    interceptor: object, answer: object, expected: str
) -> InvalidLimitError:
    ways = {"a decision": "Approve, Deny, Supply or Defer; or None for no opinion"}
    return InvalidLimitError(
        f"Expected {expected} from {_name(interceptor)}; got {shown(answer)}. The call did not run. "
        f"Return {ways.get(expected, expected)}."
    )


async def _evaluated(rule: Callable[..., Any], *arguments: Any) -> Any:
    return rule(*arguments)


def _name(ask: object) -> str:
    return str(getattr(ask, "__qualname__", type(ask).__qualname__))
