"""Crash points: kills the process with SIGKILL at a named moment of a kept run.

    PLANNER_EXT_CRASH_AT=after_intent          where
    PLANNER_EXT_CRASH_ONCE=/tmp/crashed        a file, made before the kill; no process is killed while it exists

Does nothing without the first variable. The points, in the order of one turn:

    after_model         the model has replied; the reply is not recorded
    after_model_saved   the reply is recorded
    after_intent        a call's start is recorded; the function has not run
    mid_tool            the function has been running for 50 ms, or has just ended
    after_tool          a function has ended; its result is not recorded
    after_outcome       a call's end is recorded
    mid_parallel        the first end of a batch is recorded; other calls still run
    after_pause         the pause is recorded
    after_decision      a person's decision or answer is recorded
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from planner_ext.core import facts as recorded
from planner_ext.engine.ports import RunStore

_MID_TOOL_SECONDS = 0.05

_POINTS: Mapping[str, tuple[type[recorded.Fact], ...]] = {
    "after_model": (recorded.ModelReplied,),
    "after_model_saved": (recorded.ModelReplied,),
    "after_intent": (recorded.CallStarted,),
    "mid_tool": (recorded.CallFinished,),
    "after_tool": (recorded.CallFinished,),
    "after_outcome": (recorded.CallFinished,),
    "mid_parallel": (recorded.CallFinished,),
    "after_pause": (recorded.Paused,),
    "after_decision": (recorded.CallDecided, recorded.Clarified),
}
"""The facts of each point."""

_BEFORE = frozenset({"after_model", "mid_tool", "after_tool"})
"""The points before their fact is stored."""

CRASH_POINTS = tuple(_POINTS)
"""What ``PLANNER_EXT_CRASH_AT`` takes."""


def kill() -> None:
    """End this process: nothing is flushed, nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(eq=False)
class CrashingStore:
    """Wraps the store of one run, and ends the process at one of `CRASH_POINTS`.

    Raises:
        ValueError: If the point is unknown.
    """

    store: RunStore
    point: str
    once: Path | None = None
    _: KW_ONLY
    end: Callable[[], None] = kill
    _open_calls: Counter[recorded.Place] = field(
        default_factory=Counter[recorded.Place], init=False
    )
    _resumed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.point not in CRASH_POINTS:
            raise ValueError(
                f"PLANNER_EXT_CRASH_AT must be one of {', '.join(CRASH_POINTS)}; got {self.point!r}."
            )

    @classmethod
    def of_environment(cls, store: RunStore) -> "CrashingStore":
        """Wrap a store with the crash point that the environment names."""
        once = os.environ.get("PLANNER_EXT_CRASH_ONCE")
        return cls(
            store, os.environ["PLANNER_EXT_CRASH_AT"], Path(once) if once else None
        )

    async def append(
        self, run_id: str, seq: int, facts: Sequence[recorded.Fact]
    ) -> None:
        """Store facts."""
        before = self.point in _BEFORE
        happened = [
            (recorded.place_of_fact(fact), recorded.unwrapped(fact)) for fact in facts
        ]
        if before and any(self._is_at_point(*one) for one in happened):
            self._crash()
        await self.store.append(run_id, seq, facts)
        for place, fact in happened:
            self._follow(place, fact)
            if not before and self._is_at_point(place, fact):
                self._crash()

    def _follow(self, place: recorded.Place, fact: recorded.Fact) -> None:
        match fact:
            case recorded.Resumed():
                self._open_calls[place] = 0
                self._resumed = True
            case recorded.ModelReplied(calls=calls):
                self._open_calls[place] = len(calls)
                self._resumed = False
            case recorded.CallDecided(person=True, verdict="run"):
                self._open_calls[place] += 1
            case recorded.CallFinished():
                self._open_calls[place] -= 1
            case recorded.CallStarted() if self.point == "mid_tool":
                asyncio.get_running_loop().call_later(_MID_TOOL_SECONDS, self._crash)
            case _:
                pass

    def _is_at_point(self, place: recorded.Place, fact: recorded.Fact) -> bool:
        match fact:
            case recorded.CallFinished() if self.point == "mid_parallel":
                return self._open_calls[place] > 0
            case recorded.Clarified() if not self._resumed:
                return False
            case recorded.CallDecided(person=False):
                return False
            case _:
                return isinstance(fact, _POINTS[self.point])

    def _crash(self) -> None:
        if self.once is not None:
            try:
                self.once.touch(exist_ok=False)
            except FileExistsError:
                return
        self.end()
