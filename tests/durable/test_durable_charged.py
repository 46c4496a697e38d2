"""Every request of a kept run is charged, also if the process that made it dies."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_ext.approval.decisions import Approve, ToolCall
from planner_ext.core.accounts import current_tab
from planner_ext.core.facts import Fact, Failure, RequestFailed, Rules
from planner_ext.core.fold import fold
from planner_ext.core.machine import AskModel, AskPerson
from planner_ext.core.state import Phase, State
from planner_ext.core.values import Reply, RequestedCall, ResolvedCall, TranscriptItem
from planner_ext.durable.chain import Chain
from planner_ext.durable.database import Step
from planner_ext.durable.store import JournalStore
from planner_ext.durable.writer import ADD_FACT, JournalWriter
from planner_ext.engine.document import load_facts
from planner_ext.engine.ports import Clarification, Emit, Finished
from support.examples import some_of, tried
from support.property_world import (
    Plan,
    Turn,
    World,
    charged,
    honest,
    plans,
    timeless,
)
from support.values import each_of


class RefusedError(Exception):
    """The server answered with an HTTP error."""


class DiedError(BaseException):
    """A process ended: nothing of it runs on."""


@dataclass
class Life:
    """The moments that a process has left; then it dies, or its endpoint fails or refuses from there on."""

    moments: float = float("inf")
    dies: bool = True
    refuses: bool = False

    def pass_moment(self, fault: type[Exception] | None = None) -> None:
        self.moments -= 1
        if self.moments < 0 and self.dies:
            raise DiedError
        if self.moments < 0 and fault is not None:
            raise fault


class Table(JournalStore):
    """The rows of one journal; the process may die before each write, and after it."""

    def __init__(self, life: Life) -> None:
        self.rows: list[Any] = []
        self.life = life

    async def chain(self, run_id: str, number: int) -> Chain:
        return replace(Chain.begin(run_id), number=number)

    async def append(self, run_id: str, *steps: Step) -> None:
        self.life.pass_moment()
        for text, values in steps:
            if text == ADD_FACT:
                assert values["seq"] == len(self.rows)
                self.rows.append(json.loads(str(values["fact"])))
        self.life.pass_moment()


@dataclass(slots=True)
class MortalWorld(World):
    """A world whose process may die at any moment, and whose requests may fail before they are sent, or after."""

    life: Life = field(default_factory=Life)
    refusals: int = 0

    @property
    def is_model(self) -> bool:
        return True

    def failure(self, error: BaseException) -> Failure:
        if isinstance(error, ConnectionRefusedError):
            return "unsent"
        return "refused" if isinstance(error, RefusedError) else "processed"

    async def ask(
        self, transcript: Sequence[TranscriptItem], request: AskModel, emit: Emit | None
    ) -> Reply:
        self.life.pass_moment(ConnectionRefusedError)
        reply = await World.ask(self, transcript, request, emit)
        try:
            self.life.pass_moment(
                RefusedError if self.life.refuses else ConnectionResetError
            )
        except RefusedError:
            self.refusals += request.iteration >= 0 or self.plan.rules.charge_plan
            raise
        return reply

    async def answer(self, request: AskPerson, state: State) -> Clarification:
        self.life.pass_moment(ConnectionRefusedError)
        given = await World.answer(self, request, state)
        self.life.pass_moment(ConnectionResetError)
        return given

    async def run(
        self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State
    ) -> Finished:
        """Run a function; two of them start another one as often as they may."""
        self.life.pass_moment()
        tab = current_tab()
        while (
            call.name in ("g", "slow")
            and tab is not None
            and tab.take_call("inner") is None
        ):
            await tab.record_call("inner")
            self.begun["inner"] += 1
            self.life.pass_moment()
        finished = await World.run(self, call, checked, index=index, state=state)
        self.life.pass_moment()
        return finished

    async def review(self, calls: Sequence[ToolCall], state: State) -> Any:
        self.life.pass_moment()
        return await World.review(self, calls, state)

    async def live(self, table: Table) -> State:
        """Continue the run from its rows, as a worker does."""
        facts = load_facts(table.rows)
        state = fold(facts)
        engine = self.engine(facts, store=JournalWriter(table, "run", facts))
        await engine.begin(self.first(state))
        return await engine.run()

    def first(self, state: State) -> Sequence[Fact]:
        """The facts with which a life begins; a call that had started runs again."""
        if state.phase is Phase.NEW:
            return self.start()
        if state.phase is Phase.PAUSED:
            return self.resumed(state)
        calls = () if state.batch is None else state.batch.calls
        return [
            replace(call.decided, at=self.time)
            for call in calls
            if call.started and call.answer is None and call.decided
        ]


def lives_through(plan: Plan, lives: Sequence[Life]) -> tuple[MortalWorld, list[Fact]]:
    """Drive a run through these lives, and a last one that nothing ends."""
    world = MortalWorld(plan)
    table = Table(Life())
    for life in [*lives, *(Life() for _ in range(60))]:
        world.life = table.life = life
        try:
            state = asyncio.run(world.live(table))
        except (DiedError, RefusedError, ConnectionError):
            continue
        if state.phase is Phase.ENDED:
            return world, list(load_facts(table.rows))
    raise AssertionError("it does not end")


def check(plan: Plan, most: int, lives: Sequence[Life]) -> None:
    """Fail unless every request and every call inside a function was charged, and none was one too many."""
    own = plan.rules.limits
    limits = replace(
        own,
        max_iterations=most,
        max_calls_per_function={**own.max_calls_per_function, "inner": most},
    )
    world, facts = lives_through(
        replace(plan, rules=replace(plan.rules, limits=limits)), lives
    )
    made = (
        world.requests
        + world.clarifier_requests
        + world.plan_requests * plan.rules.charge_plan
        - world.refusals
    )
    usage = fold(facts).usage
    assert made <= usage.iterations <= most
    assert usage.iterations == charged(facts, plan.rules)
    assert world.begun["inner"] <= usage.calls_by_function.get("inner", 0) <= most
    assert world.problems == []
    assert sum(isinstance(fact, RequestFailed) for fact in facts) <= len(lives)


@tried(100)
@given(
    plans.map(honest).map(timeless),
    st.integers(1, 6),
    st.lists(
        st.builds(
            Life, moments=st.integers(0, 25), dies=st.booleans(), refuses=st.booleans()
        ),
        max_size=8,
    ),
)
def test_no_number_of_lives_makes_more_requests_than_are_allowed(
    plan: Plan, most: int, lives: list[Life]
) -> None:
    """Ended at any fact, request or call, a run is charged for each request but refused ones, and each call inside."""
    check(plan, most, lives)


CALL, UNKNOWN, QUESTION, ANSWER = (
    Turn(calls=(("f", "{}"), ("g", "{}"))),
    Turn(calls=(("unknown", "{}"),)),
    Turn(calls=(("ask", "{}"),)),
    Turn(text="done"),
)
RUNS: dict[str, tuple[tuple[Turn, ...], dict[str, Any]]] = {
    "calls": ((CALL, CALL, ANSWER), {}),
    "calls that do not run": ((UNKNOWN, UNKNOWN, ANSWER), {}),
    "a plan": ((CALL, ANSWER), {"plan": True}),
    "a clarifier": ((QUESTION, Turn(text="where?"), ANSWER), {"clarifier": True}),
    "a form": ((Turn(text="prose"), Turn(text="prose"), ANSWER), {"structured": True}),
    "steps": ((CALL, Turn(text="closed"), CALL, ANSWER), {"rounds_per_step": 1}),
}


@pytest.mark.examples
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "fails"])
@each_of("name", RUNS)
def test_five_ends_at_each_moment_in_turn_make_no_request_too_many(
    name: str, dies: bool
) -> None:
    """Of a run with calls, a plan, a clarifier that is a model, an answer in a form; under any budget."""
    turns, rules = RUNS[name]
    plan = Plan(
        rules=Rules(**rules),
        turns=turns,
        decisions=(Approve(),),
        answers=("run",),
        partly=False,
        terminates=False,
        concurrency=1,
        clarifier=("model",),
    )
    for most in (2, 5):
        for moments in some_of(range(18)):
            check(plan, most, [Life(moments, dies) for _ in range(5)])
            for short in (3, 4):
                check(
                    plan,
                    most,
                    [Life(moments, dies), *(Life(short, dies) for _ in range(4))],
                )
