"""A process is killed at every point of a run; the next one finishes it, and nothing happens twice that may not."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planner_ext.core.facts import CallDecided, CallFinished, Clarified, Fact, Resumed
from planner_ext.durable import Runs
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing.crash import CRASH_POINTS, CrashingStore
from support.durable import (
    check_history,
    effects_in,
    run_life,
    see_through,
    store_neutral,
)
from support.processes import Lives

KILLED = -9
CALLS = ["book", "label", "charge", "pay"]


def counted(effects: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in effects_in(effects))


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_the_second_life_finishes_what_the_first_began(
    point: str, lives: Lives, store: str, tmp_path: Path
) -> None:
    """Killed at any point, a run continues: ``once`` never twice, the others twice at most, one result each."""
    effects = tmp_path / "effects"
    seconds = 0.2 if point == "mid_tool" else 0.0

    assert (
        lives.live(
            run_life, store, effects, "order-7", seconds, PLANNER_EXT_CRASH_AT=point
        )
        == KILLED
    )
    result = await see_through(store, effects, "order-7")

    assert (result.status, result.final_answer) == ("answered", "Settled.")
    check_history(result, CALLS)
    done = counted(effects)
    in_doubt = {
        fact.call_id
        for fact in result.facts
        if getattr(fact, "reason", "") == "supplied"
    }
    assert all(done[name] <= 1 for name in ("book", "pay"))
    assert all(done[name] == 1 for name in {"book", "pay"} - in_doubt)
    assert 1 <= done["label"] <= 2
    assert 1 <= done["charge"] <= 2
    assert len({line for line in effects_in(effects) if line.startswith("charge")}) == 1
    finished = [fact.call_id for fact in result.facts if isinstance(fact, CallFinished)]
    assert len(finished) == len(set(finished))


@pytest.mark.kills
@store_neutral("point", ["after_intent", "mid_tool", "after_outcome"])
async def test_a_run_survives_being_killed_again_and_again(
    point: str, lives: Lives, store: str, tmp_path: Path
) -> None:
    """Two lives die at the same point; what is finished stays finished, and the third ends the run."""
    effects = tmp_path / "effects"
    seconds = 0.2 if point == "mid_tool" else 0.0

    codes = [
        lives.live(
            run_life, store, effects, "order-7", seconds, PLANNER_EXT_CRASH_AT=point
        )
        for _ in range(2)
    ]
    result = await see_through(store, effects, "order-7")

    assert codes == [KILLED] * 2
    assert result.status == "answered"
    check_history(result, CALLS)
    assert counted(effects)["book"] <= 1
    assert counted(effects)["pay"] <= 1


async def test_a_life_dies_once_where_a_file_says_that_it_did(
    lives: Lives, tmp_path: Path
) -> None:
    """With ``PLANNER_EXT_CRASH_ONCE`` the second life finishes under the same environment."""
    store, effects, marker = (
        tmp_path / "runs.db",
        tmp_path / "effects",
        tmp_path / "crashed",
    )
    environment = {
        "PLANNER_EXT_CRASH_AT": "after_model_saved",
        "PLANNER_EXT_CRASH_ONCE": str(marker),
    }

    codes = [
        lives.live(run_life, store, effects, "order-7", 0.0, **environment)
        for _ in range(2)
    ]

    assert codes == [KILLED, 0]
    assert marker.exists()


class Kept:
    """A store that forgets."""

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        """Take facts."""


async def died_at(point: str, *facts: Fact) -> list[int]:
    """List after which facts a process would have died."""
    died: list[int] = []
    store = CrashingStore(Kept(), point, end=lambda: died.append(seq))
    for seq, fact in enumerate(facts):
        await store.append("r", seq, (fact,))
    return died


async def test_the_points_hold_in_a_life_that_begins_with_a_decision() -> None:
    """A batch that was approved is parallel, too, and the answer to a question is a decision."""
    place: dict[str, Any] = {"iteration": 0, "function": "p-f", "at": 1.0}
    decided = [
        CallDecided(
            **place,
            index=index,
            call_id=str(index),
            kind="function",
            verdict="run",
            person=True,
        )
        for index in range(2)
    ]
    ended = [
        CallFinished(**place, index=index, call_id=str(index), outcome="ok", result="")
        for index in range(2)
    ]
    answered = Clarified(
        question="?", answer="!", iteration=0, index=None, at=1.0, seconds=0.0
    )
    assert await died_at("mid_parallel", Resumed(at=1.0), *decided, *ended) == [3]
    assert await died_at("after_decision", Resumed(at=1.0), *decided) == [1, 2]
    assert await died_at("after_decision", Resumed(at=1.0), answered) == [1]
    assert await died_at("after_decision", answered) == []


@pytest.mark.parametrize(
    "option", [{"in_doubt": "nobody"}, {"poll_seconds": 0}, {"poll_seconds": "1"}]
)
async def test_an_option_that_means_nothing_is_refused_by_name(
    option: dict[str, Any], tmp_path: Path
) -> None:
    """Before a file is made for it."""
    with pytest.raises(PlannerInvalidConfigurationError, match=next(iter(option))):
        async with Runs.sqlite(tmp_path / "runs.db", **option):
            pass
    assert os.listdir(tmp_path) == []


def test_an_unknown_crash_point_is_refused_by_name() -> None:
    """A misspelt point does not pass for a run without crashes."""
    with pytest.raises(
        ValueError,
        match=r"PLANNER_EXT_CRASH_AT must be one of after_model, .*got 'somewhere'",
    ):
        CrashingStore(None, "somewhere")  # pyright: ignore[reportArgumentType]  # refused before the store is read
