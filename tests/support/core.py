"""Short ways to write facts, and `Play`: the machine with a scripted model, without an engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from planner_ext.core.accounts import Tab
from planner_ext.core.facts import (
    AnswerChecked,
    BudgetChanged,
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
    Clarified,
    Ended,
    Fact,
    FunctionOutcome,
    IterationCompleted,
    MessageAdded,
    ModelAsked,
    ModelReplied,
    NestedCallStarted,
    Paused,
    Planned,
    RequestFailed,
    Resumed,
    Rules,
    RunStarted,
    SharedBudgetsChecked,
    StopRequested,
    Verdict,
)
from planner_ext.core.fold import apply, fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import (
    Action,
    AddMessage,
    AskModel,
    AskPerson,
    AskPlan,
    CheckAnswer,
    CompleteIteration,
    Finish,
    Pause,
    ReviewCalls,
    RunCalls,
    WithholdCalls,
    next_action,
)
from planner_ext.core.state import Phase, State
from planner_ext.core.values import (
    CallKind,
    CallResult,
    EditedReply,
    RequestedCall,
    TextMessage,
    Usage,
)

GOAL = {"role": "user", "text": "goal"}

KINDS: dict[str, tuple[CallKind, Verdict]] = {
    "unknown": ("unknown", "answer"),
    "bad": ("invalid", "answer"),
    "final": ("final_answer", "final_answer"),
    "ask": ("question", "defer"),
    "mine": ("external", "external"),
}
"""What the names of the scripted model stand for; every other name is a function that may run."""


class Silent:
    """Records nothing that a call does, and starts no call once more."""

    @property
    def is_kept(self) -> bool:
        return False

    def records(self, _: Tab) -> bool:
        return False

    def facts_inside(self, _: Tab, __: int) -> list[Fact]:
        return []

    async def happened(
        self,
        tab: Tab,
        run: int,
        fact: Fact,
        applied: Callable[[], None],
        *,
        streamed: bool,
    ) -> None:
        del tab, run, fact, streamed
        applied()

    async def restart(self, _: Tab) -> bool:
        return False

    async def record(self, tab: Tab, function: str | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the scripted model; where functions are not offered, only a stubborn model still calls."""

    text: str = ""
    names: tuple[str, ...] = ()
    finish_reason: str | None = None
    iterations: int = 1
    usage: Usage = Usage()
    stubborn: bool = False
    available: bool = True


def says(text: str, **more: Any) -> Turn:
    """Reply with text alone."""
    return Turn(text=text, **more)


def calls(*names: str, **more: Any) -> Turn:
    """Reply with calls."""
    return Turn(names=names, **more)


def run_started(**rules: Any) -> RunStarted:
    """Start a run under these rules."""
    return RunStarted(
        run_id="run", rules=Rules(**rules), messages=(GOAL,), goal="goal", at=0.0
    )


def planned(*, iterations: int = 1, at: float = 0.0) -> Planned:
    """Answer the plan request."""
    return Planned(
        plan="plan",
        messages=(GOAL, "plan"),
        usage=Usage(iterations=iterations),
        at=at,
        seconds=1.0,
    )


def requested(names: Sequence[str]) -> tuple[RequestedCall, ...]:
    """Name the calls c0, c1, ... in order."""
    return tuple(
        RequestedCall(id=f"c{index}", name=name, arguments="{}")
        for index, name in enumerate(names)
    )


def replied(
    turn: Turn, *, iteration: int = 0, offered: bool = True, withheld: str | None = None
) -> ModelReplied:
    """Record a turn of the model."""
    names = turn.names if offered or turn.stubborn else ()
    text = turn.text if names or not turn.names else "forced"
    asked = requested(names)
    message = {
        "role": "assistant",
        "text": text,
        "calls": [(call.id, call.name) for call in asked],
    }
    return ModelReplied(
        iteration=iteration,
        message=message,
        text=text,
        calls=asked,
        finish_reason=turn.finish_reason,
        usage=replace(turn.usage, iterations=turn.iterations),
        offered=offered and turn.available,
        withheld=withheld if turn.available else None,
        at=0.0,
        seconds=1.0,
    )


