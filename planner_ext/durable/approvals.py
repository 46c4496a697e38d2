"""The approvals of a store: pending calls and questions, listed and decided in any process."""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, Unpack

from planner_ext.approval.decisions import (
    Approve,
    AuthorizeHooks,
    Decision,
    DecisionRecord,
    RunAction,
    Supply,
    digest_of,
    hooks_of,
)
from planner_ext.core.errors import shown
from planner_ext.core.text import person_of
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.database import Row, Step
from planner_ext.durable.errors import ApprovalRefusedError, NotAuthorizedError
from planner_ext.durable.grants import GrantRecord, grant_step, read_grants
from planner_ext.durable.listing import DECIDED, OPEN, CallFilters
from planner_ext.durable.options import checked_hook
from planner_ext.durable.records import (
    PendingApproval,
    any_decision_text,
    decision_record,
    read_approval,
    read_refusal,
    write_decision,
    write_votes,
)
from planner_ext.durable.store import JournalStore, opened_store, opens
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.ports import Clock

if TYPE_CHECKING:
    from planner_ext.approval.policy import Grant

logger = logging.getLogger(__name__)


class Approvals:
    """The pending calls and questions of a store, which this process shares with the workers."""

    def __init__(
        self,
        store: JournalStore,
        *,
        clock: Clock | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        """@private Called by `connect`."""
        self._store = store
        self._clock = clock or SystemClock()
        self._doorkeeper = doorkeeper or Doorkeeper()

    @classmethod
    @opens
    async def connect(
        cls,
        where: str | Path,
        *,
        clock: Clock | None = None,
        authorize: AuthorizeHooks = None,
        verified: bool = False,
    ) -> AsyncGenerator["Approvals"]:
        """Open an existing store; used as ``async with Approvals.connect(...) as approvals``.

        Args:
            where: The SQLite file, or a ``postgresql://`` address.
            clock: None uses the machine's clock.
            authorize: A function, async or not, that gets a `DecisionRequest` before a
                decision is stored. Only True allows the decision; a text, or that of an
                exception, is the reason of the refusal. Pass it to the workers, too: a
                run that begins under a hook is decided only by processes that have one.
                None: no hook, and a call with ``roles`` cannot be decided.
            verified: Whether the application vouches for the name in each decision's
                ``by``; the hook and the workers see this.

        Raises:
            PlannerInvalidConfigurationError: If ``authorize`` cannot be called.
            StoreError: If the store does not exist, or cannot be used.
        """
        doorkeeper = Doorkeeper(authorize=checked_hook(authorize), verified=verified)
        async with opened_store(where, create=False) as store:
            yield cls(store, clock=clock, doorkeeper=doorkeeper)

    async def pending(
        self,
        run_id: str | None = None,
        *,
        limit: int = 50,
        offset: int = 0,
        **filters: Unpack[CallFilters],
    ) -> list[PendingApproval]:
        """List the pending calls and questions of one run or of all, the oldest first, without expired ones.

        A row that was altered is skipped and logged: it cannot be decided.

        Args:
            run_id: None lists those of all runs.
            limit: The maximum number of entries.
            offset: The number of entries to skip.
            **filters: By function, role, tag, text and expiry; see `CallFilters`.

        Raises:
            StoreError: If a filter is invalid, or limit or offset is not an integer of
                at least 0.
        """
        now = self._clock.now()
        rows = await self._store.approvals(
            OPEN, now, run_id=run_id, limit=limit, offset=offset, **filters
        )
        refused = ()
        if rows:
            refused = await self._store.refusals(run_id=run_id)
        return _read(rows, refused, now)

    async def decidable(
        self,
        run_id: str | None = None,
        *,
        person: str,
        limit: int = 500,
        **filters: Unpack[CallFilters],
    ) -> list[PendingApproval]:
        """List what a person may decide of the oldest ``limit`` calls and questions of `pending`; see `why_not`.

        Raises:
            StoreError: As `pending`.
        """
        calls = await self.pending(run_id, limit=limit, **filters)
        return [call for call in calls if await self.may_decide(call, by=person)]

    async def count(
        self, run_id: str | None = None, **filters: Unpack[CallFilters]
    ) -> int:
        """Count the pending calls and questions that `pending` lists, altered rows included; raise as it does."""
        return await self._store.count_approvals(
            OPEN, self._clock.now(), run_id=run_id, **filters
        )

    async def equal_calls(self, *, limit: int = 100) -> Mapping[str, int]:
        """Count pending calls that have function, arguments and prompt in common, where there are several.

        Args:
            limit: The maximum number of groups.

        Returns:
            The number of calls in each group, the largest first; a key is the filter
                ``equal_to`` that lists the group's calls.
        """
        return await self._store.equal_approvals(self._clock.now(), limit=limit)

    async def decisions(
        self,
        run_id: str | None = None,
        *,
        limit: int = 50,
        offset: int = 0,
        **filters: Unpack[CallFilters],
    ) -> list[PendingApproval]:
        """List calls and questions that were decided or have expired, the latest decision first.

        Each has its ``decision``. What no person was asked about is not listed; nor are
        the calls of deleted runs. The other arguments and errors are those of
        `pending`, the filters those of `CallFilters`.
        """
        now = self._clock.now()
        rows = await self._store.approvals(
            DECIDED, now, run_id=run_id, limit=limit, offset=offset, **filters
        )
        return _read(rows, (), now)

    async def count_decisions(
        self, run_id: str | None = None, **filters: Unpack[CallFilters]
    ) -> int:
        """Count what `decisions` lists, altered rows included; raise as `pending` does."""
        return await self._store.count_approvals(
            DECIDED, self._clock.now(), run_id=run_id, **filters
        )

    async def show(self, approval_id: str) -> PendingApproval:
        """Show one call, open, decided or closed.

        Raises:
            ApprovalRefusedError: If no call has this id, or its row was altered.
        """
        return await self._shown(approval_id, self._clock.now())

    async def _shown(self, approval_id: str, now: float) -> PendingApproval:
        if not isinstance(approval_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (of untyped code)
            raise ApprovalRefusedError(
                f"approval_id must be the id of a call; got {shown(approval_id)}. "
                "Pass its .id, and its .fingerprint in Approve."
            )
        row, refused = await self._store.approval(approval_id)
        if row is None:
            raise ApprovalRefusedError(
                f"No call with the id {approval_id!r} ever waited in this store. List what waits to see the ids."
            )
        return read_approval(row, refused, now=now)

    async def refused(self, run_id: str) -> list[DecisionRecord]:
        """List the refused decisions on a run's calls, with their reasons; raise `StoreError` if one is damaged."""
        return [read_refusal(row) for row in await self._store.refusals(run_id=run_id)]

    async def decide(
        self, approval_id: str, decision: Decision, *, grant: "Grant | None" = None
    ) -> bool:
        """Decide a call. A worker takes the decision into the run's journal, now or when the next worker starts.

        A refused decision, or a second one on the same call, is stored too: `show` and
        `refused` list it. If a worker finds that the function cannot take edited
        arguments, that a question was answered with `Approve`, that an escalated one
        was with ``always``, or that its ``authorize`` hook refuses, the call waits
        again, with the ``problem`` shown.

        Where a rule has a ``quorum``, an `Approve` is a vote: the call waits until that
        many persons have approved it as it is; see `PendingApproval.tally`. Each needs
        a name that is ``verified``, and counts once. Whenever the call waits anew, as
        with edited arguments, the vote does, too.

        Args:
            approval_id: The call's id, from `pending`.
            decision: `Approve`, `Deny` or `Supply`, with ``by``; its values must be
                JSON values. Edited arguments are compared with the call's
                ``parameters`` here, and with the function itself by the worker. With
                the ``fingerprint`` of the call that was read, an `Approve` is refused
                if the call was edited since; without one it binds to the call as it
                stands now. Answer a question with `Supply`,
                or with `Deny`.
            grant: Gives this answer to the same question about later calls, too; see
                `grant`. Stored only if this decision counts. None answers this call
                alone.

        Returns:
            Whether this decision, or vote, counts. False if another decision was first;
                then nothing changed.

        Raises:
            ApprovalRefusedError: If there is no such call, its question has expired, or
                the decision is invalid, was made for other arguments, or has arguments
                that do not fit the function; or its author has voted before.
            NotAuthorizedError: If ``authorize`` refuses it, or is missing here: the
                call has roles, or its run began under a hook; or a vote's name is not
                verified.
        """
        at = self._clock.now()
        approval = await self._shown(approval_id, at)
        then: list[Step] = []
        votes: list[DecisionRecord] = []
        try:
            text = _checked_decision(
                approval, decision, at, verified=self._doorkeeper.verified
            )
            await self._check("decide", approval, decision)
            if grant is not None:
                then = [await self._grant_step(approval, decision, grant, at, text)]
            if approval.status == "open" and _is_vote(decision, approval):
                votes = await self._votes_with(approval, decision, at, text)
        except ApprovalRefusedError as error:
            await self._refuse(approval, decision, str(error), at)
            raise
        made: str | None = text
        if votes:
            made = _made_by(votes) if len(votes) >= approval.quorum else None
        if await self._store.decide(
            approval_id,
            made,
            *then,
            votes=write_votes((one.by, one.at) for one in votes),
            seen=write_votes((one.by, one.at) for one in approval.votes),
            fingerprint=approval.fingerprint,
            at=at,
        ):
            return True
        now = await self.show(approval_id)
        is_same = now.status == "open" and now.fingerprint == approval.fingerprint
        if is_same and now.votes != approval.votes:  # another vote was first
            return await self.decide(approval_id, decision)
        first = now.decision
        problem = "The call did not wait any more."
        if first is not None:
            when = f"{first.at:%Y-%m-%d %H:%M:%S} UTC"
            problem = f"The first decision counts, and was made before, at {when} by {first.by!r}."
        await self._refuse(approval, decision, problem, at)
        return False

    @property
    def asks_hook(self) -> bool:
        """Whether an ``authorize`` hook checks here who decides."""
        return bool(hooks_of(self._doorkeeper.authorize))

    async def may_decide(self, approval: PendingApproval, *, by: str) -> bool:
        """Ask whether a person may approve a call, or answer a question; nothing is decided. See `why_not`."""
        return not await self.why_not(approval, by=by)

    async def why_not(self, approval: PendingApproval, *, by: str) -> str:
        """Say why a person may not approve a call, or answer a question; "" if they may. Nothing is decided.

        Reasons are that the ``authorize`` hook refuses it, or is missing, and that
        their vote would not count.
        """
        asks = approval.kind == "question"
        decision = Supply("", by=by) if asks else Approve(by=by)
        try:
            await self._check("decide", approval, decision)
            if _is_vote(decision, approval):
                self._check_voter(approval, decision)
        except ApprovalRefusedError as error:
            return str(error)
        return ""

    async def grant(
        self, approval_id: str, decision: Decision, grant: "Grant | None"
    ) -> str:
        """Answer the same question about later calls of any run, without deciding this call.

        From now on the grant answers the question, and nobody is asked; see `Grant`. A
        `Deny` is a standing no, which comes before any yes. A condition that cannot be
        evaluated does not hold for a yes, and holds for a no, as in a policy. Each use
        is a decision of the run by the grant's author, about which the workers'
        ``authorize`` hook is asked again: if it refuses, the call waits for a person.

        Args:
            approval_id: A call that waits or waited; the grant answers its question.
            decision: `Approve`, without arguments, or `Deny`, with ``by``.
            grant: For how long, how often, and for which calls.

        Returns:
            The grant's id.

        Raises:
            ApprovalRefusedError: If there is no such call, if it is in doubt or a
                question of the model, or if the decision is neither of the two.
            NotAuthorizedError: As `decide`; the action is ``grant``.
        """
        approval = await self.show(approval_id)
        _refuse_unbound(approval, decision)
        step = await self._grant_step(approval, decision, grant, self._clock.now())
        await self._store.database.transact(step)
        return str(step[1]["id"])

    async def grants(self) -> list[GrantRecord]:
        """List the grants that hold: standing denials first, then the oldest.

        A damaged row is skipped and logged: it answers nothing.
        """
        rows = await self._store.grants(self._clock.now())
        return [grant for _, grant in read_grants(rows)]

    async def revoke(self, grant_id: str, *, by: str | None = None) -> None:
        """Let a grant answer no further question; what it decided stays decided.

        Raises:
            ApprovalRefusedError: If no grant with this id holds.
            NotAuthorizedError: If ``authorize`` refuses the action ``revoke``, or is
                missing here: the question has roles, or the run began under a hook.
        """
        now = self._clock.now()
        for _, grant in read_grants(await self._store.grant(grant_id, now)):
            await self._doorkeeper.check_under(
                grant.guards, "revoke", grant.run_id, by=by, call=grant.question
            )
            return await self._store.revoke(grant_id, by or "", at=now)
        raise ApprovalRefusedError(
            f"No grant {grant_id!r} holds in this store: it has ended, or never was. List them to see their ids."
        )

    async def _votes_with(
        self, approval: PendingApproval, decision: Approve, at: float, text: str
    ) -> list[DecisionRecord]:
        """Return the votes that count from now on: those before that the hook still allows, and this one."""
        self._check_voter(approval, decision)
        counted: list[DecisionRecord] = []
        for one in approval.votes:
            with suppress(NotAuthorizedError):
                await self._check("decide", approval, Approve(by=one.by))
                counted.append(one)
        vote = decision_record(
            approval.id, text, at, approval.fully_qualified_name, approval.arguments
        )
        return [*counted, vote]

    def _check_voter(self, approval: PendingApproval, decision: Approve) -> None:
        """Raise `ApprovalRefusedError` if a vote cannot count, whatever the hook says."""
        quorum = f"{approval.quorum} persons have to approve {approval.id!r}"
        by = decision.by or ""
        person = person_of(by)
        if not (person and self._doorkeeper.verified):
            raise NotAuthorizedError(
                f"{quorum}, and a name that nobody vouches for could be one person's second: {by!r} is only typed. "
                "Approve it where people sign in, such as in the inbox, or with Approvals.connect(verified=True)."
            )
        if decision.always is not None:
            raise ApprovalRefusedError(
                f"{quorum}, each time: no single person can answer later calls. Approve it without always."
            )
        voted = {person_of(one.by) for one in approval.votes}
        if person in voted:
            raise ApprovalRefusedError(
                f"{quorum}, and {by!r} has: one person counts once, however the name is spelled. Another vote must be "
                "somebody else's."
            )

    async def _grant_step(
        self,
        approval: PendingApproval,
        decision: Decision,
        grant: object,
        at: float,
        first: str | None = None,
    ) -> Step:
        step = grant_step(
            approval,
            decision,
            grant,
            at=at,
            verified=self._doorkeeper.verified,
            guards=await self._store.hooks(approval.run_id),
            first=first,
        )
        await self._check("grant", approval, decision)
        return step

    async def _check(
        self, action: RunAction, approval: PendingApproval, decision: Decision
    ) -> None:
        by = getattr(decision, "by", None)
        await self._doorkeeper.check(
            self._store,
            action,
            approval.run_id,
            by=by,
            call=approval,
            decision=decision,
        )

    async def _refuse(
        self, approval: PendingApproval, decision: Decision, problem: str, at: float
    ) -> None:
        await self._store.refuse(
            approval.run_id,
            approval.id,
            any_decision_text(decision),
            problem=problem,
            at=at,
        )


def _read(
    rows: Sequence[Row], refused: Sequence[Row], now: float
) -> list[PendingApproval]:
    found: list[PendingApproval] = []
    for row in rows:
        try:
            own = [one for one in refused if one[0] == row[0]]
            found.append(read_approval(row, own, now=now))
        except ApprovalRefusedError as error:
            logger.error("A call that waits cannot be shown: %s", error)
    return found


def _is_vote(decision: Decision, approval: PendingApproval) -> TypeGuard[Approve]:
    """Return whether a decision approves a call as it is, where several persons have to."""
    if approval.quorum == 1 or not isinstance(decision, Approve):
        return False
    edited = decision.arguments
    return edited is None or digest_of("", edited) == digest_of("", approval.arguments)


def _made_by(votes: Sequence[DecisionRecord]) -> str:
    """Return the decision that votes make, as JSON text."""
    names = [one.by for one in votes]
    return write_decision(Approve(by=", ".join(names)), verified=True, votes=names)


def _refuse_unbound(approval: PendingApproval, decision: Decision) -> None:
    """Refuse an approval that was given for something else."""
    if isinstance(decision, Approve) and decision.fingerprint not in (
        None,
        approval.fingerprint,
    ):
        raise ApprovalRefusedError(
            f"The approval of {approval.id!r} was given for another call or other arguments: its fingerprint is "
            f"{decision.fingerprint}, the call's {approval.fingerprint}. Show the call again and decide again."
        )


def _checked_decision(
    approval: PendingApproval, decision: Decision, at: float, *, verified: bool
) -> str:
    """Return a decision that is valid for its call as JSON text."""
    text = write_decision(decision, verified=verified)
    _refuse_unbound(approval, decision)
    if (
        isinstance(decision, Approve)
        and decision.arguments is not None
        and approval.parameters is not None
    ):
        from planner_ext.engine.schemas import argument_problem  # noqa: PLC0415  (loaded for edits only)

        problem = argument_problem(approval.parameters, decision.arguments)
        if problem:
            raise ApprovalRefusedError(
                f"The edited arguments do not fit {approval.fully_qualified_name}: {problem}. The call still waits."
            )
    if approval.decided_at is not None:  # the store decides which decision came first
        return text
    if approval.expires_at is not None and at >= approval.expires_at.timestamp():
        raise ApprovalRefusedError(
            f"The decision on {approval.id!r} came too late: the question expired at {approval.expires_at}. "
            "When a worker continues the run, the model reads that nobody decided in time."
        )
    if approval.status == "closed":
        raise ApprovalRefusedError(
            f"The call {approval.id!r} does not wait any more: its run continued, or ended."
        )
    return text
