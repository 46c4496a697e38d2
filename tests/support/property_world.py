"""A small world for property tests: a scripted model, functions, deciders and people, all drawn by Hypothesis.

Everything in it is a function of the trip and of the call's place, so a run that is interrupted and continues in a new
engine meets the same world.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from planner_ext.approval.decisions import (
    Approve,
    Decision,
    Defer,
    Deny,
    Supply,
    ToolCall,
)
from planner_ext.core.facts import (
    AnswerPurpose,
    CallDecided,
    CallStarted,
    Clarified,
    Fact,
    Failure,
    ModelReplied,
    Planned,
    RequestFailed,
    Resumed,
    Rules,
    RunStarted,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import AskModel, AskPerson
from planner_ext.core.state import Phase, State, asks
from planner_ext.core.values import (
    Reply,
    RequestedCall,
    ResolvedCall,
    TranscriptItem,
    Usage,
)
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.engine.engine import Engine
from planner_ext.engine.ports import (
    Clarification,
    Emit,
    Finished,
    Ports,
    Reviewed,
    RunStore,
)
from support.core import violations

START = 1_000_000.0
PAUSES = 60
"""More pauses than any drawn run can have; reaching it means that a run does not get on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model says in one trip; a stubborn one calls although nothing was offered."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str | None = None
    iterations: int = 1
    tokens: int = 0
    cost: float | None = None
    seconds: float = 0.0
    stubborn: bool = False
    available: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was drawn for one run."""

    rules: Rules
    turns: tuple[Turn, ...]
    decisions: tuple[Decision, ...]
    answers: tuple[str, ...]
    partly: bool
    terminates: bool
    concurrency: int | None
    clarifier: tuple[str | None, ...] = (None,)

    def decision(self, iteration: int, index: int) -> Decision:
        """What the gate says of the call at this place."""
        return self.decisions[(iteration * 3 + index) % len(self.decisions)]


ARGUMENTS = ["{}", '{"a":1}']
NAMES = [*"fgh" * 3, "fails", "slow", "unknown", "bad", "final", "mine", "ask"]
ODD_REASONS = ["odd", "length", "content_filter"]


@st.composite
def _turns(draw: st.DrawFn) -> Turn:
    """Mostly one call or a few, sometimes a text, now and then something odd."""
    calls = st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(ARGUMENTS)),
        min_size=1,
        max_size=4,
    )
    called = draw(calls) if draw(st.integers(0, 5)) else []
    return Turn(
        text=draw(
            st.sampled_from(["", "text"] if called else ["text", "text", "what?", ""])
        ),
        calls=tuple(called),
        finish_reason=draw(st.sampled_from(ODD_REASONS))
        if draw(st.integers(0, 15)) == 15
        else None,
        iterations=draw(st.sampled_from([1, 1, 1, 1, 1, 2, 5, 0])),
        tokens=draw(st.integers(0, 20)),
        cost=draw(st.sampled_from([None, 0.0, 0.25])),
        seconds=draw(st.sampled_from([0.0, 0.0, 1.0, 20.0])),
        stubborn=draw(st.booleans()),
        available=draw(st.integers(0, 15)) != 15,
    )


decisions = st.sampled_from(
    [
        Approve(),
        Approve(),
        Approve(),
        Approve(),
        Approve(by="gate", always="function"),
        Approve(arguments={"a": 2}, always="arguments"),
        Approve(arguments={"bad": 2}),
        Deny("no"),
        Supply({"x": 1}),
        Defer(prompt="?", expires_in=60.0),
    ]
)

_LIMITS: dict[str, st.SearchStrategy[Any]] = {
    "max_iterations": st.integers(1, 6),
    "max_tool_calls": st.integers(0, 6),
    "max_total_tokens": st.integers(1, 90),
    "max_cost": st.sampled_from([0.25, 0.6]),
    "max_active_seconds": st.sampled_from([0.5, 21.0]),
    "deadline": st.sampled_from([5.0, 30.0]).map(
        lambda seconds: datetime.fromtimestamp(START + seconds, UTC)
    ),
    "max_calls_per_function": st.dictionaries(
        st.sampled_from(["f", "g"]), st.integers(0, 2), max_size=2
    ),
    "max_consecutive_errors": st.integers(1, 2),
    "max_repeated_calls": st.integers(1, 2),
    "max_repeated_denials": st.integers(1, 2),
    "max_calls_per_reply": st.integers(1, 3),
}


@st.composite
def _limits(draw: st.DrawFn) -> Budget:
    """A few limits at a time: with all of them set, every run would end at once."""
    names = draw(st.lists(st.sampled_from(sorted(_LIMITS)), max_size=3, unique=True))
    return Budget(
        **{name: draw(_LIMITS[name]) for name in names},
        on_limit=draw(st.sampled_from(["answer", "raise", "stop", "return_calls"])),
        batch_over_limit=draw(st.sampled_from(["reject_batch", "fill_remaining"])),
        last_trip=draw(st.sampled_from(["withdraw", "none"])),
    )


limits = _limits()

rules = st.builds(
    Rules,
    limits=limits,
    plan=st.booleans(),
    charge_plan=st.booleans(),
    use_attempts=st.sampled_from([None, None, None, 1, 3]),
    attempts_limit=st.sampled_from(["", "maximum_use_attempts"]),
    tool_choice=st.sampled_from(["auto", "required"]),
    rounds_per_step=st.sampled_from([None, None, 1, 2]),
    require_final_answer=st.sampled_from([False, False, True]),
    on_denial=st.sampled_from(["refuse", "refuse", "reask", "return_calls"]),
    close_on_denial=st.sampled_from([False, False, True]),
    on_deferred=st.sampled_from(["hold_all", "run_safe_first"]),
    structured=st.sampled_from([False, False, True]),
    checked=st.sampled_from([False, False, True]),
    clarifier=st.booleans(),
    max_clarifications=st.sampled_from([None, None, 0, 1, 2]),
)

plans = st.builds(
    Plan,
    rules=rules,
    turns=st.lists(_turns(), min_size=1, max_size=7).map(tuple),
    decisions=st.lists(decisions, min_size=1, max_size=6).map(tuple),
    answers=st.lists(
        st.sampled_from(["run", "deny", "answer"]), min_size=1, max_size=3
    ).map(tuple),
    partly=st.booleans(),
    terminates=st.sampled_from([False] * 5 + [True]),
    clarifier=st.lists(
        st.sampled_from([None, "ann", "model"]), min_size=1, max_size=3
    ).map(tuple),
    concurrency=st.sampled_from([None, 1, 2]),
)


def honest(plan: Plan) -> Plan:
    """Let the service report one round trip a request, as connectors do."""
    return replace(
        plan, turns=tuple(replace(turn, iterations=1) for turn in plan.turns)
    )


def timeless(plan: Plan) -> Plan:
    """Let no time pass: a new engine cannot know how long the old one had been at its action."""
    return replace(plan, turns=tuple(replace(turn, seconds=0.0) for turn in plan.turns))


@dataclass(slots=True)
class World:
    """The ports of one run, and what was seen through them: counted here, not by the code under test."""

    plan: Plan
    time: float = START
    requests: int = 0
    plan_requests: int = 0
    clarifier_requests: int = 0
    begun: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])

    # Clock

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds

    # Chat

    async def ask(
        self, transcript: Sequence[TranscriptItem], request: AskModel, emit: Emit | None
    ) -> Reply:
        self.problems += violations(transcript)
        if request.iteration < 0:
            self.plan_requests += 1
            return Reply(message=None, text="plan")
        self.requests += 1
        place = request.iteration
        turn = (
            self.plan.turns[place]
            if place < len(self.plan.turns)
            else self._last(offer=request.offer)
        )
        self.time += turn.seconds
        called = (
            turn.calls if (request.offer and turn.available) or turn.stubborn else ()
        )
        calls = tuple(
            RequestedCall(id=f"c{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(called)
        )
        message = {
            "role": "assistant",
            "text": turn.text,
            "calls": [[call.id, call.name] for call in calls],
        }
        return Reply(
            message=message,
            text=turn.text,
            calls=calls,
            finish_reason=turn.finish_reason,
            usage=Usage(
                iterations=turn.iterations,
                prompt_tokens=turn.tokens,
                completion_tokens=1,
                cost=turn.cost,
            ),
            functions_available=turn.available,
        )

    def failure(self, error: BaseException) -> Failure:
        return "processed"

    def estimated(
        self, transcript: Sequence[TranscriptItem], request: AskModel
    ) -> Usage:
        return Usage()

    def _last(self, *, offer: bool) -> Turn:
        """After its script the model ends the run as soon as it can."""
        wanted = offer and self.plan.rules.require_final_answer
        return Turn(calls=(("final", "{}"),)) if wanted else Turn(text="done")

    # Functions

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        kinds: dict[str, Any] = {
            "unknown": "unknown",
            "bad": "invalid",
            "final": "final_answer",
            "mine": "external",
        }
        kinds["ask"] = "question"
        kind = (
            "invalid" if "bad" in (edited or "") else kinds.get(call.name, "function")
        )
        arguments: Mapping[str, Any] = (
            json.loads(edited or call.arguments) if kind == "function" else {}
        )
        return ResolvedCall(
            kind=kind,
            function=call.name,
            function_name=call.name,
            arguments=arguments,
            answer=kind,
        )

    async def run(
        self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State
    ) -> Finished:
        self.begun[checked.function] += 1
        self.time += 15.0 if call.name == "slow" and self.plan.turns[0].seconds else 0.0
        if call.name == "fails":
            return Finished(
                outcome="failed", text="It failed.", error="ValueError: it failed"
            )
        return Finished(
            outcome="ok",
            text=f"{call.name} ran",
            terminate=self.plan.terminates and call.name == "h",
        )

    def encode(self, result: Any) -> str:
        return json.dumps(result)

    # Respondent

    @property
    def is_model(self) -> bool:
        return False

    async def answer(self, request: AskPerson, state: State) -> Clarification:
        """The clarifier: a model where a trip is left for it, a person, or no answer, by the place of the question."""
        if request.index is None and not asks(request.question):
            return Clarification(text=None)
        who = self.plan.clarifier[
            (request.iteration + (request.index or 0)) % len(self.plan.clarifier)
        ]
        if who == "model" and request.iterations != 0:
            self.clarifier_requests += 1
            return Clarification(
                text="a model says",
                by=who,
                iterations=1,
                usage=Usage(prompt_tokens=7, cost=0.25),
            )
        return Clarification(text="ann says" if who == "ann" else None, by=who or "")

    # Prompts, gate, hook

    async def plan_request(self) -> tuple[Any, ...]:
        return ({"role": "user", "text": "plan?"},)

    async def opening(self, plan: str) -> tuple[Any, ...]:
        return ({"role": "user", "text": plan},)

    def message(self, purpose: str, problem: str) -> Any:
        return {"role": "user", "text": problem or purpose}

    # The form of the answer

    async def problem(self, answer: str, state: State) -> tuple[AnswerPurpose, str]:
        if self.plan.rules.structured:
            return "structure", "" if answer == "done" else "It is not in the form."
        is_right = answer == "done" or state.final_answer is not None
        return "revise", "" if is_right else "It is not right."

    def watches(self, function: str) -> bool:
        return True

    async def review(
        self, calls: Sequence[ToolCall], state: State
    ) -> Sequence[Reviewed]:
        decisions = [self.plan.decision(call.iteration, call.index) for call in calls]
        return [
            Reviewed(decision=one, arguments=getattr(one, "arguments", None))
            for one in decisions
        ]

    async def completed(self, state: State) -> Mapping[str, Any]:
        return {}

    # Driving

    def follow(self, state: State, fact: Fact) -> None:
        """Check what has to hold after every fact."""
        self.problems += [
            f"after {fact.type}: {problem}" for problem in violations(state.transcript)
        ]

    def engine(
        self,
        facts: Sequence[Fact],
        *,
        emit: Emit | None = None,
        stop: StopHandle | None = None,
        store: RunStore | None = None,
    ) -> Engine:
        """Make an engine that finds this world."""
        ports = Ports(
            chat=self,
            functions=self,
            message=self.message,
            prompts=self,
            clock=self,
            gate=self,
            hook=self,
            answer_check=self,
            respondent=self,
            store=store,
            follow=self.follow,
            max_concurrency=self.plan.concurrency,
        )
        return Engine(facts, ports, emit=emit, stop=stop)

    def start(self) -> list[Fact]:
        """The journal before anything was done."""
        messages = ({"role": "user", "text": "goal"},)
        return [
            RunStarted(
                run_id="run",
                rules=self.plan.rules,
                messages=messages,
                goal="goal",
                at=START,
            )
        ]

    async def finish(self, facts: Sequence[Fact]) -> list[Fact]:
        """Go on from a journal to the end; each pause is decided by a person and resumed in a new engine, from JSON."""
        for _ in range(PAUSES):
            if fold(facts).phase is Phase.PAUSED:
                facts = [*facts, *self.resumed(fold(facts))]
            engine = self.engine(facts)
            state = await engine.run()
            if state.phase is Phase.ENDED:
                return engine.facts
            assert state.phase is Phase.PAUSED
            facts = through_json(engine.facts)
        raise AssertionError(f"paused {PAUSES} times and did not get on")

    def resumed(self, state: State) -> list[Fact]:
        """A paused run is resumed, with what people say of what waits."""
        return [Resumed(at=self.time), *self.decided(state)]

    def decided(self, state: State) -> list[CallDecided | Clarified]:
        """What people say of what waits, a plain reply or deferred calls: of all of them, or of the first alone."""
        if state.batch is None:
            assert state.reply is not None
            return [_said(state.reply.text, state.reply.iteration, None, self.time)]
        waiting = [
            call.decided
            for call in state.batch.calls
            if call.decided and call.decided.verdict == "defer" and call.answer is None
        ]
        assert waiting, "a run paused, and nobody knows what for"
        verdicts: Any = self.plan.answers
        return [
            _said(fact.prompt, fact.iteration, fact.index, self.time)
            if fact.kind == "question"
            else replace(
                fact,
                verdict=(verdict := verdicts[fact.index % len(verdicts)]),
                answer="" if verdict == "run" else f"a person said {verdict}",
                by="ann",
                at=self.time,
            )
            for fact in waiting[: 1 if self.plan.partly else None]
        ]


def _said(question: str, iteration: int, index: int | None, at: float) -> Clarified:
    return Clarified(
        question=question,
        answer="a person says",
        iteration=iteration,
        index=index,
        by="ann",
        at=at,
        seconds=0.0,
    )


def through_json(facts: Sequence[Fact]) -> list[Fact]:
    """Write a journal and read it again."""
    return list(load_facts(json.loads(json.dumps(dump_facts(facts)))))


def of_a_person(fact: Fact) -> bool:
    """Whether a fact was added between two engines: a resumption and its decisions are one piece."""
    if isinstance(fact, Clarified):
        return fact.answer == "a person says"
    return isinstance(fact, Resumed) or (
        isinstance(fact, CallDecided) and fact.by == "ann"
    )


def charged(facts: Sequence[Fact], rules: Rules) -> int:
    """Sum the round trips that replies reported, and the requests without a reply."""
    plans = [
        fact.usage.iterations
        for fact in facts
        if isinstance(fact, Planned) and rules.charge_plan
    ]
    failed = [
        f.usage.iterations
        for f in facts
        if isinstance(f, RequestFailed) and (f.iteration >= 0 or rules.charge_plan)
    ]
    replies = [
        fact.usage.iterations
        for fact in facts
        if isinstance(fact, ModelReplied | Clarified)
    ]
    return sum(plans) + sum(failed) + sum(replies)


def starts(facts: Sequence[Fact]) -> Counter[str]:
    """Count the functions that were started, by name."""
    return Counter(fact.function for fact in facts if isinstance(fact, CallStarted))
