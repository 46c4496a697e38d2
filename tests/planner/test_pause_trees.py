"""Trees of runs against a reference: each effect once, each request charged exactly, at every level.

``PLANNER_EXT_EXAMPLES=2000 pytest tests/planner/test_pause_trees.py`` draws other, and more, trees.
"""

import asyncio
from copy import deepcopy
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_ext import Budget, Checkpoint, StopHandle
from planner_ext.approval.decisions import Decision
from planner_ext.approval.waiting import pending_calls
from planner_ext.core.facts import CallDecided, unwrapped
from planner_ext.core.fold import fold
from planner_ext.core.state import Phase
from planner_ext.sk.chat.history import check_history
from support.examples import tried
from support.trees import (
    PRICE,
    Died,
    Journal,
    Node,
    World,
    ended_runs,
    node_of,
    trees,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)
"""Semantic Kernel looks at every attribute of an agent that is added as a plugin, deprecated ones among them."""

IN_FLIGHT = 3**4
"""As many runs may be about to ask at once."""

OnDeferred = Literal["hold_all", "run_safe_first"]

drawn = given(
    tree=trees,
    on_deferred=st.sampled_from(("hold_all", "run_safe_first")),
    seed=st.integers(0, 10**6),
)
few = tried(6)


class EveryName:
    """What holds every name."""

    def __contains__(self, name: object) -> bool:
        return True


async def played(
    world: World,
    draw: Random,
    *,
    cancels: bool = False,
    stop: StopHandle | None = None,
) -> Any:
    """Play a tree to its end, from checkpoint to checkpoint."""
    planner, kernel = world.process()
    result = await planner.invoke(kernel, world.goal, stop=stop)
    while result.status == "paused":
        checkpoint = Checkpoint.from_json(result.checkpoint.to_json())
        assert checkpoint.state().usage == result.usage
        if cancels and draw.random() < 0.1:
            other, _ = world.process()
            stopped = other.cancel(checkpoint, by="bob")
            assert (stopped.status, stopped.iterations) == ("stopped", world.sent)
            assert stopped.chat_history is not None
            check_history(stopped.chat_history.messages, EveryName())
        if draw.random() < 0.2:
            planner, kernel = world.process()
        decisions = world.decisions(result.pending, draw)
        result = await planner.resume(kernel, checkpoint, decisions, stop=stop)
    return result


@few
@drawn
def test_each_effect_happens_once_and_each_request_is_charged_at_every_level(
    tree: Node, on_deferred: OnDeferred, seed: int
) -> None:
    """Whatever waits, and in whatever order it is decided, in part or at once."""
    world = World(deepcopy(tree), on_deferred)
    result = asyncio.run(played(world, Random(seed), cancels=True))
    assert result.status == "answered"
    assert world.done == tree.effects
    assert result.iterations == world.sent == tree.requests
    assert result.tool_calls == tree.starts
    assert abs(result.usage.cost - PRICE * tree.requests) < 1e-9
    for run in ended_runs(result.facts).values():
        node = node_of(tree, run)
        spent = (run.usage.iterations, run.usage.tool_calls)
        assert spent == (node.requests, node.starts)


@few
@drawn
def test_no_limit_of_any_run_is_exceeded(
    tree: Node, on_deferred: OnDeferred, seed: int
) -> None:
    """Runs inside end at their limits, or at those around, and their functions say so."""
    draw = Random(seed)
    most = draw.randint(1, tree.requests + 2)
    ends = draw.choice(("answer", "stop"))
    calls = draw.choice((None, 5))
    budget = Budget(max_iterations=most, max_tool_calls=calls, on_limit=ends)
    inner_ends = draw.choice(("answer", "raise", "stop"))
    inner = Budget(max_iterations=draw.randint(1, 8), on_limit=inner_ends)
    world = World(deepcopy(tree), on_deferred, budget, inner)
    result = asyncio.run(played(world, draw))
    assert result.status in ("answered", "limit_reached")
    assert all(count <= 1 for count in world.done.values())
    assert set(+world.done) <= set(tree.effects)
    assert world.sent == result.iterations <= most
    check_history(result.chat_history.messages, EveryName())


@few
@drawn
def test_a_stop_at_any_moment_ends_every_run(
    tree: Node, on_deferred: OnDeferred, seed: int
) -> None:
    """While one runs or waits, at any depth: what was sent is charged, and nothing begins after it."""
    draw = Random(seed)
    stop = StopHandle()
    left = draw.randint(1, tree.requests + tree.effects.total())
    after: list[str] = []

    def tell(what: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            stop.stop("enough")
        elif left < 0 and what == "asked":
            after.append(what)

    world = World(deepcopy(tree), on_deferred, tell=tell)
    result = asyncio.run(played(world, draw, stop=stop))
    assert result.status in ("answered", "stopped")
    assert all(count <= 1 for count in world.done.values())
    assert set(+world.done) <= set(tree.effects)
    assert result.iterations == world.sent
    assert len(after) <= IN_FLIGHT
    check_history(result.chat_history.messages, EveryName())


async def survived(world: World, draw: Random) -> tuple[Any, Journal, int]:
    """Play a tree as a store does, in processes that die at any append."""
    journal = Journal()
    decisions: dict[str, Decision] = {}
    deaths = 0
    while True:
        journal.begin(draw.randint(1, 25) if deaths < 6 else None, draw.random() < 0.5)
        try:
            result = await world.live(journal, decisions)
        except Died:
            deaths += 1
            state = fold(journal.facts)
            paused = state.phase is Phase.PAUSED
            waiting = {one.path for one in pending_calls(state)} if paused else set()
            decisions = {name: decisions[name] for name in decisions if name in waiting}
            continue
        if result.status != "paused":
            return result, journal, deaths
        decisions = world.decisions(result.pending, draw)


@few
@drawn
def test_a_death_at_any_append_repeats_nothing(
    tree: Node, on_deferred: OnDeferred, seed: int
) -> None:
    """What was in doubt is told and not run again; each request is charged, lost ones by the deaths alone."""
    world = World(deepcopy(tree), on_deferred)
    result, journal, deaths = asyncio.run(survived(world, Random(seed)))
    assert result.status == "answered"
    assert all(count <= 1 for count in world.done.values())
    assert set(+world.done) <= set(tree.effects)
    told = [unwrapped(fact) for fact in journal.facts]
    lost = sum(
        isinstance(one, CallDecided) and one.answer == "in doubt" for one in told
    )
    assert (tree.effects - world.done).total() <= lost
    in_one_batch = 3
    assert world.sent <= result.iterations <= world.sent + deaths * in_one_batch
    check_history(result.chat_history.messages, EveryName())
