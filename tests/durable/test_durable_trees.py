"""Trees of runs in a store, whose processes are killed at any moment: nothing runs twice, no request is lost.

``PLANNER_EXT_EXAMPLES=150 pytest tests/durable/test_durable_trees.py`` draws other, and more, trees.
"""

import asyncio
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner_ext import Approve
from planner_ext.core.facts import CallDecided, unwrapped
from planner_ext.durable import Approvals
from planner_ext.testing.crash import CRASH_POINTS, kill
from support.durable import effects_in, open_runs
from support.examples import tried
from support.processes import Lives
from support.trees import Node, World, allow, ended_runs, node_of, trees

pytestmark = pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)
"""Semantic Kernel looks at every attribute of an agent that is added as a plugin, deprecated ones among them."""

OnDeferred = Literal["hold_all", "run_safe_first"]
KILLED = -9
MOST_LIVES = 4
IN_ONE_BATCH = 3
OFTEN_ENOUGH = 60


@dataclass(kw_only=True)
class Kept:
    """A tree in a store, and the file of what happened in it."""

    tree: Node
    on_deferred: OnDeferred
    store: str
    run_id: str
    told: Path

    async def see_through(
        self, draw: Random, *, dies_at: int = 0, cancels: bool = False
    ) -> Any:
        """Drive the run to its end, and decide what waits, in part or at once; die when so much has happened."""
        happened = 0

        def tell(what: str) -> None:
            nonlocal happened
            happened += 1
            if happened == dies_at and draw.random() < 0.5:
                kill()
            with self.told.open("a") as file:
                file.write(what + "\n")
            if happened == dies_at:
                kill()

        world = World(deepcopy(self.tree), self.on_deferred, tell=tell)
        planner, kernel = world.process()
        async with open_runs(
            self.store,
            poll_seconds=0.01,
            lease_seconds=1.0,
            max_deaths=100,
            authorize=allow,
        ) as runs:
            handle = await runs.start(planner, kernel, world.goal, run_id=self.run_id)
            result = await handle.result()
            for _ in range(OFTEN_ENOUGH):
                if result.status != "paused":
                    return result
                if cancels:
                    await runs.cancel(self.run_id, by="bob")
                else:
                    await self._decide(world, draw)
                result = await handle.result()
        raise AssertionError("it waits for ever")

    async def _decide(self, world: World, draw: Random) -> None:
        async with Approvals.connect(self.store, authorize=allow) as approvals:
            waiting = [
                one
                for one in await approvals.pending(limit=1000)
                if one.run_id == self.run_id
            ]
            for one in draw.sample(waiting, draw.randint(1, len(waiting))):
                decision = world.decision(one.arguments, one.in_doubt)
                if isinstance(decision, Approve):
                    decision = replace(decision, fingerprint=one.fingerprint)
                await approvals.decide(one.id, decision)


def life(kept: Kept, seed: int, dies_at: int) -> None:
    asyncio.run(kept.see_through(Random(seed), dies_at=dies_at))


def ended_by_deaths(kept: Kept, draw: Random, lives: Lives) -> int:
    """Let processes begin until one ends, or so many have died; return how many have died."""
    for deaths in range(MOST_LIVES):
        at: dict[str, str] = {}
        if draw.random() < 0.5:
            at["PLANNER_EXT_CRASH_AT"] = draw.choice(CRASH_POINTS)
        code = lives.live(life, kept, draw.randrange(10**6), draw.randint(1, 12), **at)
        if code != KILLED:
            assert code == 0
            return deaths
    return MOST_LIVES


@settings(
    tried(2),
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(
    tree=trees,
    on_deferred=st.sampled_from(("hold_all", "run_safe_first")),
    seed=st.integers(0, 10**6),
)
@pytest.mark.timeout(0)
def test_a_kill_at_any_moment_repeats_nothing(
    tree: Node,
    on_deferred: OnDeferred,
    seed: int,
    store: str,
    lives: Lives,
    tmp_path: Path,
) -> None:
    """What was in doubt is told and not run again; each request is charged, lost ones by the deaths alone."""
    draw = Random(seed)
    run_id = uuid4().hex
    kept = Kept(
        tree=tree,
        on_deferred=on_deferred,
        store=store,
        run_id=run_id,
        told=tmp_path / run_id,
    )
    deaths = ended_by_deaths(kept, draw, lives)
    cancels = draw.random() < 0.1
    result = asyncio.run(kept.see_through(draw, cancels=cancels))
    told = effects_in(kept.told)
    done = Counter(int(line.split()[1]) for line in told if line != "asked")
    sent = told.count("asked")
    assert result.status in ("answered", "stopped" if cancels else "answered")
    assert all(count <= 1 for count in done.values())
    assert set(done) <= set(tree.effects)
    in_doubt = sum(
        isinstance(one, CallDecided) and one.answer == "in doubt"
        for one in map(unwrapped, result.facts)
    )
    if result.status == "answered":
        assert (tree.effects - done).total() <= in_doubt
        for run in ended_runs(result.facts).values():
            node = node_of(tree, run)
            asked = run.usage.iterations
            assert node.requests <= asked <= node.requests + deaths * IN_ONE_BATCH
            assert run.usage.tool_calls == node.starts
    assert sent <= result.iterations <= sent + deaths * IN_ONE_BATCH
