"""Writes one run's journal into a store: each fact as a row, with the updates of the derived tables."""

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from typing import Any, TypeAlias

from planner_ext.approval.decisions import ToolCall
from planner_ext.approval.waiting import questions_of, waiting_everywhere
from planner_ext.core.errors import EndedRunError
from planner_ext.core.facts import (
    BudgetChanged,
    CallDecided,
    CallStarted,
    Ended,
    Fact,
    IterationCompleted,
    ModelReplied,
    Paused,
    Place,
    PlainFact,
    Planned,
    RequestFailed,
    Resumed,
    Rules,
    RunStarted,
    place_of_fact,
    unwrapped,
)
from planner_ext.core.fold import apply
from planner_ext.core.limits import Budget
from planner_ext.core.state import (
    Call,
    OpenRun,
    Phase,
    State,
    open_runs,
    path_of,
    run_at,
)
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.chain import Chain
from planner_ext.durable.database import Step, Value
from planner_ext.durable.errors import RunFencedError
from planner_ext.durable.grants import using_steps
from planner_ext.durable.inputs import NewBudget, read_said, said_line
from planner_ext.durable.listing import joined
from planner_ext.durable.records import (
    PendingApproval,
    approval_id,
    asked_call,
    call_values,
    fold_journal,
    question_digest,
)
from planner_ext.durable.store import JournalStore, notice_step
from planner_ext.engine.batch import BudgetHandle
from planner_ext.engine.document import SCHEMA, dump_facts
from planner_ext.engine.journal import (
    cancellation_reason,
    lost_requests,
    stopping_facts,
)
from planner_ext.engine.log import log_facts
from planner_ext.engine.ports import Clock

ADD_FACT = """
    INSERT INTO planner_journal (run_id, seq, schema, fact, link, salt)
    VALUES (:run_id, :seq, :schema, :fact, :link, :salt)
"""
_ADD_OWN_FACT = """
    INSERT INTO planner_journal (run_id, seq, schema, fact, link, salt)
    VALUES (:run_id, (SELECT CAST(:seq AS INTEGER) FROM planner_runs WHERE run_id = :run_id AND owner = :owner),
            :schema, :fact, :link, :salt)
"""
"""Fails with a null key where another worker has become the owner, whether or not it
has written."""
_TOTALS = "updated_at = :at, iterations = :iterations, tool_calls = :tool_calls, tokens = :tokens, cost = :cost"
_MOVE_RUN = f"""
    UPDATE planner_runs SET status = :status, wake_at = :wake_at, {_TOTALS},
        problem = CASE WHEN :status = 'running' THEN problem END,
        outage_at = CASE WHEN :status = 'running' THEN outage_at END,
        new_budget = CASE WHEN :status IN ('running', 'paused') THEN new_budget END
    WHERE run_id = :run_id
"""  # noqa: S608  (only this module's own text)
_COUNT_REPLY = (
    f"UPDATE planner_runs SET {_TOTALS}, outage_at = NULL WHERE run_id = :run_id"  # noqa: S608  (only this module's own text)
)
_COUNT_FAILED = f"UPDATE planner_runs SET {_TOTALS} WHERE run_id = :run_id"  # noqa: S608  (only this module's own text)
_OPEN_APPROVAL = """
    INSERT INTO planner_approvals
        (id, run_id, status, fingerprint, call, function, roles, question, asked_at, expires_at, problem)
    VALUES (:id, :run_id, 'open', :fingerprint, :call, :function, :roles, :question, :asked_at, :expires_at, :problem)
    ON CONFLICT (id) DO UPDATE
    SET status = 'open', fingerprint = excluded.fingerprint, call = excluded.call, function = excluded.function,
        roles = excluded.roles, question = excluded.question, asked_at = excluded.asked_at,
        expires_at = excluded.expires_at, decision = NULL, decided_at = NULL, votes = NULL,
        problem = CASE WHEN planner_approvals.status = 'closed' OR excluded.problem IS NOT NULL THEN excluded.problem
                       ELSE planner_approvals.problem END
    WHERE planner_approvals.status = 'closed' OR planner_approvals.fingerprint <> excluded.fingerprint
"""
"""Opens an approval; reopens it if its call would now receive other values, whatever the
earlier decision."""
_KEEP_EDIT = """
    INSERT INTO planner_refusals (run_id, id, decision, problem, at)
    SELECT run_id, id, decision, :problem, decided_at FROM planner_approvals
    WHERE id = :id AND status = 'decided' AND fingerprint <> :fingerprint
"""
"""Keeps the decision whose edit is about to be asked about."""
_CLOSE_APPROVAL = """
    UPDATE planner_approvals SET status = 'closed', decision = COALESCE(decision, :decision),
        decided_at = COALESCE(decided_at, :decided_at)
    WHERE id = :id
"""
_CLOSE_UNDECIDED = f"{_CLOSE_APPROVAL} AND status <> 'decided'"
_REFUSE_DECIDED = """
    INSERT INTO planner_approvals (id, run_id, status, fingerprint, call, asked_at)
    SELECT id, run_id, status, fingerprint, call, asked_at FROM planner_approvals WHERE id = :id AND status = 'decided'
"""
"""Fails with a duplicate key where an approval was decided.

Run it after `_CLOSE_UNDECIDED`, whose lock makes sure that the decision is visible.
"""


