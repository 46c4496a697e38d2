"""The interceptors of a run, asked in order before a call runs; the first decision wins.

An edited call is reviewed like any other, from the first rule on.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

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
    source_of,
)
from planner_ext.approval.guards import Policy, guard_name
from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.fold import sticky_keys
from planner_ext.core.state import State
from planner_ext.core.values import frozen, updated
from planner_ext.engine.authorization import refusal_of
from planner_ext.engine.concurrency import (
    OUT_OF_TIME,
    Raised,
    called,
    caught,
    in_time,
    seconds_from_now,
)
from planner_ext.engine.ports import Reviewed

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
    "defer": Defer(source="unmatched", asked_by="no rule"),
    "deny": Deny("Nobody approved it.", by="default"),
}

_APPROVED_EARLIER = Approve(by="approved earlier in this run")


def _with_approval(state: State, call: ToolCall, reviewed: Reviewed) -> State:
    """Let later calls of the batch see what is approved for the rest of the run."""
    decision = reviewed.decision
    question = reviewed.question
    if not isinstance(decision, Approve) or decision.always is None or question is None:
        return state
    if reviewed.arguments is not None:
        call = replace(call, arguments=reviewed.arguments)
    return updated(
        state, sticky=state.sticky | {_keys_of(call, question)[decision.always]}
    )


def _is_approved(call: ToolCall, question: Defer, state: State) -> bool:
    return bool(state.sticky) and not state.sticky.isdisjoint(
        _keys_of(call, question).values()
    )


def _keys_of(call: ToolCall, question: Defer) -> dict[str, str]:
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
        return _APPROVED_EARLIER if _is_approved(call, question, state) else question

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
            if (decision := await self._ask(ask, call)) is not None:
                return _with_source(decision, self.interceptors, place)
        if (mark := self.marked(call.fully_qualified_name)) is not None:
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
            if (decision := await self._ask(check, call, is_check=True)) is not None:
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


@dataclass(frozen=True, slots=True)
class _Ruled:
    """What the rules say about a call, edited by an interceptor or not.

    Each question has the chain whose approver answers it.
    """

    call: ToolCall
    decision: Decision | None = None
    questions: Sequence[tuple[Defer, InterceptorChain | None]] = ()
    editor: str | None = None


@frozen
class Review:
    """Reviews calls by the rules of several chains, and by those who answer their questions.

    Attributes:
        chains: Those of the runs around, the outermost first, and of the run.
        filters: Asked afterwards; a question that the same persons were asked is not
            put again.
        approves: The chain whose approver answers the questions of the chains.
    """

    chains: Sequence[InterceptorChain]
    filters: Sequence[InterceptorChain] = ()
    approves: InterceptorChain | None = None
    edit: Edit

    async def of(self, calls: Sequence[ToolCall], state: State) -> list[Reviewed]:
        """Review calls, in order: all by the rules, before anybody is asked about one."""
        ruled = [await self._by_rules(call, state) for call in calls]
        reviewed: list[Reviewed] = []
        for call, one in zip(calls, ruled, strict=True):
            reviewed.append(await self._answered(call, one, state))
            if len(reviewed) < len(calls):
                state = _with_approval(state, call, reviewed[-1])
        return reviewed

    async def of_edit(
        self, call: ToolCall, approval: Approve, question: Defer, state: State
    ) -> Reviewed:
        """Review a person's edit; no further question is put.

        Returns:
            The approval, if the rules have no objection and ask nothing else; a `Deny`,
                if the edit is invalid or a rule denies it; or the open questions, with
                the edited arguments.
        """
        then = await self._by_edit(call, approval, question, state)
        edited = _edited_arguments(call, then.call)
        if isinstance(then.decision, Deny):
            return Reviewed(decision=then.decision)
        if isinstance(then.decision, Supply):
            return Reviewed(
                decision=then.decision, arguments=edited, edited_by=approval.by
            )
        if then.questions:
            asked, *further = (one for one, _ in then.questions)
            return Reviewed(
                decision=asked,
                question=asked,
                arguments=edited,
                edited_by=approval.by,
                further=further,
            )
        return Reviewed(
            decision=replace(approval, arguments=None),
            question=question,
            arguments=edited,
        )

    async def _by_rules(
        self, call: ToolCall, state: State, *, edited: bool = False
    ) -> _Ruled:
        """Ask each chain about a call; an edit is reviewed from the first rule on, a second one denies."""
        approved: Approve | None = None
        questions: list[tuple[Defer, InterceptorChain | None]] = []
        for chain in (*self.chains, *self.filters):
            decision = (
                await chain.decide(call, state)
                if chain.watches(call.fully_qualified_name)
                else None
            )
            match decision:
                case None:
                    continue
                case Defer():
                    answerer = self._answerer(chain, decision)
                    if chain.waits or not any(
                        _is_for(decision, answerer, one) for one in questions
                    ):
                        questions.append((decision, answerer))
                case Approve():
                    after = self._with_edit(call, decision)
                    if after is not call:
                        return await self._after_edit(
                            call, after, decision, state, edited=edited
                        )
                    if chain.waits or approved is None:
                        approved = _merged(approved, replace(decision, arguments=None))
                case _:
                    return _Ruled(call, decision)
        return _Ruled(call, approved, questions)

    def _answerer(
        self, chain: InterceptorChain, question: Defer
    ) -> InterceptorChain | None:
        """Return whose approver answers a question here; it is one person."""
        if question.panel.quorum > 1:
            return None
        return chain if chain.answers_alone else self.approves

    async def _after_edit(
        self,
        call: ToolCall,
        after: ToolCall | Deny,
        approval: Approve,
        state: State,
        *,
        edited: bool,
    ) -> _Ruled:
        if isinstance(after, Deny):
            return _Ruled(call, after)
        if edited:
            return _Ruled(call, _edited_twice(call, approval))
        ruled = await self._by_rules(after, state, edited=True)
        own = replace(approval, arguments=None)
        decision = ruled.decision
        if isinstance(decision, Approve | None):
            decision = own if decision is None else _merged(own, decision)
        return replace(ruled, decision=decision, editor=approval.by)

    async def _by_edit(
        self, call: ToolCall, approval: Approve, question: Defer, state: State
    ) -> _Ruled:
        """Review the edit in the answer to a question, which counts as answered."""
        edited = self._with_edit(call, approval)
        if isinstance(edited, Deny):
            return _Ruled(call, edited)
        if edited is call:
            return _Ruled(call)
        then = await self._by_rules(edited, state, edited=True)
        if isinstance(then.decision, Deny):
            return _Ruled(call, _refusal_of_edit(then.decision, approval))
        return replace(
            then,
            questions=[one for one in then.questions if not is_same(one[0], question)],
        )

    def _with_edit(self, call: ToolCall, approval: Approve) -> ToolCall | Deny:
        if approval.arguments is None:
            return call
        edited = self.edit(call, approval.arguments)
        if isinstance(edited, str):
            return Deny(
                f"The edited arguments cannot be used. {edited}", by=approval.by
            )
        return call if edited.fingerprint == call.fingerprint else edited

    async def _answered(self, given: ToolCall, ruled: _Ruled, state: State) -> Reviewed:
        """Put the questions about a call to those who answer here; stop at one that stays open.

        A person whose edit is denied, or asks for more, is asked once more. A question
        that nobody here answers comes last.
        """
        call = ruled.call
        decision = ruled.decision
        questions = sorted(ruled.questions, key=lambda one: one[1] is None)
        question: Defer | None = None
        editor = ruled.editor
        retried = False
        edited = False
        while questions:
            question, chain = questions[0]
            if _is_approved(call, question, state):
                decision = _APPROVED_EARLIER
                questions = questions[1:]
                continue
            decision = (
                question
                if chain is None
                else await chain.asked(call, question, state.run_id)
            )
            if not isinstance(decision, Approve):
                break
            then = await self._by_edit(call, decision, question, state)
            again = edited and then.call is not call
            if isinstance(then.decision, Deny) or again or (retried and then.questions):
                refused = (
                    then.decision
                    if isinstance(then.decision, Deny)
                    else _edited_twice(call, decision)
                )
                if retried:
                    return Reviewed(decision=replace(refused, by=decision.by))
                prompt = " ".join(filter(None, (refused.reason, question.prompt)))
                retried = True
                questions[0] = (replace(question, prompt=prompt), chain)
                continue
            if then.call is call:
                others = questions[1:]
                questions = [
                    one
                    for one in others
                    if one[1] is not chain or {*one[0].roles} != {*question.roles}
                ]
            else:
                call = then.call
                questions = [*then.questions]
                editor = decision.by
                retried = edited = True
                if isinstance(then.decision, Supply):
                    decision = then.decision
                    break
            decision = replace(decision, arguments=None)
        arguments = (
            None if isinstance(decision, Deny) else _edited_arguments(given, call)
        )
        further = (
            [one for one, _ in questions[1:]] if isinstance(decision, Defer) else ()
        )
        return Reviewed(
            decision=decision,
            question=question,
            arguments=arguments,
            edited_by=editor,
            further=further,
        )


def _edited_arguments(before: ToolCall, after: ToolCall) -> Mapping[str, Any] | None:
    return None if after.fingerprint == before.fingerprint else after.arguments


def _refusal_of_edit(refused: Deny, edit: Approve) -> Deny:
    by = f" by {refused.by}" if refused.by and refused.by != edit.by else ""
    return Deny(
        f"The edited arguments are refused{by}: {refused.reason or 'without a reason'}",
        by=edit.by,
    )


def _edited_twice(call: ToolCall, approval: Approve) -> Deny:
    by = approval.by or "an interceptor"
    problem = f"The arguments of {call.fully_qualified_name} were edited a second time in one review, by {by}."
    return Deny(problem, by=approval.by)


def _is_for(
    question: Defer,
    answerer: InterceptorChain | None,
    asked: tuple[Defer, InterceptorChain | None],
) -> bool:
    """Return whether those who answer a question are asked about the call already."""
    return asked[1] is answerer and {*asked[0].roles} == {*question.roles}


def is_same(question: Defer, other: Defer) -> bool:
    """Return whether the answer to one question about a call answers the other: same source, same roles."""
    return (
        question.source == other.source != ""
        and {*question.roles} == {*other.roles}
        and question.panel.quorum == 1
    )


def _merged(first: Approve | None, then: Approve) -> Approve:
    return then if first is None else replace(then, by=then.by or first.by)


def _asked_by(
    approver: Approver, authorize: Authorize | Sequence[Authorize] | None, run_id: str
) -> Approver:
    """Return an approver whose decisions the hook allows; a refused one leaves the question open."""
    if not hooks_of(authorize):
        return approver

    async def ask(call: ToolCall) -> Decision | None:
        answer = await called(approver, call)
        if not isinstance(answer, Approve | Deny | Supply):
            return answer
        by = answer.by if isinstance(answer.by, str) else ""
        request = DecisionRequest(
            action="decide", by=by, run_id=run_id, call=call, decision=answer
        )
        if (refusal := await refusal_of(authorize, request)) is None:
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
