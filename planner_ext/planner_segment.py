"""The facts with which a run out of a store goes on: that it started, was resumed, or was interrupted."""

from collections.abc import Sequence

from planner_ext.approval.guards import missing_guards
from planner_ext.core.facts import Fact, Rules, RunStarted
from planner_ext.core.state import Phase, State
from planner_ext.core.transitions import TRANSITIONS
from planner_ext.durable.errors import RunRefusedError
from planner_ext.durable.segment import Segment
from planner_ext.effects import Effect, effect_of
from planner_ext.kernel.approval import check_calls
from planner_ext.kernel.checkpoint import Checkpoint
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.recovery import recovery_facts
from planner_ext.kernel.resumption import Resumption
from planner_ext.planner_setting import PlannerSetting

__all__ = ["rules_kept", "segment_facts"]


def rules_kept(segment: Segment) -> Rules | None:
    """Give the rules of a run that goes on; None of one that starts, or that has ended and is only told again.

    Raises:
        InvalidCheckpointError: If the journal contradicts itself.
    """
    state = Checkpoint(tuple(segment.facts)).state()
    return None if state.phase is Phase.NEW or _told_again(state, segment) else state.rules


def _told_again(state: State, segment: Segment) -> bool:
    """Whether a run has ended and its result is all that is asked for."""
    return state.ended is not None and segment.budget is None and not segment.reopen


async def segment_facts(setting: PlannerSetting, segment: Segment) -> Sequence[Fact]:
    """List the first new facts of a segment; none where there is nothing to go on with.

    Raises:
        InvalidCheckpointError: If the journal contradicts itself, or its messages cannot be read.
        DecisionRefusedError: If a decision cannot be taken.
        RunRefusedError: If less has a say in the run's calls here than when it began; an ended run's result is read
            all the same.
        PlannerInvalidConfigurationError: If a run that was answered is given a budget to go on with.
    """
    at = setting.options.clock.now()
    if not segment.facts:
        opening = await setting.opening(())
        rules = setting.rules(plan=True)
        return (
            RunStarted(
                run_id=segment.run_id,
                rules=rules,
                messages=opening,
                goal=segment.goal,
                guards=setting.loop.guards(),
                at=at,
            ),
        )
    checkpoint = Checkpoint(tuple(segment.facts)).checked()
    state = checkpoint.state()
    if not _told_again(state, segment):
        _check_guards(setting, segment)
    reopened = segment.reopen and (state.phase, "Resumed") in TRANSITIONS
    if reopened or state.phase in (Phase.PAUSED, Phase.ENDED):
        return _resumed(setting, segment, checkpoint, at)
    check_calls(state)
    functions = setting.loop.offer.functions

    def declared(name: str) -> Effect:
        return effect_of(getattr(functions.get(name), "method", None)) or Effect()

    return await recovery_facts(
        state, effect_of=declared, functions=setting.loop.functions, in_doubt=segment.in_doubt, at=at
    )


def _check_guards(setting: PlannerSetting, segment: Segment) -> None:
    begun = segment.facts[0]
    if not isinstance(begun, RunStarted) or begun.guards is None:
        return
    if missing := missing_guards(begun.guards, setting.loop.guards(), setting.loop.offer.functions):
        raise RunRefusedError(
            f"Run {segment.run_id!r} cannot be continued here: it began under what this process lacks: "
            f"{'; '.join(missing)}. Nothing ran and nothing was recorded. Continue it with a planner that has this; on "
            "the command line, --policy and --ask-all give a planner more of a say."
        )


def _resumed(setting: PlannerSetting, segment: Segment, checkpoint: Checkpoint, at: float) -> Sequence[Fact]:
    state = checkpoint.state()
    if _told_again(state, segment):
        return ()
    if state.ended is not None and state.ended.status == "answered":
        raise PlannerInvalidConfigurationError(
            f"Run {segment.run_id!r} was answered; there is nothing to resume or to spend a budget on. "
            "Start a run with a new goal."
        )
    budget = None if segment.budget is None else setting.options.budget
    given = Resumption(checkpoint=checkpoint, decisions=segment.decisions, decided_at=segment.decided_at, budget=budget)
    facts = given.facts(setting.loop.functions, at)
    return facts if len(facts) > 1 or segment.budget is not None or segment.reopen else ()