_DROP_SAID = """
    UPDATE planner_runs
    SET said = NULLIF(SUBSTR(said, LENGTH(CAST(:line AS TEXT)) + 1), ''),
        goal = CASE WHEN SUBSTR(said, 1, LENGTH(CAST(:line AS TEXT))) = CAST(:line AS TEXT) THEN goal END
    WHERE run_id = :run_id
"""
"""Fails with a null goal where the message was taken already."""
_REFUSE_UNREAD = """
    INSERT INTO planner_journal (run_id, seq, schema, fact)
    SELECT run_id, seq, schema, fact FROM planner_journal
    WHERE run_id = :run_id AND seq = 0
          AND EXISTS (SELECT 1 FROM planner_runs WHERE run_id = :run_id AND said IS NOT NULL)
"""
"""Fails with a duplicate key where something was said that the run has not read.

Run it after `_MOVE_RUN`, whose lock makes sure that what was said is visible.
"""
_DROP_BUDGET = "UPDATE planner_runs SET new_budget = NULL WHERE run_id = :run_id AND new_budget = :text"


class StoredBudgetHandle(BudgetHandle):
    """Gives a driven run the budgets that are set in its store, and what is said to it there, each once.

    Attributes:
        taken: The last budget that the run took.
        line: The message that it took, as the store holds it, until the fact is stored.
        check_stays: Raises an error if the run may do nothing more here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.check_stays: Callable[[], None] = lambda: None
        self.taken = self._offered = self.line = ""
        self._said = dict[str, bool]()

    def offer(self, new: NewBudget) -> None:
        """Set the limits, unless they were set before."""
        if new.text != self._offered:
            self._offered = new.text
            self.change(new.limits, by=new.by)

    def say(self, lines: str) -> None:
        """Say what was not said before."""
        for line in lines.splitlines(keepends=True):
            self._said.setdefault(line, False)

    def next_message(self) -> tuple[str, str] | None:
        """Return, once, what was said next, and by whom."""
        unread = (line for line, read in self._said.items() if not read)
        line = next(unread, None)
        if line is None:
            return None
        self._said[line] = True
        self.line = line
        (message,) = read_said("", line)
        return message.text, message.by

    def take(self) -> tuple[Budget, str] | None:
        """Return the new limits and who set them, once; an error if the run may do nothing more here."""
        self.check_stays()
        given = super().take()
        if given is not None:
            self.taken = self._offered
        return given


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's hold on a run.

    Attributes:
        owner: The worker's unique id.
        settle: Returns once the worker's lease holds; if it had lapsed, the work on
            runs that others have taken is cancelled before.
    """

    owner: str
    settle: Callable[[], Awaitable[None]]


