"""Reviews the calls of a reply by every chain of interceptors around them, and puts their questions to the approvers.

An edited call is reviewed like any other, from the first rule on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from planner_ext.approval.decisions import (
    Approve,
    Decision,
    Defer,
    Deny,
    Supply,
    ToolCall,
)
from planner_ext.core.facts import Panel
from planner_ext.core.state import State
from planner_ext.core.values import frozen, updated
from planner_ext.engine.gate import (
    APPROVED_EARLIER,
    Edit,
    InterceptorChain,
    is_approved,
    keys_of,
)
from planner_ext.engine.ports import Reviewed


def _with_approval(state: State, call: ToolCall, reviewed: Reviewed) -> State:
    """Let later calls of the batch see what is approved for the rest of the run."""
    decision = reviewed.decision
    question = reviewed.question
    if not isinstance(decision, Approve) or decision.always is None or question is None:
        return state
    if reviewed.arguments is not None:
        call = replace(call, arguments=reviewed.arguments)
    return updated(
        state, sticky=state.sticky | {keys_of(call, question)[decision.always]}
    )


_Question: TypeAlias = tuple[Defer, InterceptorChain | None]
"""A question about a call, and the chain whose approver answers it; None if nobody does here."""


@dataclass(frozen=True, slots=True)
class _Ruled:
    """What the rules say about a call, edited by an interceptor or not."""

    call: ToolCall
    decision: Decision | None = None
    questions: Sequence[_Question] = ()
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
        questions: list[_Question] = []
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
                    _put(questions, decision, answerer, is_filter=not chain.waits)
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
        questions: list[_Question] = sorted(
            ruled.questions, key=lambda one: one[1] is None
        )
        question: Defer | None = None
        editor = ruled.editor
        retried = False
        edited = False
        while questions:
            question, chain = questions[0]
            if is_approved(call, question, state):
                decision = APPROVED_EARLIER
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
    by = ""
    if refused.by and refused.by != edit.by:
        by = f" by {refused.by}"
    return Deny(
        f"The edited arguments are refused{by}: {refused.reason or 'without a reason'}",
        by=edit.by,
    )


def _edited_twice(call: ToolCall, approval: Approve) -> Deny:
    by = approval.by or "an interceptor"
    problem = f"The arguments of {call.fully_qualified_name} were edited a second time in one review, by {by}."
    return Deny(problem, by=approval.by)


def _put(
    questions: list[_Question],
    question: Defer,
    answerer: InterceptorChain | None,
    *,
    is_filter: bool,
) -> None:
    """Add a question about a call, unless those who answer it are asked the same already.

    A filter's question is the same whatever it asks: its persons see the call. The
    sooner expiry counts.
    """
    for place, (asked, by) in enumerate(questions):
        same_persons = by is answerer and _persons(asked) == _persons(question)
        if same_persons and (is_filter or asked.source == question.source):
            expiries = filter(None, (asked.expires_in, question.expires_in))
            sooner = min(expiries, default=None)
            questions[place] = (replace(asked, expires_in=sooner), by)
            return
    questions.append((question, answerer))


def is_same(question: Defer, other: Defer) -> bool:
    """Return whether one person's answer to a question about a call answers the other: same source, same roles."""
    return (
        question.source == other.source != ""
        and _persons(question) == _persons(other)
        and question.panel.quorum == 1
    )


def _persons(question: Defer) -> tuple[frozenset[str], Panel]:
    return frozenset(question.roles), question.panel


def _merged(first: Approve | None, then: Approve) -> Approve:
    if first is None:
        return then
    return replace(then, by=then.by or first.by)
