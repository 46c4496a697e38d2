"""A run from a store, started or resumed from its journal, with the calls that its process left in doubt."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner_ext.approval.decisions import InDoubt
from planner_ext.core.errors import RunRefusedError
from planner_ext.core.facts import CallDecided, CallFinished, CallOutcome, Fact, Guards, Rules, RunStarted
from planner_ext.core.machine import IN_DOUBT
from planner_ext.core.state import Call, Phase, State
from planner_ext.engine.activation import Activation, missing_guards
from planner_ext.engine.batch import is_as_decided
from planner_ext.engine.concurrency import of_application
from planner_ext.engine.effects import Effect, NoEffect, Probe, TookEffect, effect_of, idempotency_key
from planner_ext.engine.ports import Emit, Functions
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult, PlannerRun, run_started
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.errors import RunEndedError
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object
from planner_ext.sk.run.approval import pending_call
from planner_ext.sk.run.resume import ResumeRequest, check_calls

logger = logging.getLogger(__name__)


def rules_kept(activation: Activation) -> Rules | None:
    """Return the rules of a run that is resumed; None for a new one, and for one whose result is only read again.

    Raises:
        InvalidCheckpointError: If the journal contradicts itself.
    """
    state = Checkpoint(tuple(activation.facts)).state()
    return None if state.phase is Phase.NEW or _only_read(state, activation) else state.rules


def _only_read(state: State, activation: Activation) -> bool:
    """Whether a run has ended and its result is only returned again."""
    return state.ended is not None and activation.budget is None


@dataclass(kw_only=True, eq=False)
class KeptRun(PlannerRun):
    """A run from a store, started or resumed from its journal; see `planner_ext.engine.activation.ActivationRun`."""

    options: FunctionCallingStepwisePlannerOptions
    activation: Activation

    async def result(self, emit: Emit | None = None) -> FunctionCallingStepwisePlannerResult:
        """Run to the next pause or end; see `PlannerRun`."""
        self.facts = self.activation.facts
        self.new = await self._first()
        self.budget = self.activation.new_budget
        return await super().result(emit or self.activation.emit)

    async def _first(self) -> Sequence[Fact]:
        """List the first new facts; empty if there is nothing to continue.

        Raises:
            InvalidCheckpointError: If the journal contradicts itself, or its messages cannot be read.
            DecisionRefusedError: If a decision cannot be taken.
            RunRefusedError: If this process lacks a policy or interceptor that the run began with; the result of an
                ended run is returned nevertheless.
            RunEndedError: If an answered run is resumed with a budget.
        """
        context = self.context
        activation = self.activation
        if not activation.facts:
            guards = context.guards()
            self._check_guards(activation.guards)
            return (await run_started(self.options, context, activation.goal, activation.run_id, guards=guards),)
        checkpoint = Checkpoint(tuple(activation.facts)).checked()
        state = checkpoint.state()
        if _only_read(state, activation):
            return ()
        begun = activation.facts[0]
        self._check_guards(begun.guards if isinstance(begun, RunStarted) else None)
        if state.phase in (Phase.PAUSED, Phase.ENDED):
            return await self._resumed(checkpoint)
        check_calls(state)

        def declared(name: str) -> Effect:
            return effect_of(context.tools.functions.get(name)) or Effect()

        at = context.options.clock.now()
        in_doubt = activation.in_doubt
        return await recovery_facts(state, effect_of=declared, functions=context.functions, in_doubt=in_doubt, at=at)

    def _check_guards(self, before: Guards | None) -> None:
        context = self.context
        if before is None:
            return
        if missing := missing_guards(before, context.guards(), context.tools.functions):
            raise RunRefusedError(
                f"Run {self.activation.run_id!r} cannot be continued here: it began under what this process lacks: "
                f"{'; '.join(missing)}. Nothing ran and nothing was recorded. Continue it with a planner that has "
                "this; on the command line, --policy and --ask-all add guards, and the factory of --app gives the hook."
            )

    async def _resumed(self, checkpoint: Checkpoint) -> Sequence[Fact]:
        activation = self.activation
        state = checkpoint.state()
        if state.ended is not None and state.ended.status == "answered":
            raise RunEndedError(
                f"Run {activation.run_id!r} was answered; there is nothing to resume or to spend a budget on. "
                "Start a run with a new goal."
            )
        budget = None if activation.budget is None else self.context.options.budget
        given = ResumeRequest(
            checkpoint=checkpoint,
            decisions=activation.decisions,
            budget=budget,
            decided_at=activation.decided_at,
            verified=activation.verified,
            described=activation.described or pending_call,
        )
        facts = await self.context.resumed(given)
        return facts if len(facts) > 1 or activation.budget is not None else ()


# The calls that had started when their process ended: run again, asked about, or left in doubt.


async def recovery_facts(
    state: State, *, effect_of: Callable[[str], Effect], functions: Functions, in_doubt: InDoubt, at: float
) -> tuple[Fact, ...]:
    """List the facts with which an interrupted run is resumed.

    A call in doubt that a person must decide gets no fact: the run pauses on it.

    Args:
        state: The run's state from its journal. Its process died, so no started call has finished.
        effect_of: Returns a function's declared effect, given its fully qualified name.
        functions: Encodes results.
        in_doubt: Who handles a call in doubt.
        at: Now, in seconds since the epoch.
    """
    batch = state.batch
    if batch is None:
        return ()
    facts: list[Fact] = []
    for call in batch.calls:
        decided = call.decided
        if not call.started or call.answer is not None or decided is None:
            continue
        effect = effect_of(decided.function)
        if effect.kind == "once":
            answer = await _probed(effect.probe, state, call, decided)
        else:  # a call that would get another value is not repeated: the first one may have taken effect
            answer = NoEffect() if is_as_decided(functions.check(call.request, decided.edited), decided) else None
        if isinstance(answer, NoEffect):
            facts.append(replace(decided, at=at))
        elif isinstance(answer, TookEffect):
            facts.append(_finished(decided, "ok", functions.encode(answer.result), at))
        elif in_doubt == "model":
            facts.append(_finished(decided, "cancelled", IN_DOUBT, at))
    return tuple(facts)


async def _probed(probe: Probe | None, state: State, call: Call, decided: CallDecided) -> TookEffect | NoEffect | None:
    """Ask a function's probe; one that raises, or returns an invalid answer, cannot tell."""
    if probe is None:
        return None
    arguments = parse_object(decided.arguments_of(call.request))
    assert not isinstance(arguments, InvalidArguments), "a call that started had arguments"
    key = idempotency_key(state.run_id, decided.iteration, decided.call_id)

    async def asked() -> TookEffect | NoEffect | None:
        answer = probe(key, arguments)
        return await answer if inspect.isawaitable(answer) else answer

    try:
        answer = await of_application(asked())
    except Exception:
        logger.exception("The probe of %s failed; the call %s stays in doubt.", decided.function, key)
        return None
    if answer is None or isinstance(answer, TookEffect | NoEffect):  # pyright: ignore[reportUnnecessaryIsInstance]
        return answer
    logger.error("The probe of %s answered %r; the call %s stays in doubt.", decided.function, answer, key)
    return None


def _finished(decided: CallDecided, outcome: CallOutcome, result: str, at: float) -> CallFinished:
    return CallFinished(
        iteration=decided.iteration,
        index=decided.index,
        call_id=decided.call_id,
        function=decided.function,
        outcome=outcome,
        result=result,
        at=at,
    )