class JournalWriter:
    """Records the facts of one run; implements `planner_ext.engine.ports.RunStore`.

    A fact that can be computed again is written with the next one: an approval without
    a person's decision, and the end of a batch. One that is the intent of the next
    request is written at once, see `planner_ext.core.machine.may_have_asked`.

    Attributes:
        facts: The journal, as far as it is in the store.
        state: The fold of all facts.
        given: Decisions that no row holds yet, by the id of their approval: as JSON
            text, with their time.
    """

    def __init__(
        self,
        store: JournalStore,
        run_id: str,
        facts: Sequence[Fact],
        *,
        decided: Collection[str] | None = None,
        claim: Claim | None = None,
        is_queued: bool = False,
        run_arguments: Mapping[str, Any] | None = None,
        chain: Chain | None = None,
    ) -> None:
        """Continue a journal.

        Args:
            store: Receives the rows.
            run_id: The run.
            facts: Its journal so far.
            decided: Ids of the decided approvals that the caller has read: a decision
                of somebody on any other one fences this writer. None: close all without
                this check.
            claim: The worker's hold; None ignores the run's owner.
            is_queued: Whether the run's row says ``queued``.
            run_arguments: The application's, for the conditions of grants. None: no
                grant answers what waits.
            chain: The end of the journal, if the caller has it.
        """
        self.state = fold_journal(run_id, facts)
        self._store = store
        self.run_id = run_id
        self.facts = list(facts)
        self._decided = decided
        self.budget = StoredBudgetHandle()
        self.given: Mapping[str, tuple[str, float]] = {}
        self._claim = claim
        self._is_queued = is_queued
        self._run_arguments = run_arguments
        self._started: dict[_Asked, str] = {}
        for seq, fact in enumerate(facts):
            self._note_start(fact, seq)
        self._chain = chain
        self._buffered: list[Step] = []
        self._held: list[Fact] = []
        self._open: dict[str, _Asked] = self._open_approvals()

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:  # noqa: ARG002  (empty for a new run)
        """Store facts durably before returning, or hold them until the next.

        Raises:
            RunFencedError: If another worker continued the run.
            StoreError: If the store cannot be used.
        """
        state = self.state
        for place, fact in enumerate(facts, start=seq):
            state = apply(state, fact)
            self._note_start(fact, place)
        closed = [
            id_ for id_, asked in self._open.items() if not _is_open(state, asked)
        ]
        opened: dict[str, tuple[OpenRun, Call]] = {}
        if isinstance(facts[-1], Paused):
            opened = {
                self._approval_id(run, call): (run, call)
                for run, call in waiting_everywhere(state).values()
            }
        chain = self._chain or await self._store.chain(self.run_id, seq)
        rows, chain = fact_rows(self.run_id, chain, dump_facts(facts))
        steps = [*self._buffered, *self._fact_steps(rows)]
        held = [*self._held, *facts]
        if (
            closed
            or any(_completes(state, fact) for fact in facts)
            or not all(_can_be_computed_again(unwrapped(fact)) for fact in facts)
        ):
            steps += self._close_steps(closed)
            steps += await self._opening_steps(opened, state.at)
            steps += self._taken_steps(facts)
            steps += _run_update(
                state,
                facts[-1],
                [call for _, call in opened.values()],
                is_queued=self._is_queued,
                head=chain.head,
            )
            # Else nobody could read it.
            if (
                self._claim is not None
                and state.ended is not None
                and state.ended.status != "stopped"
                and self.state.phase in (Phase.ASKING, Phase.ANSWERING)
            ):
                steps.append((_REFUSE_UNREAD, {"run_id": self.run_id}))
            await self._store.append(self.run_id, *steps)
            log_facts(state, facts, kept=True)
            self.facts += held
            held = []
            steps = []
        self._held = held
        self._buffered = steps
        self._chain = chain
        self.state = state
        self._open = {
            id_: asked for id_, asked in self._open.items() if id_ not in closed
        }
        self._open |= {id_: _asked(run, call) for id_, (run, call) in opened.items()}
        # What follows may be a request, and nothing is written before it.
        if self._claim is not None:
            await self._claim.settle()

    async def flush(self) -> None:
        """Store the facts that are held back; if that fails, the next fact does."""
        if self._held:
            await self._store.append(self.run_id, *self._buffered)
            self._buffered = []
            self.facts += self._held
            self._held = []

    async def follow(self) -> None:
        """Read what another writer has added.

        A run that works writes often: reading all of it again may be late again.
        """
        new, self._chain = await self._store.load_chained(self.run_id, len(self.facts))
        for place, fact in enumerate(new, start=len(self.facts)):
            self._note_start(fact, place)
        self.state = reduce(apply, new, self.state)
        self.facts += new
        self._open = self._open_approvals()

    def path_of(self, name: str) -> str:
        """Return the path of a call that waits, given that or its id."""
        if name in waiting_everywhere(self.state):
            return name
        return path_of(name)

    def approval_id_of(self, path: str) -> str:
        """Return the id of a call's open approval, or its path if it has none."""
        asked = waiting_everywhere(self.state).get(path)
        return path if asked is None else self._approval_id(*asked)

    def approval_of(self, call: ToolCall, state: State) -> PendingApproval:
        """Show a call that waited in a state of the run as the store lists it."""
        asked = waiting_everywhere(state)[call.path]
        return asked_call(call, self._approval_id(*asked), state, asked[1])

    def _note_start(self, fact: Fact, seq: int) -> None:
        started = unwrapped(fact)
        if isinstance(started, CallStarted):
            asked = (place_of_fact(fact), started.iteration, started.index)
            self._started[asked] = _start_name(started, seq)

    def _approval_id(self, run: OpenRun, call: Call) -> str:
        """Return the id of a call's approval; one asked again after a start ends in that start's name."""
        fact = call.decided_fact
        name = approval_id(run.state.run_id, fact.iteration, call.request.id)
        again = call.started and fact.person
        return f"{name}@{self._started[_asked(run, call)]}" if again else name

    def _open_approvals(self) -> "dict[str, _Asked]":
        """Map the ids of approvals that may be open to their calls; closing another does no harm."""
        asked = (
            (run, call)
            for run in open_runs(self.state)
            for _, call in questions_of(run.state)
        )
        return {self._approval_id(run, call): _asked(run, call) for run, call in asked}

    def _taken_steps(self, facts: Sequence[Fact]) -> list[Step]:
        """Remove what the run took from its row."""
        steps: list[Step] = []
        if any(isinstance(fact, BudgetChanged) for fact in facts):
            steps.append(
                (_DROP_BUDGET, {"run_id": self.run_id, "text": self.budget.taken})
            )
        if self.budget.line:
            steps.append(
                (_DROP_SAID, {"run_id": self.run_id, "line": self.budget.line})
            )
            self.budget.line = ""
        return steps

    def _fact_steps(self, rows: Sequence[Mapping[str, Value]]) -> list[Step]:
        statement = ADD_FACT
        own = {}
        # What is buffered has it: once in a transaction is enough.
        if self._claim is not None and not self._buffered:
            statement = _ADD_OWN_FACT
            own = {"owner": self._claim.owner}
        return [(statement, {**row, **own}) for row in rows]

    async def _opening_steps(
        self, opened: Mapping[str, tuple[OpenRun, Call]], at: float
    ) -> list[Step]:
        """Open approvals, and decide those that a grant answers."""
        steps = [
            step
            for id_, asked in opened.items()
            for step in _open_steps(self.run_id, id_, *asked)
        ]
        if opened and self._run_arguments is not None:
            steps += await using_steps(self._store, opened, self._run_arguments, at=at)
        return steps

    def _close_steps(self, closed: Collection[str]) -> list[Step]:
        """Close approvals; a decision that the caller has not read fences this writer."""
        steps: list[Step] = []
        for id_ in closed:
            text, at = self.given.get(id_, (None, None))
            values = {"id": id_, "decision": text, "decided_at": at}
            seen = self._decided is None or id_ in self._decided
            steps += (
                [(_CLOSE_APPROVAL, values)]
                if seen
                else [(_CLOSE_UNDECIDED, values), (_REFUSE_DECIDED, values)]
            )
        return steps


