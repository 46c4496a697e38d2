"""A run from a store, driven once: begun, resumed with the decisions that were taken, or continued after a fault."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner_ext.core.facts import Fact, Guards, Rules, RunStarted
from planner_ext.core.state import Phase, State
from planner_ext.engine.activation import Activation, check_guards
from planner_ext.engine.ports import Emit
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner.run import (
    FunctionCallingStepwisePlannerResult,
    PlannerRun,
    run_started,
)
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.errors import RunEndedError
from planner_ext.sk.messages import load_message
from planner_ext.sk.run.context import checked_messages
from planner_ext.sk.run.inside import recovered, resumed
from planner_ext.sk.run.resume import ResumeRequest


def rules_kept(activation: Activation) -> Rules | None:
    """Return a resumed run's rules; None for a new one, and where only its result is read."""
    state = Checkpoint(tuple(activation.facts)).state()
    return (
        None
        if state.phase is Phase.NEW or _only_read(state, activation)
        else state.rules
    )


def _only_read(state: State, activation: Activation) -> bool:
    return state.ended is not None and activation.budget is None


@dataclass(kw_only=True, eq=False)
class KeptRun(PlannerRun):
    """A run from a store, started or resumed from its journal; see `planner_ext.engine.activation.ActivationRun`."""

    options: FunctionCallingStepwisePlannerOptions
    activation: Activation

    async def result(
        self, emit: Emit | None = None
    ) -> FunctionCallingStepwisePlannerResult:
        """Run to the next pause or end; see `PlannerRun`."""
        self.facts = self.activation.facts
        self.new = await self._first()
        self.budget = self.activation.new_budget
        return await super().result(emit or self.activation.emit)

    async def _first(self) -> Sequence[Fact]:
        """List the first new facts; empty if there is nothing to continue."""
        context = self.context
        activation = self.activation
        if not activation.facts:
            guards = context.guards()
            self._check_guards(activation.guards)
            before = checked_messages(
                [*map(load_message, activation.before)],
                self.options.on_invalid_history,
                context.kernel,
            )
            return (
                await run_started(
                    self.options,
                    context,
                    activation.goal,
                    activation.run_id,
                    before=before,
                    continues=bool(before),
                    guards=guards,
                ),
            )
        checkpoint = Checkpoint(tuple(activation.facts)).checked()
        state = checkpoint.state()
        if _only_read(state, activation):
            return ()
        begun = activation.facts[0]
        self._check_guards(begun.guards if isinstance(begun, RunStarted) else None)
        if state.phase in (Phase.PAUSED, Phase.ENDED):
            return await self._resumed(checkpoint, state)
        return await recovered(context, activation.facts, activation.in_doubt)

    def _check_guards(self, before: Guards | None) -> None:
        if before is None:
            return
        run_id = self.activation.run_id
        context = self.context
        check_guards(run_id, before, context.guards(), context.tools.functions)

    async def _resumed(self, checkpoint: Checkpoint, state: State) -> Sequence[Fact]:
        activation = self.activation
        if state.ended is not None and state.ended.status == "answered":
            raise RunEndedError(
                f"Run {activation.run_id!r} was answered; there is nothing to resume or to spend a budget on. "
                "Start a run with a new goal."
            )
        budget = None
        if activation.budget is not None:
            budget = self.context.options.budget
        given = ResumeRequest(
            checkpoint=checkpoint,
            decisions=activation.decisions,
            budget=budget,
            described=activation.described,
        )
        facts = await resumed(self.context, given)
        only_resumed = len(facts) == 1 and activation.budget is None
        return () if only_resumed else facts
