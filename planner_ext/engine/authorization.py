"""Asks the application's ``authorize`` hook whether a person may do something to a run."""

import logging
from collections.abc import Mapping
from contextlib import suppress

from planner_ext.approval.decisions import (
    Authorize,
    AuthorizeHooks,
    DecisionRequest,
    RunAction,
    hooks_of,
)
from planner_ext.core.errors import PlannerExtError, shown
from planner_ext.engine.concurrency import called

logger = logging.getLogger(__name__)

_NO_HOOK = (
    "nothing here can check roles. Whoever runs this process gives it the application's hook: authorize= of "
    "ApprovalSettings, Runs, Approvals or the inbox, or --app on the command line"
)


_PHRASES: Mapping[RunAction, str] = {
    "set_budget": "set the budget of",
    "say": "write to",
    "pause_all": "pause all",
    "resume_all": "resume all",
    "retain": "set the retention of",
}


async def refusal_of(authorize: AuthorizeHooks, request: DecisionRequest) -> str | None:
    """Return why a hook refuses an action; None if all allow it.

    Without a hook everything is allowed but a decision on a question with roles.
    """
    hooks = hooks_of(authorize)
    roles = ()
    if request.call is not None:
        roles = request.call.roles
    reason: str | None = None
    if roles and not hooks:
        reason = f"it is for {', '.join(roles)} to decide, and {_NO_HOOK}"
    for hook in hooks:
        reason = reason or await _reason_of(hook, request)
    if reason is None:
        return None
    return f"{phrase_of(request)}: {reason.rstrip('.')}."


def phrase_of(request: DecisionRequest) -> str:
    """Say who may not do what: the beginning of a refusal."""
    who = shown(request.by) if request.by else "An unnamed person"
    what = _PHRASES.get(request.action, request.action)
    run = f"run {request.run_id!r}" if request.run_id else "runs"
    on = run if request.call is None else repr(request.call.id)
    return f"{who} may not {what} {on}"


async def _reason_of(hook: Authorize, request: DecisionRequest) -> str | None:
    try:
        answer: object = await called(hook, request)
    except (Exception, SystemExit) as error:
        if not isinstance(error, PlannerExtError | PermissionError):
            logger.exception(
                "The authorize hook failed; %s is refused.", request.action
            )
        answer = type(error).__name__
        with suppress(Exception):
            answer = str(error) or answer
    if answer is True:
        return None
    if isinstance(answer, str) and answer.strip():
        return answer
    return f"the authorize hook does not allow it: it returned {shown(answer)}, and only True allows"