async def say_to(
    store: JournalStore,
    doorkeeper: Doorkeeper,
    run_id: str,
    text: str,
    *,
    by: str,
    clock: Clock,
    once: str | None = None,
) -> str:
    """Store a message for a run, and return its line; see `planner_ext.durable.RunsClient.say`."""
    await doorkeeper.check(store, "say", run_id, by=by)
    line = said_line(text, by=by, at=clock.now())
    if not await store.say(run_id, line, tag=once):
        record = await store.record(run_id)
        if once in record.tags:
            return line
        status = record.status
        raise EndedRunError(
            f"Run {run_id!r} has ended ({status}) and reads nothing more; nothing was said to it. Start another run, "
            "or resume this one first."
        )
    return line


async def cancel_run(
    store: JournalStore, run_id: str, *, by: str, reason: str, clock: Clock
) -> bool:
    """Answer every open call of a run, and end it; False if it had ended, or was answered. Fences its worker."""
    stored = await store.load(run_id)
    writer = JournalWriter(store, run_id, stored.facts)
    while True:
        state = writer.state
        at = clock.now()
        with suppress(RunFencedError):  # it was continued meanwhile
            match state.phase:
                case Phase.ENDED:
                    return False
                case Phase.NEW:
                    begun = RunStarted(
                        run_id=run_id,
                        rules=Rules(),
                        messages=(),
                        goal=stored.record.goal,
                        at=at,
                    )
                    facts: tuple[Fact, ...] = (begun,)
                case _:
                    facts = lost_requests(state, at=at)
            ended = stopping_facts(
                reduce(apply, facts, state),
                reason=cancellation_reason(by, reason),
                at=at,
            )
            await writer.append(run_id, len(writer.facts), (*facts, *ended))
            end = writer.state.ended
            return end is not None and end.status == "stopped"
        await writer.follow()


