"""Who may decide: the application's hook, asked for each decision on a kept run before it counts."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from planner_ext.approval.decisions import Decision
from planner_ext.core.errors import PlannerExtError, shown
from planner_ext.durable.records import PendingApproval
from planner_ext.engine.concurrency import called

__all__ = ["Authorize", "DecisionRequest", "refusal_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRequest:
    """A decision to authorize.

    Attributes:
        by: The author named in the decision, "" without one. The application vouches for the name.
        run_id: The run.
        call: The call or question, with the ``roles`` of its function's mark or of the rule that asks.
        decision: The decision.
    """

    by: str
    run_id: str
    call: PendingApproval
    decision: Decision


_Answer: TypeAlias = bool | str | None

Authorize: TypeAlias = Callable[[DecisionRequest], _Answer | Awaitable[_Answer]]
"""Allows a decision with None or True. Refuses it with a reason, with False, or with an exception."""


async def refusal_of(authorize: Authorize | None, call: PendingApproval, decision: Decision) -> str | None:
    """Ask the hook about a decision; return why it is refused, or None. A hook that fails refuses."""
    if authorize is None:
        return None
    by = getattr(decision, "by", None) or ""
    try:
        answer: object = await called(
            authorize, DecisionRequest(by=by, run_id=call.run_id, call=call, decision=decision)
        )
    except Exception as error:
        if not isinstance(error, PlannerExtError | PermissionError):
            logger.exception("The authorize hook failed; the decision on %s is refused.", call.id)
        answer = str(error) or type(error).__name__
    if answer is None or answer is True:
        return None
    reason = answer if isinstance(answer, str) and answer.strip() else "the authorize hook does not allow it"
    return f"{shown(by) if by else 'An unnamed person'} may not decide {call.id!r}: {reason.rstrip('.')}."
