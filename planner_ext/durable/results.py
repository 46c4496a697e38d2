"""The result of a run in a store, computed from its journal: for any process, without Semantic Kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from planner_ext.core.errors import not_answered
from planner_ext.core.state import State
from planner_ext.core.values import Usage
from planner_ext.durable.records import PendingApproval, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run of a store: how it ended, what it waits for, or how far it is.

    Attributes:
        run_id: The run's name.
        goal: The goal of the run.
        status: As in `RunRecord`: ``answered``, ``incomplete``, ``limit_reached``, ``stopped``; ``paused``, ``failed``,
            ``quarantined``; ``queued`` or ``running`` if it was read before its next pause or end.
        final_answer: The answer, "" if there is no answer.
        iterations: Round trips charged.
        tool_calls: Functions started, failures included.
        usage: Tokens, cost and active time of all requests.
        limit: The name of the limit that ended the run, or None.
        reason: Why the run ended as it did, in words; "" if it was answered.
        problem: The last fault of a run that is ``failed`` or still tried, or why it is in quarantine; "" without one.
        pending: The calls and questions that wait for a person.
    """

    run_id: str
    goal: str
    status: str
    final_answer: str = ""
    iterations: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    limit: str | None = None
    reason: str = ""
    problem: str = ""
    pending: tuple[PendingApproval, ...] = ()

    def raise_for_status(self) -> Self:
        """Return this result if the run was answered.

        Raises:
            LimitReachedError: If a limit ended the run.
            RunNotAnsweredError: If the run waits, failed, or ended without an answer for another reason.
        """
        if self.status == "answered":
            return self
        raise not_answered(
            status=self.status,
            reason=self.reason or self.problem,
            limit=self.limit,
            iterations=self.iterations,
            tool_calls=self.tool_calls,
            usage=self.usage,
        )


def result_of(record: RunRecord, state: State, pending: Sequence[PendingApproval]) -> RunResult:
    """Build the result of a run from its row, its journal's state, which may be newer, and its pending calls."""
    ended = state.ended
    return RunResult(
        run_id=record.run_id,
        goal=record.goal,
        status=record.status if ended is None else ended.status,
        final_answer="" if ended is None else ended.answer,
        iterations=state.ledger.iterations,
        tool_calls=state.ledger.tool_calls,
        usage=state.ledger.usage,
        limit=None if ended is None else ended.limit,
        reason="" if ended is None else ended.reason,
        problem=record.problem,
        pending=tuple(pending),
    )
