"""One run of the planner, driven from its first new facts to its result; likewise a run out of a store."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from planner_ext.approval.policy import missing_guards
from planner_ext.core.facts import Fact, Rules, RunStarted
from planner_ext.core.state import TRANSITIONS, Phase, State
from planner_ext.durable.errors import RunRefusedError
from planner_ext.durable.worker import Activation
from planner_ext.engine.effects import Effect, effect_of
from planner_ext.engine.engine import StopHandle, watch
from planner_ext.engine.ports import Emit, TextDelta
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner.prepare import opening, planner_rules
from planner_ext.planner.result import FunctionCallingStepwisePlannerResult, PlannerEvent, ResultReady, result_of
from planner_ext.sk.approval import NOTHING_TAKEN, Taking, check_calls
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.errors import RunEndedError
from planner_ext.sk.options import instance_of
from planner_ext.sk.outcome import raise_at_limit
from planner_ext.sk.resumption import ResumeRequest, recovery_facts
from planner_ext.sk.run_context import RunContext

__all__ = ["KeptRun", "PlannerRun", "rules_kept"]


class PlannerRun:
    """One run from its first new facts to its result: that it started, or was resumed and what was decided."""

    def __init__(
        self,
        context: RunContext,
        *,
        facts: Sequence[Fact] = (),
        new: Sequence[Fact],
        stop: StopHandle | None = None,
        taking: Taking = NOTHING_TAKEN,
    ) -> None:
        """Bind a run to its journal.

        Args:
            context: What the run works with.
            facts: The journal that is resumed.
            new: The facts to begin with.
            stop: Ends the run from outside.
            taking: The decisions in ``new``.
        """
        self._context = context
        self._facts = tuple(facts)
        self._new = new
        self._taking = taking
        self._stop = None if stop is None else instance_of("stop", stop, StopHandle)

    async def result(self, emit: Emit | None = None) -> FunctionCallingStepwisePlannerResult:
        """Run to the next pause or end.

        Raises:
            LimitReachedError: At a limit, where the budget says so.
            DecisionRefusedError: If this planner has taken one of the decisions before; nothing was recorded.
            Exception: On a fault; whatever kind it is of, it carries the history and a checkpoint as attributes.
        """
        context = self._context
        engine = context.engine(self._facts, emit=emit, stop=self._stop)
        with self._taking.held(engine):
            for fact in self._new:
                await engine.record(fact)
            await context.drive(engine)
        key = context.options.checkpoint_key
        raise_at_limit(engine.state, engine.facts, key)
        written = context.chat.messages(engine.state.transcript)
        return result_of(engine.state, tuple(engine.facts), context.form, written=written, key=key)

    def events(self) -> AsyncGenerator[PlannerEvent, None]:
        """Run, and yield what happens; the result comes last."""
        return _events(self.result)


class KeptRun:
    """A run out of a store, ready to be driven to its next pause or end."""

    def __init__(
        self, options: FunctionCallingStepwisePlannerOptions, context: RunContext, segment: Activation
    ) -> None:
        self._options = options
        self._context = context
        self._segment = segment

    async def result(self, emit: Emit | None = None) -> FunctionCallingStepwisePlannerResult:
        """Drive the run; see `planner_ext.durable.worker.ActivationRun`."""
        new = await _segment_facts(self._options, self._context, self._segment)
        return await PlannerRun(self._context, facts=self._segment.facts, new=new).result(emit)

    def events(self) -> AsyncGenerator[PlannerEvent, None]:
        """Drive the run, and yield what happens; the result comes last."""
        return _events(self.result)


async def _events(
    result: Callable[[Emit], Awaitable[FunctionCallingStepwisePlannerResult]],
) -> AsyncGenerator[PlannerEvent, None]:
    results: list[FunctionCallingStepwisePlannerResult] = []

    async def run(emit: Emit) -> None:
        results.append(await result(emit))

    async with aclosing(watch(run)) as events:
        async for event in events:
            if not isinstance(event, TextDelta) or event.text:
                yield event
    yield ResultReady(result=results[0])


def rules_kept(segment: Activation) -> Rules | None:
    """Give the rules of a run that goes on; None of one that starts, or that has ended and is only told again.

    Raises:
        InvalidCheckpointError: If the journal contradicts itself.
    """
    state = Checkpoint(tuple(segment.facts)).state()
    return None if state.phase is Phase.NEW or _told_again(state, segment) else state.rules


def _told_again(state: State, segment: Activation) -> bool:
    """Whether a run has ended and its result is all that is asked for."""
    return state.ended is not None and segment.budget is None and not segment.reopen


async def _segment_facts(
    options: FunctionCallingStepwisePlannerOptions, context: RunContext, segment: Activation
) -> Sequence[Fact]:
    """List the first new facts of a segment; none where there is nothing to continue.

    Raises:
        InvalidCheckpointError: If the journal contradicts itself, or its messages cannot be read.
        DecisionRefusedError: If a decision cannot be taken.
        RunRefusedError: If less has a say in the run's calls here than when it began; an ended run's result is read
            all the same.
        PlannerInvalidConfigurationError: If a run that was answered is given a budget.
    """
    at = context.options.clock.now()
    if not segment.facts:
        started = RunStarted(
            run_id=segment.run_id,
            rules=planner_rules(options, context, plan=True),
            messages=await opening(options, context, segment.goal),
            goal=segment.goal,
            guards=context.guards(),
            at=at,
        )
        return (started,)
    checkpoint = Checkpoint(tuple(segment.facts)).checked()
    state = checkpoint.state()
    if not _told_again(state, segment):
        _check_guards(context, segment)
    reopened = segment.reopen and (state.phase, "Resumed") in TRANSITIONS
    if reopened or state.phase in (Phase.PAUSED, Phase.ENDED):
        return _resumed(context, segment, checkpoint, at)
    check_calls(state)

    def declared(name: str) -> Effect:
        return effect_of(getattr(context.tools.functions.get(name), "method", None)) or Effect()

    return await recovery_facts(
        state, effect_of=declared, functions=context.functions, in_doubt=segment.in_doubt, at=at
    )


def _check_guards(context: RunContext, segment: Activation) -> None:
    begun = segment.facts[0]
    if not isinstance(begun, RunStarted) or begun.guards is None:
        return
    if missing := missing_guards(begun.guards, context.guards(), context.tools.functions):
        raise RunRefusedError(
            f"Run {segment.run_id!r} cannot be continued here: it began under what this process lacks: "
            f"{'; '.join(missing)}. Nothing ran and nothing was recorded. Continue it with a planner that has this; on "
            "the command line, --policy and --ask-all give a planner more of a say."
        )


def _resumed(context: RunContext, segment: Activation, checkpoint: Checkpoint, at: float) -> Sequence[Fact]:
    state = checkpoint.state()
    if _told_again(state, segment):
        return ()
    if state.ended is not None and state.ended.status == "answered":
        raise RunEndedError(
            f"Run {segment.run_id!r} was answered; there is nothing to resume or to spend a budget on. "
            "Start a run with a new goal."
        )
    budget = None if segment.budget is None else context.options.budget
    given = ResumeRequest(
        checkpoint=checkpoint, decisions=segment.decisions, decided_at=segment.decided_at, budget=budget
    )
    facts = given.facts(context.functions, at)
    return facts if len(facts) > 1 or segment.budget is not None or segment.reopen else ()
