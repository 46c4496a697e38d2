"""What one run reserves of shared budgets, before each request and each batch of calls.

Only its store knows what is left of a shared budget, so it is asked here. A refusal
becomes a fact, and the machine decides what follows.
"""

from dataclasses import replace

from planner_ext.core.accounts import SharedBudgets
from planner_ext.core.facts import CallStarted, SharedBudgetsChecked
from planner_ext.core.machine import (
    Action,
    AskModel,
    AskPerson,
    AskPlan,
    Finish,
    Pause,
    RunCalls,
)
from planner_ext.core.values import Usage
from planner_ext.engine.journal import Recorder


class Reservations:
    """Reserves what the next action of a run needs, and charges what it used.

    A run that ends at a limit with an answer keeps one request for it, from the first
    request of an activation until the last one uses it, or a pause or end releases it.
    If its period has ended, the new one may refuse it: then there is no answer.
    """

    def __init__(self, shared: SharedBudgets, journal: Recorder) -> None:
        self._shared = shared
        self._journal = journal
        self._kept = 0
        self._requests = 0
        self._calls = 0
        self._seen = 0

    async def before(
        self, action: Action | None, *, asks_model: bool
    ) -> SharedBudgetsChecked | None:
        """Reserve what an action needs; return the refusal as a fact.

        Raises:
            StoreError: If the store of a budget cannot be used.
        """
        self._charge_started()
        match action:
            case AskPlan():
                return await self._request(last=False)
            case AskModel(offer=offer, withheld=withheld):
                return await self._request(last=not offer and withheld is not None)
            case AskPerson(iterations=iterations) if asks_model and iterations != 0:
                return await self._request(last=False)
            case RunCalls(indexes=indexes):
                batch = self._journal.state.batch
                assert batch is not None, "calls run in the open batch"
                starts = sum(not batch.calls[index].started for index in indexes)
                refused = await self._shared.reserve(calls=starts)
                if refused is not None:
                    return await self._with_answer(refused)
                self._calls = starts
                self._seen = len(self._journal.facts)
            case Pause() | Finish():
                await self.settle()
            case _:
                pass
        return None

    def answered(self, usage: Usage) -> None:
        """Charge a request with a reply: one round trip of it is reserved already."""
        self._shared.charge(usage - Usage(iterations=self._requests))
        self._requests = 0

    def failed(self, usage: Usage) -> None:
        """Charge a request that has no reply, unless its reply came, and could not be recorded."""
        if self._requests:
            self.answered(usage)

    async def settle(self) -> None:
        """Store what was charged, and release the request kept for the answer."""
        self._charge_started()
        kept = self._kept
        self._kept = 0
        await self._shared.settle(kept=-kept)

    async def _request(self, *, last: bool) -> SharedBudgetsChecked | None:
        state = self._journal.state
        kept = 0 if last else state.rules.limits.iterations_kept
        forced = state.refused is not None and self._kept > 0
        refused = await self._shared.reserve(
            requests=1, kept=kept - self._kept, forced=forced
        )
        if refused is not None and forced:  # kept in a period that has ended
            return replace(refused, answer=False, at=self._journal.now())
        if refused is not None:
            return await self._with_answer(refused)
        self._kept = kept
        self._requests = 1
        return None

    async def _with_answer(self, refused: SharedBudgetsChecked) -> SharedBudgetsChecked:
        if not self._kept and self._journal.state.rules.limits.iterations_kept:
            self._kept = 1 if await self._shared.reserve(kept=1) is None else 0
        return replace(refused, answer=self._kept > 0, at=self._journal.now())

    def _charge_started(self) -> None:
        """Release the calls of the last batch that did not start."""
        if self._calls:
            new = self._journal.facts[self._seen :]
            started = sum(
                isinstance(fact, CallStarted) and fact.attempt == 1 for fact in new
            )
            self._shared.charge(Usage(tool_calls=started - self._calls))
            self._calls = 0
