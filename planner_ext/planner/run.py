"""One run of the planner, driven from its first new facts to its result; also a run from a store."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import AuthorRole, ChatMessageContent

from planner_ext.approval.policy import missing_guards
from planner_ext.core.facts import Fact, Guards, Rules, RunStarted
from planner_ext.core.state import TRANSITIONS, Phase, State
from planner_ext.durable.errors import RunRefusedError
from planner_ext.durable.worker import Activation
from planner_ext.engine.effects import Effect, effect_of
from planner_ext.engine.engine import StopHandle, watch
from planner_ext.engine.ports import Emit, TextDelta
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner.result import FunctionCallingStepwisePlannerResult, PlannerEvent, ResultReady, result_of
from planner_ext.sk.approval import NOTHING_TAKEN, Taking, check_calls
from planner_ext.sk.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.errors import RunEndedError
from planner_ext.sk.outcome import raise_at_limit
from planner_ext.sk.resumption import ResumeRequest, recovery_facts
from planner_ext.sk.run_context import RunContext

__all__ = ["KeptRun", "PlannerRun", "rules_kept", "run_started"]


async def run_started(
    options: FunctionCallingStepwisePlannerOptions,
    context: RunContext,
    goal: str,
    run_id: str,
    *,
    before: Sequence[ChatMessageContent] = (),
    goes_on: bool = False,
    guards: Guards | None = None,
) -> RunStarted:
    """Build the first fact of a run: its rules and its opening messages.

    Args:
        options: The planner's options.
        context: The run's context.
        goal: The run's goal.
        run_id: The run's name.
        before: The history that it begins with.
        goes_on: Whether it continues a history, so that no plan is asked for.
        guards: The policies and interceptors that decide on its calls, if it is kept in a store.
    """
    behavior, rules = context.behavior, context.rules()
    if not isinstance(behavior, BoundedFunctionChoiceBehavior):
        # A stock behavior's attempts limit Semantic Kernel's own loop; only forced attempts limit ours.
        forced = behavior.maximum_auto_invoke_attempts or 1
        rules = replace(rules, use_attempts=forced if behavior.type_ is FunctionChoiceType.REQUIRED else None)
    rules = replace(
        rules,
        attempts_limit=rules.attempts_limit and "maximum_use_attempts",
        plan=options.plan is True and not goes_on,
        charge_plan=options.charge_plan or context.parent is not None,
        rounds_per_step=1 if options.control == "use_attempts" else None,
        close_on_denial=options.control == "pre_invoke",
        require_final_answer=options.require_final_answer_function,
    )
    if isinstance(options.plan, str):
        opening = await context.prompts.opening(options.plan)
    else:  # a plan that is asked for replaces it later
        opening = (ChatMessageContent(role=AuthorRole.USER, content=goal),)
    at = context.options.clock.now()
    return RunStarted(run_id=run_id, rules=rules, messages=(*before, *opening), goal=goal, guards=guards, at=at)


@dataclass(kw_only=True, eq=False)
class PlannerRun:
    """One run, from its first new facts (started; or resumed, with the decisions) to its result.

    Attributes:
        context: The run's context.
        facts: The journal that is resumed.
        new: The first new facts.
        stop: Ends the run from outside.
        taking: The decisions in ``new``.
    """

    context: RunContext
    facts: Sequence[Fact] = ()
    new: Sequence[Fact] = ()
    stop: StopHandle | None = None
    taking: Taking = NOTHING_TAKEN

    async def result(self, emit: Emit | None = None) -> FunctionCallingStepwisePlannerResult:
        """Run to the next pause or end.

        Raises:
            LimitReachedError: At a limit, if the budget says ``on_limit="raise"``.
            DecisionRefusedError: If this planner has taken one of the decisions before; nothing was recorded.
            Exception: On a fault of any kind; it carries the history and a checkpoint as attributes.
        """
        context = self.context
        engine = context.engine(self.facts, emit=emit, stop=self.stop)
        with self.taking.held(engine):
            for fact in self.new:
                await engine.record(fact)
            await context.drive(engine)
        key = context.options.checkpoint_key
        raise_at_limit(engine.state, engine.facts, key)
        written = context.chat.messages(engine.state.transcript)
        return result_of(engine.state, tuple(engine.facts), context.form, written=written, key=key)

    async def events(self) -> AsyncGenerator[PlannerEvent, None]:
        """Run, and yield the events; the result comes last."""
        results: list[FunctionCallingStepwisePlannerResult] = []

        async def run(emit: Emit) -> None:
            results.append(await self.result(emit))

        async with aclosing(watch(run)) as events:
            async for event in events:
                if not isinstance(event, TextDelta) or event.text:
                    yield event
        yield ResultReady(result=results[0])


def rules_kept(activation: Activation) -> Rules | None:
    """Return the rules of a run that is resumed; None for a new one, and for one whose result is only read again.

    Raises:
        InvalidCheckpointError: If the journal contradicts itself.
    """
    state = Checkpoint(tuple(activation.facts)).state()
    return None if state.phase is Phase.NEW or _only_read(state, activation) else state.rules


def _only_read(state: State, activation: Activation) -> bool:
    """Whether a run has ended and its result is only returned again."""
    return state.ended is not None and activation.budget is None and not activation.reopen


@dataclass(kw_only=True, eq=False)
class KeptRun(PlannerRun):
    """A run from a store, started or resumed from its journal; see `planner_ext.durable.worker.ActivationRun`."""

    options: FunctionCallingStepwisePlannerOptions
    activation: Activation

    async def result(self, emit: Emit | None = None) -> FunctionCallingStepwisePlannerResult:
        """Run to the next pause or end; see `PlannerRun`."""
        self.facts, self.new = self.activation.facts, await self._first()
        return await super().result(emit)

    async def _first(self) -> Sequence[Fact]:
        """List the first new facts; empty if there is nothing to continue.

        Raises:
            InvalidCheckpointError: If the journal contradicts itself, or its messages cannot be read.
            DecisionRefusedError: If a decision cannot be taken.
            RunRefusedError: If this process lacks a policy or interceptor that the run began with; the result of an
                ended run is returned nevertheless.
            RunEndedError: If an answered run is resumed with a budget.
        """
        context, activation = self.context, self.activation
        if not activation.facts:
            guards = context.guards()
            return (await run_started(self.options, context, activation.goal, activation.run_id, guards=guards),)
        checkpoint = Checkpoint(tuple(activation.facts)).checked()
        state = checkpoint.state()
        if _only_read(state, activation):
            return ()
        self._check_guards()
        reopened = activation.reopen and (state.phase, "Resumed") in TRANSITIONS
        if reopened or state.phase in (Phase.PAUSED, Phase.ENDED):
            return self._resumed(checkpoint)
        check_calls(state)

        def declared(name: str) -> Effect:
            return effect_of(getattr(context.tools.functions.get(name), "method", None)) or Effect()

        at, in_doubt = context.options.clock.now(), activation.in_doubt
        return await recovery_facts(state, effect_of=declared, functions=context.functions, in_doubt=in_doubt, at=at)

    def _check_guards(self) -> None:
        begun, context = self.activation.facts[0], self.context
        if not isinstance(begun, RunStarted) or begun.guards is None:
            return
        if missing := missing_guards(begun.guards, context.guards(), context.tools.functions):
            raise RunRefusedError(
                f"Run {self.activation.run_id!r} cannot be continued here: it began under what this process lacks: "
                f"{'; '.join(missing)}. Nothing ran and nothing was recorded. Continue it with a planner that has "
                "this; on the command line, --policy and --ask-all give a planner more of a say."
            )

    def _resumed(self, checkpoint: Checkpoint) -> Sequence[Fact]:
        activation, options, state = self.activation, self.context.options, checkpoint.state()
        if state.ended is not None and state.ended.status == "answered":
            raise RunEndedError(
                f"Run {activation.run_id!r} was answered; there is nothing to resume or to spend a budget on. "
                "Start a run with a new goal."
            )
        budget = None if activation.budget is None else options.budget
        given = ResumeRequest(
            checkpoint=checkpoint, decisions=activation.decisions, decided_at=activation.decided_at, budget=budget
        )
        facts = given.facts(self.context.functions, options.clock.now())
        return facts if len(facts) > 1 or activation.budget is not None or activation.reopen else ()
