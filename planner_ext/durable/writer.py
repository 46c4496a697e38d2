"""Writes one run's journal into a store: each fact as a row, with what it means for the lists that are kept of runs."""

import json
from collections.abc import Collection, Sequence

from planner_ext.approval.pending import WaitingCall, question_id, waiting_calls
from planner_ext.core.facts import CallDecided, CallStarted, Clarified, Ended, Fact, IterationCompleted, Paused, Resumed
from planner_ext.core.fold import apply
from planner_ext.core.state import State
from planner_ext.durable.decisions import decided_text
from planner_ext.durable.records import approval_id
from planner_ext.durable.rows import FactRow, fold_journal, write_facts
from planner_ext.durable.store import JournalStore, Question, RunMove

__all__ = ["JournalWriter"]


class JournalWriter:
    """Takes the facts of one run; implements `planner_ext.engine.ports.RunStore`.

    A fact that would come out the same if it were worked out again goes to disk with the next one: that a call may run,
    which nobody in particular decided, and that a batch has settled. It saves two of five waits for the disk in a turn.

    Attributes:
        state: The run, as its journal has it.
    """

    def __init__(
        self,
        store: JournalStore,
        run_id: str,
        facts: Sequence[Fact],
        *,
        decided: Collection[str] | None = None,
    ) -> None:
        """Go on with a journal.

        Args:
            store: Takes the rows.
            run_id: The run.
            facts: Its journal so far.
            decided: Ids of the questions that were seen to be decided; one that is decided later is not closed, but
                fences, so that no decision that counts is passed over. None closes them all.

        Raises:
            InvalidJournalError: If the facts contradict each other.
        """
        self.state = fold_journal(run_id, facts)
        self._store = store
        self._run_id = run_id
        self._decided = decided
        self._started = {_place(fact): seq for seq, fact in enumerate(facts) if isinstance(fact, CallStarted)}
        self._held: tuple[FactRow, ...] = ()
        self._asked = {id_: index for index, id_ in _asked_before(self.state, self._started)}

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:  # noqa: ARG002  (it takes one run's)
        """Store facts durably before returning, or hold them until the next; ``seq`` is the place of the first.

        Raises:
            RunFencedError: If somebody else has gone on with the run.
            StoreError: If the store cannot be used.
        """
        state = self.state
        for place, fact in enumerate(facts, start=seq):
            state = apply(state, fact)
            if isinstance(fact, CallStarted):
                self._started[_place(fact)] = place
        closed = tuple(id_ for id_, index in self._asked.items() if not _is_open(state, index))
        questions = self._questions(state) if isinstance(facts[-1], Paused) else ()
        move = RunMove(
            status=_status(facts[-1]),
            wake_at=min((one.expires_at for one, _ in questions if one.expires_at is not None), default=None),
            asked=tuple(one for one, _ in questions),
            closed=tuple(id_ for id_ in closed if self._is_seen(id_)),
            undecided=tuple(id_ for id_ in closed if not self._is_seen(id_)),
            decided=self._decisions(closed, facts),
            at=state.at,
        )
        rows = (*self._held, *write_facts(seq, facts))
        if closed or not all(_may_wait(fact) for fact in facts):
            await self._store.append(self._run_id, rows, move)
            rows = ()
        self._held, self.state = rows, state
        self._asked = {id_: index for id_, index in self._asked.items() if id_ not in closed}
        self._asked.update((one.id, index) for one, index in questions)

    def _decisions(self, closed: Collection[str], facts: Sequence[Fact]) -> dict[str, tuple[str, float]]:
        """Give what persons decided of the questions that are closed, by id, with the times."""
        made = {fact.index: fact for fact in facts if isinstance(fact, CallDecided | Clarified)}
        texts = {id_: decided_text(made[self._asked[id_]]) for id_ in closed if self._asked[id_] in made}
        return {id_: (text, made[self._asked[id_]].at) for id_, text in texts.items() if text is not None}

    def asked_about(self, call_id: str) -> str:
        """Name the open question about a call; where none is open, the call."""
        batch, reply = self.state.batch, self.state.reply
        for id_, index in self._asked.items():
            if index is None:
                name = "" if reply is None else question_id(reply)
            else:
                name = "" if batch is None else batch.calls[index].request.id
            if name == call_id:
                return id_
        return call_id

    def _is_seen(self, id_: str) -> bool:
        return self._decided is None or id_ in self._decided

    def _questions(self, state: State) -> tuple[tuple[Question, int | None], ...]:
        return tuple((self._question(state, call), call.index) for call in waiting_calls(state))

    def _question(self, state: State, call: WaitingCall) -> Question:
        decided = call.decided
        shown = {
            "iteration": decided.iteration,
            "call_id": call.request.id,
            "function": decided.function,
            "kind": decided.kind,
            "arguments": call.arguments,
            "prompt": decided.prompt,
            "goal": state.goal,
            "in_doubt": call.in_doubt,
            "signature": decided.signature,
        }
        return Question(
            id=_question_id(state, call.index, self._started),
            fingerprint=call.fingerprint,
            call=json.dumps(shown, separators=(",", ":")),
            expires_at=decided.expires_at,
        )


def _place(fact: CallStarted) -> tuple[int, int]:
    return fact.iteration, fact.index


def _question_id(state: State, index: int | None, started: dict[tuple[int, int], int]) -> str:
    """Name the question about a call; one that a person was asked about before has the number of its start behind."""
    if index is None:
        assert state.reply is not None
        return approval_id(state.run_id, state.reply.iteration, question_id(state.reply))
    assert state.batch is not None
    iteration, call = state.batch.iteration, state.batch.calls[index]
    name = approval_id(state.run_id, iteration, call.request.id)
    again = call.started and call.decided is not None and call.decided.person
    return f"{name}@{started[iteration, index]}" if again else name


def _asked_before(state: State, started: dict[tuple[int, int], int]) -> list[tuple[int | None, str]]:
    """List the calls about which a question may be open: closing one that is not does no harm."""
    places = (None,) if state.batch is None else range(len(state.batch.calls))
    return [(i, _question_id(state, i, started)) for i in places if _is_open(state, i)]


def _is_open(state: State, index: int | None) -> bool:
    if state.ended is not None:
        return False
    if index is None:
        return state.batch is None and state.reply is not None
    if state.batch is None:
        return False
    call = state.batch.calls[index]
    deferred = call.decided is not None and call.decided.verdict == "defer"
    return call.answer is None and (deferred or call.started)


def _may_wait(fact: Fact) -> bool:
    match fact:
        case CallDecided(person=person, by=by):
            return not person and not by
        case IterationCompleted(messages=messages, terminate=terminate):
            return messages is None and not terminate
        case _:
            return False


def _status(fact: Fact) -> str | None:
    match fact:
        case Paused():
            return "paused"
        case Resumed():
            return "running"
        case Ended(status=status):
            return status
        case _:
            return None