def decided(
    index: int,
    name: str = "f",
    verdict: Verdict | None = None,
    *,
    iteration: int = 0,
    **more: Any,
) -> Fact:
    """Decide one call; without a verdict it runs, as if no interceptor objected."""
    kind, silent = KINDS.get(name, ("function", "run"))
    verdict = verdict or silent
    more.setdefault(
        "answer",
        f"answer to {name}" if verdict not in ("run", "defer", "external") else "",
    )
    more.setdefault(
        "digest", f"digest of {name}" if kind in ("function", "question") else ""
    )
    more.setdefault("prompt", "where?" if kind == "question" else "")
    if verdict == "final_answer":
        more.setdefault("final_answer", "42")
    return CallDecided(
        iteration=iteration,
        index=index,
        call_id=f"c{index}",
        function=name,
        kind=kind,
        verdict=verdict,
        at=more.pop("at", 0.0),
        **more,
    )


def began(index: int, name: str = "f", *, iteration: int = 0) -> CallStarted:
    """Start one call."""
    return CallStarted(
        iteration=iteration, index=index, call_id=f"c{index}", function=name, at=0.0
    )


def finished(
    index: int,
    name: str = "f",
    outcome: FunctionOutcome = "ok",
    *,
    iteration: int = 0,
    **more: Any,
) -> Fact:
    """Finish one call."""
    return CallFinished(
        iteration=iteration,
        index=index,
        call_id=f"c{index}",
        function=name,
        outcome=outcome,
        result=f"result of {name}",
        at=0.0,
        **more,
    )


def clarified(
    answer: str | None = "Oslo",
    index: int | None = 0,
    *,
    iteration: int = 0,
    iterations: int = 0,
    **more: Any,
) -> Clarified:
    """Put a question to a person, or to another; by default a person answers."""
    more["usage"] = replace(more.pop("usage", Usage()), iterations=iterations)
    return Clarified(
        question="where?",
        answer=answer,
        index=index,
        iteration=iteration,
        at=0.0,
        seconds=0.0,
        **more,
    )


def model_asked(iteration: int = 0) -> ModelAsked:
    """Record a request before it is sent."""
    return ModelAsked(iteration=iteration, at=0.0)


def request_failed(
    iterations: int = 1, *, iteration: int = 0, **more: Any
) -> RequestFailed:
    """Leave a request without a reply."""
    usage = replace(more.pop("usage", Usage()), iterations=iterations)
    return RequestFailed(
        iteration=iteration, reason="lost", usage=usage, at=0.0, seconds=1.0, **more
    )


def withheld(
    *indexes: int, iteration: int = 0, limit: str | None = None
) -> CallsWithheld:
    """Answer calls without running them."""
    return CallsWithheld(
        iteration=iteration,
        indexes=indexes,
        answer="Not executed.",
        limit=limit,
        at=0.0,
    )


def completed(iteration: int = 0, **more: Any) -> IterationCompleted:
    """Complete an iteration."""
    return IterationCompleted(
        iteration=iteration, called=True, at=0.0, seconds=1.0, **more
    )


def added(purpose: Any = "step") -> MessageAdded:
    """Add a message of the planner."""
    return MessageAdded(
        message={"role": "user", "text": purpose}, purpose=purpose, at=0.0
    )


def stop(reason: str = "enough") -> StopRequested:
    """Ask the run to stop."""
    return StopRequested(reason=reason, at=0.0)


def budget_changed(limits: Budget | None = None, **more: Any) -> BudgetChanged:
    """Give the run other limits."""
    values: dict[str, Any] = {
        "limits": limits or Budget(),
        "at": 0.0,
        "seconds": 1.0,
        **more,
    }
    return BudgetChanged(**values)


def shared_budgets_checked(
    limit: str | None = "app: max_cost", *, answer: bool = False
) -> SharedBudgetsChecked:
    """Let a shared budget refuse what is due, or refuse nothing any more."""
    reason = "" if limit is None else f"The limit {limit}=1 was reached."
    return SharedBudgetsChecked(limit=limit, reason=reason, answer=answer, at=0.0)


