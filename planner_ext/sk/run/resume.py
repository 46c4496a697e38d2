"""Resuming a run: its record is checked, then each decision, then all of them become facts.

given_checkpoint         what a door was given, unless a store keeps the run
check_record             the checkpoint is that of a run that can continue, and unaltered
ResumeRequest.facts      decisions: by the ``authorize`` hook, then each by `_DecisionFacts.take`
calls_taken              names what one object decides once
cancelling_facts         a run that is cancelled
recovery_facts           a run whose process ended: its calls in doubt
"""

import hashlib
import inspect
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final, Literal, TypeAlias

from planner_ext.approval.decisions import (
    Approve,
    AuthorizeHooks,
    Decision,
    DecisionRequest,
    Defer,
    Deny,
    MadeDecision,
    Supply,
    ToolCall,
    digest_of,
    fingerprint_of,
    further_digest,
    problem_of,
)
from planner_ext.approval.waiting import (
    InDoubt,
    pending_calls,
    place_of,
    waiting_calls,
    waiting_everywhere,
)
from planner_ext.core.accounts import current_tab
from planner_ext.core.errors import InvalidLimitError, shown, way_out
from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallLeft,
    CallStarted,
    Clarified,
    Ended,
    Fact,
    FunctionOutcome,
    HappenedInside,
    Resumed,
    RunStarted,
    facts_inside,
)
from planner_ext.core.fold import apply, fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import IN_DOUBT, ReviewCalls, RunCalls, next_action
from planner_ext.core.state import (
    TRANSITIONS,
    Call,
    OpenRun,
    Phase,
    State,
    open_runs,
    path_of,
)
from planner_ext.core.text import person_of
from planner_ext.core.values import RequestedCall, frozen
from planner_ext.engine.authorization import refusal_of
from planner_ext.engine.batch import apply_decision, is_as_decided, tool_call_of
from planner_ext.engine.concurrency import of_application
from planner_ext.engine.effects import (
    Effect,
    NoEffect,
    Probe,
    TookEffect,
    idempotency_key,
)
from planner_ext.engine.journal import (
    cancellation_reason,
    lost_requests,
    stopping_facts,
)
from planner_ext.engine.log import log_facts
from planner_ext.engine.ports import Functions, Reviewed
from planner_ext.sk.chat.reply import is_written_as
from planner_ext.sk.checkpoint import Checkpoint, DecisionsTaken, SigningKey, Taking
from planner_ext.sk.errors import (
    DecisionRefusedError,
    InvalidCheckpointError,
    RunEndedError,
)
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object, quoted
from planner_ext.sk.messages import load_message

logger = logging.getLogger(__name__)


def given_checkpoint(value: object, key: SigningKey | None = None) -> Checkpoint:
    """Read what a door was given as ``checkpoint``: a checkpoint, or its JSON text; see `Checkpoint.verified`.

    Raises:
        PlannerInvalidConfigurationError: If it is neither.
        InvalidCheckpointError: If it cannot be read, is not signed with the key, or its
            run is kept in a store: what that has run since would run again.
    """
    if isinstance(value, Checkpoint):
        checkpoint = value.verified(key)
    elif isinstance(value, str):
        checkpoint = Checkpoint.from_json(value, key)
    else:
        raise InvalidLimitError(
            "checkpoint must be a Checkpoint, or its JSON text: result.checkpoint of a planner's result, "
            f"message.metadata['checkpoint'] of a service's or handler's message; got {shown(value)}."
            f"{way_out('checkpoint', value)}"
        )
    is_kept = any(
        isinstance(fact, RunStarted) and fact.guards is not None
        for fact in checkpoint.facts
    )
    # A function may resume the run that it made: the run around it records both.
    if is_kept and current_tab() is None:
        raise InvalidCheckpointError(
            f"Run {checkpoint.run_id!r} is kept in a store, which may have run since what waits in this checkpoint. "
            "Decide its calls there with Approvals.decide, continue it with Runs.resume, or end it with "
            "Runs.cancel; Runs.fork tries another way in a copy."
        )
    return checkpoint


