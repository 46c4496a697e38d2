"""One more start of a running call."""

from datetime import UTC, datetime

from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import Finish, limit_of_restart, next_action
from support.core import Play, began, calls, decided, replied, run_started, says
from support.values import each_of

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@each_of(
    ("limits", "at", "limit"),
    [
        (Budget(), 0.0, None),
        (Budget(max_tool_calls=2), 0.0, None),
        (Budget(max_tool_calls=1), 0.0, "max_tool_calls"),
        (Budget(max_calls_per_function={"f": 1}), 0.0, "max_calls_per_function"),
        (Budget(deadline=NOON), NOON.timestamp() - 1, None),
        (Budget(deadline=NOON), NOON.timestamp(), "deadline"),
    ],
)
def test_a_restart_counts_as_one_more_start(
    limits: Budget, at: float, limit: str | None
) -> None:
    state = fold(
        [run_started(limits=limits), replied(calls("f")), decided(0), began(0)]
    )
    assert limit_of_restart(state, 0, at) == limit


def test_without_a_limit_on_round_trips_the_form_is_asked_for_ten_times() -> None:
    play = Play(
        *[says("prose")] * 20, structured=True, limits=Budget(max_iterations=None)
    ).go()
    assert len(play.requests) == 11
    assert isinstance(play.actions[-1], Finish)
    assert (play.end.status, play.end.answer) == ("incomplete", "prose")
    assert "asked for again 10 times" in play.end.reason
    assert next_action(play.state) is None


def test_calls_that_wait_beside_it_come_before_a_restart() -> None:
    """Two calls that were let in with it have their starts, also if it starts again before they begin."""
    three = (
        replied(calls("f", "g", "h")),
        decided(0),
        decided(1, "g"),
        decided(2, "h"),
        began(0),
    )
    assert (
        limit_of_restart(
            fold([run_started(limits=Budget(max_tool_calls=4)), *three]), 0, 0.0
        )
        is None
    )
    assert (
        limit_of_restart(
            fold([run_started(limits=Budget(max_tool_calls=3)), *three]), 0, 0.0
        )
        == "max_tool_calls"
    )