def ended(**more: Any) -> Ended:
    """End the run."""
    given: dict[str, Any] = {"status": "stopped", "at": 0.0, "seconds": 1.0, **more}
    return Ended(**given)


PAUSED = Paused(at=0.0, seconds=1.0)
RESUMED = Resumed(at=0.0)

SAMPLES: dict[Phase, tuple[Fact, ...]] = {
    Phase.NEW: (),
    Phase.PLANNING: (run_started(plan=True),),
    Phase.ASKING: (run_started(),),
    Phase.REVIEWING: (run_started(), replied(calls("f", "g"))),
    Phase.CALLING: (run_started(), replied(calls("f")), decided(0)),
    Phase.COMPLETING: (
        run_started(),
        replied(calls("f")),
        decided(0),
        began(0),
        finished(0),
    ),
    Phase.ANSWERING: (run_started(), replied(says("hello"))),
    Phase.PAUSED: (
        run_started(),
        replied(calls("f")),
        decided(0, verdict="defer"),
        PAUSED,
    ),
    Phase.ENDED: (run_started(), ended()),
}
"""The shortest journal that leads into each phase."""


class Play:
    """A run of the machine alone: each action is turned into its facts at once, until it pauses, ends or lacks a turn.

    Attributes:
        actions: What the machine asked for.
        requests: The requests among them.
        visited: The transitions taken: phase, fact, phase.
    """

    def __init__(
        self, *turns: Turn, verdicts: Mapping[str, Any] | None = None, **rules: Any
    ) -> None:
        self.turns = list(turns)
        self.verdicts = dict(verdicts or {})
        self.outcomes: dict[str, FunctionOutcome] = {}
        self.facts: list[Fact] = []
        self.state = State()
        self.actions: list[Action] = []
        self.visited: set[tuple[Phase, str, Phase]] = set()
        self.at = 0.0
        self.formed: set[str] = set(rules.pop("formed", ()))
        self.answers: list[str | None] = list(rules.pop("answers", ()))
        if rules.pop("start", True):
            self.add(run_started(**rules))

    @property
    def requests(self) -> list[AskModel]:
        """The requests that were made after the plan."""
        return [action for action in self.actions if isinstance(action, AskModel)]

    @property
    def end(self) -> Ended:
        """The fact that ended the run."""
        assert self.state.ended is not None, self.actions[-1]
        return self.state.ended

    @property
    def results(self) -> list[str]:
        """What the model reads as results, in order."""
        return [
            entry.text
            for entry in self.state.transcript
            if isinstance(entry, CallResult)
        ]

    def add(self, *facts: Fact) -> Self:
        """Apply facts."""
        for fact in facts:
            before = self.state.phase
            self.state = apply(self.state, fact)
            self.facts.append(fact)
            self.visited.add((before, fact.type, self.state.phase))
        assert fold(self.facts) == self.state
        return self

    def go(self, *turns: Turn, steps: int | None = None) -> Self:
        """Go on, for a number of actions or as far as it goes."""
        self.turns += turns
        while steps is None or steps > 0:
            steps = None if steps is None else steps - 1
            action = next_action(self.state)
            if action is None or (isinstance(action, AskModel) and not self.turns):
                return self
            self.actions.append(action)
            self.add(*self._facts(action))
        return self

    def _facts(self, action: Action) -> list[Fact]:
        match action:
            case AskPlan():
                return [planned(at=self.at)]
            case AskModel():
                turn = self.turns.pop(0)
                offer, withheld_for = action.offer, action.withheld
                return [
                    replied(
                        turn,
                        iteration=action.iteration,
                        offered=offer,
                        withheld=withheld_for,
                    )
                ]
            case ReviewCalls():
                return [self._decide(index) for index in action.indexes]
            case RunCalls():
                return [fact for index in action.indexes for fact in self._run(index)]
            case WithholdCalls(
                iteration=iteration, indexes=indexes, answer=answer, limit=limit
            ):
                return [
                    CallsWithheld(
                        iteration=iteration,
                        indexes=indexes,
                        answer=answer,
                        limit=limit,
                        at=self.at,
                    )
                ]
            case AskPerson():
                answer = self.answers.pop(0) if self.answers else None
                return [clarified(answer, action.index, iteration=action.iteration)]
            case CompleteIteration():
                called = action.called
                return [
                    IterationCompleted(
                        iteration=action.iteration,
                        called=called,
                        at=self.at,
                        seconds=1.0,
                    )
                ]
            case AddMessage(purpose=purpose):
                return [added(purpose)]
            case CheckAnswer(answer=answer):
                problem = "" if answer in self.formed else "It is not in the form."
                purpose = "structure" if self.state.rules.structured else "revise"
                return [
                    AnswerChecked(
                        answer=answer, problem=problem, purpose=purpose, at=self.at
                    )
                ]
            case Pause():
                return [PAUSED]
            case Finish(
                status=status,
                answer=answer,
                limit=limit,
                reason=reason,
                returned=returned,
            ):
                return [
                    ended(
                        status=status,
                        answer=answer,
                        limit=limit,
                        reason=reason,
                        returned=returned,
                    )
                ]

    def _decide(self, index: int) -> Fact:
        assert self.state.batch is not None
        name = self.state.batch.calls[index].request.name
        return decided(
            index,
            name,
            self.verdicts.get(name),
            iteration=self.state.batch.iteration,
            at=self.at,
        )

    def _run(self, index: int) -> list[Fact]:
        assert self.state.batch is not None
        name, trip = (
            self.state.batch.calls[index].request.name,
            self.state.batch.iteration,
        )
        outcome = self.outcomes.get(name, "ok")
        return [
            began(index, name, iteration=trip),
            finished(index, name, outcome, iteration=trip),
        ]