def check_record(state: State) -> None:
    """Refuse the record of a run that cannot continue, or contradicts itself."""
    if (state.phase, "Resumed") not in TRANSITIONS:
        raise InvalidCheckpointError(
            "Expected the checkpoint of a run that waits or has ended; "
            f"this one stops in the middle: it is {state.phase}. It was cut short."
        )
    check_calls(state)
    if state.phase is Phase.PAUSED and not waiting_everywhere(state):
        raise InvalidCheckpointError(
            "Expected a paused run with a call that waits; none does. It was altered."
        )


def check_calls(state: State) -> None:
    """Refuse a run whose open calls, at any depth, contradict their message, or what was decided of them."""
    for run in open_runs(state):
        _check_calls(run.state)


def _check_calls(state: State) -> None:
    if state.batch is None:
        return
    if not is_written_as(
        load_message(state.batch.message), [call.request for call in state.batch.calls]
    ):
        names = ", ".join(call.request.id for call in state.batch.calls)
        raise InvalidCheckpointError(
            f"The open calls ({names}) are not those of their message. One was altered."
        )
    for call in state.batch.calls:
        fact = call.decided
        if (
            fact is not None
            and fact.verdict in ("run", "defer")
            and not _agrees(state, call, fact)
        ):
            raise InvalidCheckpointError(
                f"The record of the call {call.request.id!r} contradicts itself: its function, arguments and "
                "fingerprint do not belong together. It was altered."
            )


def _agrees(state: State, call: Call, fact: CallDecided) -> bool:
    request = call.request
    arguments = parse_object(
        request.arguments if fact.arguments is None else fact.arguments
    )
    if (
        fact.kind not in ("function", "question")
        or isinstance(arguments, InvalidArguments)
        or fact.function != request.name
        # Nothing that was asked about runs without a person.
        or (
            fact.verdict == "run"
            and not fact.person
            and (fact.prompt or fact.expires_at is not None)
        )
    ):
        return False
    given = arguments if fact.edited is None else parse_object(fact.edited)
    if isinstance(given, InvalidArguments) or fact.digest != digest_of(
        fact.function, given
    ):
        return False
    own = fingerprint_of(
        state.run_id, fact.iteration, request.id, fact.digest, fact.signature
    )
    return fact.fingerprint == own or (
        fact.approved and fact.fingerprint == _further_fingerprint(state.run_id, fact)
    )


def _further_fingerprint(run_id: str, fact: CallDecided) -> str:
    digest = further_digest(fact.digest, fact.source, fact.roles)
    return fingerprint_of(run_id, fact.iteration, fact.call_id, digest, fact.signature)


async def let_in(
    run_id: str,
    calls: Iterable[tuple[ToolCall, str, MadeDecision]],
    authorize: AuthorizeHooks,
) -> None:
    """Ask the application's hook about each decision, before any of them counts.

    Without a hook no question with roles is decided, unless the application vouches for
    its author.
    """
    for call, call_id, made in calls:
        decision = made.decision
        if not isinstance(decision, Approve | Deny | Supply):
            continue  # no decision, which is refused as that
        by = ""
        if isinstance(decision.by, str):
            by = decision.by
        request = DecisionRequest(
            action="decide",
            by=by,
            run_id=run_id,
            call=call,
            decision=decision,
            verified=made.verified,
        )
        refusal = await refusal_of(authorize, request)
        if refusal is not None:
            raise DecisionRefusedError(
                f"{refusal} The call still waits.", call_id=call_id
            )