def _open_steps(run_id: str, id_: str, run: OpenRun, call: Call) -> list[Step]:
    fact = call.decided_fact
    problem = compact(fact.reason) if fact.reason else None
    values = call_values(run, call)
    opens = {
        "id": id_,
        "run_id": run_id,
        "fingerprint": fact.fingerprint,
        "call": compact(values),
        "function": values["fully_qualified_name"],
        "roles": joined([*values["roles"], *values.get("escalates_to", ())]),
        "question": question_digest(
            values["fully_qualified_name"], values["arguments"], values["prompt"]
        ),
        "asked_at": run.state.at,
        "expires_at": fact.expires_at,
        "problem": problem,
    }
    keeps = {"id": id_, "fingerprint": fact.fingerprint, "problem": problem}
    return (
        [(_OPEN_APPROVAL, opens)]
        if problem is None
        else [(_KEEP_EDIT, keeps), (_OPEN_APPROVAL, opens)]
    )


def _run_update(
    state: State, last: Fact, waiting: Iterable[Call], *, is_queued: bool, head: str
) -> list[Step]:
    spent = state.usage
    values = {
        "run_id": state.run_id,
        "at": state.at,
        "iterations": spent.iterations,
        "tool_calls": spent.tool_calls,
        "tokens": spent.total_tokens,
        "cost": spent.cost,
    }
    match unwrapped(last):
        case Planned() | ModelReplied():
            return [(_COUNT_REPLY, values)]
        case RequestFailed():
            return [(_COUNT_FAILED, values)]
        case _:
            pass
    match last:
        case Paused():
            status = "paused"
        case RunStarted() if not is_queued:  # its row says so already
            return []
        case RunStarted() | Resumed():
            status = "running"
        case Ended():
            status = last.status
        case _:
            return []
    expiries = [
        call.decided_fact.expires_at
        for call in waiting
        if call.decided_fact.expires_at is not None
    ]
    moved = (
        _MOVE_RUN,
        {**values, "status": status, "wake_at": min(expiries, default=None)},
    )
    problem = last.reason if isinstance(last, Ended) else ""
    told = (
        []
        if status == "running"
        else [
            notice_step(state.run_id, status, at=state.at, problem=problem, head=head)
        ]
    )
    return [moved, *told]


def fact_rows(
    run_id: str, chain: Chain, values: Iterable[object]
) -> tuple[list[dict[str, Value]], Chain]:
    """Return the values of `ADD_FACT` for the next facts, as JSON values, and the chain after them."""
    rows: list[dict[str, Value]] = []
    for value in values:
        text = compact(value)
        following = chain.after(text)
        row: dict[str, Value] = {
            "run_id": run_id,
            "seq": chain.number,
            "schema": SCHEMA,
            "fact": text,
            "link": following.link,
            "salt": None if chain.number else chain.salt,
        }
        rows.append(row)
        chain = following
    return rows, chain


compact = json.JSONEncoder(separators=(",", ":")).encode


def _start_name(fact: CallStarted, seq: int) -> str:
    """Name the start of a call by its moment: a model that could foresee the name would give it to another call."""
    return sha256(f"{fact.call_id}/{seq}/{fact.at!r}".encode()).hexdigest()[:24]


_Asked: TypeAlias = tuple[Place, int, int]
"""A call about which a question may be open: the place of its run, its iteration, and
its index; 0 for a plain reply that asks."""


def _asked(run: OpenRun, call: Call) -> _Asked:
    fact = call.decided_fact
    return run.place, fact.iteration, fact.index


def _is_open(state: State, asked: _Asked) -> bool:
    place, iteration, index = asked
    run = run_at(state, place)
    return run is not None and any(
        (call.decided_fact.iteration, call.decided_fact.index) == (iteration, index)
        for _, call in questions_of(run)
    )


def _completes(state: State, fact: Fact) -> bool:
    """Return whether a fact has completed the batch of its run: it is the intent of the next request."""
    run = run_at(state, place_of_fact(fact))
    return run is not None and run.phase is Phase.COMPLETING


def _can_be_computed_again(fact: PlainFact) -> bool:
    match fact:
        case CallDecided(person=person, by=by):
            return not person and not by
        case IterationCompleted(messages=messages, terminate=terminate):
            return messages is None and not terminate
        case _:
            return False