def kept_calls(entry: object) -> list[tuple[str, str]]:
    """List the calls that a transcript entry shows to the model, as (id, name)."""
    match entry:
        case EditedReply(message=message, kept=kept):
            return [call for call in map(tuple, message["calls"]) if call[0] in kept]
        case dict():
            asked = cast("dict[str, list[tuple[str, str]]]", entry).get("calls", [])
            return [(call[0], call[1]) for call in asked]
        case _:
            return []


def violations(transcript: Sequence[object]) -> list[str]:
    """List what a chat service would refuse: calls without result, results without call, wrong order, empty turns."""
    found: list[str] = []
    waiting: list[tuple[str, str]] = []
    for place, entry in enumerate(transcript):
        if isinstance(entry, CallResult):
            expected = waiting.pop(0) if waiting else None
            if expected != (entry.call_id, entry.name):
                found.append(
                    f"{place}: expected the result of {expected}, found that of {entry.call_id}"
                )
            continue
        found += [f"{place}: {call} has no result" for call in waiting]
        if isinstance(entry, TextMessage):
            found += [] if entry.text else [f"{place}: an empty message"]
            waiting = []
            continue
        waiting = kept_calls(entry)
        if len({call_id for call_id, _ in waiting}) != len(waiting):
            found.append(f"{place}: the same call id twice")
        message = entry.message if isinstance(entry, EditedReply) else entry
        if isinstance(message, dict) and not waiting and not message["text"]:
            found.append(f"{place}: an empty message")
    return found + [f"end: {call} has no result" for call in waiting]


LOOP = (calls("f"),) * 20
"""A model that never stops calling where it can."""

ONE_OF_EACH: list[Fact] = [
    run_started(),
    planned(),
    added(),
    model_asked(),
    request_failed(),
    replied(says("hello")),
    decided(0),
    withheld(0),
    began(0),
    finished(0),
    NestedCallStarted(iteration=0, index=0, function="g", at=0.0),
    completed(),
    stop(),
    budget_changed(),
    PAUSED,
    RESUMED,
    ended(),
]

BATCH = (run_started(), replied(calls("f", "g")))

CALLED = (*BATCH, decided(0), decided(1, "g"))