def as_given(decisions: Mapping[str, Decision]) -> dict[str, MadeDecision]:
    """Return decisions as they are taken, made now."""
    if not isinstance(decisions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = way_out("decisions", decisions)
        raise DecisionRefusedError(
            f"decisions must map call ids to decisions; got {shown(decisions)}.{hint}"
        )
    return {name: MadeDecision(decision=one) for name, one in decisions.items()}


ReviewEdit: TypeAlias = Callable[[ToolCall, Approve, Defer, State], Awaitable[Reviewed]]
"""Reviews the edit in an answer; see `planner_ext.engine.review.Review.of_edit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciding:
    """What decisions on the calls of one run are checked with."""

    functions: Functions
    authorize: AuthorizeHooks
    review_edit: ReviewEdit
    effect_of: Callable[[str], Effect]


DecidingIn: TypeAlias = Callable[[OpenRun], Deciding | None]
"""Returns what decisions on the calls of a run are checked with; None of a run inside that is not known yet."""


@dataclass(frozen=True, slots=True)
class _DecisionFacts:
    state: State
    checks: Deciding
    now: float

    @property
    def functions(self) -> Functions:
        return self.checks.functions

    def leave(self, call: Call, at: float) -> CallDecided | None:
        """Expire a question that was not answered, or ask it again; None if it waits as before."""
        if not _is_late(call.decided_fact, at):
            return self._refreshed(call, at)
        answer = "The call did not run: it needed a person's approval, and nobody decided in time."
        nobody = replace(
            call.decided_fact,
            by="",
            person=False,
            approved=False,
            further=(),
            grant="",
            votes=(),
        )
        return replace(nobody, verdict="answer", answer=answer, reason="expired", at=at)

    async def take(self, call: Call, made: MadeDecision) -> CallDecided | Clarified:
        decision = made.decision
        at = self.now if made.at is None else made.at
        if call.decided_fact.kind == "question":
            return self._answered(call, decision, at)
        approved = call.started and call.decided_fact.approved
        fact = replace(
            call.decided_fact,
            at=at,
            approved=approved,
            further=(),
            grant=made.grant,
            votes=made.votes,
        )
        call_id = call.request.id
        name = f"{call_id!r} ({fact.function})"
        problem = self._problem(call, fact, decision, name)
        if problem is not None:
            changed = not _is_late(fact, at) and self._refreshed(call, at) is not None
            raise DecisionRefusedError(problem, call_id=call_id, changed=changed)
        reviewed = await self._reviewed_decision(call, decision, made.votes)
        if isinstance(reviewed.decision, Defer):
            fact = replace(fact, at=self.now)  # the new question is open from now on
        decided = apply_decision(
            fact, reviewed, self.functions, call.request, self.state.run_id
        )
        if isinstance(decision, Approve) and decided.verdict == "deny":
            problem = f"The approval of {name} cannot be taken: {decided.reason} The call still waits."
            raise DecisionRefusedError(problem, call_id=call_id)
        if isinstance(reviewed.decision, Defer):
            decided = _asked_anew(
                self.state.run_id,
                decided,
                decision,
                is_edit=reviewed.arguments is not None,
            )
        if isinstance(decision, Deny) and call.started:
            answer = f"{IN_DOUBT} It was not run again. {decision.reason}".rstrip()
            decided = replace(decided, verdict="answer", answer=answer)
        return replace(decided, person=True)

    async def _reviewed_decision(
        self, call: Call, decision: Decision, votes: Collection[str]
    ) -> Reviewed:
        """Review an edit, and put the next question about a call that was approved as it is."""
        reviewed = Reviewed(decision=decision)
        further = call.decided_fact.further
        if isinstance(decision, Approve) and decision.arguments is not None:
            reviewed = await self._reviewed(call, decision)
        quorum = call.decided_fact.panel.quorum
        approves = isinstance(reviewed.decision, Approve) and reviewed.arguments is None
        if approves and 1 < quorum > len({*map(person_of, votes)} - {""}):
            raise DecisionRefusedError(
                f"The approval of {call.request.id!r} ({call.decided_fact.function}) cannot be taken: {quorum} persons "
                "have to approve the call as it is, and only a store counts their votes: Approvals.decide.",
                call_id=call.request.id,
            )
        if (
            not further
            or not isinstance(reviewed.decision, Approve)
            or reviewed.arguments is not None
        ):
            return reviewed
        question, *others = (
            Defer(
                one.prompt or None,
                one.expires_in,
                one.roles,
                source=one.source,
                asked_by=one.asked_by,
                panel=one.panel,
            )
            for one in further
        )
        return Reviewed(decision=question, question=question, further=others)

    async def _reviewed(self, call: Call, approval: Approve) -> Reviewed:
        batch = self.state.batch
        fact = call.decided_fact
        assert batch is not None, "a call waits in a batch"
        resolved = self.functions.check(call.request, fact.edited)
        plain = fingerprint_of(
            self.state.run_id,
            fact.iteration,
            call.request.id,
            fact.digest,
            fact.signature,
        )
        asked = replace(tool_call_of(batch, fact, resolved), fingerprint=plain)
        question = Defer(
            prompt=fact.prompt or None, roles=fact.roles, source=fact.source
        )
        reviewed = await self.checks.review_edit(asked, approval, question, self.state)
        if call.started and isinstance(reviewed.decision, Defer):
            raise DecisionRefusedError(
                f"The approval of {call.request.id!r} ({fact.function}) cannot be taken: the call is in doubt, and the "
                "edited arguments raise another question. Approve it as it was, deny it, or supply its result.",
                call_id=call.request.id,
            )
        return reviewed

    def _answered(self, call: Call, decision: Decision, at: float) -> Clarified:
        """Take a person's answer, which took no active time; a denial is an answer, too."""
        question = shown(call.decided_fact.prompt)
        if not isinstance(decision, Supply | Deny):
            problem = (
                f"The question {question} was answered {shown(decision)}: there is nothing in it to approve. "
                "Answer it with Supply(text), or with Deny(reason) where nobody will."
            )
        elif (reason := problem_of(decision)) is not None:
            problem = f"The answer to the question {question} cannot be taken: {reason}. The question still waits."
        else:
            denied = decision.reason if isinstance(decision, Deny) else None
            if isinstance(decision, Deny):
                answer = " ".join(
                    filter(
                        None,
                        ("Nobody answers this.", denied, "Go on with what you know."),
                    )
                )
            else:
                answer = self.functions.encode(decision.result)
            if answer.strip():
                return Clarified(
                    question=call.decided_fact.prompt,
                    answer=answer,
                    iteration=call.decided_fact.iteration,
                    index=place_of(self.state, call.decided_fact),
                    by=decision.by or "",
                    denied=denied,
                    at=at,
                    seconds=0.0,
                )
            problem = f"The answer to the question {question} is blank. Supply a text, or Deny where nobody answers."
        raise DecisionRefusedError(problem, call_id=call.request.id)

    def _problem(
        self, call: Call, fact: CallDecided, decision: Decision, name: str
    ) -> str | None:
        if not isinstance(decision, Approve | Deny | Supply):
            hint = way_out("decision", decision)
            return f"The call {name} was answered {shown(decision)}; expected Approve, Deny or Supply.{hint}"
        if _is_late(fact, fact.at):
            late = "came too late: the question expired. Resume without it to let the model know."
            return f"The decision on {name} {late}"
        problem = problem_of(decision)
        if problem is not None:
            return f"The decision on {name} cannot be taken: {problem}. The call still waits."
        if not isinstance(decision, Approve):
            return None
        asked = call.decided_fact
        if decision.always and _roles_at(asked, fact.at) != asked.roles:
            return (
                f"The approval of {name} cannot be taken with always: it was escalated, and later calls are for "
                f"{', '.join(asked.roles) or 'anyone'} to decide first. Approve it without always."
            )
        return self._unbound(call, decision, name)

    def _unbound(self, call: Call, decision: Approve, name: str) -> str | None:
        if decision.fingerprint not in (None, call.decided_fact.fingerprint):
            return (
                f"The approval of {name} was given for another call or other arguments: its fingerprint is "
                f"{decision.fingerprint}, the call's {call.decided_fact.fingerprint}. Show the call again "
                "and decide again."
            )
        checked = self.functions.check(call.request, call.decided_fact.edited)
        if is_as_decided(checked, call.decided_fact):
            return None
        changed = f"The call {name} is no longer what was asked about: its function or parameters changed."
        if checked.kind != "function" or call.started:
            way_out = "Deny it, supply its result, or resume with the kernel that it was asked for."
            return " ".join(filter(None, (changed, checked.answer, way_out)))
        return (
            f"{changed} It would now get {quoted(checked.arguments)}. Resume without a decision on it: then it waits "
            "as what it is now, and can be decided."
        )

    def _refreshed(self, call: Call, at: float) -> CallDecided | None:
        """Ask about a call as it would run now; None if nothing changed, or it cannot run."""
        fact = call.decided_fact
        checked = self.functions.check(call.request, call.decided_fact.edited)
        if (
            call.started
            or fact.kind != "function"
            or checked.kind != "function"
            or is_as_decided(checked, fact)
        ):
            return None
        digest = digest_of(checked.function, checked.arguments)
        signature = checked.signature
        converted = {"arguments": checked.converted}
        if fact.edited is not None:
            converted = {"edited": checked.converted or fact.edited}
        anew = replace(
            fact,
            digest=digest,
            signature=signature,
            parameters=checked.parameters,
            at=at,
            **converted,
        )
        fingerprint = fingerprint_of(
            self.state.run_id, fact.iteration, call.request.id, digest, signature
        )
        if fact.approved:
            fingerprint = _further_fingerprint(self.state.run_id, anew)
        return replace(anew, fingerprint=fingerprint)


def _asked_anew(
    run_id: str, fact: CallDecided, decision: Decision, *, is_edit: bool
) -> CallDecided:
    """Record that a call waits again: with a person's arguments, or, as it is, for others."""
    by = getattr(decision, "by", None) or ""
    who = f" of {', '.join(fact.roles)}" if fact.roles else ""
    if is_edit:
        edited = f"{by or 'A person'} edited the arguments; with these, the call needs another decision{who}."
        return replace(fact, reason=edited)
    approved = (
        f"{by or 'A person'} approved the call, which needs another decision{who}, too."
    )
    fact = replace(fact, approved=True, by=by, reason=approved)
    return replace(fact, fingerprint=_further_fingerprint(run_id, fact))


_REMEMBERED_CONVERSATIONS: Final = 10_000


Late: TypeAlias = Literal["refuse", "allow"]
"""What becomes of decisions that come after the conversation went on."""


_LEFT_BEHIND: "OrderedDict[str, None]" = OrderedDict()
"""The runs whose session went on, by id: it keeps nothing of one that waits."""


def leave_behind(run_id: str) -> None:
    """Remember for `refuse_late` that a conversation continued; in this process, the newest 10,000."""
    _LEFT_BEHIND[run_id] = None
    while len(_LEFT_BEHIND) > _REMEMBERED_CONVERSATIONS:
        _LEFT_BEHIND.popitem(last=False)


def refuse_late(state: State, later: str | None) -> None:
    """Refuse to resume what is open in a conversation that continued."""
    if later is not None:
        later = f"a message {later}"
    elif state.run_id in _LEFT_BEHIND:
        later = "another prompt of its session"
    if later is not None and (state.batch is not None or state.phase is Phase.PAUSED):
        raise DecisionRefusedError(
            f"The decision comes late: the conversation went on while this run waited, with {later}. Nothing ran, "
            "and the history was not changed. Ask the user whether it is still wanted; late='allow' takes the decision "
            "all the same."
        )


def _is_late(fact: CallDecided, at: float) -> bool:
    return fact.expires_at is not None and at >= fact.expires_at


def calls_taken(facts: Sequence[Fact], more: Sequence[Fact]) -> dict[bytes, str]:
    """Name the calls that further facts decide, start or have reviewed again, at any depth; with their paths.

    A name is a place in the journal: a call in doubt that was started since has another
    one, and so has one of an ended run, whose decisions were forgotten. A call that
    is called again is not taken: it may be left again.
    """
    state = fold(facts)
    taken = _calls_taken(state, facts, more)
    calls = ()
    if state.batch is not None:
        calls = state.batch.calls
    inside = {
        (fact.iteration, fact.index, fact.run)
        for fact in more
        if isinstance(fact, HappenedInside)
    }
    for place in inside:
        path = path_of(calls[place[1]].request.id)
        within = calls_taken(facts_inside(facts, *place), facts_inside(more, *place))
        taken |= {name: f"{path}/{call}" for name, call in within.items()}
    return taken


def _calls_taken(
    state: State, facts: Sequence[Fact], more: Sequence[Fact]
) -> dict[bytes, str]:
    waiting = waiting_calls(state)
    decided = [
        call.request
        for index, call in waiting.items()
        if _is_decided(index, call, more)
    ]
    iteration = state.batch.iteration if state.batch is not None else state.iteration
    after = reduce(apply, more, state)
    action = next_action(after)
    next_calls: list[RequestedCall] = []
    if isinstance(action, RunCalls | ReviewCalls) and after.batch is not None:
        calls = [after.batch.calls[index] for index in action.indexes]
        next_calls = [call.request for call in calls if not call.left]
    again = {
        call.request.id: _asked_again(call.decided_fact) for call in waiting.values()
    }
    starts = Counter(
        fact.call_id
        for fact in facts
        if isinstance(fact, CallStarted) and fact.iteration == iteration
    )
    ends = sum(isinstance(fact, Ended) for fact in facts)

    def name(kind: str, request: RequestedCall) -> bytes:
        call = (
            request.id,
            request.name,
            request.arguments,
            starts[request.id],
            *again.get(request.id, ()),
        )
        return hashlib.sha256(
            json.dumps((kind, state.run_id, iteration, ends, call)).encode()
        ).digest()

    return {
        **{name("decided", request): path_of(request.id) for request in decided},
        **{
            name(type(action).__name__, request): path_of(request.id)
            for request in next_calls
        },
    }


def _asked_again(fact: CallDecided) -> tuple[object, ...]:
    edited = ()
    if fact.edited:
        edited = (fact.edited,)
    return (
        (*edited, fact.source, sorted({*fact.roles}))
        if fact.verdict == "defer" and fact.approved
        else edited
    )


def _is_decided(index: int | None, call: Call, facts: Sequence[Fact]) -> bool:
    return any(
        isinstance(fact, Ended)  # a cancelled run: whatever waits is decided
        or (
            isinstance(fact, CallDecided)
            and fact.call_id == call.request.id
            and _is_taken(call.decided_fact, fact)
        )
        or (isinstance(fact, Clarified) and fact.index == index)
        for fact in facts
    )


def cancelling_facts(
    checkpoint: Checkpoint, *, by: str, reason: str, at: float
) -> tuple[Fact, ...]:
    """List the facts that end a paused run for good: every pending call is answered "not executed"."""
    state = checkpoint.state()
    check_record(state)
    if state.ended is not None:
        raise RunEndedError(
            f"The run of this checkpoint has ended ({state.ended.status}); only one that waits can be cancelled."
        )
    lost = lost_requests(state, at=at)
    return (
        *lost,
        *stopping_facts(
            reduce(apply, lost, state), reason=cancellation_reason(by, reason), at=at
        ),
    )


def end_cancelled(
    checkpoint: Checkpoint, facts: Sequence[Fact], taken: Sequence[DecisionsTaken]
) -> State:
    """Take a cancellation's decisions, log its facts, and return the ended run."""
    Taking(taken, calls_taken(checkpoint.facts, facts)).take()
    state = fold((*checkpoint.facts, *facts))
    log_facts(state, facts, kept=False)
    return state


def _is_taken(before: CallDecided, fact: CallDecided) -> bool:
    """Whether a decision was taken, if only to ask others about an edited call."""
    return fact.verdict != "defer" or (
        fact.person and fact.fingerprint != before.fingerprint
    )


def _as_it_is(call: ToolCall, _: State) -> ToolCall:
    return call


def _roles_at(fact: CallDecided, at: float) -> tuple[str, ...]:
    escalates_at = fact.escalates_at
    is_escalated = escalates_at is not None and at >= escalates_at
    return fact.panel.escalates_to if is_escalated else fact.roles


@frozen
class ResumeRequest:
    """A checkpoint, the decisions on its pending calls, and a budget that replaces its own.

    Attributes:
        decisions: By call id, or path.
        described: Shows a call to the ``authorize`` hook, given the state in which it waits.
    """

    checkpoint: Checkpoint
    decisions: Mapping[str, MadeDecision]
    budget: Budget | None = None
    described: Callable[[ToolCall, State], ToolCall] | None = None

    async def facts(
        self,
        deciding: DecidingIn,
        at: float,
        *,
        within: OpenRun | None = None,
    ) -> tuple[Fact, ...]:
        """Convert the request to facts: all decisions, or none.

        A call waits again if its edit raises another question, with the edited
        arguments; if others are asked about it, too, and then no ``always`` is kept; or
        if it would now get another value, with a new fingerprint. An undecided call
        whose question has expired is answered as expired.

        A run that is not known yet is only resumed; the decisions in it are converted
        when it has been made again: then it is what they are taken ``within``.

        Args:
            deciding: Returns what decisions in a run, this one or one inside it, are
                checked with; None of a run that is not known yet.
            at: Now, in seconds since the epoch.
            within: The run inside that was made again; None for all that is known.

        Raises:
            InvalidCheckpointError: If the record cannot be resumed.
            DecisionRefusedError: If one of the decisions is invalid; names the call.
        """
        state = self.checkpoint.state()
        check_record(state)
        waiting = waiting_everywhere(state)
        named = self._by_path(waiting)
        top = "" if within is None else within.path
        runs = [run for run in open_runs(state) if run.path.startswith(top)]
        checks = {
            run.path: deciding(run)
            for run in runs
            if any(path.startswith(run.path) for path in waiting)
        }
        await self._let_in(state, named, checks, at)
        made: dict[str, Sequence[Fact]] = {}
        for run in runs:
            calls = {
                path: call
                for path, (of, call) in waiting.items()
                if of.path == run.path
            }
            known = checks.get(run.path)
            if known is not None:
                taking = _DecisionFacts(run.state, known, at)
                decided = await self._of_run(taking, calls, named)
                if decided:
                    made[run.path] = decided
            elif _is_to_be_decided(calls, named, at):
                made[run.path] = ()
        facts: list[Fact] = []
        for run in _that_go_on(runs, made, checks):
            if within is None or run.path != top:
                limits = None if run.place else self.budget
                facts.append(run.wrapped(Resumed(limits=limits, at=at)))
            facts += map(run.wrapped, made.get(run.path, ()))
        return tuple(facts)

    async def _let_in(
        self,
        state: State,
        named: Mapping[str, str],
        checks: Mapping[str, Deciding | None],
        at: float,
    ) -> None:
        """Ask the hooks about the decisions in the runs that are known."""
        waiting = waiting_everywhere(state)
        pending = {call.path: call for call in pending_calls(state)}
        show = self.described or _as_it_is
        for path, name in named.items():
            run, call = waiting[path]
            known = checks.get(run.path)
            if known is None:
                continue
            made = self.decisions[name]
            decided_at = at if made.at is None else made.at
            roles = _roles_at(call.decided_fact, decided_at)
            shown_call = show(replace(pending[path], roles=roles), state)
            asked = [(shown_call, name, one) for one in _asked_about(made)]
            await let_in(state.run_id, asked, known.authorize)

    def named_in(self, run: OpenRun) -> list[str]:
        """Name the decisions on what waits in a run, and in those inside it."""
        named = self._by_path(waiting_everywhere(self.checkpoint.state()))
        return [name for path, name in named.items() if path.startswith(run.path)]

    def without(self, name: str | None, run: OpenRun) -> "ResumeRequest":
        """Leave out a decision that was refused; if none of the run has its name, all of the run."""
        named = self.named_in(run)
        refused = [name] if name in named else named
        kept = {
            one: self.decisions[one] for one in self.decisions if one not in refused
        }
        return replace(self, decisions=kept)

    async def _of_run(
        self,
        taking: _DecisionFacts,
        calls: Mapping[str, Call],
        named: Mapping[str, str],
    ) -> Sequence[Fact]:
        """List what is decided of the calls of one run, then what becomes of the others."""
        at = taking.now
        decided: list[Fact | None] = []
        for path, call in calls.items():
            name = named.get(path)
            if name is None:
                continue
            try:
                decided.append(await taking.take(call, self.decisions[name]))
            except DecisionRefusedError as error:
                error.call_id = name
                raise
        decided += [
            taking.leave(call, at) for path, call in calls.items() if path not in named
        ]
        return [fact for fact in decided if fact is not None]

    def _by_path(self, waiting: Mapping[str, object]) -> dict[str, str]:
        """Find what waits by the names of the decisions: paths, or plain ids; in the order in which it waits.

        Raises:
            DecisionRefusedError: If something is named that does not wait.
        """
        found = dict[str, str]()
        for name in self.decisions:
            path = name if name in waiting else path_of(name)
            if path not in waiting:
                there = ", ".join(sorted(waiting)) or "none"
                raise DecisionRefusedError(
                    f"A decision was given for the call {name!r}, which does not wait for one; waiting: {there}. "
                    "It was decided before, belongs to another run, or never was.",
                    call_id=name,
                )
            found[path] = name
        return {path: found[path] for path in waiting if path in found}


def _asked_about(made: MadeDecision) -> list[MadeDecision]:
    """List the votes that make a decision, or the decision alone."""
    votes = [replace(made, decision=Approve(by=by)) for by in made.votes]
    return votes or [made]


def _is_to_be_decided(
    calls: Mapping[str, Call], named: Container[str], at: float
) -> bool:
    return any(
        path in named or _is_late(call.decided_fact, at) for path, call in calls.items()
    )


def _that_go_on(
    runs: Iterable[OpenRun], made: Iterable[str], known: Mapping[str, object]
) -> Iterator[OpenRun]:
    """List the outermost run, and those in which something is decided, at any depth; none inside an unknown one."""
    unknown: str | None = None
    for run in runs:
        goes_on = any(path.startswith(run.path) for path in made)
        is_known = unknown is None or not run.path.startswith(unknown)
        if run.place and not (goes_on and is_known):
            continue
        yield run
        if run.place and known[run.path] is None:
            unknown = run.path


# The calls that had started when their process ended: run again, asked about, or left in doubt.


async def recovery_facts(
    state: State,
    *,
    deciding: DecidingIn,
    in_doubt: InDoubt,
    at: float,
    within: OpenRun | None = None,
) -> tuple[Fact, ...]:
    """List the facts that resume an interrupted run; a call in doubt that a person must decide gets none.

    No started call has finished: the run's process died. A call that may be called
    again was left, and so the runs in it are recovered, too; unless it has called
    functions itself and no run in it has begun, so that it would call them again.

    Args:
        state: The run.
        deciding: Returns what the calls of a run, this one or one inside it, are
            checked with; None of a run that is not known yet, which is recovered when
            it has been made again.
        in_doubt: Who handles calls in doubt.
        at: Now, in seconds since the epoch.
        within: The run inside that was made again; None for all that is known.
    """
    top = "" if within is None else within.path
    found: list[Fact] = []
    for run in open_runs(state):
        if (
            run.state.batch is not None
            and run.state.phase is not Phase.PAUSED
            and run.path.startswith(top)
            and (checks := deciding(run)) is not None
        ):
            found += map(run.wrapped, await _recovered(run, checks, in_doubt, at))
    return tuple(found)


async def _recovered(
    run: OpenRun, checks: Deciding, in_doubt: InDoubt, at: float
) -> list[Fact]:
    state = run.state
    batch = state.batch
    assert batch is not None, "only open batches are recovered"
    facts: list[Fact] = []
    for call in batch.calls:
        decided = call.decided
        if not call.started or call.answer is not None or decided is None:
            continue
        effect = checks.effect_of(decided.function)
        unknown = call.recorded.tool_calls > 0 or effect.kind != "once"
        if decided.nested and (len(call.runs) > call.entered or not unknown):
            facts.append(
                CallLeft(
                    iteration=decided.iteration,
                    index=decided.index,
                    call_id=decided.call_id,
                    function=decided.function,
                    at=at,
                )
            )
            continue
        if effect.kind == "once":
            answer = await _probed(effect.probe, state, call, decided)
        else:  # a call that would get another value is not repeated: the first one may have taken effect
            resolved = checks.functions.check(call.request, decided.edited)
            answer = NoEffect() if is_as_decided(resolved, decided) else None
        if isinstance(answer, NoEffect):
            facts.append(replace(decided, at=at))
        elif isinstance(answer, TookEffect):
            result = checks.functions.encode(answer.result)
            facts.append(_finished(decided, "ok", result, at))
        elif in_doubt == "model":
            facts.append(_finished(decided, "cancelled", IN_DOUBT, at))
    return facts


async def _probed(
    probe: Probe | None, state: State, call: Call, decided: CallDecided
) -> TookEffect | NoEffect | None:
    """Ask a function's probe; one that raises, or returns an invalid answer, cannot tell."""
    if probe is None:
        return None
    arguments = parse_object(decided.arguments_of(call.request))
    assert not isinstance(arguments, InvalidArguments), (
        "a call that started had arguments"
    )
    key = idempotency_key(state.run_id, decided.iteration, decided.call_id)

    async def asked() -> TookEffect | NoEffect | None:
        answer = probe(key, arguments)
        return await answer if inspect.isawaitable(answer) else answer

    try:
        answer = await of_application(asked())
    except Exception:
        logger.exception(
            "The probe of %s failed; the call %s stays in doubt.", decided.function, key
        )
        return None
    if answer is None or isinstance(answer, TookEffect | NoEffect):  # pyright: ignore[reportUnnecessaryIsInstance]
        return answer
    logger.error(
        "The probe of %s answered %r; the call %s stays in doubt.",
        decided.function,
        answer,
        key,
    )
    return None


def _finished(
    decided: CallDecided, outcome: FunctionOutcome, result: str, at: float
) -> CallFinished:
    return CallFinished(
        iteration=decided.iteration,
        index=decided.index,
        call_id=decided.call_id,
        function=decided.function,
        outcome=outcome,
        result=result,
        at=at,
    )
