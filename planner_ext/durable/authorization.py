"""Who may act on a kept run: the application's hook is asked before a store changes anything.

A run that began under an ``authorize`` hook keeps its name among its guards, and is
closed to a process without one.
"""

from collections.abc import Sequence

from planner_ext.approval.decisions import (
    AuthorizeHooks,
    Decision,
    DecisionRequest,
    RunAction,
    ToolCall,
    hooks_of,
)
from planner_ext.core.values import frozen
from planner_ext.durable.errors import NotAuthorizedError
from planner_ext.durable.store import JournalStore
from planner_ext.engine.authorization import phrase_of, refusal_of


@frozen
class Doorkeeper:
    """Asks the application's hook who may act on the runs of a store.

    Attributes:
        authorize: The hook, or several that all have to allow.
        verified: Whether the application vouches for the names of those who act.
    """

    authorize: AuthorizeHooks = None
    verified: bool = False

    async def check(
        self,
        store: JournalStore,
        action: RunAction,
        run_id: str,
        *,
        by: object = "",
        call: ToolCall | None = None,
        decision: Decision | None = None,
    ) -> None:
        """Ask whether a person may act on a run.

        Raises:
            NotAuthorizedError: If the hook refuses, or is missing here: the run began
                under one, or the call has roles.
        """
        guards = ()
        if not hooks_of(self.authorize):
            guards = await store.hooks(run_id)
        await self.check_under(
            guards, action, run_id, by=by, call=call, decision=decision
        )

    async def check_under(
        self,
        guards: Sequence[str],
        action: RunAction,
        run_id: str,
        *,
        by: object = "",
        call: ToolCall | None = None,
        decision: Decision | None = None,
    ) -> None:
        """Ask as `check` does, about a run that began under the hooks of these names."""
        request = DecisionRequest(
            action=action,
            by=by if isinstance(by, str) else "",
            run_id=run_id,
            call=call,
            decision=decision,
            verified=self.verified,
        )
        if guards and not hooks_of(self.authorize):
            raise NotAuthorizedError(
                f"{phrase_of(request)}: the run began under the authorize hook {', '.join(guards)}, which this process "
                "lacks. Nothing was changed. Give the hook: authorize= of Runs, Runs.connect, Approvals.connect or the "
                "inbox; on the command line --app, with a factory that gives it."
            )
        refusal = await refusal_of(self.authorize, request)
        if refusal is not None:
            raise NotAuthorizedError(refusal)
